"""The table of prices, and what a price is for."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, Identity, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.models.base import Base, one_of


class ServiceTier(StrEnum):
    """What a request is: somebody waits for it, or it fills what others leave."""

    __hash__ = str.__hash__  # an Enum's own is Python, at ten times the cost

    INTERACTIVE = "interactive"
    BATCH = "batch"


class TokenKind(StrEnum):
    """What a token is billed as."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"
    EMBEDDING = "embedding"


class PriceVersion(Base):
    """Prices of one model and service tier from a moment on, in picos per token. Never changed; a correction is a later version.

    organization_id: whose own price it is; none for the list. multiplier_milli: thousandths of the interactive prices that these
    were made with, for display. withdrawn: from then on the organization pays the list price again; nobody is charged by the row.
    """

    __tablename__ = "price_versions"
    __table_args__ = (
        UniqueConstraint(
            "model",
            "currency_code",
            "organization_id",
            "tier",
            "effective_at",
            name="uq_price_versions_place",
            postgresql_nulls_not_distinct=True,
        ),
        CheckConstraint(
            "least(input_picos_per_token, cached_input_picos_per_token, output_picos_per_token, embedding_picos_per_token) >= 0",
            name="not_negative",
        ),
        CheckConstraint(one_of("tier", ServiceTier), name="tier_known"),
        CheckConstraint("multiplier_milli >= 0 AND (tier <> 'interactive' OR multiplier_milli = 1000)", name="multiplier_sane"),
        CheckConstraint("NOT withdrawn OR organization_id IS NOT NULL", name="list_stays"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    model: Mapped[str]
    currency_code: Mapped[str]
    input_picos_per_token: Mapped[int]
    cached_input_picos_per_token: Mapped[int]
    output_picos_per_token: Mapped[int]
    embedding_picos_per_token: Mapped[int] = mapped_column(server_default="0")
    organization_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("organizations.id"))
    tier: Mapped[str] = mapped_column(server_default="interactive")
    multiplier_milli: Mapped[int] = mapped_column(server_default="1000")
    withdrawn: Mapped[bool] = mapped_column(server_default=text("false"))
    effective_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
