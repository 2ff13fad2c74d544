"""Validation of the checks that revision 0017 added, with a lock that blocks no request."""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

CHECKS = (
    ("holds", "ck_holds_embedding_has_no_output"),
    ("usage_events", "ck_usage_events_embedding_alone"),
    ("ledger_entries", "ck_ledger_entries_token_kind_known"),
    ("meter_batches", "ck_meter_batches_token_kind_known"),
)


def upgrade() -> None:
    """Validate without a time limit, beside all traffic: the tables may be of any size."""
    op.execute("SET LOCAL statement_timeout = 0")
    for table, name in CHECKS:
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def downgrade() -> None:
    """Keep the validated checks."""
