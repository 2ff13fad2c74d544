"""Usage events in one partition per month, and a separate list of those that await rating.

`create_usage_partitions` creates partitions ahead. An event without one is stored in
`usage_events_default` and counts like others until `create_usage_partition` moves it. Statements
that name a partition are refused.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

COLUMNS = """
    id bigint {identity} NOT NULL,
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
    CONSTRAINT ck_usage_events_receipt_complete
        CHECK (num_nulls(receipt_sequence, previous_receipt_hash, receipt_hash) IN (0, 3) AND receipt_sequence > 0),
    CONSTRAINT ck_usage_events_billed_within_delivered CHECK (billed_token_count BETWEEN 0 AND delivered_token_count),
    CONSTRAINT ck_usage_events_cached_within_input CHECK (cached_input_token_count BETWEEN 0 AND input_token_count),
    CONSTRAINT ck_usage_events_delivered_within_generated CHECK (delivered_token_count BETWEEN 0 AND generated_token_count),
    CONSTRAINT ck_usage_events_rated_and_posted CHECK ((rated_at IS NULL) = (ledger_transaction_id IS NULL))
"""
NAMES = (
    "id, hold_id, part, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count, "
    "cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count, price_version_id, cost_picos, "
    "timings, labels, recovered, admitted_at, settled_at, rated_at, ledger_transaction_id, receipt_sequence, "
    "previous_receipt_hash, receipt_hash, receipt_batch_id"
)
# Half of a page stays free: rating updates each row once, in its page and without index writes.
FILLFACTOR = "fillfactor = 50"
# Rows are inserted and deleted by the thousand: vacuum often, whatever the size.
SWEPT_OFTEN = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000"

CREATE_USAGE_PARTITION = f"""
CREATE FUNCTION create_usage_partition(month date) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    name text := 'usage_events_' || to_char(month, 'YYYY_MM');
    begins timestamptz := date_trunc('month', month::timestamp) AT TIME ZONE 'UTC';
    ends timestamptz := (date_trunc('month', month::timestamp) + interval '1 month') AT TIME ZONE 'UTC';
    place text := (SELECT format('%I.%I', relnamespace::regnamespace, name) FROM pg_class WHERE oid = 'usage_events'::regclass);
    moved bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(1466263922, 2);
    IF to_regclass(place) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE usage_events INCLUDING DEFAULTS INCLUDING CONSTRAINTS) WITH ({FILLFACTOR})', place);
    LOCK TABLE usage_events_default IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('INSERT INTO %s SELECT * FROM usage_events_default WHERE settled_at >= $1 AND settled_at < $2', place)
        USING begins, ends;
    GET DIAGNOSTICS moved = ROW_COUNT;
    IF moved > 0 THEN
        ALTER TABLE usage_events_default DISABLE TRIGGER USER;
        DELETE FROM usage_events_default WHERE settled_at >= begins AND settled_at < ends;
        ALTER TABLE usage_events_default ENABLE TRIGGER USER;
        RAISE NOTICE 'usage_events: % rows of % moved from the default partition', moved, to_char(month, 'YYYY-MM');
    END IF;
    EXECUTE format('ALTER TABLE usage_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', place, begins, ends);
    EXECUTE format('CREATE TRIGGER usage_events_partition BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
        'FOR EACH STATEMENT EXECUTE FUNCTION refuse_partition()', place);
    RETURN true;
END $$
"""
# The lock first: waiting for it after reading the default partition would deadlock with its holder,
# which needs that partition exclusively.
CREATE_USAGE_PARTITIONS = """
CREATE FUNCTION create_usage_partitions(months_ahead int) RETURNS SETOF date LANGUAGE plpgsql AS $$
DECLARE wanted date[]; month date;
BEGIN
    PERFORM pg_advisory_xact_lock(1466263922, 2);
    wanted := ARRAY(
        SELECT date_trunc('month', settled_at AT TIME ZONE 'UTC')::date FROM usage_events_default
        WHERE settled_at < now() + make_interval(months => months_ahead)
        UNION
        SELECT (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => ahead))::date
        FROM generate_series(0, months_ahead) ahead
        ORDER BY 1);
    FOREACH month IN ARRAY wanted LOOP
        IF create_usage_partition(month) THEN
            RETURN NEXT month;
        END IF;
    END LOOP;
END $$
"""
REFUSE_PARTITION = """
CREATE FUNCTION refuse_partition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is a partition of usage_events: name that, whose guards see every row; it is append-only', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END $$
"""
# The parts of a hold are unique over all months: a settlement writes part 0 in the transaction that
# ends its hold, once. Later parts are rare and are checked in all months, with the hold locked.
USAGE_EVENTS_ARE_OF_THEIR_HOLDS = """
CREATE OR REPLACE FUNCTION usage_events_are_of_their_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid; late uuid[];
BEGIN
    SELECT a.hold_id INTO stray FROM added a LEFT JOIN holds h ON h.id = a.hold_id
    WHERE (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
        IS DISTINCT FROM (a.organization_id, a.project_id, a.api_key_id, a.price_version_id)
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'usage event of hold %: there is no such hold of the same key and price version', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    SELECT hold_id INTO stray FROM added GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'usage event of hold %: it has this part twice', stray USING ERRCODE = 'unique_violation';
    END IF;
    SELECT array_agg(a.hold_id) INTO late FROM added a JOIN holds h ON h.id = a.hold_id
    WHERE a.part > 0 OR h.ended_at IS DISTINCT FROM now();
    IF late IS NOT NULL THEN
        PERFORM FROM (SELECT id FROM holds WHERE id = ANY(late) ORDER BY id FOR NO KEY UPDATE) locked;
        SELECT hold_id INTO stray FROM usage_events WHERE hold_id = ANY(late) GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: it has this part already', stray USING ERRCODE = 'unique_violation';
        END IF;
        SELECT h.id INTO stray FROM holds h WHERE h.id = ANY(late) AND h.ended_at IS NULL LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: it has not ended', stray USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    IF EXISTS (SELECT FROM added WHERE rated_at IS NOT NULL) THEN
        RAISE EXCEPTION 'usage_events: an event is not rated as it is written' USING ERRCODE = 'restrict_violation';
    END IF;
    INSERT INTO unrated_usage (event_id, hold_id, part, settled_at, organization_id)
    SELECT id, hold_id, part, settled_at, organization_id FROM added ORDER BY id;
    RETURN NULL;
END $$
"""
USAGE_EVENTS_WERE_OF_THEIR_HOLDS = """
CREATE OR REPLACE FUNCTION usage_events_are_of_their_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    SELECT a.hold_id INTO stray FROM added a LEFT JOIN holds h ON h.id = a.hold_id
    WHERE (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
        IS DISTINCT FROM (a.organization_id, a.project_id, a.api_key_id, a.price_version_id)
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'usage event of hold %: there is no such hold of the same key and price version', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$
"""
MONTHS_AHEAD = 3
# One statement writes all entries of a transaction and is checked once.
LEDGER_BALANCED = """
CREATE OR REPLACE FUNCTION ledger_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken bigint;
BEGIN
    SELECT e.id INTO broken
    FROM added e LEFT JOIN ledger_transactions t ON t.id = e.transaction_id LEFT JOIN ledger_accounts a ON a.id = e.account_id
    LEFT JOIN price_versions p ON p.id = e.price_version_id
    WHERE t.organization_id IS DISTINCT FROM a.organization_id OR a.id IS NULL
        OR e.price_version_id IS NOT NULL AND p.currency_code IS DISTINCT FROM a.currency_code
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'ledger entry %: its transaction, account and price version do not exist or do not belong together', broken
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    SELECT e.transaction_id INTO broken
    FROM ledger_entries e JOIN ledger_accounts a ON a.id = e.account_id
    WHERE e.transaction_id IN (SELECT transaction_id FROM added)
    GROUP BY e.transaction_id, a.currency_code HAVING sum(e.amount_picos) <> 0
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', broken USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$
"""
LEDGER_WAS_BALANCED = """
CREATE OR REPLACE FUNCTION ledger_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken bigint;
BEGIN
    SELECT e.transaction_id INTO broken
    FROM ledger_entries e JOIN ledger_accounts a ON a.id = e.account_id
    WHERE e.transaction_id IN (SELECT transaction_id FROM added)
    GROUP BY e.transaction_id, a.currency_code HAVING sum(e.amount_picos) <> 0
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', broken USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$
"""
LEDGER_KEYS = (
    ("transaction_id", "ledger_transactions"),
    ("account_id", "ledger_accounts"),
    ("price_version_id", "price_versions"),
)


def upgrade() -> None:
    op.execute(LEDGER_BALANCED)
    for column, parent in LEDGER_KEYS:
        op.drop_constraint(f"fk_ledger_entries_{column}_{parent}", "ledger_entries", type_="foreignkey")
    partition_usage_events()


def partition_usage_events() -> None:
    op.execute("ALTER TABLE usage_events RENAME TO usage_events_before")
    op.execute("ALTER SEQUENCE usage_events_id_seq RENAME TO usage_events_before_id_seq")
    identity = "GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME usage_events_id_seq)"
    key = "CONSTRAINT pk_usage_events_by_month PRIMARY KEY (hold_id, part, settled_at)"
    op.execute(f"CREATE TABLE usage_events ({COLUMNS.format(identity=identity)}, {key}) PARTITION BY RANGE (settled_at)")
    op.execute(f"CREATE TABLE usage_events_default PARTITION OF usage_events DEFAULT WITH ({FILLFACTOR})")
    op.execute(
        "CREATE TABLE unrated_usage (event_id bigint NOT NULL, hold_id uuid NOT NULL, part smallint NOT NULL, "
        f"settled_at timestamptz NOT NULL, organization_id uuid NOT NULL) WITH ({SWEPT_OFTEN})"
    )
    for function in (REFUSE_PARTITION, CREATE_USAGE_PARTITION, CREATE_USAGE_PARTITIONS):
        op.execute(function)
    op.execute("""
        SELECT create_usage_partition(month) FROM (
            SELECT DISTINCT date_trunc('month', settled_at AT TIME ZONE 'UTC')::date AS month FROM usage_events_before ORDER BY 1) m
    """)
    op.execute(f"SELECT create_usage_partitions({MONTHS_AHEAD})")
    move("usage_events_before", "usage_events")
    op.execute(
        "INSERT INTO unrated_usage (event_id, hold_id, part, settled_at, organization_id) "
        "SELECT id, hold_id, part, settled_at, organization_id FROM usage_events WHERE rated_at IS NULL ORDER BY id"
    )
    op.execute("DROP TABLE usage_events_before")
    op.execute("ALTER TABLE usage_events RENAME CONSTRAINT pk_usage_events_by_month TO pk_usage_events")
    op.execute("CREATE INDEX ix_usage_events_organization_id_settled_at ON usage_events (organization_id, settled_at)")
    op.execute("CREATE INDEX ix_usage_events_rated_at ON usage_events USING brin (rated_at) WITH (autosummarize = true)")
    op.execute(USAGE_EVENTS_ARE_OF_THEIR_HOLDS)
    create_triggers()
    op.execute(
        "CREATE TRIGGER usage_events_partition BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON usage_events_default "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_partition()"
    )


def move(source: str, target: str) -> None:
    """Copy all rows and continue their numbering."""
    op.execute(f"INSERT INTO {target} ({NAMES}) OVERRIDING SYSTEM VALUE SELECT {NAMES} FROM {source} ORDER BY id")
    op.execute(f"SELECT setval('usage_events_id_seq', last_value, is_called) FROM {source}_id_seq")


def create_triggers() -> None:
    op.execute("SELECT guard_usage_events()")
    op.execute(
        "CREATE TRIGGER usage_events_posted AFTER UPDATE ON usage_events REFERENCING NEW TABLE AS marked "
        "FOR EACH STATEMENT EXECUTE FUNCTION usage_events_posted()"
    )
    op.execute(
        "CREATE TRIGGER usage_events_append_only BEFORE DELETE OR TRUNCATE ON usage_events "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )
    op.execute(
        "CREATE TRIGGER usage_events_are_of_their_holds AFTER INSERT ON usage_events REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION usage_events_are_of_their_holds()"
    )


def downgrade() -> None:
    op.execute(USAGE_EVENTS_WERE_OF_THEIR_HOLDS)
    op.execute("ALTER TABLE usage_events RENAME TO usage_events_by_month")
    op.execute("ALTER SEQUENCE usage_events_id_seq RENAME TO usage_events_by_month_id_seq")
    op.execute("ALTER TABLE usage_events_by_month RENAME CONSTRAINT pk_usage_events TO pk_usage_events_by_month")
    identity = "GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME usage_events_id_seq)"
    keys = "CONSTRAINT pk_usage_events PRIMARY KEY (id), CONSTRAINT uq_usage_events_hold_id_part UNIQUE (hold_id, part)"
    op.execute(f"CREATE TABLE usage_events ({COLUMNS.format(identity=identity)}, {keys})")
    move("usage_events_by_month", "usage_events")
    op.execute("DROP TABLE usage_events_by_month")
    op.execute("DROP TABLE unrated_usage")
    op.execute("CREATE INDEX ix_usage_events_organization_id_settled_at ON usage_events (organization_id, settled_at)")
    op.execute("CREATE INDEX ix_usage_events_unrated ON usage_events (id) WHERE rated_at IS NULL")
    op.execute("CREATE INDEX ix_usage_events_rated_at ON usage_events USING brin (rated_at) WITH (autosummarize = true)")
    create_triggers()
    for function in ("create_usage_partitions", "create_usage_partition", "refuse_partition"):
        op.execute(f"DROP FUNCTION {function}")
    op.execute(LEDGER_WAS_BALANCED)
    for column, parent in LEDGER_KEYS:
        op.create_foreign_key(f"fk_ledger_entries_{column}_{parent}", "ledger_entries", parent, [column], ["id"])
