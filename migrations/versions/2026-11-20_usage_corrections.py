"""Usage with a wrong cost, billed by an adjustment that two people have approved."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_corrections",
        sa.Column("hold_id", sa.Uuid(), nullable=False),
        sa.Column("part", sa.SmallInteger(), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("adjustment_id", sa.Uuid(), nullable=False),
        sa.Column("corrected_by", sa.Text(), nullable=False),
        sa.Column("corrected_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["adjustment_id"],
            ["adjustment_decisions.adjustment_id"],
            name=op.f("fk_usage_corrections_adjustment_id_adjustment_decisions"),
        ),
        sa.PrimaryKeyConstraint("hold_id", "part", "settled_at", name=op.f("pk_usage_corrections")),
    )
    op.execute(
        "CREATE TRIGGER usage_corrections_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON usage_corrections "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    """Refuse if there are corrections: the corrected events no longer await rating."""
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM usage_corrections) THEN
                RAISE EXCEPTION 'there is usage that was billed by adjustments, which a downgrade would lose';
            END IF;
        END $$
    """)
    op.drop_table("usage_corrections")
