"""Receipts with timings: which usage events have one."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE usage_events ADD COLUMN receipt_is_timed boolean DEFAULT false NOT NULL"
    )
    op.execute("SELECT guard_usage_events()")  # no rating may change the new column


def downgrade() -> None:
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")  # it reads the column
    op.execute("ALTER TABLE usage_events DROP COLUMN receipt_is_timed")
    op.execute("SELECT guard_usage_events()")
