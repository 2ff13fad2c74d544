"""Keys without a secret, persons, their memberships and invitations, and the owners of keys.

A bound key is a row of `api_keys` without a secret. It acts for a caller that is known by other
means, such as a signed-in person.
"""

from __future__ import annotations

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE api_keys ALTER COLUMN secret_hash DROP NOT NULL;
CREATE TABLE persons (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_persons PRIMARY KEY,
    email text COLLATE "C" NOT NULL CONSTRAINT uq_persons_email UNIQUE,  -- pages are ranges of it
    display_name text NOT NULL,
    issuer text,
    subject text,
    created_at timestamptz DEFAULT now() NOT NULL,
    deactivated_at timestamptz,
    CONSTRAINT uq_persons_issuer_subject UNIQUE (issuer, subject),
    CONSTRAINT ck_persons_email_lower CHECK (email = lower(email) AND email <> ''),
    CONSTRAINT ck_persons_display_name_not_empty CHECK (display_name <> ''),
    CONSTRAINT ck_persons_identity_whole CHECK ((issuer IS NULL) = (subject IS NULL))
);
CREATE TABLE memberships (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_memberships PRIMARY KEY,
    person_id uuid NOT NULL CONSTRAINT fk_memberships_person_id_persons REFERENCES persons (id),
    organization_id uuid NOT NULL
        CONSTRAINT fk_memberships_organization_id_organizations REFERENCES organizations (id),
    api_key_id uuid NOT NULL CONSTRAINT uq_memberships_api_key_id UNIQUE
        CONSTRAINT fk_memberships_api_key_id_api_keys REFERENCES api_keys (id),
    created_at timestamptz DEFAULT now() NOT NULL,
    removed_at timestamptz
);
-- In the order of lists, which are paged by person
CREATE UNIQUE INDEX uq_memberships_active ON memberships (organization_id, person_id)
    WHERE removed_at IS NULL;
CREATE INDEX ix_memberships_person_id ON memberships (person_id);
CREATE TABLE service_accounts (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_service_accounts PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_service_accounts_organization_id_organizations REFERENCES organizations (id),
    name text NOT NULL,
    role text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    deleted_at timestamptz,
    CONSTRAINT ck_service_accounts_role
        CHECK (role IN ('', 'owner', 'admin', 'developer', 'finance', 'viewer'))
);
CREATE TABLE invitations (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_invitations PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_invitations_organization_id_organizations REFERENCES organizations (id),
    project_id uuid NOT NULL
        CONSTRAINT fk_invitations_project_id_projects REFERENCES projects (id),
    email text COLLATE "C" NOT NULL,
    role text NOT NULL,
    token_hash bytea NOT NULL CONSTRAINT uq_invitations_token_hash UNIQUE,
    issuer text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    accepted_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT ck_invitations_email_lower CHECK (email = lower(email) AND email <> ''),
    CONSTRAINT ck_invitations_role
        CHECK (role IN ('owner', 'admin', 'developer', 'finance', 'viewer', 'operator')),
    CONSTRAINT ck_invitations_one_end CHECK (num_nonnulls(accepted_at, revoked_at) <= 1)
);
CREATE UNIQUE INDEX uq_invitations_pending ON invitations (organization_id, email)
    WHERE accepted_at IS NULL AND revoked_at IS NULL;
CREATE UNIQUE INDEX uq_service_accounts_active ON service_accounts (organization_id, name)
    WHERE deleted_at IS NULL;
-- A row of its own, so that neither the table of keys nor the views of it change.
CREATE TABLE api_key_owners (
    api_key_id uuid CONSTRAINT pk_api_key_owners PRIMARY KEY
        CONSTRAINT fk_api_key_owners_api_key_id_api_keys REFERENCES api_keys (id),
    person_id uuid CONSTRAINT fk_api_key_owners_person_id_persons REFERENCES persons (id),
    service_account_id uuid
        CONSTRAINT fk_api_key_owners_service_account_id_service_accounts
        REFERENCES service_accounts (id),
    creator_id uuid CONSTRAINT fk_api_key_owners_creator_id_persons REFERENCES persons (id),
    CONSTRAINT ck_api_key_owners_one_owner CHECK (num_nonnulls(person_id, service_account_id) <= 1)
);
CREATE INDEX ix_api_key_owners_person_id ON api_key_owners (person_id)
    WHERE person_id IS NOT NULL;
CREATE INDEX ix_api_key_owners_service_account_id ON api_key_owners (service_account_id)
    WHERE service_account_id IS NOT NULL;
CREATE INDEX ix_api_key_owners_creator_id ON api_key_owners (creator_id)
    WHERE creator_id IS NOT NULL;
-- The defaults are set apart, so that entries that exist are neither read nor rewritten.
ALTER TABLE audit_log ADD COLUMN actor_person_id uuid, ADD COLUMN actor_address text;
ALTER TABLE audit_log
    ALTER COLUMN actor_person_id SET DEFAULT
        nullif(current_setting('weir.actor_person', true), '')::uuid,
    ALTER COLUMN actor_address SET DEFAULT
        coalesce(current_setting('weir.actor_address', true), '');
"""
# Raises an error without the setting even if the table is empty
IS_SET = "(SELECT current_setting('weir.organization')) <> ''"
ORGANIZATION = f"{IS_SET} AND organization_id = (SELECT current_setting('weir.organization')::uuid)"
OWN = {
    "memberships": ORGANIZATION,
    "persons": f"{IS_SET} AND id IN (SELECT person_id FROM organization_border.memberships)",
    "service_accounts": ORGANIZATION,
    "invitations": ORGANIZATION,
    "api_key_owners": f"{IS_SET} AND api_key_id IN (SELECT id FROM organization_border.api_keys)",
}
# Of revision 0031
AUDITED = """
actor_organization_id = (SELECT current_setting('weir.organization')::uuid)
    AND actor_role <> 'operator'
OR subject_id IN (SELECT id::text FROM organization_border.subjects)
OR coalesce(after, before) ->> 'organization_id' IN (
    SELECT id::text FROM organization_border.subjects
)
OR coalesce(after, before) ->> 'project_id' IN (SELECT id::text FROM organization_border.subjects)
OR coalesce(after, before) ->> 'subject_id' IN (SELECT id::text FROM organization_border.subjects)
"""
# A bound key gets an unknown secret, and is revoked.
DOWNGRADE = """
UPDATE api_keys
SET secret_hash = sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
    revoked_at = coalesce(revoked_at, now())
WHERE secret_hash IS NULL;
ALTER TABLE api_keys ALTER COLUMN secret_hash SET NOT NULL;
ALTER TABLE audit_log DROP COLUMN actor_address, DROP COLUMN actor_person_id;
"""


def upgrade() -> None:
    op.execute(UPGRADE)
    for table, condition in OWN.items():
        op.execute(
            f"CREATE VIEW organization_border.{table} AS SELECT * FROM {table} WHERE {condition}"
            " WITH CHECK OPTION"
        )
    create_view_of_audit_log()


def create_view_of_audit_log() -> None:
    """Create the view of the audit log, with all columns that the table has."""
    op.execute("DROP VIEW IF EXISTS organization_border.audit_log")
    op.execute(
        f"CREATE VIEW organization_border.audit_log AS SELECT * FROM audit_log WHERE {AUDITED}"
        " WITH CHECK OPTION"
    )


def downgrade() -> None:
    for table in reversed(OWN):
        op.execute(f"DROP VIEW organization_border.{table}")
    for table in ("api_key_owners", "memberships", "invitations", "service_accounts", "persons"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP VIEW organization_border.audit_log")
    op.execute(DOWNGRADE)
    create_view_of_audit_log()
