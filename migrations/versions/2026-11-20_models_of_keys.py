"""Allowed models of an API key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; an empty list allows every model. The default needs no table rewrite."""
    op.add_column("api_keys", sa.Column("models", sa.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False))
    op.create_check_constraint(op.f("ck_api_keys_models_named"), "api_keys", "array_position(models, '') IS NULL")


def downgrade() -> None:
    """Refuse if an active key is limited, since it would become valid for every model."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM api_keys WHERE models <> '{}' AND revoked_at IS NULL) THEN "
        "RAISE EXCEPTION 'keys are limited to models, which the previous schema cannot store: revoke them first'; END IF; END $$"
    )
    op.drop_constraint(op.f("ck_api_keys_models_named"), "api_keys")
    op.drop_column("api_keys", "models")
