"""Usage export: batches of tokens, and Stripe's objects, events, invoices and items."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BATCHES = """
CREATE TABLE export_progress (
    id smallint CONSTRAINT pk_export_progress PRIMARY KEY,
    closed_until timestamptz NOT NULL,
    scanned_until timestamptz NOT NULL,
    failure_count integer DEFAULT 0 NOT NULL,
    paused_until timestamptz,
    pause_reason text,
    late_items_since timestamptz DEFAULT now() NOT NULL,
    month_items_since timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_export_progress_one_row CHECK (id = 1)
);

-- Invoice items for usage that reached Stripe after the invoice of its period.
CREATE TABLE stripe_late_items (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_stripe_late_items PRIMARY KEY,
    number bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT uq_stripe_late_items_number UNIQUE,
    organization_id uuid NOT NULL
        CONSTRAINT fk_stripe_late_items_organization_id_organizations REFERENCES organizations (id),
    currency_code text NOT NULL,
    period_start timestamptz NOT NULL,
    period_end timestamptz NOT NULL,
    token_count bigint NOT NULL,
    exact_picos numeric(38, 0) NOT NULL,
    carried_in_picos numeric(38, 0) NOT NULL,
    amount_minor bigint NOT NULL,
    stripe_id text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_stripe_late_items_amounts_not_negative
        CHECK (token_count > 0 AND exact_picos >= 0 AND amount_minor >= 0)
);
CREATE INDEX ix_stripe_late_items_organization_id ON stripe_late_items (organization_id);

CREATE TABLE meter_batches (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_meter_batches PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_meter_batches_organization_id_organizations REFERENCES organizations (id),
    price_version_id bigint NOT NULL
        CONSTRAINT fk_meter_batches_price_version_id_price_versions REFERENCES price_versions (id),
    token_kind text NOT NULL,
    hour timestamptz NOT NULL,
    part smallint NOT NULL,
    token_count bigint NOT NULL,
    state text DEFAULT 'pending' NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamptz DEFAULT now() NOT NULL,
    sent_at timestamptz,
    delivered_at timestamptz,
    last_error text,
    created_at timestamptz DEFAULT now() NOT NULL,
    late_item_id uuid
        CONSTRAINT fk_meter_batches_late_item_id_stripe_late_items
        REFERENCES stripe_late_items (id),
    CONSTRAINT ck_meter_batches_token_kind_known
        CHECK (token_kind IN ('input', 'cached_input', 'output', 'embedding')),
    CONSTRAINT ck_meter_batches_state_known CHECK (state IN (
        'pending', 'sent', 'delivered', 'rejected', 'parked', 'cancelling', 'cancelled')),
    CONSTRAINT ck_meter_batches_tokens_positive CHECK (token_count > 0),
    CONSTRAINT ck_meter_batches_part_not_negative CHECK (part >= 0),
    CONSTRAINT ck_meter_batches_whole_hour CHECK (hour = date_trunc('hour', hour, 'UTC')),
    CONSTRAINT ck_meter_batches_delivered_has_time
        CHECK ((state = 'delivered') <= (delivered_at IS NOT NULL)),
    CONSTRAINT uq_meter_batches_organization_id_price_version_id_token_259d
        UNIQUE (organization_id, price_version_id, token_kind, hour, part)
);
CREATE INDEX ix_meter_batches_waiting ON meter_batches (next_attempt_at)
    WHERE state IN ('pending', 'sent');
"""
STRIPE = """
CREATE TABLE stripe_objects (
    account text,
    kind text,
    ref text,
    stripe_id text NOT NULL,
    seen_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_stripe_objects PRIMARY KEY (account, kind, ref)
);

CREATE TABLE stripe_events (
    id text CONSTRAINT pk_stripe_events PRIMARY KEY,
    type text NOT NULL,
    payload jsonb NOT NULL,
    received_at timestamptz DEFAULT now() NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    handled_at timestamptz,
    outcome text
);
CREATE INDEX ix_stripe_events_unhandled ON stripe_events (received_at) WHERE handled_at IS NULL;

CREATE TABLE stripe_invoices (
    id text CONSTRAINT pk_stripe_invoices PRIMARY KEY,
    organization_id uuid
        CONSTRAINT fk_stripe_invoices_organization_id_organizations REFERENCES organizations (id),
    customer_id text NOT NULL,
    currency_code text NOT NULL,
    period_start timestamptz NOT NULL,
    period_end timestamptz NOT NULL,
    amount_due_minor bigint NOT NULL,
    amount_paid_minor bigint NOT NULL,
    finalized_at timestamptz,
    paid_at timestamptz,
    payment_failed_at timestamptz,
    last_event_at timestamptz NOT NULL,
    total_minor bigint,
    voided_at timestamptz,
    uncollectible_at timestamptz,
    overdue_at timestamptz,
    stripe_number text,
    hosted_url text,
    payment_state text NOT NULL GENERATED ALWAYS AS (
        CASE WHEN paid_at IS NOT NULL THEN 'paid'
             WHEN voided_at IS NOT NULL THEN 'void'
             WHEN uncollectible_at IS NOT NULL THEN 'uncollectible'
             WHEN payment_failed_at IS NOT NULL THEN 'failed'
             WHEN overdue_at IS NOT NULL THEN 'overdue'
             ELSE 'open'
        END) STORED
);
CREATE INDEX ix_stripe_invoices_organization_id ON stripe_invoices (organization_id);
CREATE INDEX ix_stripe_invoices_unpaid ON stripe_invoices (period_start)
    WHERE payment_state IN ('failed', 'overdue', 'uncollectible');

-- Closed months: invoice items bring Stripe's invoice to the total of ours.
CREATE TABLE stripe_month_settlements (
    organization_id uuid,
    month date,
    currency_code text NOT NULL,
    due_picos numeric(38, 0) NOT NULL,
    carried_in_picos numeric(38, 0) NOT NULL,
    due_minor bigint NOT NULL,
    invoiced_minor bigint,
    late_minor bigint,
    created_at timestamptz DEFAULT now() NOT NULL,
    settled_at timestamptz,
    CONSTRAINT ck_stripe_month_settlements_settled_complete
        CHECK (num_nulls(invoiced_minor, late_minor, settled_at) IN (0, 3)),
    CONSTRAINT pk_stripe_month_settlements PRIMARY KEY (organization_id, month),
    CONSTRAINT fk_stripe_month_settlements_organization_id_month_billi_3bef
        FOREIGN KEY (organization_id, month) REFERENCES billing_months (organization_id, month)
);
CREATE TABLE stripe_month_items (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_stripe_month_items PRIMARY KEY,
    organization_id uuid NOT NULL,
    month date NOT NULL,
    position bigint NOT NULL,
    description text NOT NULL,
    amount_minor bigint NOT NULL,
    stripe_id text,
    invoice_stripe_id text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_stripe_month_items_amount_not_zero CHECK (amount_minor <> 0),
    CONSTRAINT uq_stripe_month_items_organization_id_month_position
        UNIQUE (organization_id, month, position),
    CONSTRAINT fk_stripe_month_items_organization_id_month_stripe_mont_237b
        FOREIGN KEY (organization_id, month)
        REFERENCES stripe_month_settlements (organization_id, month)
);
"""
# The subject and amount of a row never change. Its state or Stripe identifier is written later, and
# `cancelled` is a final state.
RESTRICTIONS = """
CREATE FUNCTION meter_batch_keeps_tokens() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.organization_id, NEW.price_version_id, NEW.token_kind, NEW.hour, NEW.part,
        NEW.token_count, NEW.created_at)
        IS DISTINCT FROM
       (OLD.id, OLD.organization_id, OLD.price_version_id, OLD.token_kind, OLD.hour, OLD.part,
        OLD.token_count, OLD.created_at)
    THEN
        RAISE EXCEPTION 'meter_batches: tokens never change: write another part'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.state <> NEW.state AND (OLD.state, NEW.state) NOT IN (
        ('pending', 'sent'), ('pending', 'rejected'),
        ('sent', 'pending'), ('sent', 'delivered'), ('sent', 'rejected'), ('sent', 'parked'),
        ('delivered', 'rejected'), ('delivered', 'cancelling'),
        ('cancelling', 'delivered'), ('cancelling', 'cancelled'), ('cancelling', 'parked'),
        ('rejected', 'cancelled'),
        ('parked', 'delivered'), ('parked', 'rejected'), ('parked', 'cancelled'))
    THEN
        RAISE EXCEPTION 'meter batch %: its state cannot change from % to %',
            OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION meter_batch_invoiced_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'meter batch % is already invoiced by item %', OLD.id, OLD.late_item_id
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER meter_batches_invoiced_once BEFORE UPDATE ON meter_batches FOR EACH ROW
    WHEN (OLD.late_item_id IS NOT NULL AND OLD.late_item_id IS DISTINCT FROM NEW.late_item_id)
    EXECUTE FUNCTION meter_batch_invoiced_once();

CREATE FUNCTION stripe_event_keeps_payload() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.type, NEW.payload, NEW.received_at)
            IS DISTINCT FROM (OLD.id, OLD.type, OLD.payload, OLD.received_at)
        OR OLD.handled_at IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_events: an event never changes, and is handled once'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION stripe_late_item_keeps_amount() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - 'stripe_id' IS DISTINCT FROM to_jsonb(OLD) - 'stripe_id'
        OR OLD.stripe_id IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_late_items: an item never changes, and is created once'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION stripe_month_settled_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - '{invoiced_minor,late_minor,settled_at}'::text[]
            IS DISTINCT FROM to_jsonb(OLD) - '{invoiced_minor,late_minor,settled_at}'::text[]
        OR OLD.settled_at IS NOT NULL
    THEN
        RAISE EXCEPTION
            'stripe_month_settlements: the amount due never changes, and is settled once'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION stripe_month_item_keeps_amount() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - '{stripe_id,invoice_stripe_id}'::text[]
            IS DISTINCT FROM to_jsonb(OLD) - '{stripe_id,invoice_stripe_id}'::text[]
        OR OLD.stripe_id IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_month_items: an item never changes, and is created once'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
"""
RESTRICTED = {
    "meter_batches": "meter_batch_keeps_tokens",
    "stripe_events": "stripe_event_keeps_payload",
    "stripe_late_items": "stripe_late_item_keeps_amount",
    "stripe_month_settlements": "stripe_month_settled_once",
    "stripe_month_items": "stripe_month_item_keeps_amount",
}


def upgrade() -> None:
    op.execute(BATCHES)
    op.execute(STRIPE)
    op.execute(RESTRICTIONS)
    for table, function in RESTRICTED.items():
        op.execute(
            f"CREATE TRIGGER {table}_restrict_update BEFORE UPDATE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {function}()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


def downgrade() -> None:
    op.execute(
        f"DROP TABLE {', '.join(RESTRICTED)}, stripe_invoices, stripe_objects, export_progress"
    )
    op.execute(f"DROP FUNCTION {', '.join(RESTRICTED.values())}, meter_batch_invoiced_once")
