"""Incidents of billing workers by background loop, since a worker has no metrics endpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_incidents",
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("incident_count", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("source", name=op.f("pk_worker_incidents")),
    )


def downgrade() -> None:
    op.drop_table("worker_incidents")
