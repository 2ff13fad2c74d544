"""Keys that refuse unknown parameters over HTTP."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE api_keys ADD COLUMN strict_parameters boolean DEFAULT false NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE api_keys DROP COLUMN strict_parameters")
