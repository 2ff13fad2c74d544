"""Sessions of persons who signed in, links that sign in once, and memberships by groups."""

from __future__ import annotations

from alembic import op

revision = "0039"
down_revision = "0037"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE TABLE sign_in_sessions (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_sign_in_sessions PRIMARY KEY,
    person_id uuid NOT NULL
        CONSTRAINT fk_sign_in_sessions_person_id_persons REFERENCES persons (id),
    organization_id uuid
        CONSTRAINT fk_sign_in_sessions_organization_id_organizations
        REFERENCES organizations (id),
    secret_hash bytea NOT NULL CONSTRAINT uq_sign_in_sessions_secret_hash UNIQUE,
    provider text NOT NULL,
    provider_session text NOT NULL,
    address text NOT NULL,
    idle_max_s bigint NOT NULL CONSTRAINT ck_sign_in_sessions_idle_max_s CHECK (idle_max_s > 0),
    created_at timestamptz DEFAULT now() NOT NULL,
    last_used_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    ended_at timestamptz
);
CREATE INDEX ix_sign_in_sessions_person_id ON sign_in_sessions (person_id, created_at);
CREATE INDEX ix_sign_in_sessions_expires_at ON sign_in_sessions (expires_at);
CREATE INDEX ix_sign_in_sessions_provider_session ON sign_in_sessions (provider_session)
    WHERE provider_session <> '';
CREATE TABLE sign_in_links (
    secret_hash bytea CONSTRAINT pk_sign_in_links PRIMARY KEY,
    person_id uuid NOT NULL CONSTRAINT fk_sign_in_links_person_id_persons REFERENCES persons (id),
    created_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE INDEX ix_sign_in_links_expires_at ON sign_in_links (expires_at);
-- Memberships that groups of a provider make, and end. All others are made by invitations.
CREATE TABLE group_memberships (
    membership_id uuid CONSTRAINT pk_group_memberships PRIMARY KEY
        CONSTRAINT fk_group_memberships_membership_id_memberships REFERENCES memberships (id),
    provider text NOT NULL
);
"""
# Raises an error without the setting even if the table is empty
IS_SET = "(SELECT current_setting('weir.organization')) <> ''"
OF_PERSON = f"{IS_SET} AND person_id IN (SELECT id FROM organization_border.persons)"
OWN = {
    "sign_in_sessions": OF_PERSON,
    "sign_in_links": OF_PERSON,
    "group_memberships": f"{IS_SET} AND membership_id IN"
    " (SELECT id FROM organization_border.memberships)",
}


def upgrade() -> None:
    op.execute(UPGRADE)
    for table, condition in OWN.items():
        op.execute(
            f"CREATE VIEW organization_border.{table} AS SELECT * FROM {table} WHERE {condition}"
            " WITH CHECK OPTION"
        )


def downgrade() -> None:
    for table in OWN:
        op.execute(f"DROP VIEW organization_border.{table}")
        op.execute(f"DROP TABLE {table}")
