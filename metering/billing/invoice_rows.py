"""Writing invoices at the close of a month, and reading them. Functions take a session and never commit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date, datetime
from decimal import Decimal

from sqlalchemy import func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.invoice_models import Adjustment, AdjustmentDecision, InvoiceLineRow, InvoiceRow
from metering.billing.invoices import Invoice, InvoiceLine, InvoiceLineKind, invoice_lines, is_charge
from metering.billing.months import month_text
from metering.billing.reports import Charge, ChargeKind, MonthReport
from metering.errors import NotFound
from metering.models import TokenKind

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
    return Invoice(
        number=row.number,
        organization_id=row.organization_id,
        organization_name=row.organization_name,
        month=month_text(row.month),
        currency_code=row.currency_code,
        issued_at=row.issued_at,
        issued_by=row.issued_by,
        lines=await read_lines(session, row.id),
        exact_picos=int(row.exact_picos),
        carried_in_picos=int(row.carried_in_picos),
        carried_out_picos=int(row.carried_out_picos),
        total_picos=int(row.total_picos),
        credited_picos=await credited_picos(session, row.id),
    )


async def read_lines(session: AsyncSession, invoice_id: uuid.UUID) -> tuple[InvoiceLine, ...]:
    """The lines of an invoice, in their order."""
    query = select(InvoiceLineRow).where(InvoiceLineRow.invoice_id == invoice_id).order_by(InvoiceLineRow.position)
    return tuple(
        InvoiceLine(
            kind=InvoiceLineKind(line.kind),
            description=line.description,
            exact_picos=int(line.exact_picos),
            amount_picos=int(line.amount_picos),
            model=line.model,
            price_version=line.price_version_id,
            token_kind=None if line.token_kind is None else TokenKind(line.token_kind),
            token_count=line.token_count,
            unit_price_picos=line.unit_price_picos,
            usage_month=line.usage_month,
            source_id=line.source_id,
        )
        for line in await session.scalars(query)
    )


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
    return tuple(
        Charge(
            kind=ChargeKind(line.kind.value),
            description=line.description,
            amount_picos=line.exact_picos,
            model=line.model,
            token_kind=line.token_kind,
            token_count=line.token_count,
            source_id=line.source_id,
        )
        for line in lines
        if is_charge(line.kind)
    )
