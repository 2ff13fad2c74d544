"""Reasoning tokens of usage events: how much of the delivered output is the model's thinking."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE usage_events ADD COLUMN reasoning_token_count bigint DEFAULT 0 NOT NULL"
    )
    op.execute("SELECT guard_usage_events()")  # no rating may change the new column


def downgrade() -> None:
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")  # it reads the column
    op.execute("ALTER TABLE usage_events DROP COLUMN reasoning_token_count")
    op.execute("SELECT guard_usage_events()")
