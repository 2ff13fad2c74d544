"""Periodic statements that cost by what changed, not by how many end users there are.

Limits of end users and label values are scanned for alerts when their use or terms have changed
(`alert_scans`); past counters are found by the start of their window.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0017"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE INDEX ix_quota_counters_window_start ON quota_counters (window_start);
CREATE INDEX ix_quotas_alerting ON quotas (dimension)
    WHERE alert_at <> '{}'
      AND deleted_at IS NULL
      AND NOT for_new_keys
      AND for_each = ''
      AND within_id IS NULL;

-- Limits of usage subjects, and selectors, to scan for crossed thresholds from a time on: use has
-- been rated, the terms have changed, or a temporary override ends. The limits of a selector are
-- scanned by subject, those after `after_id` next.
CREATE TABLE alert_scans (
    due_at timestamptz DEFAULT '-infinity',
    quota_id uuid,
    after_id uuid DEFAULT '00000000-0000-0000-0000-000000000000' NOT NULL,
    CONSTRAINT pk_alert_scans PRIMARY KEY (due_at, quota_id)
);
INSERT INTO alert_scans (quota_id)
SELECT id FROM quotas WHERE within_id IS NOT NULL AND alert_at <> '{}' AND deleted_at IS NULL;

-- A limit that an admission takes from a selector has no use yet.
CREATE FUNCTION quotas_alerts_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO alert_scans (due_at, quota_id)
    SELECT due_at, c.id
    FROM changed c, unnest(ARRAY['-infinity', c.override_until]) AS d(due_at)
    WHERE (c.for_each <> ''
           OR c.within_id IS NOT NULL AND (c.selector_id IS NULL OR TG_OP = 'UPDATE'))
      AND c.alert_at <> '{}'
      AND c.deleted_at IS NULL
      AND due_at IS NOT NULL
    ORDER BY 1, 2
    ON CONFLICT ON CONSTRAINT pk_alert_scans DO UPDATE SET after_id = excluded.after_id;
    RETURN NULL;
END $$;
CREATE TRIGGER quotas_insert_alerts_due AFTER INSERT ON quotas REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION quotas_alerts_due();
CREATE TRIGGER quotas_update_alerts_due AFTER UPDATE ON quotas REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION quotas_alerts_due();
"""
DOWNGRADE = """
DROP TRIGGER quotas_update_alerts_due ON quotas;
DROP TRIGGER quotas_insert_alerts_due ON quotas;
DROP FUNCTION quotas_alerts_due;
DROP TABLE alert_scans;
DROP INDEX ix_quotas_alerting, ix_quota_counters_window_start;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
