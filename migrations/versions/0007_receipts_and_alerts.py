"""Signed receipts, one chain per project; alerts on quotas and invoices, and their webhooks."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

RECEIPTS = """
CREATE TABLE receipt_keys (
    id text CONSTRAINT pk_receipt_keys PRIMARY KEY,
    public_key bytea NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_receipt_keys_public_key_size CHECK (octet_length(public_key) = 32)
);

CREATE TABLE receipt_batches (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_receipt_batches PRIMARY KEY,
    key_id text NOT NULL
        CONSTRAINT fk_receipt_batches_key_id_receipt_keys REFERENCES receipt_keys (id),
    hashes bytea NOT NULL,
    signature bytea NOT NULL,
    CONSTRAINT ck_receipt_batches_hashes_size
        CHECK (octet_length(hashes) > 0 AND octet_length(hashes) % 32 = 0),
    CONSTRAINT ck_receipt_batches_signature_size CHECK (octet_length(signature) = 64)
);

CREATE TABLE receipt_chains (
    project_id uuid CONSTRAINT pk_receipt_chains PRIMARY KEY
        CONSTRAINT fk_receipt_chains_project_id_projects REFERENCES projects (id),
    last_sequence bigint DEFAULT '0' NOT NULL,
    last_hash bytea DEFAULT decode(repeat('00', 32), 'hex') NOT NULL,
    last_settled_at timestamptz DEFAULT '1970-01-01 00:00:00+00' NOT NULL,
    CONSTRAINT ck_receipt_chains_sequence_not_negative CHECK (last_sequence >= 0),
    CONSTRAINT ck_receipt_chains_hash_size CHECK (octet_length(last_hash) = 32)
) WITH (fillfactor = 50);

CREATE TRIGGER receipt_keys_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON receipt_keys
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER receipt_batches_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON receipt_batches
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER receipt_chains_no_delete BEFORE DELETE OR TRUNCATE ON receipt_chains
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE FUNCTION create_receipt_chain() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO receipt_chains (project_id) VALUES (NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER projects_create_receipt_chain AFTER INSERT ON projects
    FOR EACH ROW EXECUTE FUNCTION create_receipt_chain();

-- The head of a chain only moves forward, and no two receipts have the same sequence number.
CREATE FUNCTION refuse_chain_rewind() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the receipt chain of project % only moves forward', OLD.project_id
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER receipt_chains_only_forward BEFORE UPDATE ON receipt_chains FOR EACH ROW WHEN (
    NEW.project_id <> OLD.project_id
    OR NEW.last_sequence < OLD.last_sequence
    OR NEW.last_settled_at < OLD.last_settled_at
    OR (NEW.last_sequence = OLD.last_sequence) <> (NEW.last_hash = OLD.last_hash)
) EXECUTE FUNCTION refuse_chain_rewind();
"""
ALERTS = """
-- An alert on a quota, on an invoice at Stripe, or a test. Unique indexes prevent duplicates.
CREATE TABLE alerts (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_alerts PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_alerts_organization_id_organizations REFERENCES organizations (id),
    quota_id uuid CONSTRAINT fk_alerts_quota_id_quotas REFERENCES quotas (id),
    window_start timestamptz,
    threshold bigint,
    limit_value bigint,
    used bigint,
    fired_at timestamptz DEFAULT now() NOT NULL,
    stripe_invoice_id text,
    invoice_event text,
    invoice jsonb,
    CONSTRAINT ck_alerts_quota_complete
        CHECK (num_nulls(quota_id, window_start, threshold, limit_value, used) IN (0, 5)),
    CONSTRAINT ck_alerts_invoice_complete
        CHECK (num_nulls(stripe_invoice_id, invoice_event, invoice) IN (0, 3)),
    CONSTRAINT ck_alerts_quota_or_invoice CHECK (num_nulls(quota_id, stripe_invoice_id) > 0),
    CONSTRAINT ck_alerts_invoice_event_known
        CHECK (invoice_event IN ('invoice_payment_failed', 'invoice_paid'))
);
CREATE UNIQUE INDEX uq_alerts_quota_window_threshold
    ON alerts (quota_id, window_start, threshold, limit_value);
CREATE UNIQUE INDEX uq_alerts_invoice_event ON alerts (stripe_invoice_id, invoice_event);
CREATE INDEX ix_alerts_organization_id_fired_at_id ON alerts (organization_id, fired_at, id);
CREATE INDEX ix_alerts_fired_at_id ON alerts (fired_at, id);
CREATE TRIGGER alerts_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON alerts
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE alert_webhooks (
    organization_id uuid CONSTRAINT pk_alert_webhooks PRIMARY KEY
        CONSTRAINT fk_alert_webhooks_organization_id_organizations REFERENCES organizations (id),
    url text NOT NULL,
    secret text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    failure_count integer DEFAULT 0 NOT NULL,
    paused_until timestamptz
);

CREATE TABLE alert_deliveries (
    alert_id uuid CONSTRAINT pk_alert_deliveries PRIMARY KEY
        CONSTRAINT fk_alert_deliveries_alert_id_alerts REFERENCES alerts (id),
    organization_id uuid NOT NULL
        CONSTRAINT fk_alert_deliveries_organization_id_organizations REFERENCES organizations (id),
    state text DEFAULT 'pending' NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    attempted_at timestamptz,
    ended_at timestamptz,
    last_error text,
    CONSTRAINT ck_alert_deliveries_state_known CHECK (state IN ('pending', 'delivered', 'failed')),
    CONSTRAINT ck_alert_deliveries_ended_at_of_final_state
        CHECK ((state = 'pending') = (ended_at IS NULL))
);
CREATE INDEX ix_alert_deliveries_pending ON alert_deliveries (organization_id, created_at)
    WHERE state = 'pending';
"""


def upgrade() -> None:
    op.execute(RECEIPTS)
    op.execute(ALERTS)


def downgrade() -> None:
    op.execute("DROP TRIGGER projects_create_receipt_chain ON projects")
    op.execute(
        "DROP TABLE alert_deliveries, alert_webhooks, alerts, receipt_chains, receipt_batches,"
        " receipt_keys"
    )
    op.execute("DROP FUNCTION refuse_chain_rewind, create_receipt_chain")
