"""Last use of each key, in a separate table: it changes every minute, a key hardly ever."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; uses of existing keys are recorded from now on."""
    known_since = sa.Column("uses_known_since", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False)
    op.add_column("api_keys", known_since)
    op.create_table(
        "api_key_uses",
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_api_key_uses_api_key_id_api_keys")),
        sa.PrimaryKeyConstraint("api_key_id", name=op.f("pk_api_key_uses")),
        postgresql_with={"fillfactor": "50"},
    )


def downgrade() -> None:
    op.drop_table("api_key_uses")
    op.drop_column("api_keys", "uses_known_since")
