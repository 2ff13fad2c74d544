"""Token issuers whose tokens work once, and the tokens that were used."""

from __future__ import annotations

from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

# Rows last as long as tokens live. The index finds those that can go.
UPGRADE = """
ALTER TABLE token_issuers ADD COLUMN single_use boolean DEFAULT false NOT NULL;
CREATE TABLE used_tokens (
    mark bytea CONSTRAINT pk_used_tokens PRIMARY KEY,
    token_issuer_id uuid NOT NULL
        CONSTRAINT fk_used_tokens_token_issuer_id_token_issuers REFERENCES token_issuers (id),
    expires_at timestamptz NOT NULL
);
CREATE INDEX ix_used_tokens_expires_at ON used_tokens (expires_at);
CREATE INDEX ix_used_tokens_token_issuer_id ON used_tokens (token_issuer_id);
"""
# Raises an error without the setting even if the table is empty
IS_SET = "(SELECT current_setting('weir.organization')) <> ''"
OWN = {
    "token_issuers": (
        f"{IS_SET} AND organization_id = (SELECT current_setting('weir.organization')::uuid)"
    ),
    **dict.fromkeys(
        ("token_keys", "token_revocations", "used_tokens"),
        f"{IS_SET} AND token_issuer_id IN (SELECT id FROM organization_border.token_issuers)",
    ),
}
RELEASED = ("token_issuers", "token_keys", "token_revocations")


def upgrade() -> None:
    op.execute(UPGRADE)
    for table in ("token_issuers", "used_tokens"):
        create_view(table)


def downgrade() -> None:
    op.execute("DROP VIEW organization_border.used_tokens")
    op.execute("DROP TABLE used_tokens")
    for table in reversed(RELEASED):  # a view cannot lose a column, and two read the first one
        op.execute(f"DROP VIEW organization_border.{table}")
    op.execute("ALTER TABLE token_issuers DROP COLUMN single_use")
    for table in RELEASED:
        create_view(table)


def create_view(table: str) -> None:
    op.execute(
        f"CREATE OR REPLACE VIEW organization_border.{table} AS SELECT * FROM {table}"
        f" WHERE {OWN[table]} WITH CHECK OPTION"
    )
