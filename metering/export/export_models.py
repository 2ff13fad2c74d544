"""The tables of the export: what was handed to the biller, and what the biller told us.

A batch's tokens never change and no batch is deleted (trigger `meter_batches_keep_tokens`); only its state moves on.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Computed,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    SmallInteger,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base, TokenKind, one_of


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
    __table_args__ = (
        UniqueConstraint("organization_id", "price_version_id", "token_kind", "hour", "part"),
        CheckConstraint(one_of("token_kind", TokenKind), name="token_kind_known"),
        CheckConstraint(one_of("state", BatchState), name="state_known"),
        CheckConstraint("token_count > 0", name="tokens_positive"),
        CheckConstraint("part >= 0", name="part_not_negative"),
        CheckConstraint("hour = date_trunc('hour', hour, 'UTC')", name="whole_hour"),
        CheckConstraint("(state = 'delivered') <= (delivered_at IS NOT NULL)", name="delivered_when"),
        Index("ix_meter_batches_waiting", "next_attempt_at", postgresql_where=text("state IN ('pending', 'sent')")),
    )

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
    late_item_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("stripe_late_items.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StripeLateItem(Base):
    """Usage that Stripe was told of after the invoice of its period: what it owes, and the invoice item that says so, once created.

    Exact and carried amounts are in picos; what rounding leaves of both is carried into the organization's next item. `number` is
    their order.
    """

    __tablename__ = "stripe_late_items"
    __table_args__ = (
        CheckConstraint("token_count > 0 AND exact_picos >= 0 AND amount_minor >= 0", name="not_negative"),
        Index("ix_stripe_late_items_organization_id", "organization_id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    number: Mapped[int] = mapped_column(Identity(always=True), unique=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    currency_code: Mapped[str]
    period_start: Mapped[datetime]
    period_end: Mapped[datetime]
    token_count: Mapped[int]
    exact_picos: Mapped[Decimal]
    carried_in_picos: Mapped[Decimal]
    amount_minor: Mapped[int]
    stripe_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StripeMonthSettlement(Base):
    """What a closed month comes to in Stripe's minor units, and once it is settled what Stripe has invoiced of it.

    due: the total of our invoice and what the month before left, in whole minor units; what that leaves goes into the next month.
    invoiced: the usage on Stripe's invoices. late: items for late usage that were made until then. With the items of the month the
    two add up to what is due.
    """

    __tablename__ = "stripe_month_settlements"
    __table_args__ = (
        ForeignKeyConstraint(["organization_id", "month"], ["billing_months.organization_id", "billing_months.month"]),
        CheckConstraint("num_nulls(invoiced_minor, late_minor, settled_at) IN (0, 3)", name="settled_whole"),
    )

    organization_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    month: Mapped[date] = mapped_column(primary_key=True)
    currency_code: Mapped[str]
    due_picos: Mapped[Decimal]
    carried_in_picos: Mapped[Decimal]
    due_minor: Mapped[int]
    invoiced_minor: Mapped[int | None]
    late_minor: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    settled_at: Mapped[datetime | None]


class StripeMonthItem(Base):
    """What of our invoice Stripe does not know by itself, as an invoice item there. invoice_stripe_id: of the draft it is on."""

    __tablename__ = "stripe_month_items"
    __table_args__ = (
        UniqueConstraint("organization_id", "month", "position"),
        ForeignKeyConstraint(
            ["organization_id", "month"], ["stripe_month_settlements.organization_id", "stripe_month_settlements.month"]
        ),
        CheckConstraint("amount_minor <> 0", name="of_something"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID]
    month: Mapped[date]
    position: Mapped[int]
    description: Mapped[str]
    amount_minor: Mapped[int]
    stripe_id: Mapped[str | None]
    invoice_stripe_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ExportProgress(Base):
    """How far batches are made, and whether the biller is given a rest. One row.

    closed_until: all hours before it have their batches, but for usage that was rated after `scanned_until`. late_items_since: late
    usage of invoices that were finalised before it is left to a person; month_items_since: so are months closed before it.
    """

    __tablename__ = "export_progress"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(SmallInteger(), primary_key=True, autoincrement=False)
    closed_until: Mapped[datetime]
    scanned_until: Mapped[datetime]
    failure_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    paused_until: Mapped[datetime | None]
    pause_reason: Mapped[str | None]
    late_items_since: Mapped[datetime] = mapped_column(server_default=func.now())
    month_items_since: Mapped[datetime] = mapped_column(server_default=func.now())


class StripeObject(Base):
    """Which object of Stripe stands for one of ours. A cache: `weir stripe sync` finds each again by what is written on it.

    account: `test` or `live`, whose objects have nothing to do with each other.
    """

    __tablename__ = "stripe_objects"

    account: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    ref: Mapped[str] = mapped_column(primary_key=True)
    stripe_id: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StripeEvent(Base):
    """A webhook event, stored once by Stripe's id, as it came. outcome: what became of it, once it is handled."""

    __tablename__ = "stripe_events"
    __table_args__ = (Index("ix_stripe_events_unhandled", "received_at", postgresql_where=text("handled_at IS NULL")),)

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
    __table_args__ = (
        Index("ix_stripe_invoices_organization_id", "organization_id"),
        Index(
            "ix_stripe_invoices_unpaid",
            "period_start",
            postgresql_where=text("payment_state IN ('failed', 'overdue', 'uncollectible')"),
        ),
    )

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
