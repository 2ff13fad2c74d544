"""Double-entry ledger by billing month. A closed month accepts no transactions."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE billing_months (
    organization_id uuid
        CONSTRAINT fk_billing_months_organization_id_organizations REFERENCES organizations (id),
    month date,
    state text DEFAULT 'open' NOT NULL,
    closing_at timestamptz,
    closing_by text,
    closed_at timestamptz,
    closed_by text,
    CONSTRAINT ck_billing_months_whole_month CHECK (extract(day FROM month) = 1),
    CONSTRAINT ck_billing_months_state_known CHECK (state IN ('open', 'closing', 'closed')),
    CONSTRAINT ck_billing_months_closing_complete
        CHECK (num_nulls(closing_at, closing_by) IN (0, 2)),
    CONSTRAINT ck_billing_months_closed_complete
        CHECK (num_nulls(closed_at, closed_by) = CASE state WHEN 'closed' THEN 0 ELSE 2 END),
    CONSTRAINT pk_billing_months PRIMARY KEY (organization_id, month)
);

CREATE TABLE ledger_accounts (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_ledger_accounts PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_ledger_accounts_organization_id_organizations REFERENCES organizations (id),
    kind text NOT NULL,
    currency_code text NOT NULL,
    CONSTRAINT ck_ledger_accounts_kind_known CHECK (kind IN (
        'receivable', 'revenue', 'discount', 'commitment',
        'prepaid_credit', 'credit_funding', 'credit_breakage', 'adjustment', 'rounding')),
    CONSTRAINT uq_ledger_accounts_organization_id_kind_currency_code
        UNIQUE (organization_id, kind, currency_code)
);

CREATE TABLE ledger_transactions (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_ledger_transactions PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_ledger_transactions_organization_id_organizations
        REFERENCES organizations (id),
    description text NOT NULL,
    effective_at timestamptz NOT NULL,
    recorded_at timestamptz DEFAULT now() NOT NULL,
    kind text NOT NULL,
    billing_month date NOT NULL,
    source_id uuid,
    CONSTRAINT ck_ledger_transactions_kind_known CHECK (kind IN (
        'usage', 'plan', 'credit_granted', 'credit_applied', 'credit_expired', 'adjustment',
        'rounding')),
    CONSTRAINT ck_ledger_transactions_whole_month CHECK (extract(day FROM billing_month) = 1),
    CONSTRAINT ck_ledger_transactions_usage_not_before
        CHECK (kind <> 'usage'
               OR billing_month >= date_trunc('month', effective_at AT TIME ZONE 'UTC')::date)
);
CREATE INDEX ix_ledger_transactions_organization_id_billing_month
    ON ledger_transactions (organization_id, billing_month);
CREATE UNIQUE INDEX uq_ledger_transactions_source ON ledger_transactions (kind, source_id)
    WHERE source_id IS NOT NULL;

CREATE TABLE ledger_entries (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_ledger_entries PRIMARY KEY,
    transaction_id bigint NOT NULL,
    account_id bigint NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    token_kind text,
    token_count bigint,
    price_version_id bigint,
    CONSTRAINT ck_ledger_entries_token_kind_known
        CHECK (token_kind IS NULL
               OR token_kind IN ('input', 'cached_input', 'output', 'embedding')),
    CONSTRAINT ck_ledger_entries_tokens_complete
        CHECK ((token_kind IS NULL) = (token_count IS NULL)
               AND (token_kind IS NULL) = (price_version_id IS NULL))
);
CREATE INDEX ix_ledger_entries_transaction_id ON ledger_entries (transaction_id);
"""
GUARDS = """
CREATE TRIGGER billing_months_append_only BEFORE DELETE OR TRUNCATE ON billing_months
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER ledger_accounts_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_accounts
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER ledger_transactions_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_transactions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER ledger_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_entries
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- One statement writes all entries of a transaction, which sum to zero in every currency. They are
-- checked once per statement, which replaces foreign keys.
CREATE FUNCTION ledger_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken bigint;
BEGIN
    SELECT e.id
    INTO broken
    FROM added e
    LEFT JOIN ledger_transactions t ON t.id = e.transaction_id
    LEFT JOIN ledger_accounts a ON a.id = e.account_id
    LEFT JOIN price_versions p ON p.id = e.price_version_id
    WHERE t.organization_id IS DISTINCT FROM a.organization_id
       OR a.id IS NULL
       OR e.price_version_id IS NOT NULL AND p.currency_code IS DISTINCT FROM a.currency_code
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION
            'ledger entry %: transaction, account and price version must exist and belong together',
            broken
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    SELECT e.transaction_id
    INTO broken
    FROM ledger_entries e
    JOIN ledger_accounts a ON a.id = e.account_id
    WHERE e.transaction_id IN (SELECT transaction_id FROM added)
    GROUP BY e.transaction_id, a.currency_code
    HAVING sum(e.amount_picos) <> 0
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', broken
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER ledger_entries_balanced AFTER INSERT ON ledger_entries REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_balanced();

-- A posting takes one of 64 posting locks, by organization, in shared mode; closing a month takes
-- it exclusively. So a posting either commits before its month closes, or is refused.
CREATE FUNCTION ledger_months_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE closed record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(
        1466263923, get_byte(uuid_send(locks.organization_id), 15) % 64)
    FROM (
        SELECT DISTINCT ON (get_byte(uuid_send(organization_id), 15) % 64) organization_id
        FROM added
        ORDER BY get_byte(uuid_send(organization_id), 15) % 64
    ) locks;
    SELECT a.organization_id, a.billing_month
    INTO closed
    FROM (SELECT DISTINCT organization_id, billing_month FROM added) a
    JOIN billing_months m ON m.organization_id = a.organization_id AND m.month >= a.billing_month
    WHERE m.state = 'closed'
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger_transactions: % of organization % is closed: post to a later month',
            to_char(closed.billing_month, 'YYYY-MM'), closed.organization_id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER ledger_months_open AFTER INSERT ON ledger_transactions REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_months_open();

CREATE FUNCTION billing_month_closes_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF (NEW.organization_id, NEW.month) IS DISTINCT FROM (OLD.organization_id, OLD.month)
            OR OLD.state = 'closed'
               AND (NEW.state, NEW.closed_at, NEW.closed_by)
                   IS DISTINCT FROM (OLD.state, OLD.closed_at, OLD.closed_by)
        THEN
            RAISE EXCEPTION 'billing_months: a closed month cannot be changed or reopened'
                USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    IF NEW.state = 'closed' THEN
        PERFORM pg_advisory_xact_lock(
            1466263923, get_byte(uuid_send(NEW.organization_id), 15) % 64);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER billing_months_close_once BEFORE INSERT OR UPDATE ON billing_months
    FOR EACH ROW EXECUTE FUNCTION billing_month_closes_once();

-- Months close in order: closing one closes every earlier month that was never opened.
CREATE FUNCTION billing_months_close_in_order() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> 'open' AND EXISTS (
        SELECT
        FROM billing_months m
        WHERE m.organization_id = NEW.organization_id
          AND m.month > NEW.month
          AND m.state = 'closed')
    THEN
        RAISE EXCEPTION 'billing_months: % is already closed, because a later month is closed',
            to_char(NEW.month, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER billing_months_close_in_order BEFORE INSERT OR UPDATE ON billing_months
    FOR EACH ROW EXECUTE FUNCTION billing_months_close_in_order();

-- Replaces a foreign key, which would check each event alone: one statement marks thousands.
CREATE FUNCTION usage_events_posted() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken record;
BEGIN
    SELECT m.ledger_transaction_id AS id, m.organization_id, m.cost_picos, t.id AS usage_id,
           l.amount_picos
    INTO broken
    FROM (
        SELECT ledger_transaction_id, organization_id, sum(cost_picos) AS cost_picos
        FROM marked
        GROUP BY 1, 2
    ) m
    LEFT JOIN ledger_transactions t
        ON t.id = m.ledger_transaction_id
       AND t.organization_id = m.organization_id
       AND t.kind = 'usage'
    LEFT JOIN LATERAL (
        SELECT coalesce(sum(e.amount_picos), 0) AS amount_picos
        FROM ledger_entries e
        WHERE e.transaction_id = t.id AND e.token_kind IS NULL
    ) l ON true
    WHERE t.id IS NULL OR l.amount_picos <> m.cost_picos
    LIMIT 1;
    IF FOUND AND broken.usage_id IS NULL THEN
        RAISE EXCEPTION
            'usage_events: ledger transaction % is not for usage of organization %',
            broken.id, broken.organization_id
            USING ERRCODE = 'integrity_constraint_violation';
    ELSIF FOUND THEN
        RAISE EXCEPTION
            'usage_events: events that cost % picos name ledger transaction %, which debits %',
            broken.cost_picos, broken.id, broken.amount_picos
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_events_posted AFTER UPDATE ON usage_events REFERENCING NEW TABLE AS marked
    FOR EACH STATEMENT EXECUTE FUNCTION usage_events_posted();
"""


def upgrade() -> None:
    op.execute(TABLES)
    op.execute(GUARDS)


def downgrade() -> None:
    op.execute("DROP TRIGGER usage_events_posted ON usage_events")
    op.execute("DROP TABLE ledger_entries, ledger_transactions, ledger_accounts, billing_months")
    op.execute("DROP FUNCTION usage_events_posted, ledger_balanced, ledger_months_open")
    op.execute("DROP FUNCTION billing_month_closes_once, billing_months_close_in_order")
