"""Adjustments of zero, for misstated usage whose tokens cost nothing."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

NAME = "ck_adjustments_amount_sign"


def upgrade() -> None:
    op.drop_constraint(op.f(NAME), "adjustments", type_="check")
    op.create_check_constraint(op.f(NAME), "adjustments", "invoice_id IS NULL OR amount_picos < 0")


def downgrade() -> None:
    """Refuse if there is one, since it stays in the ledger and on its invoice."""
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM adjustments WHERE amount_picos = 0) THEN
                RAISE EXCEPTION 'there are adjustments of zero, which the previous schema cannot store';
            END IF;
        END $$
    """)
    op.drop_constraint(op.f(NAME), "adjustments", type_="check")
    op.create_check_constraint(op.f(NAME), "adjustments", "amount_picos <> 0 AND (invoice_id IS NULL OR amount_picos < 0)")
