"""Drain orders for replicas, and reports of each process on its replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replica_drains",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("move_after_ms", sa.BigInteger(), nullable=True),
        sa.Column("drained_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("move_after_ms >= 0", name=op.f("ck_replica_drains_move_after_not_negative")),
        sa.PrimaryKeyConstraint("model", "replica", name=op.f("pk_replica_drains")),
    )
    replicas = sa.Column("replicas", postgresql.JSONB(astext_type=sa.Text()), server_default="[]", nullable=False)
    op.add_column("live_reports", replicas)


def downgrade() -> None:
    op.drop_column("live_reports", "replicas")
    op.drop_table("replica_drains")
