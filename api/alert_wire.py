"""Alerts as messages. Pure."""

from __future__ import annotations

from weir.v1 import alerts_pb2 as pb

from api import wire
from metering.alerts.invoice_alerts import facts_of
from metering.alerts.listing import ListedAlert
from metering.alerts.webhooks import WebhookState
from metering.models import QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import NO_WINDOW

STATES = {
    "pending": pb.ALERT_DELIVERY_STATE_PENDING,
    "delivered": pb.ALERT_DELIVERY_STATE_DELIVERED,
    "failed": pb.ALERT_DELIVERY_STATE_FAILED,
}


def alert_message(listed: ListedAlert) -> pb.Alert:
    """One alert."""
    alert, quota = listed.alert, listed.quota
    message = pb.Alert(
        alert_id=str(alert.id),
        organization_id=str(listed.organization.id),
        organization_name=listed.organization.name,
        currency_code=listed.organization.currency_code,
        fire_time=wire.timestamp(alert.fired_at),
        kind=listed.kind,
    )
    if quota is not None:
        message.MergeFrom(
            pb.Alert(
                quota_id=str(quota.id),
                subject=wire.SUBJECTS[QuotaSubject(quota.subject)],
                subject_id=str(quota.subject_id),
                subject_name=listed.subject_name,
                model=quota.model,
                dimension=wire.DIMENSIONS[QuotaDimension(quota.dimension)],
                threshold=alert.threshold or 0,
                limit_value=alert.limit_value or 0,
                used_value=alert.used or 0,
                window_start_time=None if alert.window_start == NO_WINDOW else wire.timestamp(alert.window_start),
            )
        )
    if alert.invoice_event is not None:
        facts = facts_of(alert)
        message.invoice.MergeFrom(
            pb.AlertInvoice(
                stripe_invoice_id=alert.stripe_invoice_id or "",
                stripe_number=facts.stripe_number,
                month=facts.month,
                amount_due=wire.money(facts.currency_code, facts.amount_due_picos),
                amount_paid=wire.money(facts.currency_code, facts.amount_paid_picos),
                hosted_url=facts.hosted_url,
            )
        )
    if (delivery := listed.delivery) is not None:
        message.delivery.MergeFrom(
            pb.AlertDelivery(
                state=STATES[delivery.state],
                attempt_count=delivery.attempt_count,
                attempt_time=wire.timestamp(delivery.attempted_at),
                end_time=wire.timestamp(delivery.ended_at),
                last_error=delivery.last_error or "",
            )
        )
    return message


def webhook_message(state: WebhookState) -> pb.AlertWebhook:
    """A webhook without its secret."""
    return pb.AlertWebhook(
        organization_id=str(state.organization.id),
        organization_name=state.organization.name,
        url=state.webhook.url,
        create_time=wire.timestamp(state.webhook.created_at),
        pending_count=state.pending_count,
        failure_count=state.webhook.failure_count,
        rest_end_time=wire.timestamp(state.webhook.rests_until),
        last_error=state.last_error,
    )
