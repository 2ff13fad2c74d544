"""Alerts on limits and credit, and their webhooks: the values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.values import QuotaDimension, QuotaSubject


class AlertDeliveryState(StrEnum):
    """Where an alert stands on its way to a webhook: PENDING, for 24 hours at most, then one of the others."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AlertDelivery:
    """An alert on its way to a webhook. last_error: of the latest attempt that failed; empty if none did."""

    state: AlertDeliveryState
    attempt_count: int
    attempt_time: datetime | None
    end_time: datetime | None
    last_error: str


@dataclass(frozen=True, slots=True)
class AlertInvoice:
    """An invoice at Stripe when an alert fired. month: the one that it bills, YYYY-MM."""

    stripe_invoice_id: str
    stripe_number: str
    month: str
    amount_due: Money
    amount_paid: Money
    hosted_url: str  # Stripe's page on which the customer can pay it


@dataclass(frozen=True, slots=True)
class Alert:
    """So much of a limit was used in a window, or so little credit was left; or an invoice was paid or could not be charged.

    Values are tokens or picos, by dimension. quota_id is empty for a test and for an invoice, which tell nothing of a limit.
    """

    alert_id: str
    organization_id: str
    organization_name: str
    currency_code: str
    fire_time: datetime
    quota_id: str
    subject: QuotaSubject
    subject_id: str
    subject_name: str  # for people
    model: str  # empty: all models together
    dimension: QuotaDimension
    threshold: int  # percent of the limit that are used; of prepaid credit, picos that are left
    limit_value: int
    used_value: int
    window_start_time: datetime | None  # None for prepaid credit
    delivery: AlertDelivery | None = None  # None: there was no webhook when it fired
    kind: str = ""  # "quota", "credit", "test", "invoice_payment_failed" or "invoice_paid"
    invoice: AlertInvoice | None = None  # of the two last kinds


@dataclass(frozen=True, slots=True)
class AlertWebhook:
    """Where an organization is told of its alerts. failure_count: attempts that failed since one succeeded."""

    organization_id: str
    organization_name: str
    url: str
    create_time: datetime | None
    pending_count: int
    failure_count: int
    rest_end_time: datetime | None  # after failures no attempt is made before
    last_error: str


@dataclass(frozen=True, slots=True)
class CreatedAlertWebhook:
    """A webhook with the secret that signs what it is sent, which no later call can tell again."""

    webhook: AlertWebhook
    secret: str = field(repr=False)  # kept out of logs
