"""Journalled tokens of usage events: what a crash of a server did not deliver is credited."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE usage_events ADD COLUMN journalled_token_count bigint DEFAULT 0 NOT NULL"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE usage_events DROP COLUMN journalled_token_count")
