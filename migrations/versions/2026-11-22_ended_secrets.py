"""Ended secrets in orders about changed keys, so that requests begun with them end too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("stop_orders", sa.Column("ended_secrets", postgresql.ARRAY(sa.LargeBinary()), nullable=True))


def downgrade() -> None:
    op.drop_column("stop_orders", "ended_secrets")
