"""Ledger by billing month: transactions of every kind, summed usage, permanently closed months."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
OLD_ACCOUNT_KINDS = ("receivable", "revenue")
ACCOUNT_KINDS = (
    "receivable",
    "revenue",
    "discount",
    "commitment",
    "prepaid_credit",
    "credit_funding",
    "credit_breakage",
    "adjustment",
    "rounding",
)
TRANSACTION_KINDS = ("usage", "plan", "credit_granted", "credit_applied", "credit_expired", "adjustment", "rounding")
MONTH_STATES = ("open", "closing", "closed")
USAGE_NOT_BEFORE = "kind <> 'usage' OR billing_month >= date_trunc('month', effective_at AT TIME ZONE 'UTC')::date"
SOURCE_GIVEN = sa.text("source_id IS NOT NULL")
RATED_AND_POSTED = "(rated_at IS NULL) = (ledger_transaction_id IS NULL)"
# Postings hold the organization's posting lock shared, a close holds it exclusively: a posting is
# in the month or in a later one.
LANE = "1466263923, get_byte(uuid_send({}.organization_id), 15) % 64"

LEDGER_MONTHS_OPEN = f"""
CREATE FUNCTION ledger_months_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE closed record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({LANE.format("lanes")})
    FROM (SELECT DISTINCT ON (get_byte(uuid_send(organization_id), 15) % 64) organization_id FROM added
          ORDER BY get_byte(uuid_send(organization_id), 15) % 64) lanes;
    SELECT a.organization_id, a.billing_month INTO closed
    FROM (SELECT DISTINCT organization_id, billing_month FROM added) a
    JOIN billing_months m ON m.organization_id = a.organization_id AND m.month = a.billing_month
    WHERE m.state = 'closed' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger_transactions: % of organization % is closed: post to a later month',
            to_char(closed.billing_month, 'YYYY-MM'), closed.organization_id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$
"""
# `NEW.state` becomes `closed` only while there are no postings; the row then keeps who closed it.
BILLING_MONTH_CLOSES_ONCE = f"""
CREATE FUNCTION billing_month_closes_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF (NEW.organization_id, NEW.month) IS DISTINCT FROM (OLD.organization_id, OLD.month)
            OR OLD.state = 'closed'
                AND (NEW.state, NEW.closed_at, NEW.closed_by) IS DISTINCT FROM (OLD.state, OLD.closed_at, OLD.closed_by)
        THEN
            RAISE EXCEPTION 'billing_months: a closed month stays closed' USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    IF NEW.state = 'closed' THEN
        PERFORM pg_advisory_xact_lock({LANE.format("NEW")});
    END IF;
    RETURN NEW;
END $$
"""
USAGE_EVENT_CHANGED = """
CREATE FUNCTION usage_event_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'usage_events is append-only: only rated_at and ledger_transaction_id may be set, together and once'
        USING ERRCODE = 'restrict_violation';
END $$
"""
# A condition over all columns costs less per row than a function. Call after adding a column.
GUARD_USAGE_EVENTS = """
CREATE FUNCTION guard_usage_events() RETURNS void LANGUAGE plpgsql AS $$
DECLARE kept text; new_values text; old_values text;
BEGIN
    SELECT string_agg(format('NEW.%I', attname), ', ' ORDER BY attnum), string_agg(format('OLD.%I', attname), ', ' ORDER BY attnum)
    INTO new_values, old_values
    FROM pg_attribute
    WHERE attrelid = 'usage_events'::regclass AND attnum > 0 AND NOT attisdropped
      AND attname NOT IN ('rated_at', 'ledger_transaction_id');
    kept := format('(%s) IS NOT DISTINCT FROM (%s)', new_values, old_values);
    DROP TRIGGER IF EXISTS usage_events_rated_once ON usage_events;
    EXECUTE format('CREATE TRIGGER usage_events_rated_once BEFORE UPDATE ON usage_events FOR EACH ROW '
        'WHEN (NOT (OLD.rated_at IS NULL AND NEW.rated_at IS NOT NULL AND %s)) EXECUTE FUNCTION usage_event_changed()', kept);
END $$
"""
# Replaces a foreign key, which would check each event alone: one statement marks thousands.
USAGE_EVENTS_POSTED = """
CREATE FUNCTION usage_events_posted() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken record;
BEGIN
    SELECT m.ledger_transaction_id AS id, m.organization_id, m.cost_picos, t.id AS found, l.amount_picos INTO broken
    FROM (SELECT ledger_transaction_id, organization_id, sum(cost_picos) AS cost_picos FROM marked GROUP BY 1, 2) m
    LEFT JOIN ledger_transactions t
        ON t.id = m.ledger_transaction_id AND t.organization_id = m.organization_id AND t.kind = 'usage'
    LEFT JOIN LATERAL (
        SELECT coalesce(sum(e.amount_picos), 0) AS amount_picos FROM ledger_entries e
        WHERE e.transaction_id = t.id AND e.token_kind IS NULL) l ON true
    WHERE t.id IS NULL OR l.amount_picos <> m.cost_picos LIMIT 1;
    IF FOUND AND broken.found IS NULL THEN
        RAISE EXCEPTION 'usage_events: ledger transaction % is none for usage of organization %', broken.id, broken.organization_id
            USING ERRCODE = 'integrity_constraint_violation';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'usage_events: events that cost % picos point to ledger transaction %, which debits %',
            broken.cost_picos, broken.id, broken.amount_picos USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$
"""
USAGE_EVENT_RATED_ONCE = """
CREATE FUNCTION usage_event_rated_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.rated_at IS NULL AND to_jsonb(NEW) - 'rated_at' = to_jsonb(OLD) - 'rated_at' THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'usage_events is append-only: only rated_at may be set, once' USING ERRCODE = 'restrict_violation';
END $$
"""
FUNCTIONS = {
    "ledger_months_open": LEDGER_MONTHS_OPEN,
    "billing_month_closes_once": BILLING_MONTH_CLOSES_ONCE,
    "usage_event_changed": USAGE_EVENT_CHANGED,
    "guard_usage_events": GUARD_USAGE_EVENTS,
    "usage_events_posted": USAGE_EVENTS_POSTED,
}


def one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(map(repr, values))})"


def guard(enabled: bool) -> None:
    """Enable or disable the guards, which would refuse the one conversion of history."""
    for table in ("usage_events", "ledger_transactions", "ledger_entries", "ledger_accounts"):
        op.execute(f"ALTER TABLE {table} {'ENABLE' if enabled else 'DISABLE'} TRIGGER USER")


def upgrade() -> None:
    create_billing_months()
    op.drop_constraint(op.f("ck_ledger_accounts_kind_known"), "ledger_accounts", type_="check")
    op.create_check_constraint(op.f("ck_ledger_accounts_kind_known"), "ledger_accounts", one_of("kind", ACCOUNT_KINDS))
    op.add_column("ledger_transactions", sa.Column("kind", sa.Text(), nullable=True))
    op.add_column("ledger_transactions", sa.Column("billing_month", sa.Date(), nullable=True))
    op.add_column("ledger_transactions", sa.Column("source_id", sa.Uuid(), nullable=True))
    op.add_column("usage_events", sa.Column("ledger_transaction_id", sa.BigInteger(), nullable=True))
    carry_over()
    for column in ("kind", "billing_month"):
        op.alter_column("ledger_transactions", column, nullable=False)
    op.drop_column("ledger_transactions", "usage_event_id")
    op.create_check_constraint(op.f("ck_ledger_transactions_kind_known"), "ledger_transactions", one_of("kind", TRANSACTION_KINDS))
    op.create_check_constraint(
        op.f("ck_ledger_transactions_whole_month"), "ledger_transactions", "extract(day FROM billing_month) = 1"
    )
    op.create_check_constraint(op.f("ck_ledger_transactions_usage_not_before"), "ledger_transactions", USAGE_NOT_BEFORE)
    op.create_check_constraint(op.f("ck_usage_events_rated_and_posted"), "usage_events", RATED_AND_POSTED)
    op.drop_index("ix_ledger_transactions_organization_id_effective_at", table_name="ledger_transactions")
    op.create_index(
        "ix_ledger_transactions_organization_id_billing_month", "ledger_transactions", ["organization_id", "billing_month"]
    )
    op.create_index(
        "uq_ledger_transactions_source", "ledger_transactions", ["kind", "source_id"], unique=True, postgresql_where=SOURCE_GIVEN
    )
    create_triggers()


def create_billing_months() -> None:
    op.create_table(
        "billing_months",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("closing_at", TIME, nullable=True),
        sa.Column("closing_by", sa.Text(), nullable=True),
        sa.Column("closed_at", TIME, nullable=True),
        sa.Column("closed_by", sa.Text(), nullable=True),
        sa.CheckConstraint("extract(day FROM month) = 1", name=op.f("ck_billing_months_whole_month")),
        sa.CheckConstraint(one_of("state", MONTH_STATES), name=op.f("ck_billing_months_state_known")),
        sa.CheckConstraint("num_nulls(closing_at, closing_by) IN (0, 2)", name=op.f("ck_billing_months_closing_complete")),
        sa.CheckConstraint(
            "num_nulls(closed_at, closed_by) = CASE state WHEN 'closed' THEN 0 ELSE 2 END",
            name=op.f("ck_billing_months_closed_complete"),
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_billing_months_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("organization_id", "month", name=op.f("pk_billing_months")),
    )


def carry_over() -> None:
    """Turn transactions of events into those of days; add one for events without tokens."""
    guard(enabled=False)
    op.execute(
        "UPDATE ledger_transactions SET kind = 'usage', effective_at = date_trunc('day', effective_at, 'UTC'), "
        "billing_month = date_trunc('month', effective_at AT TIME ZONE 'UTC')::date"
    )
    op.execute("UPDATE usage_events u SET ledger_transaction_id = t.id FROM ledger_transactions t WHERE t.usage_event_id = u.id")
    op.execute("""
        INSERT INTO ledger_accounts (organization_id, kind, currency_code)
        SELECT DISTINCT u.organization_id, 'receivable', p.currency_code
        FROM usage_events u JOIN price_versions p ON p.id = u.price_version_id
        WHERE u.rated_at IS NOT NULL AND u.ledger_transaction_id IS NULL
        ON CONFLICT DO NOTHING
    """)
    op.execute("""
        WITH posted AS (
            INSERT INTO ledger_transactions (organization_id, kind, billing_month, effective_at, description)
            SELECT DISTINCT organization_id, 'usage', date_trunc('month', settled_at, 'UTC')::date,
                   date_trunc('day', settled_at, 'UTC'), 'usage'
            FROM usage_events WHERE rated_at IS NOT NULL AND ledger_transaction_id IS NULL
            RETURNING id, organization_id, effective_at)
        UPDATE usage_events u SET ledger_transaction_id = p.id FROM posted p
        WHERE u.rated_at IS NOT NULL AND u.ledger_transaction_id IS NULL AND u.organization_id = p.organization_id
          AND date_trunc('day', u.settled_at, 'UTC') = p.effective_at
    """)
    op.execute("""
        INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
        SELECT t.id, (SELECT min(id) FROM ledger_accounts WHERE organization_id = t.organization_id AND kind = 'receivable'), 0
        FROM ledger_transactions t WHERE NOT EXISTS (SELECT FROM ledger_entries e WHERE e.transaction_id = t.id)
    """)
    guard(enabled=True)


def create_triggers() -> None:
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")
    op.execute("DROP FUNCTION usage_event_rated_once")
    for function in FUNCTIONS.values():
        op.execute(function)
    op.execute("SELECT guard_usage_events()")
    op.execute(
        "CREATE TRIGGER usage_events_posted AFTER UPDATE ON usage_events REFERENCING NEW TABLE AS marked "
        "FOR EACH STATEMENT EXECUTE FUNCTION usage_events_posted()"
    )
    op.execute(
        "CREATE TRIGGER ledger_months_open AFTER INSERT ON ledger_transactions REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION ledger_months_open()"
    )
    op.execute(
        "CREATE TRIGGER billing_months_close_once BEFORE INSERT OR UPDATE ON billing_months "
        "FOR EACH ROW EXECUTE FUNCTION billing_month_closes_once()"
    )
    op.execute(
        "CREATE TRIGGER billing_months_append_only BEFORE DELETE OR TRUNCATE ON billing_months "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    """Refuse if there is more than usage; the previous worker posts usage again by event."""
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM ledger_transactions WHERE kind <> 'usage') OR EXISTS (SELECT FROM billing_months) THEN
                RAISE EXCEPTION 'the ledger has transactions other than usage, which a downgrade would lose';
            END IF;
        END $$
    """)
    guard(enabled=False)
    op.execute("DELETE FROM ledger_entries")
    op.execute("DELETE FROM ledger_transactions")
    op.drop_constraint(op.f("ck_usage_events_rated_and_posted"), "usage_events", type_="check")
    op.execute("UPDATE usage_events SET rated_at = NULL WHERE rated_at IS NOT NULL")
    op.execute("DELETE FROM ledger_accounts WHERE kind NOT IN ('receivable', 'revenue')")
    guard(enabled=True)
    op.execute("DROP TRIGGER usage_events_posted ON usage_events")
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")
    op.execute("DROP TRIGGER ledger_months_open ON ledger_transactions")
    op.drop_table("billing_months")
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}")
    op.drop_index("uq_ledger_transactions_source", table_name="ledger_transactions", postgresql_where=SOURCE_GIVEN)
    op.drop_index("ix_ledger_transactions_organization_id_billing_month", table_name="ledger_transactions")
    for name in ("usage_not_before", "whole_month", "kind_known"):
        op.drop_constraint(op.f(f"ck_ledger_transactions_{name}"), "ledger_transactions", type_="check")
    op.drop_column("usage_events", "ledger_transaction_id")
    for column in ("source_id", "billing_month", "kind"):
        op.drop_column("ledger_transactions", column)
    op.drop_constraint(op.f("ck_ledger_accounts_kind_known"), "ledger_accounts", type_="check")
    op.create_check_constraint(op.f("ck_ledger_accounts_kind_known"), "ledger_accounts", one_of("kind", OLD_ACCOUNT_KINDS))
    op.add_column("ledger_transactions", sa.Column("usage_event_id", sa.BigInteger(), nullable=True))
    op.create_foreign_key(
        op.f("fk_ledger_transactions_usage_event_id_usage_events"),
        "ledger_transactions",
        "usage_events",
        ["usage_event_id"],
        ["id"],
    )
    op.create_unique_constraint(op.f("uq_ledger_transactions_usage_event_id"), "ledger_transactions", ["usage_event_id"])
    op.create_index(
        "ix_ledger_transactions_organization_id_effective_at", "ledger_transactions", ["organization_id", "effective_at"]
    )
    op.execute(USAGE_EVENT_RATED_ONCE)
    op.execute(
        "CREATE TRIGGER usage_events_rated_once BEFORE UPDATE ON usage_events "
        "FOR EACH ROW EXECUTE FUNCTION usage_event_rated_once()"
    )
