"""Payments of Stripe's invoices: how far each is paid, by what its events have told."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alerts import InvoiceEvent, InvoiceFacts, fire_invoice_alert
from metering.core.models import Organization, record_of
from metering.export.export_models import PaymentState, StripeInvoice
from metering.export.stripe_gateway import minor_unit_picos

UNPAID = (PaymentState.FAILED, PaymentState.OVERDUE, PaymentState.UNCOLLECTIBLE)  # that a person should look at
ALERTING = {"invoice.payment_failed": InvoiceEvent.PAYMENT_FAILED, "invoice.paid": InvoiceEvent.PAID}


@dataclass(frozen=True, slots=True)
class InvoicePayment:
    """One invoice at Stripe. month: the one that it bills, `YYYY-MM`."""

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


async def payments_by_month(session: AsyncSession, organization_id: uuid.UUID) -> dict[str, list[InvoicePayment]]:
    query = (
        select(StripeInvoice, Organization.name)
        .join(Organization)
        .where(StripeInvoice.organization_id == organization_id, StripeInvoice.period_end > StripeInvoice.period_start)
        .order_by(StripeInvoice.period_start, StripeInvoice.id)
    )
    found: dict[str, list[InvoicePayment]] = defaultdict(list)
    for row, name in await session.execute(query):
        found[month_of_invoice(row)].append(payment_of(row, name))
    return found


async def unpaid_invoices(session: AsyncSession, limit: int) -> list[InvoicePayment]:
    """Invoices of all organizations that a person should look at, the oldest first."""
    query = (
        select(StripeInvoice, Organization.name)
        .join(Organization)
        .where(StripeInvoice.payment_state.in_([str(each) for each in UNPAID]))
        .order_by(StripeInvoice.period_start, Organization.name, StripeInvoice.id)
        .limit(limit)
    )
    return [payment_of(row, name) for row, name in await session.execute(query)]


async def alert_on_payment(session: AsyncSession, stripe_invoice_id: str, kind: str) -> None:
    """Fire the alert of an event that is stored already. kind: the event's type. Never commits.

    A failure that is told of after the payment is old news. Nothing is due of an invoice of zero.
    """
    invoice = await session.get(StripeInvoice, stripe_invoice_id, populate_existing=True)
    event = ALERTING.get(kind)
    if invoice is None or invoice.organization_id is None or event is None:
        return
    is_stale = event is InvoiceEvent.PAYMENT_FAILED and invoice.payment_state != PaymentState.FAILED
    if is_stale or not (invoice.amount_due_minor or invoice.amount_paid_minor):
        return
    facts = record_of(InvoiceFacts, payment_of(invoice, ""))
    await fire_invoice_alert(session, invoice.organization_id, invoice.id, event, facts)


def month_of_invoice(row: StripeInvoice) -> str:
    """The month that an invoice bills, in UTC."""
    return f"{row.period_start.astimezone(UTC):%Y-%m}"


def payment_of(row: StripeInvoice, organization: str) -> InvoicePayment:
    unit = minor_unit_picos(row.currency_code)
    return record_of(
        InvoicePayment,
        row,
        stripe_invoice_id=row.id,
        stripe_number=row.stripe_number or "",
        organization=organization,
        month=month_of_invoice(row),
        state=PaymentState(row.payment_state),
        amount_due_picos=row.amount_due_minor * unit,
        amount_paid_picos=row.amount_paid_minor * unit,
        hosted_url=row.hosted_url or "",
    )
