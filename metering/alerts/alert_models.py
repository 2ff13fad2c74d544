"""The tables of alerts: what was crossed, where an organization wants to be told of it, and how far that has come.

Alerts are append-only (trigger), and the database takes each but once.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, Integer, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.models import Base, one_of


class DeliveryState(StrEnum):
    """Where an alert stands on its way to a webhook. `pending` until one of the others, for ever."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class InvoiceEvent(StrEnum):
    """What Stripe told of the payment of an invoice."""

    PAYMENT_FAILED = "invoice_payment_failed"
    PAID = "invoice_paid"


class Alert(Base):
    """So much of a quota's limit was used in a window, or so little of prepaid credit was left; or Stripe told of a payment.

    A test is of neither.

    threshold: percent of the limit that are used, or picos of credit that are left, as the quota's `alert_at` had it. limit_value,
    used: of the look that found it. organization_id: whose the quota's subject is. invoice: what was known of it when it fired, as
    `invoice_alerts.py` writes it.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        CheckConstraint("num_nulls(quota_id, window_start, threshold, limit_value, used) IN (0, 5)", name="of_a_quota_or_a_test"),
        CheckConstraint("num_nulls(stripe_invoice_id, invoice_event, invoice) IN (0, 3)", name="of_an_invoice_whole"),
        CheckConstraint("num_nulls(quota_id, stripe_invoice_id) > 0", name="of_one_thing"),
        CheckConstraint(one_of("invoice_event", InvoiceEvent), name="invoice_event_known"),
        Index("uq_alerts_once_per_invoice", "stripe_invoice_id", "invoice_event", unique=True),
        # Claimed by the row itself: whoever looks, however often, at the same crossing.
        Index("uq_alerts_once", "quota_id", "window_start", "threshold", "limit_value", unique=True),
        Index("ix_alerts_organization_id_fired_at_id", "organization_id", "fired_at", "id"),
        Index("ix_alerts_fired_at_id", "fired_at", "id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    quota_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("quotas.id"))
    window_start: Mapped[datetime | None]
    threshold: Mapped[int | None]
    limit_value: Mapped[int | None]
    used: Mapped[int | None]
    stripe_invoice_id: Mapped[str | None]
    invoice_event: Mapped[str | None]
    invoice: Mapped[dict[str, Any] | None]
    fired_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AlertWebhook(Base):
    """Where an organization is told of its alerts. secret: signs what is sent; it is shown once, and in no log.

    failure_count: attempts that failed since one succeeded; rests_until: none is made before.
    """

    __tablename__ = "alert_webhooks"

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    url: Mapped[str]
    secret: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    failure_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    rests_until: Mapped[datetime | None]


class AlertDelivery(Base):
    """An alert on its way to the webhook that its organization had when it fired."""

    __tablename__ = "alert_deliveries"
    __table_args__ = (
        CheckConstraint(one_of("state", DeliveryState), name="state_known"),
        CheckConstraint("(state = 'pending') = (ended_at IS NULL)", name="ended_once"),
        Index("ix_alert_deliveries_pending", "organization_id", "created_at", postgresql_where=text("state = 'pending'")),
    )

    alert_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("alerts.id"), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    state: Mapped[str] = mapped_column(server_default="pending")
    attempt_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempted_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
