"""Validates the constraint of revision 0034, without a lock that stops writers."""

from __future__ import annotations

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE ledger_transactions VALIDATE CONSTRAINT ck_ledger_transactions_kind_known"
    )


def downgrade() -> None:
    """Leave the constraint valid: revision 0034 adds it again."""
