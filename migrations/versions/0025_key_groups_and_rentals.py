"""Groups of keys, selectors that give a limit to each key of a group, and rented replicas.

The limit of a key has the terms of its selector: they are written to its row when they change, so
that admissions and alerts read it like any other limit of the key.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
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
# Each second from `starts_at` to `ends_at` is charged, of each replica. An empty one is cancelled.
RENTALS = """
ALTER TABLE resale_prices
    ADD COLUMN replica_hour_picos bigint DEFAULT 0 NOT NULL,
    ADD CONSTRAINT ck_resale_prices_replica_hour_not_negative CHECK (replica_hour_picos >= 0);
CREATE TABLE replica_rentals (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_replica_rentals PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_replica_rentals_organization_id_organizations REFERENCES organizations (id),
    end_user_id uuid NOT NULL
        CONSTRAINT fk_replica_rentals_end_user_id_usage_subjects REFERENCES usage_subjects (id),
    model text NOT NULL,
    replica_count bigint NOT NULL,
    starts_at timestamptz NOT NULL,
    ends_at timestamptz,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_replica_rentals_replica_count_positive CHECK (replica_count > 0),
    CONSTRAINT ck_replica_rentals_ends_after_start CHECK (ends_at >= starts_at),
    CONSTRAINT ck_replica_rentals_whole_seconds CHECK (
        (starts_at, coalesce(ends_at, starts_at))
        = (date_trunc('second', starts_at), date_trunc('second', coalesce(ends_at, starts_at))))
);
CREATE INDEX ix_replica_rentals_end_user_id
    ON replica_rentals (organization_id, end_user_id, model, starts_at);
CREATE TRIGGER replica_rentals_no_delete BEFORE DELETE OR TRUNCATE ON replica_rentals
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
-- Only the end of a rental changes.
CREATE FUNCTION replica_rental_keeps_terms() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'replica rental %: only its end may change', OLD.id
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER replica_rentals_keep_terms BEFORE UPDATE ON replica_rentals FOR EACH ROW WHEN (
    (NEW.id, NEW.organization_id, NEW.end_user_id, NEW.model, NEW.replica_count, NEW.starts_at,
     NEW.created_at)
        IS DISTINCT FROM
    (OLD.id, OLD.organization_id, OLD.end_user_id, OLD.model, OLD.replica_count, OLD.starts_at,
     OLD.created_at)
) EXECUTE FUNCTION replica_rental_keeps_terms();
"""
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
DELETE FROM quota_checkpoints WHERE quota_id IN (SELECT id FROM forgotten);
DELETE FROM quotas WHERE id IN (SELECT id FROM forgotten);
"""
DOWNGRADE = """
DROP TABLE replica_rentals;
DROP FUNCTION replica_rental_keeps_terms;
ALTER TABLE resale_prices DROP COLUMN replica_hour_picos;
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
    op.execute(RENTALS)


def downgrade() -> None:
    op.execute(FORGET)
    op.execute(RECORDED.format(of_keys=""))
    op.execute(DOWNGRADE)
