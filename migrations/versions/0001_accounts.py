"""Accounts: organizations, projects, API keys, audit log, idempotency keys of admin calls."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Trigger functions that later revisions share. Corrections are new rows, and rows that other rows
# refer to stay.
GUARDS = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: write a correcting row instead', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END $$;

CREATE FUNCTION refuse_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % cannot be deleted: other rows refer to them', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END $$;
"""
TABLES = """
CREATE TABLE organizations (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_organizations PRIMARY KEY,
    name text NOT NULL CONSTRAINT uq_organizations_name UNIQUE,
    currency_code text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_organizations_name_form CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    CONSTRAINT ck_organizations_currency_form CHECK (currency_code ~ '^[A-Z]{3}$')
);

CREATE TABLE projects (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_projects PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_projects_organization_id_organizations REFERENCES organizations (id),
    name text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_projects_name_form CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    CONSTRAINT uq_projects_organization_id_name UNIQUE (organization_id, name)
);

-- Only the hash of a secret is stored. An empty list of models or networks means all of them; a
-- missing maximum means as many tokens as the model takes.
CREATE TABLE api_keys (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_api_keys PRIMARY KEY,
    project_id uuid NOT NULL CONSTRAINT fk_api_keys_project_id_projects REFERENCES projects (id),
    name text NOT NULL,
    prefix text NOT NULL CONSTRAINT uq_api_keys_prefix UNIQUE,
    secret_hash bytea NOT NULL CONSTRAINT uq_api_keys_secret_hash UNIQUE,
    scopes text[] NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz,
    models text[] DEFAULT '{}' NOT NULL,
    uses_tracked_since timestamptz DEFAULT now() NOT NULL,
    max_input_tokens bigint,
    max_output_tokens bigint,
    allowed_networks text[] DEFAULT '{}' NOT NULL,
    CONSTRAINT ck_api_keys_secret_hash_size CHECK (octet_length(secret_hash) = 32),
    CONSTRAINT ck_api_keys_scopes_known
        CHECK (scopes <@ ARRAY['inference', 'admin', 'billing'] AND scopes <> '{}'),
    CONSTRAINT ck_api_keys_model_names_not_empty CHECK (array_position(models, '') IS NULL),
    CONSTRAINT ck_api_keys_max_input_tokens_positive CHECK (max_input_tokens > 0),
    CONSTRAINT ck_api_keys_max_output_tokens_positive CHECK (max_output_tokens > 0),
    CONSTRAINT ck_api_keys_allowed_networks_valid CHECK (allowed_networks::cidr[] IS NOT NULL)
);
CREATE INDEX ix_api_keys_project_id ON api_keys (project_id);

-- Separate from the key, since the last use changes every minute and a key hardly ever.
CREATE TABLE api_key_uses (
    api_key_id uuid CONSTRAINT pk_api_key_uses PRIMARY KEY
        CONSTRAINT fk_api_key_uses_api_key_id_api_keys REFERENCES api_keys (id),
    last_used_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Secrets that a rotation replaced and that still work until they expire.
CREATE TABLE superseded_secrets (
    secret_hash bytea CONSTRAINT pk_superseded_secrets PRIMARY KEY,
    api_key_id uuid NOT NULL
        CONSTRAINT fk_superseded_secrets_api_key_id_api_keys REFERENCES api_keys (id),
    superseded_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT ck_superseded_secrets_secret_hash_size CHECK (octet_length(secret_hash) = 32)
);
CREATE INDEX ix_superseded_secrets_api_key_id ON superseded_secrets (api_key_id);

CREATE TABLE audit_log (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_audit_log PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    subject_id text NOT NULL,
    before jsonb,
    after jsonb
);

-- Idempotency keys of administrative calls.
CREATE TABLE admin_requests (
    request_id uuid CONSTRAINT pk_admin_requests PRIMARY KEY,
    method text NOT NULL,
    payload_hash bytea NOT NULL,
    subject_id text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_admin_requests_payload_hash_size CHECK (octet_length(payload_hash) = 32)
);
CREATE INDEX ix_admin_requests_created_at ON admin_requests (created_at);

CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER organizations_no_delete BEFORE DELETE OR TRUNCATE ON organizations
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
CREATE TRIGGER projects_no_delete BEFORE DELETE OR TRUNCATE ON projects
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
CREATE TRIGGER api_keys_no_delete BEFORE DELETE OR TRUNCATE ON api_keys
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
"""


def upgrade() -> None:
    op.execute(GUARDS)
    op.execute(TABLES)


def downgrade() -> None:
    op.execute(
        "DROP TABLE admin_requests, audit_log, superseded_secrets, api_key_uses, api_keys,"
        " projects, organizations"
    )
    op.execute("DROP FUNCTION refuse_deletion, refuse_change")
