"""Tables of what requests have consumed: the rows that are billed."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    SmallInteger,
    Table,
    Uuid,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from metering.models.base import Base


class UsageEvent(Base):
    """What one request consumed: the row that is billed. Written in the transaction that ends the hold.

    Tokens that were embedded are counted apart, and an event that has some has no others. `part` 0 is the settlement. `part` 1
    exists only where a hold had expired before its owner's journal was found, and carries the tokens beyond part 0, so that the
    parts of a hold add up to what was delivered. A trigger on each INSERT sees that its hold exists, has ended and has the same key
    and price version, and that no month has the part already; it puts the event into `unrated_usage`. Rating sets `rated_at` and
    `ledger_transaction_id` together, once; a trigger sees that the transaction is there, is of the same organization, and debits
    what its events cost. `receipt_hash` is that of the event's receipt, the rest of which is in the other columns; events of before
    there were receipts have none. `migration_count` says how often the request went on in another engine after its first token; it
    is not billed, and of what a dead process left behind it is not known.

    One partition per month of `settled_at` (UTC). The primary key has that in it because PostgreSQL wants it there; `id` has no
    index, and is the order in which events were written. Pages are left half free for what rating writes (`usage_by_month`).
    """

    __tablename__ = "usage_events"
    __table_args__ = (
        CheckConstraint("cached_input_token_count BETWEEN 0 AND input_token_count", name="cached_within_input"),
        CheckConstraint("delivered_token_count BETWEEN 0 AND generated_token_count", name="delivered_within_generated"),
        CheckConstraint("billed_token_count BETWEEN 0 AND delivered_token_count", name="billed_within_delivered"),
        CheckConstraint(
            "embedding_token_count = 0 OR embedding_token_count > 0 AND input_token_count + generated_token_count = 0",
            name="embedding_alone",
        ),
        CheckConstraint("(rated_at IS NULL) = (ledger_transaction_id IS NULL)", name="rated_and_posted"),
        CheckConstraint(
            "num_nulls(receipt_sequence, previous_receipt_hash, receipt_hash) IN (0, 3) AND receipt_sequence > 0",
            name="receipt_complete",
        ),
        Index("ix_usage_events_organization_id_settled_at", "organization_id", "settled_at"),
        Index("ix_usage_events_rated_at", "rated_at", postgresql_using="brin", postgresql_with={"autosummarize": "true"}),
        {"postgresql_partition_by": "RANGE (settled_at)"},
    )

    id: Mapped[int] = mapped_column(Identity(always=True))
    hold_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(SmallInteger(), server_default="0", primary_key=True)
    organization_id: Mapped[uuid.UUID]
    project_id: Mapped[uuid.UUID]
    api_key_id: Mapped[uuid.UUID]
    request_id: Mapped[uuid.UUID]
    model: Mapped[str]
    outcome: Mapped[str]
    input_token_count: Mapped[int]
    cached_input_token_count: Mapped[int]
    generated_token_count: Mapped[int]
    delivered_token_count: Mapped[int]
    billed_token_count: Mapped[int]
    embedding_token_count: Mapped[int] = mapped_column(server_default="0")
    migration_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    price_version_id: Mapped[int]
    cost_picos: Mapped[int]
    timings: Mapped[dict[str, Any] | None]
    labels: Mapped[dict[str, Any]]
    recovered: Mapped[bool] = mapped_column(server_default=text("false"))
    admitted_at: Mapped[datetime]
    settled_at: Mapped[datetime] = mapped_column(server_default=func.now(), primary_key=True)
    rated_at: Mapped[datetime | None]
    ledger_transaction_id: Mapped[int | None]
    receipt_sequence: Mapped[int | None]
    previous_receipt_hash: Mapped[bytes | None]
    receipt_hash: Mapped[bytes | None]
    receipt_batch_id: Mapped[int | None]


# The usage events that are not rated, by their keys: a list that rating reads from the front and takes rows out of. A trigger puts
# each event in as it is written. No index, so that an event's way through it costs next to nothing.
unrated_usage = Table(
    "unrated_usage",
    Base.metadata,
    Column("event_id", BigInteger(), nullable=False),
    Column("hold_id", Uuid(), nullable=False),
    Column("part", SmallInteger(), nullable=False),
    Column("settled_at", DateTime(timezone=True), nullable=False),
    Column("organization_id", Uuid(), nullable=False),
)


class Outcome(StrEnum):
    """How a request that cost something ended, as stored in `usage_events.outcome`."""

    __hash__ = str.__hash__  # an Enum's own is Python, at ten times the cost

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUOTA_EXHAUSTED = "quota_exhausted"
    COST_LIMIT = "cost_limit"
    SLOW_CONSUMER = "slow_consumer"
    FILTERED = "filtered"
    FAILED = "failed"
