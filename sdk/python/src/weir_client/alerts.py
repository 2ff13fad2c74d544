"""Values of alerts on limits and credit, and their webhooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.plain import Value
from weir_client.values import QuotaDimension, QuotaSubject


class AlertDeliveryState(StrEnum):
    """State of an alert's delivery: PENDING for at most 24 hours, then final."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AlertDelivery(Value):
    """Delivery of an alert to a webhook. `last_error` describes the latest failed attempt."""

    state: AlertDeliveryState
    attempt_count: int
    attempt_time: datetime | None
    end_time: datetime | None
    last_error: str


@dataclass(frozen=True, slots=True)
class AlertInvoice(Value):
    """Stripe invoice when the alert was raised. `month` is the billed month, `YYYY-MM`."""

    stripe_invoice_id: str
    stripe_number: str
    month: str
    amount_due: Money
    amount_paid: Money
    hosted_url: str  # Stripe's payment page


@dataclass(frozen=True, slots=True)
class AlertKey(Value):
    """API key that was rotated or given more rights. `changed_by` is the prefix of another key."""

    prefix: str
    name: str
    changed_by: str
    changed: tuple[str, ...]  # "secret", "scopes", "allowed_networks", "expires_at"


@dataclass(frozen=True, slots=True)
class Alert(Value):
    """Notice of usage or credit at a threshold, of a paid or failed invoice, or of a changed key.

    Values are tokens or picos, by `dimension`. `quota_id` is empty for tests and invoices.
    """

    alert_id: str
    organization_id: str
    organization_name: str
    currency_code: str
    fire_time: datetime
    quota_id: str
    subject: QuotaSubject
    subject_id: str
    subject_name: str  # display name
    model: str  # empty: all models together
    dimension: QuotaDimension
    threshold: int  # percent of the limit used; for prepaid credit, remaining picos
    limit_value: int
    used_value: int
    window_start_time: datetime | None  # None for prepaid credit
    delivery: AlertDelivery | None = None  # None: there was no webhook at that time
    # "quota", "credit", "test", "invoice_payment_failed", "invoice_paid", "key_rotated" or
    # "key_widened"
    kind: str = ""
    invoice: AlertInvoice | None = None  # only for alerts about an invoice
    key: AlertKey | None = None  # only for alerts about a key


@dataclass(frozen=True, slots=True)
class AlertWebhook(Value):
    """Webhook of one organization; `failure_count` counts failures since the last success."""

    organization_id: str
    organization_name: str
    url: str
    create_time: datetime | None
    pending_count: int
    failure_count: int
    pause_end_time: datetime | None  # no attempt is made before this time after failures
    last_error: str


@dataclass(frozen=True, slots=True)
class CreatedAlertWebhook(Value):
    """Webhook with the secret that signs its requests. No later call returns the secret."""

    webhook: AlertWebhook
    secret: str = field(repr=False)  # kept out of logs
