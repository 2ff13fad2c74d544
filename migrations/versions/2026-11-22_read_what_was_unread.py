"""The checks that revision 0017 added hold for the rows from before it, too: read here, under a lock that stops nobody."""

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
    """No time limit: it reads tables of any size, beside all traffic."""
    op.execute("SET LOCAL statement_timeout = 0")
    for table, name in CHECKS:
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def downgrade() -> None:
    """What was found true stays so."""
