"""Letterheads of invoices, stored when an invoice is first issued."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the append-only table with one row per invoice."""
    op.create_table(
        "invoice_letterheads",
        sa.Column("invoice_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("address", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("tax_id", sa.Text(), nullable=False),
        sa.Column("contact", sa.Text(), nullable=False),
        sa.Column("payment", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_letterheads_invoice_id_invoices")),
        sa.PrimaryKeyConstraint("invoice_id", name=op.f("pk_invoice_letterheads")),
    )
    op.execute(
        "CREATE TRIGGER invoice_letterheads_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON invoice_letterheads "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    """Drop the table with its trigger."""
    op.drop_table("invoice_letterheads")
