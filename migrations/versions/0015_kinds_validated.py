"""Validates the constraints of revision 0014, without a lock that stops writers."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TABLES = ("ledger_entries", "meter_batches")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT ck_{table}_token_kind_known")


def downgrade() -> None:
    """Leave the constraints valid: revision 0014 adds them again."""
