"""Invoices: their lines and totals, their tables, and writing and reading them.

An invoice is made of a month's report, line by line in its order. Each line has its exact amount, and beside it the whole minor
units that the customer pays for it. All tables are append-only, by triggers; only `document_series` counts on: the next number is
drawn in the transaction that uses it and given back if that fails, so numbers have no gaps. Functions never commit.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ForeignKey,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.errors import NotFound
from metering.core.models import Base, ServiceTier, TokenKind, record_of
from metering.core.money import exact_text
from metering.invoicing.month_report import Charge, ChargeKind, MonthReport, ReportLine
from metering.ledger.ledger import month_text

TOKENS_PER_PRICE = 10**6  # prices are told per million tokens, as they are set


class Series(StrEnum):
    """A row of numbers without gaps, by the prefix of its documents."""

    INVOICE = "INV"
    CREDIT_NOTE = "CN"


class InvoiceLineKind(StrEnum):
    """What a line is for: usage of the month or of an earlier one, or a charge (the rest, as in `ChargeKind`)."""

    USAGE = "usage"
    LATE_USAGE = "late_usage"
    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """One line. exact_picos: before rounding; amount_picos: in whole minor units, what the customer pays."""

    kind: InvoiceLineKind
    description: str
    exact_picos: int
    amount_picos: int
    model: str = ""
    price_version: int | None = None
    token_kind: TokenKind | None = None
    token_count: int | None = None
    unit_price_picos: int | None = None
    usage_month: str = ""
    source_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class Invoice:
    """What a customer owes for a month. Picos; total = exact + carried in - carried out, and the sum of the lines' amounts."""

    number: str
    organization_id: uuid.UUID
    organization_name: str
    month: str
    currency_code: str
    issued_at: datetime
    issued_by: str
    lines: tuple[InvoiceLine, ...]
    exact_picos: int
    carried_in_picos: int
    carried_out_picos: int
    total_picos: int
    credited_picos: int = 0


def document_number(series: Series, ordinal: int) -> str:
    """`INV-000001`: the ordinal has at least six digits, so that numbers sort as text for long enough."""
    return f"{series}-{ordinal:06d}"


def invoice_lines(report: MonthReport) -> tuple[InvoiceLine, ...]:
    parts = iter(report.rounded_parts_picos)
    usage = (
        record_of(
            InvoiceLine,
            line,
            kind=InvoiceLineKind.LATE_USAGE if line.late_month else InvoiceLineKind.USAGE,
            description=usage_description(line, report.currency_code),
            exact_picos=line.amount_picos,
            amount_picos=next(parts),
            usage_month=line.late_month or report.month,
        )
        for line in report.lines
    )
    charges = (
        record_of(InvoiceLine, each, kind=InvoiceLineKind(each.kind.value), exact_picos=each.amount_picos, amount_picos=next(parts))
        for each in report.charges
    )
    return (*usage, *charges)


def usage_description(line: ReportLine, currency_code: str) -> str:
    """A line of usage in words: `late usage of 2026-10: demo, output tokens, USD 0.60 per million (price 3)`."""
    late = f"late usage of {line.late_month}: " if line.late_month else ""
    price = exact_text(line.unit_price_picos * TOKENS_PER_PRICE, currency_code)
    tier = "" if line.tier is ServiceTier.INTERACTIVE else f"{line.tier} "
    words = f"{tier}{line.token_kind.replace('_', ' ')} tokens"
    return f"{late}{line.model}, {words}, {currency_code} {price} per million (price {line.price_version})"


def is_charge(kind: InvoiceLineKind) -> bool:
    """Whether a line stands beside the usage."""
    return kind.value in set(ChargeKind)


class DocumentSeries(Base):
    """How far a row of numbers is. Whoever draws one keeps the row locked until it commits: so no number is ever left out."""

    __tablename__ = "document_series"

    series: Mapped[str] = mapped_column(primary_key=True)
    last_ordinal: Mapped[int] = mapped_column(server_default="0")


class MonthClosing(Base):
    """Parts of a closed month's report that no other row holds: names, the remainder it began with, and digests of its documents.

    billing_profile: addressee of its documents; None for a month that was closed without a profile.
    """

    __tablename__ = "month_closings"

    organization_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    month: Mapped[date] = mapped_column(primary_key=True)
    organization_name: Mapped[str]
    currency_code: Mapped[str]
    carried_in_picos: Mapped[Decimal]
    report_format: Mapped[int]
    json_sha256: Mapped[bytes]
    csv_sha256: Mapped[bytes]
    receipts_root: Mapped[str] = mapped_column(server_default="")
    billing_profile: Mapped[dict[str, Any] | None]


class InvoiceRow(Base):
    """An invoice: one for each month that has anything to invoice. Its lines are written by one statement and add up to it."""

    __tablename__ = "invoices"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    ordinal: Mapped[int] = mapped_column(unique=True)
    number: Mapped[str] = mapped_column(unique=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    month: Mapped[date]
    organization_name: Mapped[str]
    currency_code: Mapped[str]
    issued_at: Mapped[datetime]
    issued_by: Mapped[str]
    line_count: Mapped[int]
    exact_picos: Mapped[Decimal]
    carried_in_picos: Mapped[Decimal]
    carried_out_picos: Mapped[Decimal]
    total_picos: Mapped[Decimal]


class InvoiceLineRow(Base):
    """A line. Amounts are exact, and rounded so that they add up to the invoice's total."""

    __tablename__ = "invoice_lines"

    invoice_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    description: Mapped[str]
    exact_picos: Mapped[Decimal]
    amount_picos: Mapped[Decimal]
    model: Mapped[str]
    price_version_id: Mapped[int | None] = mapped_column(ForeignKey("price_versions.id"))
    token_kind: Mapped[str | None]
    token_count: Mapped[int | None]
    unit_price_picos: Mapped[int | None]
    usage_month: Mapped[str]
    source_id: Mapped[uuid.UUID | None]


class Adjustment(Base):
    """A proposed correction in picos: what the customer owes more, negative for less. With an invoice it is a credit note."""

    __tablename__ = "adjustments"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    invoice_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("invoices.id"))
    currency_code: Mapped[str]
    amount_picos: Mapped[Decimal]
    reason: Mapped[str]
    author: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdjustmentDecision(Base):
    """What became of an adjustment, once: approved by somebody else than its author, or rejected. An approved one is posted."""

    __tablename__ = "adjustment_decisions"

    adjustment_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    author: Mapped[str]
    approved: Mapped[bool]
    decided_by: Mapped[str]
    decided_at: Mapped[datetime] = mapped_column(server_default=func.now())
    billing_month: Mapped[date | None]
    credit_note_ordinal: Mapped[int | None] = mapped_column(unique=True)
    credit_note_number: Mapped[str | None] = mapped_column(unique=True)


async def draw_number(session: AsyncSession, series: Series) -> tuple[int, str]:
    """The next ordinal and number. Whoever else draws one waits until this transaction ends: draw late in it."""
    statement = (
        upsert(DocumentSeries)
        .values(series=series, last_ordinal=1)
        .on_conflict_do_update(index_elements=["series"], set_={"last_ordinal": DocumentSeries.last_ordinal + 1})
        .returning(DocumentSeries.last_ordinal)
    )
    ordinal: int = (await session.scalars(statement)).one()
    return ordinal, document_number(series, ordinal)


# One statement for all lines: a trigger sees that they add up to the invoice. One parameter, since a statement has 65,535 at most.
WRITE_LINES = text("INSERT INTO invoice_lines SELECT * FROM jsonb_populate_recordset(NULL::invoice_lines, CAST(:lines AS jsonb))")


async def write_invoice(
    session: AsyncSession,
    report: MonthReport,
    *,
    invoice_id: uuid.UUID,
    month: date,
    ordinal: int,
    number: str,
    issued_at: datetime,
    issued_by: str,
) -> None:
    """The rows of a month's invoice, as its report tells it."""
    lines = invoice_lines(report)
    row = {
        "id": invoice_id,
        "ordinal": ordinal,
        "number": number,
        "organization_id": report.organization_id,
        "month": month,
        "organization_name": report.organization_name,
        "currency_code": report.currency_code,
        "issued_at": issued_at,
        "issued_by": issued_by,
        "line_count": len(lines),
        "exact_picos": Decimal(report.total_picos),
        "carried_in_picos": Decimal(report.carried_in_picos),
        "carried_out_picos": Decimal(report.carried_out_picos),
        "total_picos": Decimal(report.total_rounded_picos),
    }
    await session.execute(insert(InvoiceRow).values(row))
    values = [_line_values(invoice_id, position, line) for position, line in enumerate(lines)]
    await session.execute(WRITE_LINES, {"lines": json.dumps(values)})


def _line_values(invoice_id: uuid.UUID, position: int, line: InvoiceLine) -> dict[str, object]:
    values = asdict(line) | {"invoice_id": str(invoice_id), "position": position}
    values["price_version_id"] = values.pop("price_version")
    return values | {"source_id": None if line.source_id is None else str(line.source_id)}


async def find_invoice_row(session: AsyncSession, number: str) -> InvoiceRow:
    """By its number. Raises: NotFound."""
    if (row := await session.scalar(select(InvoiceRow).where(InvoiceRow.number == number))) is None:
        raise NotFound("invoice", number)
    return row


async def invoice_of_month(session: AsyncSession, organization_id: uuid.UUID, month: date) -> InvoiceRow | None:
    """The invoice of a closed month; None where there was nothing to invoice, or the month is not closed."""
    query = select(InvoiceRow).where(InvoiceRow.organization_id == organization_id, InvoiceRow.month == month)
    return (await session.scalars(query)).one_or_none()


async def read_invoice(session: AsyncSession, row: InvoiceRow) -> Invoice:
    """The whole invoice, with what credit notes have given back of it."""
    lines, credited = await read_lines(session, row.id), await credited_picos(session, row.id)
    return record_of(Invoice, row, month=month_text(row.month), lines=lines, credited_picos=credited)


async def read_lines(session: AsyncSession, invoice_id: uuid.UUID) -> tuple[InvoiceLine, ...]:
    query = select(InvoiceLineRow).where(InvoiceLineRow.invoice_id == invoice_id).order_by(InvoiceLineRow.position)
    return tuple(record_of(InvoiceLine, line, price_version=line.price_version_id) for line in await session.scalars(query))


async def credited_picos(session: AsyncSession, invoice_id: uuid.UUID) -> int:
    """The sum of an invoice's approved credit notes."""
    query = (
        select(func.coalesce(-func.sum(Adjustment.amount_picos), 0))
        .join(AdjustmentDecision, AdjustmentDecision.adjustment_id == Adjustment.id)
        .where(Adjustment.invoice_id == invoice_id, AdjustmentDecision.approved)
    )
    return int((await session.scalars(query)).one())


def charges_of(lines: Sequence[InvoiceLine]) -> tuple[Charge, ...]:
    """The charges that an invoice froze, as the report of its month tells them."""
    charges = (line for line in lines if is_charge(line.kind))
    return tuple(record_of(Charge, each, kind=ChargeKind(each.kind.value), amount_picos=each.exact_picos) for each in charges)
