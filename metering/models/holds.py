"""The table of what running requests claim of their quotas."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.models.base import Base, one_of


class HoldState(StrEnum):
    """A hold's life: `held`, then exactly one of the others, for ever."""

    HELD = "held"
    SETTLED = "settled"
    VOIDED = "voided"
    EXPIRED = "expired"


class Hold(Base):
    """One request's claim on its quotas.

    For the token quotas it holds input + leased output - posted tokens, all in the window of `charged_at`; an extension posts what
    was delivered to the window it was charged to and moves the rest into the window of the moment. `quota_ids` are the quotas
    charged. `posted_minutes` has a pair for each minute (since 1970) whose charge was moved on: the minute, and the tokens that
    were posted up to its end; so what a hold used in any window can be told at any later time. Of an `embedding` the input is what
    is embedded: quotas on tokens count it as input, those on money at its own price. That key, project, organization and price
    version exist and belong together is seen to by a trigger on each INSERT, at a fraction of the cost of foreign keys.
    """

    __tablename__ = "holds"
    __table_args__ = (
        # A voided request left no trace, so its id may be used again.
        Index("uq_holds_request", "project_id", "request_id", unique=True, postgresql_where=text("state <> 'voided'")),
        CheckConstraint(one_of("state", HoldState), name="state_known"),
        CheckConstraint("(state = 'held') = (ended_at IS NULL)", name="ended_once"),
        CheckConstraint("delivered_token_count BETWEEN 0 AND leased_token_count", name="delivered_within_lease"),
        CheckConstraint("cached_input_token_count BETWEEN 0 AND input_token_count", name="cached_within_input"),
        CheckConstraint("posted_token_count BETWEEN 0 AND input_token_count + delivered_token_count", name="posted_sane"),
        CheckConstraint("NOT embedding OR leased_token_count + cached_input_token_count = 0", name="embedding_has_no_output"),
        Index("ix_holds_owner_held", "owner_id", postgresql_where=text("state = 'held'")),
        # Expired holds are charged to quotas without a usage event: rare, and looked for when a quota is set.
        Index(
            "ix_holds_charged_unbilled",
            "organization_id",
            "ended_at",
            postgresql_where=text("state = 'expired' OR (state = 'voided' AND posted_token_count > 0)"),
        ),
        {"postgresql_with": {"fillfactor": "70"}},
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    organization_id: Mapped[uuid.UUID]
    project_id: Mapped[uuid.UUID]
    api_key_id: Mapped[uuid.UUID]
    request_id: Mapped[uuid.UUID]
    payload_hash: Mapped[bytes]
    model: Mapped[str]
    price_version_id: Mapped[int]
    labels: Mapped[dict[str, Any]]
    embedding: Mapped[bool] = mapped_column(server_default=text("false"))
    state: Mapped[str] = mapped_column(server_default="held")
    owner_id: Mapped[uuid.UUID]
    input_token_count: Mapped[int]
    cached_input_token_count: Mapped[int] = mapped_column(server_default="0")
    leased_token_count: Mapped[int]
    delivered_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_cost_picos: Mapped[int] = mapped_column(server_default="0")
    posted_minutes: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    quota_ids: Mapped[list[uuid.UUID]]
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    charged_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
