"""Groups of keys, and selectors that give a limit to each key of a group.

The limit of a key has the terms of its selector: they are written to its row when they change, so
that admissions and alerts read it like any other limit of the key.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0022"
branch_labels = None
depends_on = None

GROUPS = """
ALTER TABLE api_keys ADD COLUMN "group" text DEFAULT '' NOT NULL;
ALTER TABLE quotas
    DROP CONSTRAINT ck_quotas_for_each_known,
    ADD CONSTRAINT ck_quotas_for_each_known
        CHECK (for_each IN ('', 'end_user') OR for_each LIKE 'label:_%' OR for_each LIKE 'key:_%'),
    DROP CONSTRAINT ck_quotas_selector_of_usage_subject,
    ADD CONSTRAINT ck_quotas_selector_of_usage_subject
        CHECK (selector_id IS NULL OR within_id IS NOT NULL OR subject = 'api_key');
"""
# A key's limit is recorded even if a selector gives it: its key may be cached.
RECORDED = """
CREATE OR REPLACE FUNCTION quotas_insert_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rule_changes (subject_id)
    SELECT subject_id FROM changed WHERE selector_id IS NULL{of_keys}
    UNION
    SELECT c.within_id
    FROM changed c
    WHERE c.selector_id IS NULL
      AND c.within_id IS NOT NULL
      AND (c.subject = 'label' OR NOT EXISTS (
          SELECT
          FROM quotas o
          WHERE o.within_id = c.within_id
            AND o.subject = c.subject
            AND o.selector_id IS NULL
            AND o.deleted_at IS NULL
            AND o.id NOT IN (SELECT id FROM changed)));
    RETURN NULL;
END $$;
"""
OF_KEYS = " OR within_id IS NULL"
# The previous code does not know groups: running requests stop counting in their limits.
FORGET = """
CREATE TEMPORARY TABLE forgotten ON COMMIT DROP AS
    SELECT id FROM quotas
    WHERE for_each LIKE 'key:_%' OR subject = 'api_key' AND selector_id IS NOT NULL;
UPDATE holds
SET quota_ids = ARRAY(
    SELECT q FROM unnest(quota_ids) WITH ORDINALITY AS u (q, i)
    WHERE q NOT IN (SELECT id FROM forgotten) ORDER BY i)
WHERE state = 'held' AND quota_ids && ARRAY(SELECT id FROM forgotten);
DELETE FROM alert_deliveries d USING alerts a
WHERE a.id = d.alert_id AND a.quota_id IN (SELECT id FROM forgotten);
ALTER TABLE alerts DISABLE TRIGGER alerts_append_only;
DELETE FROM alerts WHERE quota_id IN (SELECT id FROM forgotten);
ALTER TABLE alerts ENABLE TRIGGER alerts_append_only;
DELETE FROM alert_scans WHERE quota_id IN (SELECT id FROM forgotten);
DELETE FROM quota_counters WHERE quota_id IN (SELECT id FROM forgotten);
DELETE FROM quotas WHERE id IN (SELECT id FROM forgotten);
"""
DOWNGRADE = """
ALTER TABLE quotas
    DROP CONSTRAINT ck_quotas_selector_of_usage_subject,
    ADD CONSTRAINT ck_quotas_selector_of_usage_subject
        CHECK (selector_id IS NULL OR within_id IS NOT NULL),
    DROP CONSTRAINT ck_quotas_for_each_known,
    ADD CONSTRAINT ck_quotas_for_each_known
        CHECK (for_each IN ('', 'end_user') OR for_each LIKE 'label:_%');
ALTER TABLE api_keys DROP COLUMN "group";
"""


def upgrade() -> None:
    op.execute(GROUPS)
    op.execute(RECORDED.format(of_keys=OF_KEYS))


def downgrade() -> None:
    op.execute(FORGET)
    op.execute(RECORDED.format(of_keys=""))
    op.execute(DOWNGRADE)
