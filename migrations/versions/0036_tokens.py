"""Trusted issuers of tokens, the keys that act for their tokens, revocations, and client tokens.

An issuer is trusted for one audience by one organization. A row never changes but for its removal,
so what a process remembers of it stays true.
"""

from __future__ import annotations

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE TABLE token_issuers (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_token_issuers PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_token_issuers_organization_id_organizations REFERENCES organizations (id),
    issuer text NOT NULL,
    audience text NOT NULL,
    algorithms text[] NOT NULL,
    keys_url text NOT NULL,
    keys text NOT NULL,
    leeway_s bigint NOT NULL,
    lifetime_max_s bigint NOT NULL,
    token_type text NOT NULL,
    requires_id boolean NOT NULL,
    project_claim text NOT NULL,
    end_user_claim text NOT NULL,
    models_claim text NOT NULL,
    max_output_tokens_claim text NOT NULL,
    label_claims text[] NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    removed_at timestamptz,
    CONSTRAINT ck_token_issuers_times CHECK (leeway_s >= 0 AND lifetime_max_s > 0)
);
-- A token has one issuer and audience, so it leads to one organization.
CREATE UNIQUE INDEX uq_token_issuers_active ON token_issuers (issuer, audience)
    WHERE removed_at IS NULL;
CREATE INDEX ix_token_issuers_organization_id ON token_issuers (organization_id);
CREATE TABLE token_keys (
    token_issuer_id uuid NOT NULL
        CONSTRAINT fk_token_keys_token_issuer_id_token_issuers REFERENCES token_issuers (id),
    claim_value text NOT NULL,
    api_key_id uuid NOT NULL CONSTRAINT uq_token_keys_api_key_id UNIQUE
        CONSTRAINT fk_token_keys_api_key_id_api_keys REFERENCES api_keys (id),
    CONSTRAINT pk_token_keys PRIMARY KEY (token_issuer_id, claim_value)
);
CREATE TABLE token_revocations (
    mark bytea CONSTRAINT pk_token_revocations PRIMARY KEY,
    token_issuer_id uuid NOT NULL
        CONSTRAINT fk_token_revocations_token_issuer_id_token_issuers REFERENCES token_issuers (id),
    kind text NOT NULL,
    revoked_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT ck_token_revocations_kind CHECK (kind IN ('jti', 'sid', 'sub'))
);
CREATE INDEX ix_token_revocations_expires_at ON token_revocations (expires_at);
CREATE INDEX ix_token_revocations_token_issuer_id ON token_revocations (token_issuer_id);
CREATE TABLE client_tokens (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_client_tokens PRIMARY KEY,
    api_key_id uuid NOT NULL
        CONSTRAINT fk_client_tokens_api_key_id_api_keys REFERENCES api_keys (id),
    secret_hash bytea NOT NULL CONSTRAINT uq_client_tokens_secret_hash UNIQUE,
    call text NOT NULL,
    model text NOT NULL,
    end_user text NOT NULL,
    origins text[] NOT NULL,
    max_requests bigint NOT NULL,
    request_count bigint DEFAULT 0 NOT NULL,
    max_input_tokens bigint,
    max_output_tokens bigint,
    created_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz,
    CONSTRAINT ck_client_tokens_request_count
        CHECK (request_count >= 0 AND request_count <= max_requests)
);
CREATE INDEX ix_client_tokens_api_key_id ON client_tokens (api_key_id);
CREATE INDEX ix_client_tokens_expires_at ON client_tokens (expires_at);
"""
# Raises an error without the setting even if the table is empty
IS_SET = "(SELECT current_setting('weir.organization')) <> ''"
ORGANIZATION = f"{IS_SET} AND organization_id = (SELECT current_setting('weir.organization')::uuid)"
OWN = {
    "token_issuers": ORGANIZATION,
    **dict.fromkeys(
        ("token_keys", "token_revocations"),
        f"{IS_SET} AND token_issuer_id IN (SELECT id FROM organization_border.token_issuers)",
    ),
    "client_tokens": (f"{IS_SET} AND api_key_id IN (SELECT id FROM organization_border.api_keys)"),
}


def upgrade() -> None:
    op.execute(UPGRADE)
    for table, condition in OWN.items():
        op.execute(
            f"CREATE VIEW organization_border.{table} AS SELECT * FROM {table} WHERE {condition}"
            " WITH CHECK OPTION"
        )


def downgrade() -> None:
    for table in reversed(OWN):
        op.execute(f"DROP VIEW organization_border.{table}")
        op.execute(f"DROP TABLE {table}")
