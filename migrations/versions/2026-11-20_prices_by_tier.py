"""Prices per service tier and per customer, and of embedded tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

OLD_KEY = "uq_price_versions_model_currency_code_effective_at"
OLD_CHECK = "input_picos_per_token >= 0 AND cached_input_picos_per_token >= 0 AND output_picos_per_token >= 0"
CHECK = "least(input_picos_per_token, cached_input_picos_per_token, output_picos_per_token, embedding_picos_per_token) >= 0"


def upgrade() -> None:
    """Make existing prices the interactive list prices."""
    op.add_column("price_versions", sa.Column("embedding_picos_per_token", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("price_versions", sa.Column("organization_id", sa.Uuid(), nullable=True))
    op.add_column("price_versions", sa.Column("tier", sa.Text(), server_default="interactive", nullable=False))
    op.add_column("price_versions", sa.Column("multiplier_milli", sa.BigInteger(), server_default="1000", nullable=False))
    op.add_column("price_versions", sa.Column("withdrawn", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_foreign_key(
        op.f("fk_price_versions_organization_id_organizations"), "price_versions", "organizations", ["organization_id"], ["id"]
    )
    op.drop_constraint(op.f("ck_price_versions_not_negative"), "price_versions", type_="check")
    op.create_check_constraint(op.f("ck_price_versions_not_negative"), "price_versions", CHECK)
    op.create_check_constraint(op.f("ck_price_versions_tier_known"), "price_versions", "tier IN ('interactive', 'batch')")
    op.create_check_constraint(
        op.f("ck_price_versions_multiplier_sane"),
        "price_versions",
        "multiplier_milli >= 0 AND (tier <> 'interactive' OR multiplier_milli = 1000)",
    )
    op.create_check_constraint(
        op.f("ck_price_versions_list_stays"), "price_versions", "NOT withdrawn OR organization_id IS NOT NULL"
    )
    op.create_unique_constraint(
        "uq_price_versions_place",
        "price_versions",
        ["model", "currency_code", "organization_id", "tier", "effective_at"],
        postgresql_nulls_not_distinct=True,
    )
    op.drop_constraint(op.f(OLD_KEY), "price_versions", type_="unique")


def downgrade() -> None:
    """Refuse unless all prices are interactive list prices, since others cannot be stored."""
    op.create_unique_constraint(op.f(OLD_KEY), "price_versions", ["model", "currency_code", "effective_at"])
    op.drop_constraint("uq_price_versions_place", "price_versions", type_="unique")
    for name in ("list_stays", "multiplier_sane", "tier_known", "not_negative"):
        op.drop_constraint(op.f(f"ck_price_versions_{name}"), "price_versions", type_="check")
    op.create_check_constraint(op.f("ck_price_versions_not_negative"), "price_versions", OLD_CHECK)
    op.drop_constraint(op.f("fk_price_versions_organization_id_organizations"), "price_versions", type_="foreignkey")
    for column in ("withdrawn", "multiplier_milli", "tier", "organization_id", "embedding_picos_per_token"):
        op.drop_column("price_versions", column)
