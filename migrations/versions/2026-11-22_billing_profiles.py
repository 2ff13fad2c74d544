"""Billing profiles of organizations, and the profile that a month was closed with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

TEXTS = (
    *("legal_name", "address_line1", "address_line2", "city", "postal_code"),
    *("state", "country", "tax_id", "language"),
)


def upgrade() -> None:
    op.create_table(
        "billing_profiles",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("emails", sa.ARRAY(sa.Text()), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in TEXTS),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_billing_profiles_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_billing_profiles")),
    )
    op.add_column("month_closings", sa.Column("billing_profile", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("month_closings", "billing_profile")
    op.drop_table("billing_profiles")
