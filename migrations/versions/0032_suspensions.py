"""Suspensions of organizations and projects, and the command that tells every process of one."""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

# A row of its own, so that suspending an organization changes no row that admissions refer to. Rows
# of an organization itself have no project.
SUSPENSIONS = """
CREATE TABLE suspensions (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_suspensions PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_suspensions_organization_id_organizations REFERENCES organizations (id),
    project_id uuid CONSTRAINT fk_suspensions_project_id_projects REFERENCES projects (id),
    reason text NOT NULL,
    by_operator boolean NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT uq_suspensions_organization_id_project_id
        UNIQUE NULLS NOT DISTINCT (organization_id, project_id),
    CONSTRAINT ck_suspensions_reason_not_empty CHECK (reason <> ''),
    CONSTRAINT ck_suspensions_organization_by_operator CHECK (project_id IS NOT NULL OR by_operator)
);
"""
BORDER = """
CREATE VIEW organization_border.suspensions AS
SELECT * FROM suspensions
WHERE organization_id = (SELECT current_setting('weir.organization')::uuid)
WITH CHECK OPTION
"""
# The organization or project that was suspended or resumed; `suspended_by_operator` is NULL for the
# latter.
COMMANDS = """
ALTER TABLE cancel_commands ADD COLUMN owner_id uuid, ADD COLUMN suspended_by_operator boolean;
ALTER TABLE cancel_commands DROP CONSTRAINT ck_cancel_commands_one_target;
ALTER TABLE cancel_commands ADD CONSTRAINT ck_cancel_commands_one_target
    CHECK (num_nonnulls(request_id, api_key_id, changed_key_id, owner_id) = 1);
ALTER TABLE cancel_commands ADD CONSTRAINT ck_cancel_commands_suspension_of_owner
    CHECK (suspended_by_operator IS NULL OR owner_id IS NOT NULL);
"""
DOWNGRADE = """
DROP VIEW organization_border.suspensions;
DROP TABLE suspensions;
DELETE FROM cancel_commands WHERE owner_id IS NOT NULL;
ALTER TABLE cancel_commands DROP CONSTRAINT ck_cancel_commands_suspension_of_owner;
ALTER TABLE cancel_commands DROP CONSTRAINT ck_cancel_commands_one_target;
ALTER TABLE cancel_commands ADD CONSTRAINT ck_cancel_commands_one_target
    CHECK (num_nonnulls(request_id, api_key_id, changed_key_id) = 1);
ALTER TABLE cancel_commands DROP COLUMN owner_id, DROP COLUMN suspended_by_operator;
"""


def upgrade() -> None:
    op.execute(SUSPENSIONS)
    op.execute(BORDER)
    op.execute(COMMANDS)


def downgrade() -> None:
    op.execute(DOWNGRADE)
