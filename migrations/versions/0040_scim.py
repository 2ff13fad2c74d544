"""Users and groups provisioned by SCIM, suspended members, and the erasure of persons."""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_scopes_known;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_scopes_known CHECK (
    scopes <@ ARRAY['inference', 'admin', 'billing', 'scim'] AND (scopes <> '{}' OR role <> '')
    AND (NOT scopes @> ARRAY['scim'] OR scopes = ARRAY['scim'])
);
ALTER TABLE api_key_owners ADD COLUMN suspended_at timestamptz;
ALTER TABLE persons ADD COLUMN erased_at timestamptz;
ALTER TABLE persons ADD CONSTRAINT ck_persons_erased CHECK (
    erased_at IS NULL OR (deactivated_at IS NOT NULL AND subject IS NULL)
);
CREATE TABLE scim_users (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_scim_users PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_scim_users_organization_id_organizations REFERENCES organizations (id),
    user_name text NOT NULL,
    user_name_key text COLLATE "C" NOT NULL,
    external_id text,
    email text COLLATE "C",
    attributes jsonb NOT NULL,
    is_active boolean NOT NULL,
    person_id uuid CONSTRAINT fk_scim_users_person_id_persons REFERENCES persons (id),
    has_role boolean DEFAULT false NOT NULL,
    version bigint DEFAULT 1 NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT uq_scim_users_user_name UNIQUE (organization_id, user_name_key),
    CONSTRAINT uq_scim_users_email UNIQUE (organization_id, email),
    CONSTRAINT uq_scim_users_person_id UNIQUE (organization_id, person_id)
);
CREATE INDEX ix_scim_users_external_id ON scim_users (organization_id, external_id);
CREATE INDEX ix_scim_users_created_at ON scim_users (organization_id, created_at, id);
CREATE INDEX ix_scim_users_person_id ON scim_users (person_id) WHERE person_id IS NOT NULL;
CREATE INDEX ix_scim_users_waiting ON scim_users (email) WHERE person_id IS NULL;
CREATE TABLE scim_groups (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_scim_groups PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_scim_groups_organization_id_organizations REFERENCES organizations (id),
    display_name text NOT NULL,
    name_key text COLLATE "C" NOT NULL,
    external_id text,
    version bigint DEFAULT 1 NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT uq_scim_groups_name UNIQUE (organization_id, name_key)
);
CREATE TABLE scim_group_members (
    group_id uuid CONSTRAINT fk_scim_group_members_group_id_scim_groups REFERENCES scim_groups (id),
    user_id uuid CONSTRAINT fk_scim_group_members_user_id_scim_users REFERENCES scim_users (id),
    CONSTRAINT pk_scim_group_members PRIMARY KEY (group_id, user_id)
);
CREATE INDEX ix_scim_group_members_user_id ON scim_group_members (user_id);
-- By name, so that a role can be set before the group is provisioned
CREATE TABLE scim_group_roles (
    organization_id uuid
        CONSTRAINT fk_scim_group_roles_organization_id_organizations REFERENCES organizations (id),
    name_key text COLLATE "C",
    name text NOT NULL,
    role text NOT NULL CONSTRAINT ck_scim_group_roles_role
        CHECK (role IN ('owner', 'admin', 'developer', 'finance', 'viewer')),
    project_id uuid CONSTRAINT fk_scim_group_roles_project_id_projects REFERENCES projects (id),
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_scim_group_roles PRIMARY KEY (organization_id, name_key)
);
"""
# Of revision 0019, with the second exception
AUDIT = """
-- The state of an audit entry without what describes a person. Ids and times stay.
CREATE FUNCTION without_person(state jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT CASE WHEN jsonb_typeof(state) <> 'object' THEN state ELSE (
        SELECT coalesce(jsonb_object_agg(
            key,
            CASE WHEN key = ANY('{email,display_name,subject,name,address,provider_session,
                                  user_name,user_name_key,external_id,attributes}'::text[])
                 THEN 'null' ELSE value END), '{}')
        FROM jsonb_each(state))
    END
$$;
CREATE OR REPLACE FUNCTION audit_entry_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.created_at, NEW.actor, NEW.action, NEW.subject_id)
           IS NOT DISTINCT FROM (OLD.id, OLD.created_at, OLD.actor, OLD.action, OLD.subject_id)
       AND (NEW.before, NEW.after) IS NOT DISTINCT FROM
           (OLD.before || '{"override_reason": null}', OLD.after || '{"override_reason": null}')
       AND EXISTS (
           SELECT
           FROM quotas q
           JOIN usage_subjects u ON u.id = q.subject_id
           WHERE q.id::text = OLD.subject_id AND u.erased_at IS NOT NULL)
    THEN
        RETURN NEW;
    END IF;
    -- Of an erased person, its memberships, keys and invitations, what describes it may be removed.
    IF to_jsonb(NEW) - 'before' - 'after' = to_jsonb(OLD) - 'before' - 'after'
       AND (NEW.before, NEW.after) IS NOT DISTINCT FROM
           (without_person(OLD.before), without_person(OLD.after))
       AND EXISTS (
           SELECT
           FROM persons p
           WHERE p.erased_at IS NOT NULL
             AND (p.id::text = OLD.subject_id
                  OR EXISTS (SELECT FROM memberships m
                             WHERE m.person_id = p.id AND m.id::text = OLD.subject_id)
                  OR EXISTS (SELECT FROM api_key_owners o
                             WHERE o.person_id = p.id AND o.api_key_id::text = OLD.subject_id)
                  OR OLD.action LIKE 'scim_user.%' AND (
                      OLD.before ->> 'email' = p.email OR OLD.after ->> 'email' = p.email
                      OR coalesce(OLD.after, OLD.before) ->> 'person_id' = p.id::text)
                  OR EXISTS (SELECT FROM invitations i
                             WHERE i.email = p.email AND i.id::text = OLD.subject_id)))
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'audit_log is append-only: write a correcting row instead'
        USING ERRCODE = 'restrict_violation';
END $$;
"""
AUDIT_DOWN = """
CREATE OR REPLACE FUNCTION audit_entry_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.created_at, NEW.actor, NEW.action, NEW.subject_id)
           IS NOT DISTINCT FROM (OLD.id, OLD.created_at, OLD.actor, OLD.action, OLD.subject_id)
       AND (NEW.before, NEW.after) IS NOT DISTINCT FROM
           (OLD.before || '{"override_reason": null}', OLD.after || '{"override_reason": null}')
       AND EXISTS (
           SELECT
           FROM quotas q
           JOIN usage_subjects u ON u.id = q.subject_id
           WHERE q.id::text = OLD.subject_id AND u.erased_at IS NOT NULL)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'audit_log is append-only: write a correcting row instead'
        USING ERRCODE = 'restrict_violation';
END $$;
DROP FUNCTION without_person;
"""
# Keys for provisioning are revoked. Suspended members stay out, since their keys are revoked too.
DOWNGRADE = """
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now())
WHERE id IN (SELECT api_key_id FROM api_key_owners WHERE suspended_at IS NOT NULL);
UPDATE api_keys SET scopes = ARRAY['inference'], revoked_at = coalesce(revoked_at, now())
WHERE scopes = ARRAY['scim'];
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_scopes_known;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_scopes_known CHECK (
    scopes <@ ARRAY['inference', 'admin', 'billing'] AND (scopes <> '{}' OR role <> '')
);
ALTER TABLE api_key_owners DROP COLUMN suspended_at;
ALTER TABLE persons DROP CONSTRAINT ck_persons_erased, DROP COLUMN erased_at;
"""
# Raises an error without the setting even if the table is empty
IS_SET = "(SELECT current_setting('weir.organization')) <> ''"
ORGANIZATION = f"{IS_SET} AND organization_id = (SELECT current_setting('weir.organization')::uuid)"
OWN = {
    "scim_users": ORGANIZATION,
    "scim_groups": ORGANIZATION,
    "scim_group_members": f"{IS_SET}"
    " AND group_id IN (SELECT id FROM organization_border.scim_groups)"
    " AND user_id IN (SELECT id FROM organization_border.scim_users)",
    "scim_group_roles": ORGANIZATION,
}
# Of revisions 0035 and 0039. The tables have new columns, and the last two views read the first.
OF_PERSON = f"{IS_SET} AND person_id IN (SELECT id FROM organization_border.persons)"
CHANGED = {
    "persons": f"{IS_SET} AND id IN (SELECT person_id FROM organization_border.memberships)",
    "api_key_owners": f"{IS_SET} AND api_key_id IN (SELECT id FROM organization_border.api_keys)",
    "sign_in_sessions": OF_PERSON,
    "sign_in_links": OF_PERSON,
}


def create_view(table: str, condition: str) -> None:
    op.execute(
        f"CREATE VIEW organization_border.{table} AS SELECT * FROM {table} WHERE {condition}"
        " WITH CHECK OPTION"
    )


def upgrade() -> None:
    op.execute(UPGRADE)
    op.execute(AUDIT)
    for table in reversed(CHANGED):
        op.execute(f"DROP VIEW organization_border.{table}")
    for table, condition in (CHANGED | OWN).items():
        create_view(table, condition)


def downgrade() -> None:
    for table in (*reversed(OWN), *reversed(CHANGED)):
        op.execute(f"DROP VIEW organization_border.{table}")
    for table in ("scim_group_members", "scim_group_roles", "scim_groups", "scim_users"):
        op.execute(f"DROP TABLE {table}")
    op.execute(AUDIT_DOWN)
    op.execute(DOWNGRADE)
    for table, condition in CHANGED.items():
        create_view(table, condition)
