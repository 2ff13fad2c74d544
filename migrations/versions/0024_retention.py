"""Retention: usage events of old months are replaced by sums per day, and audit entries expire.

A month is retired in steps, each a function that runs with the rights of its owner, so that the
application role can remove nothing else: `begin_usage_retirement` refuses months that are open,
unrated or recent; `sum_retiring_day` writes the sums; `retire_holds` deletes holds; the month's
events are exchanged for their sums by `detach_retired_usage`, and `drop_retired_usage` frees the
disk.
"""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

TABLES = """
-- Months whose usage events are being removed, or were: first summed by day, then detached with
-- their partition, then dropped. Holds that ended before the end of the last one are deleted.
CREATE TABLE retired_months (
    month date CONSTRAINT pk_retired_months PRIMARY KEY,
    kept_months integer NOT NULL,
    begun_at timestamptz DEFAULT now() NOT NULL,
    summed_until timestamptz NOT NULL,
    hold_page bigint DEFAULT 0 NOT NULL,
    hold_count bigint DEFAULT 0 NOT NULL,
    pass_hold_count bigint DEFAULT 0 NOT NULL,
    holds_retired_at timestamptz,
    event_count bigint,
    receipt_count bigint,
    receipt_batch_id bigint,
    detached_at timestamptz,
    dropped_at timestamptz,
    CONSTRAINT ck_retired_months_whole_month CHECK (extract(day FROM month) = 1),
    CONSTRAINT ck_retired_months_in_order
        CHECK (num_nulls(event_count, receipt_count, detached_at) IN (0, 3)
               AND (detached_at IS NULL OR holds_retired_at IS NOT NULL)
               AND (dropped_at IS NULL OR detached_at IS NOT NULL))
);
CREATE TRIGGER retired_months_no_delete BEFORE DELETE OR TRUNCATE ON retired_months
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();

-- `event_count` usage events that are equal in all columns but the sums, and in which kinds of
-- token they have. `settled_at` is the beginning of their day, `billing_month` that of the bill, or
-- null if an adjustment bills them. `repeated_kinds` are those that part 0 of the request has too.
CREATE TABLE usage_days (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_usage_days PRIMARY KEY,
    month date NOT NULL
        CONSTRAINT fk_usage_days_month_retired_months REFERENCES retired_months (month),
    settled_at timestamptz NOT NULL,
    organization_id uuid NOT NULL,
    project_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    model text NOT NULL,
    outcome text NOT NULL,
    price_version_id bigint NOT NULL,
    part smallint NOT NULL,
    billing_month date,
    repeated_kinds text[] NOT NULL,
    event_count bigint NOT NULL,
    input_token_count bigint NOT NULL,
    cached_input_token_count bigint NOT NULL,
    billed_token_count bigint NOT NULL,
    billed_reasoning_token_count bigint NOT NULL,
    embedding_token_count bigint NOT NULL,
    cost_picos numeric(38, 0) NOT NULL,
    migration_count bigint NOT NULL
);
CREATE INDEX ix_usage_days_organization_id_settled_at
    ON usage_days (organization_id, settled_at);
CREATE TRIGGER usage_days_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON usage_days
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- The hashes of a project's receipts of one day, in order, at most 65,536 in a row.
CREATE TABLE retired_receipts (
    project_id uuid,
    first_sequence bigint,
    last_sequence bigint NOT NULL,
    month date NOT NULL
        CONSTRAINT fk_retired_receipts_month_retired_months REFERENCES retired_months (month),
    organization_id uuid NOT NULL,
    receipt_count bigint NOT NULL,
    previous_hash bytea NOT NULL,
    hashes bytea NOT NULL,
    CONSTRAINT pk_retired_receipts PRIMARY KEY (project_id, first_sequence)
);
CREATE INDEX ix_retired_receipts_organization_id_month
    ON retired_receipts (organization_id, month);
CREATE TRIGGER retired_receipts_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON retired_receipts
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- What deleted holds used of a lifetime limit or prepaid credit; `late_picos` is the part of the
-- credit that owners of expired holds reported late.
CREATE TABLE quota_checkpoints (
    quota_id uuid CONSTRAINT pk_quota_checkpoints PRIMARY KEY
        CONSTRAINT fk_quota_checkpoints_quota_id_quotas REFERENCES quotas (id),
    used numeric(38, 0) NOT NULL,
    late_picos numeric(38, 0) DEFAULT 0 NOT NULL
);

CREATE TABLE audit_retentions (
    before timestamptz CONSTRAINT pk_audit_retentions PRIMARY KEY,
    kept_months integer NOT NULL,
    begun_at timestamptz DEFAULT now() NOT NULL
);
CREATE TRIGGER audit_retentions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_retentions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Usage events and, for months whose events were removed, the sums that replace them.
CREATE VIEW usage_sums AS
SELECT hold_id, part, organization_id, project_id, api_key_id, model, outcome, price_version_id,
       input_token_count, cached_input_token_count, billed_token_count,
       billed_reasoning_token_count, embedding_token_count, cost_picos::numeric AS cost_picos,
       migration_count::bigint AS migration_count, settled_at, rated_at, ledger_transaction_id,
       NULL::date AS billing_month, '{}'::text[] AS repeated_kinds, 1::bigint AS event_count
FROM usage_events
UNION ALL
SELECT NULL::uuid, d.part, d.organization_id, d.project_id, d.api_key_id, d.model, d.outcome,
       d.price_version_id, d.input_token_count, d.cached_input_token_count, d.billed_token_count,
       d.billed_reasoning_token_count, d.embedding_token_count, d.cost_picos::numeric,
       d.migration_count, d.settled_at,
       CASE WHEN d.billing_month IS NOT NULL THEN d.settled_at END, NULL::bigint,
       d.billing_month, d.repeated_kinds, d.event_count
FROM usage_days d
JOIN retired_months r ON r.month = d.month AND r.detached_at IS NOT NULL;
"""

# A month is retired three months after its end at the earliest: counters of windows, late reports
# and the first export read so far back.
USAGE = """
CREATE FUNCTION month_ends(month date) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
    SELECT (month + interval '1 month') AT TIME ZONE 'UTC'
$$;
CREATE FUNCTION retired_until() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(month_ends(max(month)), '-infinity') FROM retired_months
$$;

CREATE FUNCTION begin_usage_retirement(retired date, months_kept int) RETURNS void LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF months_kept < 3
       OR retired + make_interval(months => 1 + months_kept)
          > date_trunc('month', now() AT TIME ZONE 'UTC') THEN
        RAISE EXCEPTION 'usage of % is kept: 3 whole months after a month are never removed',
            to_char(retired, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF EXISTS (SELECT FROM unrated_usage WHERE settled_at < month_ends(retired))
       OR EXISTS (SELECT FROM holds WHERE state = 'held' AND admitted_at < month_ends(retired))
       OR EXISTS (
           SELECT
           FROM ledger_transactions t
           LEFT JOIN billing_months b
               ON b.organization_id = t.organization_id
              AND b.month = t.billing_month
              AND b.state = 'closed'
           WHERE t.kind = 'usage'
             AND t.effective_at < month_ends(retired)
             AND t.effective_at >= retired_until()
             AND b.month IS NULL)
    THEN
        RAISE EXCEPTION 'usage of % is not all billed by closed months', to_char(retired, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF EXISTS (
        SELECT FROM retired_months WHERE month > retired OR month < retired AND detached_at IS NULL)
       OR EXISTS (
           SELECT FROM usage_events WHERE settled_at < retired::timestamp AT TIME ZONE 'UTC')
    THEN
        RAISE EXCEPTION 'usage is removed month by month: an earlier one is before %',
            to_char(retired, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    INSERT INTO retired_months (month, kept_months, summed_until)
    VALUES (retired, months_kept, retired::timestamp AT TIME ZONE 'UTC')
    ON CONFLICT DO NOTHING;
END $$;

-- Sums one day of the month and returns its end; NULL if all days are summed.
CREATE FUNCTION sum_retiring_day(retired date) RETURNS timestamptz LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    begins timestamptz;
    ends timestamptz;
BEGIN
    SELECT summed_until, summed_until + interval '24 hours'
    INTO begins, ends
    FROM retired_months
    WHERE month = retired AND summed_until < month_ends(retired)
    FOR UPDATE;
    IF begins IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO usage_days (
        month, settled_at, organization_id, project_id, api_key_id, model, outcome,
        price_version_id, part, billing_month, repeated_kinds, event_count, input_token_count,
        cached_input_token_count, billed_token_count, billed_reasoning_token_count,
        embedding_token_count, cost_picos, migration_count)
    SELECT retired, begins, u.organization_id, u.project_id, u.api_key_id, u.model, u.outcome,
           u.price_version_id, u.part, t.billing_month, r.kinds, count(*),
           sum(u.input_token_count), sum(u.cached_input_token_count), sum(u.billed_token_count),
           sum(u.billed_reasoning_token_count), sum(u.embedding_token_count), sum(u.cost_picos),
           sum(u.migration_count)
    FROM organizations o
    JOIN usage_events u
        ON u.organization_id = o.id AND u.settled_at >= begins AND u.settled_at < ends
    LEFT JOIN ledger_transactions t ON t.id = u.ledger_transaction_id
    CROSS JOIN LATERAL (
        SELECT CASE WHEN u.part = 0 THEN '{}'::text[] ELSE ARRAY(
            SELECT k.kind
            FROM usage_events f
            JOIN ledger_transactions ft
                ON ft.id = f.ledger_transaction_id AND ft.billing_month = t.billing_month
            CROSS JOIN LATERAL (VALUES
                ('input', f.input_token_count > f.cached_input_token_count
                          AND u.input_token_count > u.cached_input_token_count),
                ('cached_input', f.cached_input_token_count > 0
                                 AND u.cached_input_token_count > 0),
                ('output', f.billed_token_count > f.billed_reasoning_token_count
                           AND u.billed_token_count > u.billed_reasoning_token_count),
                ('reasoning', f.billed_reasoning_token_count > 0
                              AND u.billed_reasoning_token_count > 0),
                ('embedding', f.embedding_token_count > 0 AND u.embedding_token_count > 0)
            ) AS k (kind, both_have)
            WHERE f.hold_id = u.hold_id
              AND f.part = 0
              AND f.settled_at >= retired::timestamp AT TIME ZONE 'UTC'
              AND f.settled_at < month_ends(retired)
              AND k.both_have
            ORDER BY 1
        ) END AS kinds
    ) AS r
    GROUP BY u.organization_id, u.project_id, u.api_key_id, u.model, u.outcome,
             u.price_version_id, u.part, t.billing_month, r.kinds,
             u.input_token_count > u.cached_input_token_count, u.cached_input_token_count > 0,
             u.billed_token_count > u.billed_reasoning_token_count,
             u.billed_reasoning_token_count > 0, u.embedding_token_count > 0;
    INSERT INTO retired_receipts (
        project_id, first_sequence, last_sequence, month, organization_id, receipt_count,
        previous_hash, hashes)
    SELECT u.project_id, min(u.receipt_sequence), max(u.receipt_sequence), retired,
           u.organization_id, count(*),
           (array_agg(u.previous_receipt_hash ORDER BY u.receipt_sequence))[1],
           string_agg(u.receipt_hash, ''::bytea ORDER BY u.receipt_sequence)
    FROM organizations o
    JOIN usage_events u
        ON u.organization_id = o.id AND u.settled_at >= begins AND u.settled_at < ends
    WHERE u.receipt_sequence IS NOT NULL
    GROUP BY u.organization_id, u.project_id, u.receipt_sequence / 65536;
    UPDATE retired_months SET summed_until = ends WHERE month = retired;
    RETURN ends;
END $$;

-- Deletes the ended holds in some pages of the table, and adds what they used of lifetime limits
-- and prepaid credit to the checkpoints. Returns how many; NULL after the last pass, which finds
-- none.
CREATE FUNCTION retire_holds(retired date, page_count int) RETURNS int LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    page bigint;
    ids uuid[];
    is_pass_done boolean;
BEGIN
    -- A recount sums holds and checkpoints in several steps (`quota_recount.py`).
    PERFORM pg_advisory_xact_lock(1466263922, 3);
    SELECT hold_page
    INTO page
    FROM retired_months
    WHERE month = retired AND holds_retired_at IS NULL
    FOR UPDATE;
    IF page IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT coalesce(array_agg(id), '{}')
    INTO ids
    FROM (
        SELECT id
        FROM holds
        WHERE ctid >= format('(%s,0)', page)::tid
          AND ctid < format('(%s,0)', page + page_count)::tid
          AND ended_at < month_ends(retired)
        FOR UPDATE SKIP LOCKED
    ) AS ended;
    IF EXISTS (
        SELECT FROM quota_counters
        WHERE window_start = 'epoch' AND kept_until IS NULL AND quota_id IN (
            SELECT id FROM quotas WHERE dimension <> 'concurrent_requests'))
    THEN
        INSERT INTO quota_checkpoints AS kept (quota_id, used, late_picos)
        SELECT quota_id,
               sum(CASE WHEN measure = 'requests' THEN 1 ELSE div(
                   (input - least(cached, input)) * w_input + least(cached, input) * w_cached
                       + (output - reasoning)
                           * CASE WHEN keeps_lease THEN greatest(w_output, w_reasoning)
                                  ELSE w_output END
                       + reasoning * w_reasoning
                       + divisor - 1,
                   divisor) END),
               sum(CASE WHEN is_credit AND state = 'expired' THEN late_picos ELSE 0 END)
        FROM (
            SELECT q.id AS quota_id, d.measure, h.state, c.is_credit, l.keeps_lease, e.late_picos,
                   CASE WHEN l.keeps_lease THEN h.input_token_count ELSE e.input END AS input,
                   CASE WHEN l.keeps_lease THEN h.leased_token_count ELSE e.output END AS output,
                   CASE WHEN l.keeps_lease THEN h.reasoning_token_count
                        ELSE e.reasoning END AS reasoning,
                   h.cached_input_token_count AS cached,
                   CASE WHEN d.measure = 'picos' THEN 1 ELSE 1000 END::numeric AS divisor,
                   CASE WHEN d.measure = 'output_tokens' THEN 0
                        WHEN d.measure <> 'picos' THEN q.input_weight_milli
                        WHEN h.embedding THEN p.embedding_picos_per_token
                        ELSE p.input_picos_per_token END AS w_input,
                   CASE WHEN d.measure = 'output_tokens' THEN 0
                        WHEN d.measure <> 'picos' THEN q.cached_input_weight_milli
                        WHEN h.embedding THEN p.embedding_picos_per_token
                        ELSE p.cached_input_picos_per_token END AS w_cached,
                   CASE WHEN d.measure = 'input_tokens' THEN 0
                        WHEN d.measure <> 'picos' THEN q.output_weight_milli
                        ELSE p.output_picos_per_token END AS w_output,
                   CASE WHEN d.measure = 'input_tokens' THEN 0
                        WHEN d.measure <> 'picos' THEN q.output_weight_milli
                        ELSE coalesce(p.reasoning_picos_per_token, p.output_picos_per_token)
                   END AS w_reasoning
            FROM holds h
            JOIN price_versions p ON p.id = h.price_version_id
            CROSS JOIN LATERAL (
                SELECT count(*) AS parts,
                       coalesce(sum(input_token_count + embedding_token_count), 0) AS input,
                       coalesce(sum(billed_token_count), 0) AS output,
                       coalesce(sum(billed_reasoning_token_count), 0) AS reasoning,
                       coalesce(sum(cost_picos) FILTER (
                           WHERE part = (h.delivered_token_count > 0)::int), 0) AS late_picos
                FROM usage_events
                WHERE hold_id = h.id AND settled_at >= h.ended_at
            ) AS e
            CROSS JOIN LATERAL (
                SELECT unnest(h.quota_ids)
                UNION
                SELECT o.id
                FROM (
                    SELECT unnest(
                        ARRAY[h.organization_id, h.project_id, h.api_key_id, h.end_user_id])
                    UNION ALL
                    SELECT u.id
                    FROM jsonb_each_text(h.labels) AS l
                    JOIN usage_subjects u
                        ON u.organization_id = h.organization_id
                       AND u.kind = 'label'
                       AND (u.label_key, u.name) = (l.key, l.value)
                ) AS s (subject_id)
                JOIN quotas o
                    ON o.subject_id = s.subject_id
                   AND o.deleted_at IS NULL
                   AND (o.within_id IS NULL OR o.within_id IN (h.organization_id, h.project_id))
                   AND o.model IN ('', h.model)
                   AND NOT o.for_new_keys
                   AND o.for_each = ''
            ) AS s (quota_id)
            JOIN quota_terms q
                ON q.id = s.quota_id AND (q.deleted_at IS NULL OR q.id = ANY(h.quota_ids))
            JOIN quota_counters k ON k.quota_id = q.id AND k.window_start = 'epoch'
            CROSS JOIN LATERAL (
                SELECT CASE WHEN q.dimension LIKE 'requests%' THEN 'requests'
                            WHEN q.dimension LIKE '%picos%' THEN 'picos'
                            WHEN q.dimension LIKE 'input%' THEN 'input_tokens'
                            WHEN q.dimension LIKE 'output%' THEN 'output_tokens'
                            ELSE 'tokens' END
            ) AS d (measure)
            CROSS JOIN LATERAL (SELECT q.dimension = 'prepaid_credit_picos') AS c (is_credit)
            -- The lease of an expired hold stays used until its owner reports it, by an event after
            -- that of the expiry. Prepaid credit was paid for, and is charged the events only.
            CROSS JOIN LATERAL (
                SELECT h.state = 'expired'
                    AND e.parts <= (h.delivered_token_count > 0)::int
                    AND NOT c.is_credit
            ) AS l (keeps_lease)
            WHERE h.id = ANY(ids)
              AND h.state <> 'voided'
              AND q.dimension <> 'concurrent_requests'
        ) AS charges
        GROUP BY quota_id
        ON CONFLICT (quota_id) DO UPDATE
        SET used = kept.used + excluded.used, late_picos = kept.late_picos + excluded.late_picos;
    END IF;
    DELETE FROM holds WHERE id = ANY(ids);
    is_pass_done := page + page_count
        > pg_relation_size('holds') / current_setting('block_size')::bigint;
    -- A row that was locked, or moved to a page behind, is found by another pass.
    UPDATE retired_months
    SET hold_count = hold_count + cardinality(ids),
        hold_page = CASE WHEN is_pass_done THEN 0 ELSE page + page_count END,
        pass_hold_count = CASE WHEN is_pass_done THEN hold_count + cardinality(ids)
                               ELSE pass_hold_count END,
        holds_retired_at = CASE
            WHEN is_pass_done AND hold_count + cardinality(ids) = pass_hold_count THEN now()
        END
    WHERE month = retired;
    RETURN cardinality(ids);
END $$;

-- Exchanges a month's events for their sums. Waits a tenth of a second for the lock, since requests
-- wait behind it, and tries again; raises lock_not_available after the last attempt.
CREATE FUNCTION detach_retired_usage(retired date) RETURNS boolean LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    name text := 'usage_events_' || to_char(retired, 'YYYY_MM');
    is_partitioned boolean;
    differs text;
    events bigint;
    receipts bigint;
    batch bigint;
BEGIN
    PERFORM FROM retired_months
    WHERE month = retired
      AND detached_at IS NULL
      AND holds_retired_at IS NOT NULL
      AND summed_until = month_ends(retired)
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT count(*), count(receipt_sequence), max(receipt_batch_id)
    INTO events, receipts, batch
    FROM usage_events
    WHERE settled_at < month_ends(retired);
    SELECT string_agg(organization_id::text, ', ')
    INTO differs
    FROM (
        SELECT organization_id, sum(e.n) AS events, sum(e.cost) AS cost, sum(e.tokens) AS tokens
        FROM (
            SELECT organization_id, 1 AS n, cost_picos AS cost,
                   input_token_count + billed_token_count + embedding_token_count AS tokens
            FROM usage_events
            WHERE settled_at < month_ends(retired)
            UNION ALL
            SELECT organization_id, -event_count, -cost_picos,
                   -(input_token_count + billed_token_count + embedding_token_count)
            FROM usage_days
            WHERE month = retired
        ) AS e
        GROUP BY 1
        HAVING sum(e.n) <> 0 OR sum(e.cost) <> 0 OR sum(e.tokens) <> 0
    ) AS different;
    IF differs IS NOT NULL OR receipts <> (
        SELECT coalesce(sum(receipt_count), 0) FROM retired_receipts WHERE month = retired)
    THEN
        RAISE EXCEPTION 'the sums of % differ from its usage events: %',
            to_char(retired, 'YYYY-MM'), coalesce(differs, 'receipts')
            USING ERRCODE = 'data_exception';
    END IF;
    SELECT EXISTS (
        SELECT
        FROM pg_inherits
        WHERE inhparent = 'usage_events'::regclass AND inhrelid = to_regclass(name))
    INTO is_partitioned;
    IF NOT is_partitioned AND events > 0 THEN
        RAISE EXCEPTION 'usage of % is not in a partition of its own', to_char(retired, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    UPDATE retired_months
    SET detached_at = now(), event_count = events, receipt_count = receipts,
        receipt_batch_id = batch
    WHERE month = retired;
    PERFORM set_config('lock_timeout', '100ms', true);
    FOR attempt IN 1..50 LOOP
        BEGIN
            PERFORM pg_advisory_xact_lock(1466263922, 2);
            IF is_partitioned THEN
                EXECUTE format('ALTER TABLE usage_events DETACH PARTITION %I', name);
            END IF;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF attempt = 50 THEN
                RAISE;
            END IF;
            PERFORM pg_sleep(0.1);
        END;
    END LOOP;
    RETURN true;
END $$;

CREATE FUNCTION drop_retired_usage(retired date) RETURNS boolean LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    UPDATE retired_months
    SET dropped_at = now()
    WHERE month = retired AND detached_at IS NOT NULL AND dropped_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS %I', 'usage_events_' || to_char(retired, 'YYYY_MM'));
    RETURN true;
END $$;

DROP TRIGGER holds_no_delete ON holds;
CREATE TRIGGER holds_no_delete BEFORE DELETE ON holds
    FOR EACH ROW WHEN (OLD.ended_at IS NULL OR OLD.ended_at >= retired_until())
    EXECUTE FUNCTION refuse_deletion();
CREATE TRIGGER holds_no_truncate BEFORE TRUNCATE ON holds
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
"""

AUDIT = """
CREATE FUNCTION begin_audit_retention(expired timestamptz, months_kept int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF months_kept < 3 OR expired > now() - make_interval(months => months_kept) THEN
        RAISE EXCEPTION 'audit entries of the last 3 months are never removed'
            USING ERRCODE = 'restrict_violation';
    END IF;
    INSERT INTO audit_retentions (before, kept_months) VALUES (expired, months_kept)
    ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION audit_kept_from() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(before), '-infinity') FROM audit_retentions
$$;
-- Entries that decide something never expire: who made whose key (approvals by two persons), which
-- limits an administrator set and lowered (`weir fsck`), and what retention removed.
CREATE FUNCTION audit_entry_decides(action text, subject_id text) RETURNS boolean
    LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN $1 LIKE 'api\\_key.%' OR $1 LIKE 'retention.%' THEN true
        WHEN $1 IN ('quota.set', 'quota.override') THEN EXISTS (
            SELECT
            FROM quotas q
            WHERE (q.id = $2::uuid OR q.selector_id = $2::uuid)
              AND (q.deleted_at IS NULL
                   OR EXISTS (SELECT FROM quota_counters c WHERE c.quota_id = q.id)))
        ELSE false
    END
$$;
CREATE FUNCTION audit_entry_expires() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.created_at >= audit_kept_from() OR audit_entry_decides(OLD.action, OLD.subject_id) THEN
        RAISE EXCEPTION 'audit_log is append-only: this entry is kept'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN OLD;
END $$;
DROP TRIGGER audit_log_append_only ON audit_log;
CREATE TRIGGER audit_log_append_only BEFORE TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_log_expires BEFORE DELETE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION audit_entry_expires();

-- Deletes expired entries among the first `rows_max` after an id; returns the last id, and how many
-- were deleted.
CREATE FUNCTION delete_expired_entries(after_id bigint, rows_max int, OUT last_id bigint,
                                       OUT deleted_count bigint) LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    WITH old AS MATERIALIZED (
        SELECT id, action, subject_id
        FROM audit_log
        WHERE id > after_id AND created_at < audit_kept_from()
        ORDER BY id
        LIMIT rows_max
    ), deleted AS (
        DELETE FROM audit_log
        WHERE id IN (SELECT id FROM old WHERE NOT audit_entry_decides(action, subject_id))
        RETURNING id
    )
    SELECT (SELECT max(id) FROM old), (SELECT count(*) FROM deleted)
    INTO last_id, deleted_count;
END $$;
"""
FUNCTIONS = (
    "begin_usage_retirement(date, int)",
    "sum_retiring_day(date)",
    "retire_holds(date, int)",
    "detach_retired_usage(date)",
    "drop_retired_usage(date)",
    "begin_audit_retention(timestamptz, int)",
    "delete_expired_entries(bigint, int)",
)

# The schema of before has no place for the sums.
REFUSE_DOWNGRADE = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM retired_months) THEN
        RAISE EXCEPTION 'usage events of % were removed: the schema of before has no sums',
            (SELECT string_agg(to_char(month, 'YYYY-MM'), ', ' ORDER BY month) FROM retired_months);
    END IF;
END $$;
"""
DOWNGRADE = """
DROP TRIGGER audit_log_expires ON audit_log;
DROP TRIGGER audit_log_append_only ON audit_log;
CREATE TRIGGER audit_log_append_only BEFORE DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
DROP TRIGGER holds_no_truncate ON holds;
DROP TRIGGER holds_no_delete ON holds;
CREATE TRIGGER holds_no_delete BEFORE DELETE OR TRUNCATE ON holds
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();
DROP FUNCTION audit_entry_expires, audit_entry_decides, audit_kept_from, retired_until;
DROP VIEW usage_sums;
DROP TABLE audit_retentions, quota_checkpoints, retired_receipts, usage_days, retired_months;
DROP FUNCTION month_ends;
"""


def upgrade() -> None:
    op.execute(TABLES)
    op.execute(USAGE)
    op.execute(AUDIT)
    op.execute(f"REVOKE EXECUTE ON FUNCTION {', '.join(FUNCTIONS)} FROM PUBLIC")


def downgrade() -> None:
    op.execute(REFUSE_DOWNGRADE)
    op.execute(f"DROP FUNCTION {', '.join(FUNCTIONS)}")
    op.execute(DOWNGRADE)
