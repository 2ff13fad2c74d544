"""Number of times that a usage event's request moved to another engine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("migration_count", sa.Integer(), server_default="0", nullable=False))
    op.execute("SELECT guard_usage_events()")


def downgrade() -> None:
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")
    op.drop_column("usage_events", "migration_count")
    op.execute("SELECT guard_usage_events()")
