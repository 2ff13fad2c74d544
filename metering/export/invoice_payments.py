"""Payments of invoices, as Stripe's events report them (`stripe_inbox.py`)."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import record_of
from metering.export.stripe_gateway import minor_unit_picos


class PaymentState(StrEnum):
    """Payment state of an invoice at Stripe, explained by the contract's `PaymentState`."""

    OPEN = "open"
    FAILED = "failed"
    OVERDUE = "overdue"
    PAID = "paid"
    VOID = "void"
    UNCOLLECTIBLE = "uncollectible"


UNPAID = [
    str(each) for each in (PaymentState.FAILED, PaymentState.OVERDUE, PaymentState.UNCOLLECTIBLE)
]

INVOICES = """
SELECT i.*, o.name AS organization
FROM stripe_invoices i
JOIN organizations o ON o.id = i.organization_id
"""

INVOICES_OF_ORGANIZATION = text(f"""
{INVOICES}
WHERE i.organization_id = :organization_id AND i.period_end > i.period_start
ORDER BY i.period_start, i.id
""")

UNPAID_INVOICES = text(f"""
{INVOICES}
WHERE i.payment_state = ANY(:states)
ORDER BY i.period_start, o.name, i.id
LIMIT :limit
""")

ONE_INVOICE = text(f"{INVOICES} WHERE i.id = :id")


@dataclass(frozen=True, slots=True)
class InvoicePayment:
    """Payment of one invoice at Stripe. `month` is the billing month as `YYYY-MM`."""

    stripe_invoice_id: str
    stripe_number: str
    organization: str
    month: str
    currency_code: str
    state: PaymentState
    amount_due_picos: int
    amount_paid_picos: int
    hosted_url: str
    finalized_at: datetime | None
    paid_at: datetime | None
    payment_failed_at: datetime | None


async def payments_by_month(
    session: AsyncSession, organization_id: uuid.UUID
) -> dict[str, list[InvoicePayment]]:
    found: dict[str, list[InvoicePayment]] = defaultdict(list)
    for row in await session.execute(
        INVOICES_OF_ORGANIZATION, {"organization_id": organization_id}
    ):
        payment = payment_of(row)
        found[payment.month].append(payment)
    return found


async def unpaid_invoices(session: AsyncSession, limit: int) -> list[InvoicePayment]:
    """List the unpaid invoices that need an operator, the oldest first, at most `limit`."""
    return [
        payment_of(row)
        for row in await session.execute(UNPAID_INVOICES, {"states": UNPAID, "limit": limit})
    ]


def payment_of(row: Row[Any]) -> InvoicePayment:
    unit = minor_unit_picos(row.currency_code)
    return record_of(
        InvoicePayment,
        row,
        stripe_invoice_id=row.id,
        stripe_number=row.stripe_number or "",
        month=f"{row.period_start.astimezone(UTC):%Y-%m}",
        state=PaymentState(row.payment_state),
        amount_due_picos=row.amount_due_minor * unit,
        amount_paid_picos=row.amount_paid_minor * unit,
        hosted_url=row.hosted_url or "",
    )
