"""Prices, quotas with their counters, and holds: what decides whether a request is admitted."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

PRICES = """
-- Picos per token from `effective_at` on. A price without an organization is the list price.
CREATE TABLE price_versions (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_price_versions PRIMARY KEY,
    model text NOT NULL,
    currency_code text NOT NULL,
    input_picos_per_token bigint NOT NULL,
    cached_input_picos_per_token bigint NOT NULL,
    output_picos_per_token bigint NOT NULL,
    effective_at timestamptz NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    embedding_picos_per_token bigint DEFAULT '0' NOT NULL,
    organization_id uuid
        CONSTRAINT fk_price_versions_organization_id_organizations REFERENCES organizations (id),
    tier text DEFAULT 'interactive' NOT NULL,
    multiplier_milli bigint DEFAULT '1000' NOT NULL,
    withdrawn boolean DEFAULT false NOT NULL,
    CONSTRAINT ck_price_versions_prices_not_negative
        CHECK (least(input_picos_per_token, cached_input_picos_per_token, output_picos_per_token,
                     embedding_picos_per_token) >= 0),
    CONSTRAINT ck_price_versions_tier_known CHECK (tier IN ('interactive', 'batch')),
    CONSTRAINT ck_price_versions_multiplier_fits_tier
        CHECK (multiplier_milli >= 0 AND (tier <> 'interactive' OR multiplier_milli = 1000)),
    CONSTRAINT ck_price_versions_withdrawn_has_organization
        CHECK (NOT withdrawn OR organization_id IS NOT NULL),
    CONSTRAINT uq_price_versions_scope_effective_at
        UNIQUE NULLS NOT DISTINCT (model, currency_code, organization_id, tier, effective_at)
);
CREATE TRIGGER price_versions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON price_versions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""
QUOTAS = """
CREATE TABLE quotas (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_quotas PRIMARY KEY,
    subject text NOT NULL,
    subject_id uuid NOT NULL,
    model text DEFAULT '' NOT NULL,
    dimension text NOT NULL,
    limit_value bigint NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    deleted_at timestamptz,
    input_weight_milli integer DEFAULT 1000 NOT NULL,
    cached_input_weight_milli integer DEFAULT 1000 NOT NULL,
    output_weight_milli integer DEFAULT 1000 NOT NULL,
    enforced boolean DEFAULT true NOT NULL,
    for_new_keys boolean DEFAULT false NOT NULL,
    override_limit_value bigint,
    override_until timestamptz,
    override_reason text,
    alert_at bigint[] DEFAULT '{}' NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_quotas_subject_known CHECK (subject IN ('organization', 'project', 'api_key')),
    CONSTRAINT ck_quotas_dimension_known CHECK (dimension IN (
        'concurrent_requests', 'requests_per_minute',
        'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute',
        'tokens_per_day', 'tokens_per_month',
        'cost_picos_per_day', 'cost_picos_per_month', 'prepaid_credit_picos')),
    CONSTRAINT ck_quotas_limit_not_negative CHECK (limit_value >= 0),
    CONSTRAINT ck_quotas_weights_in_range
        CHECK (input_weight_milli BETWEEN 0 AND 1000000
               AND cached_input_weight_milli BETWEEN 0 AND 1000000
               AND output_weight_milli BETWEEN 0 AND 1000000),
    CONSTRAINT ck_quotas_for_new_keys_subject CHECK (NOT for_new_keys OR subject <> 'api_key'),
    CONSTRAINT ck_quotas_override_complete
        CHECK (num_nulls(override_limit_value, override_until, override_reason) IN (0, 3)
               AND override_limit_value > limit_value),
    CONSTRAINT ck_quotas_alert_at_positive
        CHECK (array_position(alert_at, NULL) IS NULL AND 0 < ALL (alert_at))
);
CREATE UNIQUE INDEX uq_quotas_active ON quotas (subject_id, model, dimension, for_new_keys)
    WHERE deleted_at IS NULL;
CREATE FUNCTION quotas_set_changed_at() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.changed_at := now();
    RETURN NEW;
END $$;
CREATE TRIGGER quotas_set_changed_at BEFORE UPDATE ON quotas
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION quotas_set_changed_at();

-- Half of each page is free: counters are updated in place, without touching an index.
CREATE TABLE quota_counters (
    quota_id uuid CONSTRAINT fk_quota_counters_quota_id_quotas REFERENCES quotas (id),
    window_start timestamptz,
    used bigint DEFAULT '0' NOT NULL,
    held bigint DEFAULT '0' NOT NULL,
    would_refuse_count bigint DEFAULT '0' NOT NULL,
    CONSTRAINT ck_quota_counters_used_not_negative CHECK (used >= 0),
    CONSTRAINT ck_quota_counters_held_not_negative CHECK (held >= 0),
    CONSTRAINT pk_quota_counters PRIMARY KEY (quota_id, window_start)
) WITH (fillfactor = 50);

-- Organizations that may spend only the credit they have, with the quota that counts it.
CREATE TABLE prepaid_organizations (
    organization_id uuid CONSTRAINT pk_prepaid_organizations PRIMARY KEY
        CONSTRAINT fk_prepaid_organizations_organization_id_organizations
        REFERENCES organizations (id),
    quota_id uuid NOT NULL CONSTRAINT uq_prepaid_organizations_quota_id UNIQUE
        CONSTRAINT fk_prepaid_organizations_quota_id_quotas REFERENCES quotas (id),
    month date NOT NULL,
    CONSTRAINT ck_prepaid_organizations_whole_month CHECK (extract(day FROM month) = 1)
);

-- One row per change of a quota, key or price, which processes read to refresh what they cache.
CREATE TABLE rule_changes (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_rule_changes PRIMARY KEY,
    transaction_id bigint DEFAULT pg_current_xact_id()::text::bigint NOT NULL,
    subject_id uuid,
    changed_at timestamptz DEFAULT now() NOT NULL
);
CREATE INDEX ix_rule_changes_transaction_id ON rule_changes (transaction_id);
"""
# Table, event and subject of the change: NULL concerns every subject. No process has cached a new
# key, so the creation of keys is not recorded.
RECORDED_CHANGES = (
    ("quotas", "insert", "subject_id"),
    ("quotas", "update", "subject_id"),
    ("quotas", "delete", "subject_id"),
    ("api_keys", "update", "id"),
    ("price_versions", "insert", "NULL::uuid"),
)
HOLDS = """
CREATE TABLE holds (
    id uuid CONSTRAINT pk_holds PRIMARY KEY,
    organization_id uuid NOT NULL,
    project_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    request_id uuid NOT NULL,
    payload_hash bytea NOT NULL,
    model text NOT NULL,
    price_version_id bigint NOT NULL,
    labels jsonb NOT NULL,
    state text DEFAULT 'held' NOT NULL,
    process_id uuid NOT NULL,
    input_token_count bigint NOT NULL,
    cached_input_token_count bigint DEFAULT '0' NOT NULL,
    leased_token_count bigint NOT NULL,
    delivered_token_count bigint DEFAULT '0' NOT NULL,
    posted_token_count bigint DEFAULT '0' NOT NULL,
    posted_cost_picos bigint DEFAULT '0' NOT NULL,
    quota_ids uuid[] NOT NULL,
    admitted_at timestamptz DEFAULT now() NOT NULL,
    charged_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    ended_at timestamptz,
    posted_minutes bigint[] DEFAULT '{}' NOT NULL,
    embedding boolean DEFAULT false NOT NULL,
    CONSTRAINT ck_holds_state_known CHECK (state IN ('held', 'settled', 'voided', 'expired')),
    CONSTRAINT ck_holds_ended_at_of_final_state CHECK ((state = 'held') = (ended_at IS NULL)),
    CONSTRAINT ck_holds_cached_within_input
        CHECK (cached_input_token_count BETWEEN 0 AND input_token_count),
    CONSTRAINT ck_holds_delivered_within_lease
        CHECK (delivered_token_count BETWEEN 0 AND leased_token_count),
    CONSTRAINT ck_holds_posted_within_usage
        CHECK (posted_token_count BETWEEN 0 AND input_token_count + delivered_token_count),
    CONSTRAINT ck_holds_embedding_without_output
        CHECK (NOT embedding OR leased_token_count + cached_input_token_count = 0)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX uq_holds_request ON holds (project_id, request_id) WHERE state <> 'voided';
CREATE INDEX ix_holds_process_held ON holds (process_id) WHERE state = 'held';
CREATE INDEX ix_holds_charged_unbilled ON holds (organization_id, ended_at)
    WHERE state = 'expired' OR (state = 'voided' AND posted_token_count > 0);

CREATE TRIGGER holds_no_delete BEFORE DELETE OR TRUNCATE ON holds
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();

-- A hold ends exactly once. An expired hold whose request id is its own id is pre-authorized: it
-- has no request yet, and assigning it to one may only make it smaller.
CREATE FUNCTION hold_ends_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'hold % has already ended as %', OLD.id, OLD.state
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER holds_end_once BEFORE UPDATE ON holds FOR EACH ROW WHEN (
    OLD.state <> 'held' AND NOT (
        OLD.state = 'expired'
        AND NEW.state = 'expired'
        AND OLD.request_id = OLD.id
        AND NEW.ended_at = OLD.ended_at
        AND NEW.delivered_token_count = OLD.delivered_token_count
        AND NEW.input_token_count <= OLD.input_token_count
        AND NEW.leased_token_count <= OLD.leased_token_count)
) EXECUTE FUNCTION hold_ends_once();

-- Replaces four foreign keys: one query per statement, which also checks that key, project and
-- organization belong together. Most holds of a batch share key and price, so distinct combinations
-- are checked first, and single holds only to name the wrong one.
CREATE FUNCTION holds_belong_together() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    IF NOT EXISTS (
        SELECT
        FROM (
            SELECT DISTINCT api_key_id, project_id, organization_id, price_version_id FROM added
        ) a
        LEFT JOIN api_keys k ON k.id = a.api_key_id
        LEFT JOIN projects p ON p.id = k.project_id
        LEFT JOIN price_versions v ON v.id = a.price_version_id
        WHERE k.project_id IS DISTINCT FROM a.project_id
           OR p.organization_id IS DISTINCT FROM a.organization_id
           OR v.id IS NULL
    ) THEN
        RETURN NULL;
    END IF;
    SELECT a.id
    INTO stray
    FROM added a
    LEFT JOIN api_keys k ON k.id = a.api_key_id
    LEFT JOIN projects p ON p.id = k.project_id
    LEFT JOIN price_versions v ON v.id = a.price_version_id
    WHERE k.project_id IS DISTINCT FROM a.project_id
       OR p.organization_id IS DISTINCT FROM a.organization_id
       OR v.id IS NULL
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION
            'hold %: key, project, organization and price version must exist and belong together',
            stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER holds_belong_together AFTER INSERT ON holds REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION holds_belong_together();
"""


def upgrade() -> None:
    op.execute(PRICES)
    op.execute(QUOTAS)
    for table, event, subject in RECORDED_CHANGES:
        rows = "OLD" if event == "delete" else "NEW"
        op.execute(f"""
            CREATE FUNCTION {table}_{event}_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                INSERT INTO rule_changes (subject_id) SELECT DISTINCT {subject} FROM changed;
                RETURN NULL;
            END $$;
            CREATE TRIGGER {table}_{event}_recorded AFTER {event} ON {table}
                REFERENCING {rows} TABLE AS changed
                FOR EACH STATEMENT EXECUTE FUNCTION {table}_{event}_recorded();
        """)
    op.execute(HOLDS)


def downgrade() -> None:
    op.execute("DROP TRIGGER api_keys_update_recorded ON api_keys")
    op.execute(
        "DROP TABLE holds, rule_changes, prepaid_organizations, quota_counters, quotas,"
        " price_versions"
    )
    for table, event, _ in RECORDED_CHANGES:
        op.execute(f"DROP FUNCTION {table}_{event}_recorded")
    op.execute("DROP FUNCTION holds_belong_together, hold_ends_once, quotas_set_changed_at")
