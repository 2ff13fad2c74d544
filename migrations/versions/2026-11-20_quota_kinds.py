"""Quotas on input, output tokens and daily money; weights, overrides, shadow mode, defaults."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

OLD_DIMENSIONS = (
    "concurrent_requests",
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "cost_picos_per_month",
)
DIMENSIONS = (
    "concurrent_requests",
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "cost_picos_per_day",
    "cost_picos_per_month",
)
WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")
WEIGHTS_IN_RANGE = " AND ".join(f"{column} BETWEEN 0 AND 1000000" for column in WEIGHTS)
RAISE_COMPLETE = "num_nulls(raised_limit_value, raised_until, raise_reason) IN (0, 3) AND raised_limit_value > limit_value"
CHARGED_UNBILLED = "state = 'expired' OR (state = 'voided' AND posted_token_count > 0)"


def one_of(values: tuple[str, ...]) -> str:
    return f"dimension IN ({', '.join(map(repr, values))})"


def upgrade() -> None:
    for column in WEIGHTS:
        op.add_column("quotas", sa.Column(column, sa.Integer(), server_default="1000", nullable=False))
    op.add_column("quotas", sa.Column("enforced", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.add_column("quotas", sa.Column("for_new_keys", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("quotas", sa.Column("raised_limit_value", sa.BigInteger(), nullable=True))
    op.add_column("quotas", sa.Column("raised_until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("quotas", sa.Column("raise_reason", sa.Text(), nullable=True))
    op.drop_constraint(op.f("ck_quotas_dimension_known"), "quotas", type_="check")
    op.create_check_constraint(op.f("ck_quotas_dimension_known"), "quotas", one_of(DIMENSIONS))
    op.create_check_constraint(op.f("ck_quotas_weights_in_range"), "quotas", WEIGHTS_IN_RANGE)
    op.create_check_constraint(op.f("ck_quotas_raise_complete"), "quotas", RAISE_COMPLETE)
    op.create_check_constraint(op.f("ck_quotas_keys_have_no_new_keys"), "quotas", "NOT for_new_keys OR subject <> 'api_key'")
    create_live_index("subject_id", "model", "dimension", "for_new_keys")
    op.add_column("quota_counters", sa.Column("would_refuse_count", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column(
        "holds", sa.Column("posted_minutes", postgresql.ARRAY(sa.BigInteger()), server_default=sa.text("'{}'"), nullable=False)
    )
    op.create_index(
        "ix_holds_charged_unbilled", "holds", ["organization_id", "ended_at"], postgresql_where=sa.text(CHARGED_UNBILLED)
    )


def downgrade() -> None:
    """Remove quotas that the old schema cannot express, with their counters."""
    unknown = f"for_new_keys OR NOT ({one_of(OLD_DIMENSIONS)})"
    op.execute(f"DELETE FROM quota_counters WHERE quota_id IN (SELECT id FROM quotas WHERE {unknown})")
    op.execute(f"DELETE FROM quotas WHERE {unknown}")
    op.drop_index("ix_holds_charged_unbilled", table_name="holds", postgresql_where=sa.text(CHARGED_UNBILLED))
    op.drop_column("holds", "posted_minutes")
    op.drop_column("quota_counters", "would_refuse_count")
    create_live_index("subject_id", "model", "dimension")
    for name in ("keys_have_no_new_keys", "raise_complete", "weights_in_range", "dimension_known"):
        op.drop_constraint(op.f(f"ck_quotas_{name}"), "quotas", type_="check")
    op.create_check_constraint(op.f("ck_quotas_dimension_known"), "quotas", one_of(OLD_DIMENSIONS))
    for column in ("raise_reason", "raised_until", "raised_limit_value", "for_new_keys", "enforced", *reversed(WEIGHTS)):
        op.drop_column("quotas", column)


def create_live_index(*columns: str) -> None:
    live = sa.text("deleted_at IS NULL")
    op.drop_index("uq_quotas_live", table_name="quotas", postgresql_where=live)
    op.create_index("uq_quotas_live", "quotas", list(columns), unique=True, postgresql_where=live)
