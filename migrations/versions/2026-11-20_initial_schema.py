"""Initial schema: tenants, quotas, holds, usage, prices, ledger, audit, append-only triggers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY_TABLES = ("audit_log", "ledger_accounts", "ledger_entries", "ledger_transactions", "price_versions")

# Corrections are new rows: the database refuses changes of history.
REFUSE_CHANGE = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: write a correcting row instead', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$
"""

# Rating marks an event once; no other column ever changes.
USAGE_EVENT_RATED_ONCE = """
CREATE FUNCTION usage_event_rated_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.rated_at IS NULL AND to_jsonb(NEW) - 'rated_at' = to_jsonb(OLD) - 'rated_at' THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'usage_events is append-only: only rated_at may be set, once' USING ERRCODE = 'restrict_violation';
END $$
"""

# Ended holds never change, so a hold ends exactly once, even if the code has a bug.
HOLD_ENDS_ONCE = """
CREATE FUNCTION hold_ends_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'hold % has already ended as %', OLD.id, OLD.state USING ERRCODE = 'restrict_violation';
END $$
"""

# One statement writes all entries of a transaction; they sum to zero in every currency.
LEDGER_BALANCED = """
CREATE FUNCTION ledger_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
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


def create_triggers() -> None:
    for function in (REFUSE_CHANGE, USAGE_EVENT_RATED_ONCE, HOLD_ENDS_ONCE, LEDGER_BALANCED):
        op.execute(function)
    for table in APPEND_ONLY_TABLES:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    op.execute(
        "CREATE TRIGGER usage_events_append_only BEFORE DELETE OR TRUNCATE ON usage_events "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )
    op.execute(
        "CREATE TRIGGER usage_events_rated_once BEFORE UPDATE ON usage_events "
        "FOR EACH ROW EXECUTE FUNCTION usage_event_rated_once()"
    )
    op.execute(
        "CREATE TRIGGER holds_end_once BEFORE UPDATE ON holds "
        "FOR EACH ROW WHEN (OLD.state <> 'held') EXECUTE FUNCTION hold_ends_once()"
    )
    op.execute(
        "CREATE TRIGGER ledger_entries_balanced AFTER INSERT ON ledger_entries REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION ledger_balanced()"
    )


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("before", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("after", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_table(
        "organizations",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("currency_code ~ '^[A-Z]{3}$'", name=op.f("ck_organizations_currency_form")),
        sa.CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name=op.f("ck_organizations_name_form")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organizations")),
        sa.UniqueConstraint("name", name=op.f("uq_organizations_name")),
    )
    op.create_table(
        "price_versions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("input_picos_per_token", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_picos_per_token", sa.BigInteger(), nullable=False),
        sa.Column("output_picos_per_token", sa.BigInteger(), nullable=False),
        sa.Column("effective_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "input_picos_per_token >= 0 AND cached_input_picos_per_token >= 0 AND output_picos_per_token >= 0",
            name=op.f("ck_price_versions_not_negative"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_versions")),
        sa.UniqueConstraint(
            "model", "currency_code", "effective_at", name=op.f("uq_price_versions_model_currency_code_effective_at")
        ),
    )
    op.create_table(
        "quotas",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.Text(), server_default="", nullable=False),
        sa.Column("dimension", sa.Text(), nullable=False),
        sa.Column("limit_value", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "dimension IN ('concurrent_requests', 'requests_per_minute', 'tokens_per_minute', 'tokens_per_day', "
            "'tokens_per_month', 'cost_picos_per_month')",
            name=op.f("ck_quotas_dimension_known"),
        ),
        sa.CheckConstraint("subject IN ('organization', 'project', 'api_key')", name=op.f("ck_quotas_subject_known")),
        sa.CheckConstraint("limit_value >= 0", name=op.f("ck_quotas_limit_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quotas")),
    )
    op.create_index(
        "uq_quotas_live",
        "quotas",
        ["subject_id", "model", "dimension"],
        unique=True,
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_table(
        "ledger_accounts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.CheckConstraint("kind IN ('receivable', 'revenue')", name=op.f("ck_ledger_accounts_kind_known")),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_ledger_accounts_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_accounts")),
        sa.UniqueConstraint(
            "organization_id",
            "kind",
            "currency_code",
            name=op.f("uq_ledger_accounts_organization_id_kind_currency_code"),
        ),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name=op.f("ck_projects_name_form")),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name=op.f("fk_projects_organization_id_organizations")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("organization_id", "name", name=op.f("uq_projects_organization_id_name")),
    )
    op.create_table(
        "quota_counters",
        sa.Column("quota_id", sa.Uuid(), nullable=False),
        sa.Column("window_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("held >= 0", name=op.f("ck_quota_counters_held_not_negative")),
        sa.CheckConstraint("used >= 0", name=op.f("ck_quota_counters_used_not_negative")),
        sa.ForeignKeyConstraint(["quota_id"], ["quotas.id"], name=op.f("fk_quota_counters_quota_id_quotas")),
        sa.PrimaryKeyConstraint("quota_id", "window_start", name=op.f("pk_quota_counters")),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "scopes <@ ARRAY['inference', 'admin', 'billing'] AND scopes <> '{}'", name=op.f("ck_api_keys_scopes_known")
        ),
        sa.CheckConstraint("octet_length(secret_hash) = 32", name=op.f("ck_api_keys_secret_hash_size")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_keys_prefix")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"], unique=False)
    op.create_table(
        "holds",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("payload_hash", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("price_version_id", sa.BigInteger(), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.Text(), server_default="held", nullable=False),
        sa.Column("owner_id", sa.Uuid(), nullable=False),
        sa.Column("input_token_count", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_token_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("leased_token_count", sa.BigInteger(), nullable=False),
        sa.Column("delivered_token_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("posted_token_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("posted_cost_picos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("quota_ids", postgresql.ARRAY(sa.Uuid()), nullable=False),
        sa.Column("admitted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("charged_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'held') = (ended_at IS NULL)", name=op.f("ck_holds_ended_once")),
        sa.CheckConstraint("state IN ('held', 'settled', 'voided', 'expired')", name=op.f("ck_holds_state_known")),
        sa.CheckConstraint("cached_input_token_count BETWEEN 0 AND input_token_count", name=op.f("ck_holds_cached_within_input")),
        sa.CheckConstraint("delivered_token_count BETWEEN 0 AND leased_token_count", name=op.f("ck_holds_delivered_within_lease")),
        sa.CheckConstraint(
            "posted_token_count BETWEEN 0 AND input_token_count + delivered_token_count",
            name=op.f("ck_holds_posted_sane"),
        ),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_holds_api_key_id_api_keys")),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name=op.f("fk_holds_organization_id_organizations")),
        sa.ForeignKeyConstraint(["price_version_id"], ["price_versions.id"], name=op.f("fk_holds_price_version_id_price_versions")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_holds_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holds")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index("ix_holds_expiring", "holds", ["expires_at"], unique=False, postgresql_where=sa.text("state = 'held'"))
    op.create_index("ix_holds_owner_held", "holds", ["owner_id"], unique=False, postgresql_where=sa.text("state = 'held'"))
    op.create_index(
        "uq_holds_request", "holds", ["project_id", "request_id"], unique=True, postgresql_where=sa.text("state <> 'voided'")
    )
    op.create_table(
        "usage_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("hold_id", sa.Uuid(), nullable=False),
        sa.Column("part", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("input_token_count", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_token_count", sa.BigInteger(), nullable=False),
        sa.Column("generated_token_count", sa.BigInteger(), nullable=False),
        sa.Column("delivered_token_count", sa.BigInteger(), nullable=False),
        sa.Column("billed_token_count", sa.BigInteger(), nullable=False),
        sa.Column("price_version_id", sa.BigInteger(), nullable=False),
        sa.Column("cost_picos", sa.BigInteger(), nullable=False),
        sa.Column("timings", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("recovered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("admitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("rated_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "billed_token_count BETWEEN 0 AND delivered_token_count",
            name=op.f("ck_usage_events_billed_within_delivered"),
        ),
        sa.CheckConstraint(
            "cached_input_token_count BETWEEN 0 AND input_token_count", name=op.f("ck_usage_events_cached_within_input")
        ),
        sa.CheckConstraint(
            "delivered_token_count BETWEEN 0 AND generated_token_count",
            name=op.f("ck_usage_events_delivered_within_generated"),
        ),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_usage_events_api_key_id_api_keys")),
        sa.ForeignKeyConstraint(["hold_id"], ["holds.id"], name=op.f("fk_usage_events_hold_id_holds")),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_usage_events_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(
            ["price_version_id"], ["price_versions.id"], name=op.f("fk_usage_events_price_version_id_price_versions")
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_usage_events_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_events")),
        sa.UniqueConstraint("hold_id", "part", name=op.f("uq_usage_events_hold_id_part")),
    )
    op.create_index("ix_usage_events_organization_id_settled_at", "usage_events", ["organization_id", "settled_at"], unique=False)
    op.create_index("ix_usage_events_unrated", "usage_events", ["id"], unique=False, postgresql_where=sa.text("rated_at IS NULL"))
    op.create_table(
        "ledger_transactions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("usage_event_id", sa.BigInteger(), nullable=True),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("effective_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_ledger_transactions_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(
            ["usage_event_id"], ["usage_events.id"], name=op.f("fk_ledger_transactions_usage_event_id_usage_events")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_transactions")),
        sa.UniqueConstraint("usage_event_id", name=op.f("uq_ledger_transactions_usage_event_id")),
    )
    op.create_index(
        "ix_ledger_transactions_organization_id_effective_at",
        "ledger_transactions",
        ["organization_id", "effective_at"],
        unique=False,
    )
    op.create_table(
        "ledger_entries",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("transaction_id", sa.BigInteger(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("amount_picos", sa.Numeric(precision=38, scale=0), nullable=False),
        sa.Column("token_kind", sa.Text(), nullable=True),
        sa.Column("token_count", sa.BigInteger(), nullable=True),
        sa.Column("price_version_id", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "token_kind IS NULL OR token_kind IN ('input', 'cached_input', 'output')",
            name=op.f("ck_ledger_entries_token_kind_known"),
        ),
        sa.CheckConstraint(
            "(token_kind IS NULL) = (token_count IS NULL) AND (token_kind IS NULL) = (price_version_id IS NULL)",
            name=op.f("ck_ledger_entries_tokens_complete"),
        ),
        sa.ForeignKeyConstraint(["account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_entries_account_id_ledger_accounts")),
        sa.ForeignKeyConstraint(
            ["price_version_id"], ["price_versions.id"], name=op.f("fk_ledger_entries_price_version_id_price_versions")
        ),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_ledger_entries_transaction_id_ledger_transactions"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_entries")),
    )
    op.create_index("ix_ledger_entries_transaction_id", "ledger_entries", ["transaction_id"], unique=False)
    create_triggers()


def downgrade() -> None:
    op.drop_index("ix_ledger_entries_transaction_id", table_name="ledger_entries")
    op.drop_table("ledger_entries")
    op.drop_index("ix_ledger_transactions_organization_id_effective_at", table_name="ledger_transactions")
    op.drop_table("ledger_transactions")
    op.drop_index("ix_usage_events_unrated", table_name="usage_events", postgresql_where=sa.text("rated_at IS NULL"))
    op.drop_index("ix_usage_events_organization_id_settled_at", table_name="usage_events")
    op.drop_table("usage_events")
    op.drop_index("ix_holds_owner_held", table_name="holds", postgresql_where=sa.text("state = 'held'"))
    op.drop_index("ix_holds_expiring", table_name="holds", postgresql_where=sa.text("state = 'held'"))
    op.drop_index("uq_holds_request", table_name="holds", postgresql_where=sa.text("state <> 'voided'"))
    op.drop_table("holds")
    op.drop_index("ix_api_keys_project_id", table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("quota_counters")
    op.drop_table("projects")
    op.drop_table("ledger_accounts")
    op.drop_index("uq_quotas_live", table_name="quotas", postgresql_where=sa.text("deleted_at IS NULL"))
    op.drop_table("quotas")
    op.drop_table("price_versions")
    op.drop_table("organizations")
    op.drop_table("audit_log")
    for function in ("refuse_change", "usage_event_rated_once", "hold_ends_once", "ledger_balanced"):
        op.execute(f"DROP FUNCTION {function}")
