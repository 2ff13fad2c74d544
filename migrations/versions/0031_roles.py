"""Roles of keys, the border of an organization, its own limits, and the role in the audit log.

`organization_border` has a view for each table: with the rows of one organization, or none of a
table that belongs to the service. A transaction of a key with a role finds these views instead of
the tables, by its `search_path` (`metering/store/border.py`). The settings `weir.organization` and
`weir.project` name the organization, and the only project of a developer. Without the first, each
view raises an error.

Tables in no list below are shared: they have no data of organizations, or their ids only.
"""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

SCHEMA = "organization_border"
ORGANIZATION = "(SELECT current_setting('weir.organization')::uuid)"
PROJECT = "(SELECT nullif(current_setting('weir.project', true), '')::uuid)"
IN_ORGANIZATION = f"organization_id = {ORGANIZATION}"
IN_PROJECT = f"{IN_ORGANIZATION} AND ({PROJECT} IS NULL OR project_id = {PROJECT})"
# A column among the values of another one of a view
AMONG = "{} IN (SELECT {} FROM organization_border.{})"
# A field of an audit entry that refers to the organization or an object in it
REFERRED = "coalesce(after, before) ->> '{}' IN (SELECT id::text FROM organization_border.subjects)"
# Views in an order in which each refers to earlier ones only
OWN: dict[str, str] = {
    "organizations": f"id = {ORGANIZATION}",
    "projects": f"{IN_ORGANIZATION} AND ({PROJECT} IS NULL OR id = {PROJECT})",
    "api_keys": AMONG.format("project_id", "id", "projects"),
    "api_key_uses": AMONG.format("api_key_id", "id", "api_keys"),
    "superseded_secrets": AMONG.format("api_key_id", "id", "api_keys"),
    "receipt_chains": AMONG.format("project_id", "id", "projects"),
    **dict.fromkeys(("holds", "usage_events", "usage_days", "retired_receipts"), IN_PROJECT),
    **dict.fromkeys(
        (
            *("usage_subjects", "usage_subject_counts", "unrated_usage", "billing_profiles"),
            *("prepaid_organizations", "plan_assignments", "credit_grants", "adjustments"),
            *("alerts", "alert_deliveries", "alert_webhooks", "billing_months", "month_closings"),
            *("invoices", "issued_documents", "ledger_accounts", "ledger_transactions"),
            *("meter_batches", "replica_rentals", "resale_prices", "resale_statements"),
            *("stripe_invoices", "stripe_late_items", "stripe_month_items"),
            *("stripe_month_settlements", "queue_weights"),
        ),
        IN_ORGANIZATION,
    ),
    "price_versions": f"organization_id IS NULL OR {IN_ORGANIZATION}",
    "plan_versions": AMONG.format("id", "plan_version_id", "plan_assignments"),
    "credit_applications": AMONG.format("grant_id", "id", "credit_grants"),
    "adjustment_decisions": AMONG.format("adjustment_id", "id", "adjustments"),
    "usage_corrections": AMONG.format("adjustment_id", "id", "adjustments"),
    "invoice_lines": AMONG.format("invoice_id", "id", "invoices"),
    "invoice_letterheads": AMONG.format("invoice_id", "id", "invoices"),
    "ledger_entries": AMONG.format("transaction_id", "id", "ledger_transactions"),
    "resale_statement_lines": AMONG.format("statement_id", "id", "resale_statements"),
    "quotas": AMONG.format("coalesce(within_id, subject_id)", "id", "subjects"),
    "quota_counters": AMONG.format("quota_id", "id", "quotas"),
    "quota_checkpoints": AMONG.format("quota_id", "id", "quotas"),
    "audit_log": (
        # An operator's key belongs to some organization, and changes others.
        f"actor_organization_id = {ORGANIZATION} AND actor_role <> 'operator'"
        f" OR subject_id IN (SELECT id::text FROM {SCHEMA}.subjects)"
        f" OR {' OR '.join(map(REFERRED.format, ('organization_id', 'project_id', 'subject_id')))}"
    ),
}
# Views over views of the tables, for reading only
READ: dict[str, str] = {
    "quota_terms": AMONG.format("coalesce(within_id, subject_id)", "id", "subjects"),
    "usage_sums": IN_PROJECT,
}
OF_SERVICE = (
    *("alembic_version", "document_series", "live_reports", "replica_drains", "stripe_events"),
    *("stripe_objects", "worker_incidents", "fleet_versions", "queue_reports"),
    *("launched_replicas", "replica_demands", "replica_runs"),
)
SUBJECTS = f"""
CREATE VIEW {SCHEMA}.subjects AS
SELECT {ORGANIZATION} AS id
UNION ALL SELECT id FROM {SCHEMA}.projects
UNION ALL SELECT id FROM {SCHEMA}.api_keys
"""

UPGRADE = """
ALTER TABLE api_keys ADD COLUMN role text NOT NULL DEFAULT '';
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_role CHECK (
    role IN ('', 'owner', 'admin', 'developer', 'finance', 'viewer')
    AND (role = '' OR scopes <@ ARRAY['inference'])
);
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_scopes_known;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_scopes_known CHECK (
    scopes <@ ARRAY['inference', 'admin', 'billing'] AND (scopes <> '{}' OR role <> '')
);
ALTER TABLE quotas ADD COLUMN set_by_organization boolean NOT NULL DEFAULT false;
DROP INDEX uq_quotas_active;
CREATE UNIQUE INDEX uq_quotas_active ON quotas (
    subject_id, model, dimension, window_minutes, for_new_keys, for_each, within_id, selector_id,
    set_by_organization
) NULLS NOT DISTINCT WHERE deleted_at IS NULL;
-- The defaults are set apart, so that entries that exist are neither read nor rewritten.
ALTER TABLE audit_log ADD COLUMN actor_role text, ADD COLUMN actor_organization_id uuid;
ALTER TABLE audit_log
    ALTER COLUMN actor_role SET DEFAULT coalesce(current_setting('weir.actor_role', true), ''),
    ALTER COLUMN actor_organization_id SET DEFAULT
        nullif(current_setting('weir.actor_organization', true), '')::uuid;
"""
DOWNGRADE = f"""
DROP SCHEMA {SCHEMA} CASCADE;
ALTER TABLE audit_log DROP COLUMN actor_organization_id, DROP COLUMN actor_role;
DELETE FROM superseded_secrets WHERE api_key_id IN (SELECT id FROM api_keys WHERE scopes = '{{}}');
UPDATE api_keys
SET scopes = ARRAY['inference'], revoked_at = coalesce(revoked_at, now())
WHERE scopes = '{{}}';
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_scopes_known;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_scopes_known CHECK (
    scopes <@ ARRAY['inference', 'admin', 'billing'] AND scopes <> '{{}}'
);
ALTER TABLE api_keys DROP COLUMN role;
"""
# A limit that an organization set cannot be kept: without the column it would be the operator's.
DOWNGRADE_QUOTAS = """
UPDATE quotas SET deleted_at = coalesce(deleted_at, now()) WHERE set_by_organization;
DROP INDEX uq_quotas_active;
ALTER TABLE quotas DROP COLUMN set_by_organization;
CREATE UNIQUE INDEX uq_quotas_active ON quotas (
    subject_id, model, dimension, window_minutes, for_new_keys, for_each, within_id, selector_id
) NULLS NOT DISTINCT WHERE deleted_at IS NULL;
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
    q.created_at, greatest(q.changed_at, s.changed_at) AS changed_at, q.window_minutes{more}
FROM quotas q
LEFT JOIN quotas s ON s.id = q.selector_id;
"""


def upgrade() -> None:
    op.execute(UPGRADE)
    op.execute(TERMS.replace("{more}", ", q.set_by_organization"))
    op.execute(f"CREATE SCHEMA {SCHEMA}")
    for table, condition in OWN.items():
        if table == "quotas":
            op.execute(SUBJECTS)
        op.execute(
            f"CREATE VIEW {SCHEMA}.{table} AS SELECT * FROM {table} WHERE {condition}"
            " WITH CHECK OPTION"
        )
    for view, condition in READ.items():
        op.execute(f"CREATE VIEW {SCHEMA}.{view} AS SELECT * FROM {view} WHERE {condition}")
    for table in OF_SERVICE:
        op.execute(
            f"CREATE VIEW {SCHEMA}.{table} AS SELECT * FROM {table} WHERE false WITH CHECK OPTION"
        )


def downgrade() -> None:
    op.execute(DOWNGRADE)
    op.execute("DROP VIEW quota_terms")
    op.execute(DOWNGRADE_QUOTAS)
    op.execute(TERMS.replace("{more}", ""))
