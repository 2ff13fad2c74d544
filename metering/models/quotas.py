"""Tables of quotas, of what they have counted, and of the news that rules have changed."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, Integer, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.models.base import Base, one_of


class QuotaSubject(StrEnum):
    """What a quota hangs on."""

    ORGANIZATION = "organization"
    PROJECT = "project"
    API_KEY = "api_key"


class QuotaDimension(StrEnum):
    """What a quota counts, and over which calendar window (UTC)."""

    CONCURRENT_REQUESTS = "concurrent_requests"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    COST_PICOS_PER_DAY = "cost_picos_per_day"
    COST_PICOS_PER_MONTH = "cost_picos_per_month"
    PREPAID_CREDIT_PICOS = "prepaid_credit_picos"  # for ever: `billing/prepaid.py` moves the limit with what is granted and billed


class Quota(Base):
    """One limit. `model` is empty for all models together. A removed limit stays, for the holds that were charged to it.

    Weights are thousandths per token of a kind, for quotas on tokens. A raise holds instead of the limit until `raised_until`. One
    that is not enforced counts and refuses nobody. One for new keys limits nothing itself: each key that is created under its
    subject gets a copy of it. `alert_at`: percent of the limit that are used, of prepaid credit picos that are left
    (`quotas/quota_rules.py`).
    """

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint(one_of("subject", QuotaSubject), name="subject_known"),
        CheckConstraint(one_of("dimension", QuotaDimension), name="dimension_known"),
        CheckConstraint("limit_value >= 0", name="limit_not_negative"),
        CheckConstraint(
            "input_weight_milli BETWEEN 0 AND 1000000 AND cached_input_weight_milli BETWEEN 0 AND 1000000 "
            "AND output_weight_milli BETWEEN 0 AND 1000000",
            name="weights_in_range",
        ),
        CheckConstraint(
            "num_nulls(raised_limit_value, raised_until, raise_reason) IN (0, 3) AND raised_limit_value > limit_value",
            name="raise_complete",
        ),
        CheckConstraint("NOT for_new_keys OR subject <> 'api_key'", name="keys_have_no_new_keys"),
        CheckConstraint("array_position(alert_at, NULL) IS NULL AND 0 < ALL (alert_at)", name="alert_at_sane"),
        Index(
            "uq_quotas_live",
            "subject_id",
            "model",
            "dimension",
            "for_new_keys",
            unique=True,
            postgresql_where=text("deleted_at IS NULL"),
        ),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    subject: Mapped[str]
    subject_id: Mapped[uuid.UUID]
    model: Mapped[str] = mapped_column(server_default="")
    dimension: Mapped[str]
    limit_value: Mapped[int]
    input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    cached_input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    output_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    enforced: Mapped[bool] = mapped_column(server_default=text("true"))
    for_new_keys: Mapped[bool] = mapped_column(server_default=text("false"))
    raised_limit_value: Mapped[int | None]
    raised_until: Mapped[datetime | None]
    raise_reason: Mapped[str | None]
    alert_at: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())  # set by a trigger
    deleted_at: Mapped[datetime | None]


class QuotaCounter(Base):
    """What is used and held of one quota in one window. Equals the sums over holds and usage events (checked by fsck tests).

    would_refuse_count: admissions that a quota which is not enforced would have refused.
    """

    __tablename__ = "quota_counters"
    __table_args__ = (
        CheckConstraint("used >= 0", name="used_not_negative"),
        CheckConstraint("held >= 0", name="held_not_negative"),
        # Every admission updates these rows: free space on the page keeps the updates off the index.
        {"postgresql_with": {"fillfactor": "50"}},
    )

    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), primary_key=True)
    window_start: Mapped[datetime] = mapped_column(primary_key=True)
    used: Mapped[int] = mapped_column(server_default="0")
    held: Mapped[int] = mapped_column(server_default="0")
    would_refuse_count: Mapped[int] = mapped_column(server_default="0")


class RuleChange(Base):
    """That rules or prices of a subject have changed, or those of all. Written by triggers; read by those who keep rules in memory.

    transaction_id: of the change, a 64-bit transaction number as the server counts them.
    """

    __tablename__ = "rule_changes"
    __table_args__ = (Index("ix_rule_changes_transaction_id", "transaction_id"),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    transaction_id: Mapped[int] = mapped_column(server_default=text("pg_current_xact_id()::text::bigint"))
    subject_id: Mapped[uuid.UUID | None]
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())
