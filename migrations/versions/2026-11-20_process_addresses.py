"""Addresses at which api processes reach each other."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("peer_address", "peer_certificate"):
        op.add_column("live_reports", sa.Column(name, sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    for name in ("peer_certificate", "peer_address"):
        op.drop_column("live_reports", name)
