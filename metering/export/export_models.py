"""The tables of the export: what was handed to the biller, and what the biller told us.

A batch's tokens never change and no batch is deleted (trigger `meter_batches_keep_tokens`); only its state moves on.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    Computed,
    ForeignKey,
    Integer,
    SmallInteger,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base


class BatchState(StrEnum):
    """Where a batch stands.

    pending: certainly not counted by the biller. sent: asked to be, the answer is not known (yet). delivered: counted. rejected:
    refused for good. parked: may or may not be counted, and asking again could count it twice; a person decides. cancelling: to be
    taken back. cancelled: certainly not counted, and its tokens are in a later part.
    """

    PENDING = "pending"
    SENT = "sent"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    PARKED = "parked"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class MeterBatch(Base):
    """Tokens of one customer, price version and kind in one hour (UTC): what one meter event says. `id` is its identifier,
    and derived from these (`exporting.py`).

    `part` 0 is the hour as it was when it was over; later parts are usage that was found afterwards, or that replaces a cancelled
    part. The parts that are not cancelled add up to the usage events of the hour. sent_at: since when the outcome is unknown.
    """

    __tablename__ = "meter_batches"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    price_version_id: Mapped[int] = mapped_column(ForeignKey("price_versions.id"))
    token_kind: Mapped[str]
    hour: Mapped[datetime]
    part: Mapped[int] = mapped_column(SmallInteger())
    token_count: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="pending")
    attempt_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    next_attempt_at: Mapped[datetime] = mapped_column(server_default=func.now())
    sent_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
    late_item_id: Mapped[uuid.UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StripeEvent(Base):
    """A webhook event, stored once by Stripe's id, as it came. outcome: what became of it, once it is handled."""

    __tablename__ = "stripe_events"

    id: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str]
    payload: Mapped[dict[str, Any]]
    received_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempt_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    handled_at: Mapped[datetime | None]
    outcome: Mapped[str | None]


class PaymentState(StrEnum):
    """How far an invoice at Stripe is paid. See the contract, `PaymentState`."""

    OPEN = "open"
    FAILED = "failed"
    OVERDUE = "overdue"
    PAID = "paid"
    VOID = "void"
    UNCOLLECTIBLE = "uncollectible"


# By the times that events have set, so that it is the same in whatever order they came. A paid invoice stays paid; one that was
# voided cannot be paid; one that was written off may still be.
PAYMENT_STATE = f"""
CASE WHEN paid_at IS NOT NULL THEN '{PaymentState.PAID}'
     WHEN voided_at IS NOT NULL THEN '{PaymentState.VOID}'
     WHEN uncollectible_at IS NOT NULL THEN '{PaymentState.UNCOLLECTIBLE}'
     WHEN payment_failed_at IS NOT NULL THEN '{PaymentState.FAILED}'
     WHEN overdue_at IS NOT NULL THEN '{PaymentState.OVERDUE}' ELSE '{PaymentState.OPEN}' END
"""


class StripeInvoice(Base):
    """What Stripe told of an invoice, in whatever order: each time is set by its own event, so none overwrites another."""

    __tablename__ = "stripe_invoices"

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("organizations.id"))
    customer_id: Mapped[str]
    currency_code: Mapped[str]
    period_start: Mapped[datetime]
    period_end: Mapped[datetime]
    amount_due_minor: Mapped[int]
    amount_paid_minor: Mapped[int]
    total_minor: Mapped[int | None]
    finalized_at: Mapped[datetime | None]
    paid_at: Mapped[datetime | None]
    payment_failed_at: Mapped[datetime | None]
    voided_at: Mapped[datetime | None]
    uncollectible_at: Mapped[datetime | None]
    overdue_at: Mapped[datetime | None]
    payment_state: Mapped[str] = mapped_column(Computed(PAYMENT_STATE, persisted=True))
    stripe_number: Mapped[str | None]
    hosted_url: Mapped[str | None]
    told_at: Mapped[datetime]
