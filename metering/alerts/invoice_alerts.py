"""Alerts on payments: fired with the event that Stripe tells of one, once for each invoice and kind."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass

from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alert_models import Alert, InvoiceEvent

FIRE = text("""
WITH fired AS (
    INSERT INTO alerts (organization_id, stripe_invoice_id, invoice_event, invoice, fired_at)
    VALUES (:organization_id, :stripe_invoice_id, :event, :invoice, now()) ON CONFLICT DO NOTHING RETURNING id, organization_id
), queued AS (
    INSERT INTO alert_deliveries (alert_id, organization_id, created_at)
    SELECT f.id, f.organization_id, now() FROM fired f JOIN alert_webhooks USING (organization_id)
)
SELECT count(*) FROM fired
""").bindparams(bindparam("invoice", type_=JSONB))


@dataclass(frozen=True, slots=True)
class InvoiceFacts:
    """Facts of an invoice in an alert, stored with it so that each delivery attempt sends the same."""

    stripe_number: str
    month: str
    currency_code: str
    amount_due_picos: int
    amount_paid_picos: int
    hosted_url: str


async def fire_invoice_alert(
    session: AsyncSession, organization_id: uuid.UUID, stripe_invoice_id: str, event: InvoiceEvent, facts: InvoiceFacts
) -> None:
    """Write the alert and queue it for the organization's webhook, unless it has fired before. Never commits."""
    # Picos are texts: JSON has no whole numbers of their size in every reader.
    document = asdict(facts) | {
        "amount_due_picos": str(facts.amount_due_picos),
        "amount_paid_picos": str(facts.amount_paid_picos),
    }
    parameters = {"organization_id": organization_id, "stripe_invoice_id": stripe_invoice_id, "event": event, "invoice": document}
    await session.execute(FIRE, parameters)


def facts_of(alert: Alert) -> InvoiceFacts:
    """Build the facts of an invoice for a payment alert."""
    document = alert.invoice
    assert document is not None
    return InvoiceFacts(**document | {name: int(document[name]) for name in ("amount_due_picos", "amount_paid_picos")})
