"""Fleet as rows: its versions, and the version that each process serves."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

UPGRADE = """
-- Each row is a whole fleet, as the canonical document; the largest number is in force.
CREATE TABLE fleet_versions (
    number bigint CONSTRAINT pk_fleet_versions PRIMARY KEY,
    document text NOT NULL,
    digest text NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_fleet_versions_number_positive CHECK (number > 0)
);
CREATE TRIGGER fleet_versions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON fleet_versions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- 0: the fleet of the settings.
ALTER TABLE live_reports
    ADD COLUMN fleet_number bigint DEFAULT 0 NOT NULL,
    ADD COLUMN fleet_fault text DEFAULT '' NOT NULL;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("ALTER TABLE live_reports DROP COLUMN fleet_fault, DROP COLUMN fleet_number")
    op.execute("DROP TABLE fleet_versions")
