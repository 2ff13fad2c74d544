"""Organizations bound to a region, and the command that tells every process of a binding."""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

# A row of its own, as for suspensions: binding an organization changes no row that admissions refer
# to.
REGIONS = """
CREATE TABLE organization_regions (
    organization_id uuid CONSTRAINT pk_organization_regions PRIMARY KEY
        CONSTRAINT fk_organization_regions_organization_id_organizations
        REFERENCES organizations (id),
    region text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_organization_regions_region_not_empty CHECK (region <> '')
);
"""
BORDER = """
CREATE VIEW organization_border.organization_regions AS
SELECT * FROM organization_regions
WHERE organization_id = (SELECT current_setting('weir.organization')::uuid)
WITH CHECK OPTION
"""
# The region to which the organization `owner_id` was bound; empty if to none any more.
COMMANDS = """
ALTER TABLE cancel_commands ADD COLUMN bound_region text;
ALTER TABLE cancel_commands ADD CONSTRAINT ck_cancel_commands_binding_of_owner
    CHECK (bound_region IS NULL OR owner_id IS NOT NULL AND suspended_by_operator IS NULL);
"""
DOWNGRADE = """
DROP VIEW organization_border.organization_regions;
DROP TABLE organization_regions;
DELETE FROM cancel_commands WHERE bound_region IS NOT NULL;
ALTER TABLE cancel_commands DROP CONSTRAINT ck_cancel_commands_binding_of_owner;
ALTER TABLE cancel_commands DROP COLUMN bound_region;
"""


def upgrade() -> None:
    op.execute(REGIONS)
    op.execute(BORDER)
    op.execute(COMMANDS)


def downgrade() -> None:
    op.execute(DOWNGRADE)
