"""Bounds of an API key on the tokens of one request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

COLUMNS = ("max_input_tokens", "max_output_tokens")


def upgrade() -> None:
    """Add the columns; NULL allows what the model allows."""
    for column in COLUMNS:
        op.add_column("api_keys", sa.Column(column, sa.BigInteger(), nullable=True))
        op.create_check_constraint(op.f(f"ck_api_keys_{column}_positive"), "api_keys", f"{column} > 0")


def downgrade() -> None:
    """Refuse if an active key is limited, since its limit would be lost."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM api_keys WHERE num_nonnulls(max_input_tokens, max_output_tokens) > 0 "
        "AND revoked_at IS NULL) THEN RAISE EXCEPTION 'keys are limited in tokens, which the previous schema cannot store: "
        "revoke them first'; END IF; END $$"
    )
    for column in COLUMNS:
        op.drop_constraint(op.f(f"ck_api_keys_{column}_positive"), "api_keys")
        op.drop_column("api_keys", column)
