"""Limits on rolling windows and on the lifetime.

A rolling window has one counter for each bucket of minutes. One of them is open and carries what
the others count.
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

MEASURES = "requests", "tokens", "input_tokens", "output_tokens", "cost_picos"
ADDED = ", ".join(
    f"'{measure}_per_{window}'" for measure in MEASURES for window in ("window", "lifetime")
)
KNOWN = """
ALTER TABLE quotas
    DROP CONSTRAINT ck_quotas_dimension_known,
    ADD CONSTRAINT ck_quotas_dimension_known CHECK (dimension IN (
        'concurrent_requests', 'requests_per_minute', 'requests_per_hour', 'requests_per_day',
        'requests_per_week', 'requests_per_month',
        'tokens_per_minute', 'tokens_per_hour', 'tokens_per_day', 'tokens_per_week',
        'tokens_per_month',
        'input_tokens_per_minute', 'input_tokens_per_hour', 'input_tokens_per_day',
        'input_tokens_per_week', 'input_tokens_per_month',
        'output_tokens_per_minute', 'output_tokens_per_hour', 'output_tokens_per_day',
        'output_tokens_per_week', 'output_tokens_per_month',
        'cost_picos_per_hour', 'cost_picos_per_day', 'cost_picos_per_week',
        'cost_picos_per_month', 'prepaid_credit_picos'{more}));
"""
INDEX = """
DROP INDEX uq_quotas_active;
CREATE UNIQUE INDEX uq_quotas_active
    ON quotas (subject_id, model, dimension{window}, for_new_keys, for_each, within_id, selector_id)
    NULLS NOT DISTINCT
    WHERE deleted_at IS NULL;
"""
COUNTERS = """
-- A bucket is kept until it can count in no window any more; its row says so, and other counters
-- are found by the start of their window.
ALTER TABLE quota_counters
    ADD COLUMN carried bigint DEFAULT '0',
    ADD COLUMN kept_until timestamptz,
    ADD CONSTRAINT ck_quota_counters_carried_not_negative CHECK (carried >= 0),
    ADD CONSTRAINT ck_quota_counters_only_buckets_close
        CHECK (carried IS NOT NULL OR kept_until IS NOT NULL);
DROP INDEX ix_quota_counters_window_start;
CREATE INDEX ix_quota_counters_window_start ON quota_counters (window_start)
    WHERE kept_until IS NULL;
CREATE INDEX ix_quota_counters_kept_until ON quota_counters (kept_until)
    WHERE kept_until IS NOT NULL;
"""
COUNTERS_DOWN = """
DROP INDEX ix_quota_counters_kept_until, ix_quota_counters_window_start;
ALTER TABLE quota_counters DROP COLUMN carried, DROP COLUMN kept_until;
CREATE INDEX ix_quota_counters_window_start ON quota_counters (window_start);
"""
QUOTAS = """
ALTER TABLE quotas
    ADD COLUMN window_minutes integer DEFAULT '0' NOT NULL,
    ADD CONSTRAINT ck_quotas_window_of_rolling
        CHECK ((window_minutes <> 0) = (dimension LIKE '%_per_window')),
    ADD CONSTRAINT ck_quotas_window_in_buckets
        CHECK (window_minutes BETWEEN 0 AND 44640
               AND (window_minutes = 0
                    OR window_minutes % ((greatest(window_minutes, 1) + 59) / 60) = 0));
"""
TERMS = """
CREATE OR REPLACE VIEW quota_terms AS
SELECT q.id, concat(q.xmin, '.', s.xmin) AS version, q.subject, q.subject_id, q.within_id,
    q.selector_id, q.for_each, q.for_new_keys, q.model, q.dimension,
    coalesce(s.limit_value, q.limit_value) AS limit_value,
    coalesce(s.input_weight_milli, q.input_weight_milli) AS input_weight_milli,
    coalesce(s.cached_input_weight_milli, q.cached_input_weight_milli) AS cached_input_weight_milli,
    coalesce(s.output_weight_milli, q.output_weight_milli) AS output_weight_milli,
    coalesce(s.enforced, q.enforced) AS enforced,
    CASE WHEN s.id IS NULL THEN q.override_limit_value ELSE s.override_limit_value END
        AS override_limit_value,
    CASE WHEN s.id IS NULL THEN q.override_until ELSE s.override_until END AS override_until,
    CASE WHEN s.id IS NULL THEN q.override_reason ELSE s.override_reason END AS override_reason,
    coalesce(s.alert_at, q.alert_at) AS alert_at,
    coalesce(q.deleted_at, s.deleted_at) AS deleted_at, q.deleted_at AS own_deleted_at,
    q.created_at, greatest(q.changed_at, s.changed_at) AS changed_at{more}
FROM quotas q
LEFT JOIN quotas s ON s.id = q.selector_id;
"""
BELONG_TOGETHER = """
CREATE OR REPLACE FUNCTION quotas_belong_together() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    SELECT a.id
    INTO stray
    FROM added a
    LEFT JOIN usage_subjects u ON u.id = a.subject_id AND u.kind = a.subject
    LEFT JOIN projects p ON p.id = a.within_id
    LEFT JOIN quotas s ON s.id = a.selector_id
    WHERE a.within_id IS NOT NULL
      AND (u.organization_id IS DISTINCT FROM coalesce(p.organization_id, a.within_id)
           OR a.selector_id IS NOT NULL
              AND (s.subject_id, s.model, s.dimension{of_selector}, s.for_each)
                  IS DISTINCT FROM
                  (a.within_id, a.model, a.dimension{of_limit},
                   CASE u.kind WHEN 'label' THEN 'label:' || u.label_key ELSE 'end_user' END))
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'quota %: subject, scope and selector must exist and belong together', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$;
"""
# The previous code does not know these dimensions: running requests stop counting in such limits,
# and their alerts go with them.
FORGET = f"""
CREATE TEMPORARY TABLE forgotten ON COMMIT DROP AS
    SELECT id FROM quotas WHERE dimension IN ({ADDED});
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


def upgrade() -> None:
    op.execute(KNOWN.replace("{more}", ", " + ADDED))
    op.execute(QUOTAS)
    op.execute(INDEX.replace("{window}", ", window_minutes"))
    op.execute(TERMS.replace("{more}", ", q.window_minutes"))
    op.execute(
        BELONG_TOGETHER.replace("{of_selector}", ", s.window_minutes").replace(
            "{of_limit}", ", a.window_minutes"
        )
    )
    op.execute(COUNTERS)


def downgrade() -> None:
    op.execute(FORGET)
    op.execute(COUNTERS_DOWN)
    op.execute(BELONG_TOGETHER.replace("{of_selector}", "").replace("{of_limit}", ""))
    op.execute("DROP VIEW quota_terms")
    op.execute(INDEX.replace("{window}", ""))
    op.execute("ALTER TABLE quotas DROP COLUMN window_minutes")
    op.execute(TERMS.replace("{more}", ""))
    op.execute(KNOWN.replace("{more}", ""))
