"""An adjustment may be of nothing: what misstated usage costs whose tokens cost nothing."""

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
    """Only where there is none: it stays in the ledger and on its invoice."""
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM adjustments WHERE amount_picos = 0) THEN
                RAISE EXCEPTION 'there are adjustments of nothing, which the schema before cannot say';
            END IF;
        END $$
    """)
    op.drop_constraint(op.f(NAME), "adjustments", type_="check")
    op.create_check_constraint(op.f(NAME), "adjustments", "amount_picos <> 0 AND (invoice_id IS NULL OR amount_picos < 0)")
