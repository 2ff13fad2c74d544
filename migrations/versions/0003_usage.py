"""Usage events in one partition per month, and the queue of events to rate.

`create_usage_partitions` creates partitions in advance. An event of a month without a partition is
stored in `usage_events_default`, where every query sees it, until `create_usage_partition` moves
it.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE usage_events (
    id bigint GENERATED ALWAYS AS IDENTITY NOT NULL,
    hold_id uuid NOT NULL,
    part smallint DEFAULT 0 NOT NULL,
    organization_id uuid NOT NULL,
    project_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    request_id uuid NOT NULL,
    model text NOT NULL,
    outcome text NOT NULL,
    input_token_count bigint NOT NULL,
    cached_input_token_count bigint NOT NULL,
    generated_token_count bigint NOT NULL,
    delivered_token_count bigint NOT NULL,
    billed_token_count bigint NOT NULL,
    price_version_id bigint NOT NULL,
    cost_picos bigint NOT NULL,
    timings jsonb,
    labels jsonb NOT NULL,
    recovered boolean DEFAULT false NOT NULL,
    admitted_at timestamptz NOT NULL,
    settled_at timestamptz DEFAULT now() NOT NULL,
    rated_at timestamptz,
    ledger_transaction_id bigint,
    receipt_sequence bigint,
    previous_receipt_hash bytea,
    receipt_hash bytea,
    receipt_batch_id bigint,
    embedding_token_count bigint DEFAULT '0' NOT NULL,
    migration_count integer DEFAULT 0 NOT NULL,
    CONSTRAINT ck_usage_events_cached_within_input
        CHECK (cached_input_token_count BETWEEN 0 AND input_token_count),
    CONSTRAINT ck_usage_events_delivered_within_generated
        CHECK (delivered_token_count BETWEEN 0 AND generated_token_count),
    CONSTRAINT ck_usage_events_billed_within_delivered
        CHECK (billed_token_count BETWEEN 0 AND delivered_token_count),
    CONSTRAINT ck_usage_events_embedding_alone
        CHECK (embedding_token_count = 0
               OR embedding_token_count > 0 AND input_token_count + generated_token_count = 0),
    CONSTRAINT ck_usage_events_rated_and_posted
        CHECK ((rated_at IS NULL) = (ledger_transaction_id IS NULL)),
    CONSTRAINT ck_usage_events_receipt_complete
        CHECK (num_nulls(receipt_sequence, previous_receipt_hash, receipt_hash) IN (0, 3)
               AND receipt_sequence > 0),
    CONSTRAINT pk_usage_events PRIMARY KEY (hold_id, part, settled_at)
) PARTITION BY RANGE (settled_at);
CREATE TABLE usage_events_default PARTITION OF usage_events DEFAULT WITH (fillfactor = 50);
CREATE INDEX ix_usage_events_organization_id_settled_at
    ON usage_events (organization_id, settled_at);
-- The export finds late usage by the time of its rating; a block range index costs almost nothing.
CREATE INDEX ix_usage_events_rated_at
    ON usage_events USING brin (rated_at) WITH (autosummarize = true);

-- Rows are added and deleted by the thousand, so vacuum runs often, whatever the table's size.
CREATE TABLE unrated_usage (
    event_id bigint NOT NULL,
    hold_id uuid NOT NULL,
    part smallint NOT NULL,
    settled_at timestamptz NOT NULL,
    organization_id uuid NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
"""
# Half of each page is free: rating updates each row once, on its own page, without touching an
# index. The functions take the advisory lock first: a process that reads the default partition and
# then waits would deadlock with the lock's holder, which needs exclusive access to that partition.
PARTITIONS = """
CREATE FUNCTION refuse_partition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is a partition of usage_events, which is append-only: write to usage_events',
        TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER usage_events_partition
    BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON usage_events_default
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_partition();

CREATE FUNCTION create_usage_partition(month date) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    name text := 'usage_events_' || to_char(month, 'YYYY_MM');
    begins timestamptz := date_trunc('month', month::timestamp) AT TIME ZONE 'UTC';
    ends timestamptz :=
        (date_trunc('month', month::timestamp) + interval '1 month') AT TIME ZONE 'UTC';
    place text := (
        SELECT format('%I.%I', relnamespace::regnamespace, name)
        FROM pg_class
        WHERE oid = 'usage_events'::regclass
    );
    moved bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(1466263922, 2);
    IF to_regclass(place) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'CREATE TABLE %s (LIKE usage_events INCLUDING DEFAULTS INCLUDING CONSTRAINTS) '
        'WITH (fillfactor = 50)', place);
    LOCK TABLE usage_events_default IN ACCESS EXCLUSIVE MODE;
    EXECUTE format(
        'INSERT INTO %s SELECT * FROM usage_events_default '
        'WHERE settled_at >= $1 AND settled_at < $2', place)
        USING begins, ends;
    GET DIAGNOSTICS moved = ROW_COUNT;
    IF moved > 0 THEN
        ALTER TABLE usage_events_default DISABLE TRIGGER USER;
        DELETE FROM usage_events_default WHERE settled_at >= begins AND settled_at < ends;
        ALTER TABLE usage_events_default ENABLE TRIGGER USER;
        RAISE NOTICE 'usage_events: % rows of % moved from the default partition',
            moved, to_char(month, 'YYYY-MM');
    END IF;
    EXECUTE format(
        'ALTER TABLE usage_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
        place, begins, ends);
    EXECUTE format(
        'CREATE TRIGGER usage_events_partition BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
        'FOR EACH STATEMENT EXECUTE FUNCTION refuse_partition()', place);
    RETURN true;
END $$;

-- Runs with the rights of its owner, so that the application role can create partitions without
-- owning a table. It takes only a number and resolves every name in `public`, where that role may
-- not create objects.
CREATE FUNCTION create_usage_partitions(months_ahead int) RETURNS SETOF date LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    months date[];
    month date;
BEGIN
    PERFORM pg_advisory_xact_lock(1466263922, 2);
    months := ARRAY(
        SELECT date_trunc('month', settled_at AT TIME ZONE 'UTC')::date
        FROM usage_events_default
        WHERE settled_at < now() + make_interval(months => months_ahead)
        UNION
        SELECT (date_trunc('month', now() AT TIME ZONE 'UTC')
                + make_interval(months => ahead))::date
        FROM generate_series(0, months_ahead) ahead
        ORDER BY 1);
    FOREACH month IN ARRAY months LOOP
        IF create_usage_partition(month) THEN
            RETURN NEXT month;
        END IF;
    END LOOP;
END $$;
REVOKE EXECUTE ON FUNCTION create_usage_partitions(int), create_usage_partition(date) FROM PUBLIC;
"""
CHECKS = """
CREATE TRIGGER usage_events_append_only BEFORE DELETE OR TRUNCATE ON usage_events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Rating marks an event once; no other column ever changes. A trigger condition over all columns is
-- far cheaper than a function that reads them. Call guard_usage_events() after adding a column.
CREATE FUNCTION usage_event_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION
        'usage_events is append-only: only rated_at and ledger_transaction_id may be set, once'
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE FUNCTION guard_usage_events() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    new_values text;
    old_values text;
    is_unchanged text;
BEGIN
    SELECT string_agg(format('NEW.%I', attname), ', ' ORDER BY attnum),
           string_agg(format('OLD.%I', attname), ', ' ORDER BY attnum)
    INTO new_values, old_values
    FROM pg_attribute
    WHERE attrelid = 'usage_events'::regclass
      AND attnum > 0
      AND NOT attisdropped
      AND attname NOT IN ('rated_at', 'ledger_transaction_id');
    is_unchanged := format('(%s) IS NOT DISTINCT FROM (%s)', new_values, old_values);
    DROP TRIGGER IF EXISTS usage_events_rated_once ON usage_events;
    EXECUTE format(
        'CREATE TRIGGER usage_events_rated_once BEFORE UPDATE ON usage_events FOR EACH ROW '
        'WHEN (NOT (OLD.rated_at IS NULL AND NEW.rated_at IS NOT NULL AND %s)) '
        'EXECUTE FUNCTION usage_event_changed()', is_unchanged);
END $$;
SELECT guard_usage_events();

-- Replaces foreign keys: one query counts the unusual rows of a statement; further queries find the
-- fault only if there are any. The parts of a hold are unique over all months: a settlement writes
-- part 0 in the transaction that ends its hold, which happens once. Later parts are rare, and are
-- looked up in all months under a lock on their hold.
CREATE FUNCTION usage_events_match_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stray uuid;
    late uuid[];
    unusual_count bigint;
BEGIN
    SELECT count(*) FILTER (
               WHERE a.part > 0
                  OR a.rated_at IS NOT NULL
                  OR h.ended_at IS DISTINCT FROM now()
                  OR (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
                     IS DISTINCT FROM
                     (a.organization_id, a.project_id, a.api_key_id, a.price_version_id)
           ) + count(*) - count(DISTINCT a.hold_id)
    INTO unusual_count
    FROM added a
    LEFT JOIN holds h ON h.id = a.hold_id;
    IF unusual_count > 0 THEN
        SELECT a.hold_id
        INTO stray
        FROM added a
        LEFT JOIN holds h ON h.id = a.hold_id
        WHERE (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
              IS DISTINCT FROM (a.organization_id, a.project_id, a.api_key_id, a.price_version_id)
        LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION
                'usage event of hold %: there is no such hold with the same key and price version',
                stray
                USING ERRCODE = 'foreign_key_violation';
        END IF;
        SELECT hold_id INTO stray FROM added GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: the statement has this part twice', stray
                USING ERRCODE = 'unique_violation';
        END IF;
        SELECT array_agg(a.hold_id)
        INTO late
        FROM added a
        JOIN holds h ON h.id = a.hold_id
        WHERE a.part > 0 OR h.ended_at IS DISTINCT FROM now();
        IF late IS NOT NULL THEN
            PERFORM FROM (
                SELECT id FROM holds WHERE id = ANY(late) ORDER BY id FOR NO KEY UPDATE
            ) locked;
            SELECT hold_id
            INTO stray
            FROM usage_events
            WHERE hold_id = ANY(late)
            GROUP BY hold_id, part
            HAVING count(*) > 1
            LIMIT 1;
            IF stray IS NOT NULL THEN
                RAISE EXCEPTION 'usage event of hold %: the hold has this part already', stray
                    USING ERRCODE = 'unique_violation';
            END IF;
            SELECT h.id
            INTO stray
            FROM holds h
            WHERE h.id = ANY(late) AND h.ended_at IS NULL
            LIMIT 1;
            IF stray IS NOT NULL THEN
                RAISE EXCEPTION 'usage event of hold %: the hold has not ended', stray
                    USING ERRCODE = 'restrict_violation';
            END IF;
        END IF;
        IF EXISTS (SELECT FROM added WHERE rated_at IS NOT NULL) THEN
            RAISE EXCEPTION 'usage_events: a new event must not be rated'
                USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    INSERT INTO unrated_usage (event_id, hold_id, part, settled_at, organization_id)
    SELECT id, hold_id, part, settled_at, organization_id FROM added ORDER BY id;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_events_match_holds AFTER INSERT ON usage_events
    REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION usage_events_match_holds();
"""


def upgrade() -> None:
    op.execute(TABLES)
    op.execute(PARTITIONS)
    op.execute(CHECKS)


def downgrade() -> None:
    op.execute("DROP TABLE usage_events, unrated_usage")
    op.execute("DROP FUNCTION usage_events_match_holds, guard_usage_events, usage_event_changed")
    op.execute("DROP FUNCTION create_usage_partitions, create_usage_partition, refuse_partition")
