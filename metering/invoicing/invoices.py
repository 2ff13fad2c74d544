"""Invoices: lines and totals, writing and reading.

An invoice is made from a month's report, line by line in its order. Each line has its exact amount
and the whole minor units that the customer pays for it; a last line completes them to the total.
All tables are append-only, by triggers; only `document_series` counts: a number is drawn in the
transaction that uses it and returned if that fails, so numbers have no gaps. Functions never
commit.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import NotFound
from metering.core.models import ServiceTier, TokenKind, insertion, record_of
from metering.core.money import exact_text
from metering.invoicing.month_report import MonthReport, ReportLine
from metering.ledger.ledger import month_text
from metering.plans.plans import LineKind

TOKENS_PER_PRICE = 10**6  # prices are set and shown per million tokens


class Series(StrEnum):
    """Gapless series of document numbers; the value is their prefix."""

    INVOICE = "INV"
    CREDIT_NOTE = "CN"


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """A line of an invoice.

    `exact_picos` is the amount before rounding, `amount_picos` the payable one in whole minor
    units. The line of the rounding has no exact amount.
    """

    kind: LineKind
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
    """Invoice of one month. Amounts are in picos; total = exact + carried in - carried out."""

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
    """Format a number such as `INV-000001`. Six digits or more, so that numbers sort as text."""
    return f"{series}-{ordinal:06d}"


def invoice_lines(report: MonthReport) -> tuple[InvoiceLine, ...]:
    parts = iter(report.rounded_parts_picos)
    usage = (
        record_of(
            InvoiceLine,
            line,
            kind=LineKind.LATE_USAGE if line.late_month else LineKind.USAGE,
            description=usage_description(line, report.currency_code),
            exact_picos=line.amount_picos,
            amount_picos=next(parts),
            usage_month=line.late_month or report.month,
        )
        for line in report.lines
    )
    charges = (
        record_of(InvoiceLine, each, exact_picos=each.amount_picos, amount_picos=next(parts))
        for each in report.charges
    )
    rounding = report.rounding_picos
    last = (InvoiceLine(LineKind.ROUNDING, "Rounding", 0, rounding),) if rounding else ()
    return (*usage, *charges, *last)


def usage_description(line: ReportLine, currency_code: str) -> str:
    """Describe a line, as in `demo, output tokens, USD 0.60 per million (price 3)`."""
    late = f"late usage of {line.late_month}: " if line.late_month else ""
    price = exact_text(line.unit_price_picos * TOKENS_PER_PRICE, currency_code)
    tier = "" if line.tier is ServiceTier.INTERACTIVE else f"{line.tier} "
    words = f"{tier}{line.token_kind.replace('_', ' ')} tokens"
    return (
        f"{late}{line.model}, {words}, {currency_code} {price} per million (price"
        f" {line.price_version})"
    )


NUMBER = text("""
INSERT INTO document_series AS known (series, last_ordinal)
VALUES (:series, 1)
ON CONFLICT (series) DO UPDATE
SET last_ordinal = known.last_ordinal + 1
RETURNING last_ordinal
""")
INVOICE = "SELECT * FROM invoices WHERE"
OF_NUMBER = text(f"{INVOICE} number = :number")
OF_MONTH = text(f"{INVOICE} organization_id = :organization_id AND month = :month")
LINES = text("""
SELECT *, price_version_id AS price_version
FROM invoice_lines
WHERE invoice_id = :invoice_id
ORDER BY position
""")
CREDITED = text("""
SELECT -coalesce(sum(a.amount_picos), 0)
FROM adjustments a
JOIN adjustment_decisions d ON d.adjustment_id = a.id
WHERE a.invoice_id = :invoice_id AND d.approved
""")


async def draw_number(session: AsyncSession, series: Series) -> tuple[int, str]:
    """Take the next ordinal and number of a series. Other calls wait until the commit."""
    ordinal: int = (await session.execute(NUMBER, {"series": series})).scalar_one()
    return ordinal, document_number(series, ordinal)


# One statement for all lines: a trigger checks their sum. One parameter, since a statement has
# 65,535 at most.
WRITE_LINES = text("""
INSERT INTO invoice_lines
SELECT * FROM jsonb_populate_recordset(NULL::invoice_lines, CAST(:lines AS jsonb))
""")


async def write_invoice(
    session: AsyncSession,
    report: MonthReport,
    invoice_id: uuid.UUID,
    month: date,
    issued_at: datetime,
    issued_by: str,
) -> str:
    """Insert a month's invoice and its lines; return the invoice number."""
    ordinal, number = await draw_number(session, Series.INVOICE)
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
    await session.execute(insertion("invoices", row))
    values = [_line_values(invoice_id, position, line) for position, line in enumerate(lines)]
    await session.execute(WRITE_LINES, {"lines": json.dumps(values)})
    return number


def _line_values(invoice_id: uuid.UUID, position: int, line: InvoiceLine) -> dict[str, object]:
    values = asdict(line) | {"invoice_id": str(invoice_id), "position": position}
    values["price_version_id"] = values.pop("price_version")
    return values | {"source_id": None if line.source_id is None else str(line.source_id)}


async def find_invoice_row(session: AsyncSession, number: str) -> Row[Any]:
    """Look up an invoice's row by its number. Raises: NotFound."""
    if (row := (await session.execute(OF_NUMBER, {"number": number})).one_or_none()) is None:
        raise NotFound("invoice", number)
    return row


async def invoice_of_month(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> Row[Any] | None:
    """Look up a month's invoice; None if the month is open or has nothing to invoice."""
    return (
        await session.execute(OF_MONTH, {"organization_id": organization_id, "month": month})
    ).one_or_none()


async def read_invoice(session: AsyncSession, row: Row[Any]) -> Invoice:
    """Read an invoice with its lines and the sum of its credit notes."""
    lines, credited = await read_lines(session, row.id), await credited_picos(session, row.id)
    return record_of(
        Invoice, row, month=month_text(row.month), lines=lines, credited_picos=credited
    )


async def read_lines(session: AsyncSession, invoice_id: uuid.UUID) -> tuple[InvoiceLine, ...]:
    return tuple(
        record_of(InvoiceLine, line)
        for line in await session.execute(LINES, {"invoice_id": invoice_id})
    )


async def credited_picos(session: AsyncSession, invoice_id: uuid.UUID) -> int:
    """Sum the approved credit notes of an invoice."""
    return int((await session.execute(CREDITED, {"invoice_id": invoice_id})).scalar_one())
