"""Plans, prepaid credit, invoices of closed months, adjustments and billing profiles."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Months are stored as their first day.
PLANS_AND_CREDIT = """
CREATE TABLE plan_versions (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_plan_versions PRIMARY KEY,
    name text NOT NULL,
    version bigint NOT NULL,
    currency_code text NOT NULL,
    rules jsonb NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_plan_versions_name_form CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    CONSTRAINT uq_plan_versions_name_version UNIQUE (name, version)
);

-- The newest assignment of a month applies; one without a plan version ends the plan.
CREATE TABLE plan_assignments (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_plan_assignments PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_plan_assignments_organization_id_organizations REFERENCES organizations (id),
    first_month date NOT NULL,
    plan_version_id bigint
        CONSTRAINT fk_plan_assignments_plan_version_id_plan_versions REFERENCES plan_versions (id),
    assigned_by text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_plan_assignments_whole_month CHECK (extract(day FROM first_month) = 1)
);
CREATE INDEX ix_plan_assignments_organization_id_first_month
    ON plan_assignments (organization_id, first_month, id);

CREATE TABLE credit_grants (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_credit_grants PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_credit_grants_organization_id_organizations REFERENCES organizations (id),
    currency_code text NOT NULL,
    amount_picos bigint NOT NULL,
    first_month date NOT NULL,
    last_month date NOT NULL,
    reason text NOT NULL,
    granted_by text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_credit_grants_amount_positive CHECK (amount_picos > 0),
    CONSTRAINT ck_credit_grants_whole_months
        CHECK (extract(day FROM first_month) = 1
               AND extract(day FROM last_month) = 1
               AND first_month <= last_month)
);
CREATE INDEX ix_credit_grants_organization_id ON credit_grants (organization_id);

CREATE TABLE credit_applications (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_credit_applications PRIMARY KEY,
    grant_id uuid NOT NULL
        CONSTRAINT fk_credit_applications_grant_id_credit_grants REFERENCES credit_grants (id),
    billing_month date NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_credit_applications_amount_positive CHECK (amount_picos > 0),
    CONSTRAINT ck_credit_applications_whole_month CHECK (extract(day FROM billing_month) = 1),
    CONSTRAINT uq_credit_applications_grant_id_billing_month UNIQUE (grant_id, billing_month)
);

-- The row of the grant is locked first, so that two transactions that spend it see each other.
CREATE FUNCTION credit_within_grant() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE granted record;
BEGIN
    SELECT * INTO granted FROM credit_grants WHERE id = NEW.grant_id FOR NO KEY UPDATE;
    IF granted.amount_picos
        < (SELECT sum(amount_picos) FROM credit_applications WHERE grant_id = NEW.grant_id)
    THEN
        RAISE EXCEPTION 'credit_applications: grant % has less than % picos left',
            NEW.grant_id, NEW.amount_picos
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.billing_month NOT BETWEEN granted.first_month AND granted.last_month THEN
        RAISE EXCEPTION 'credit_applications: grant % is not valid in month %',
            NEW.grant_id, NEW.billing_month
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER credit_applications_within_grant AFTER INSERT ON credit_applications
    FOR EACH ROW EXECUTE FUNCTION credit_within_grant();
"""
INVOICES = """
CREATE TABLE billing_profiles (
    organization_id uuid CONSTRAINT pk_billing_profiles PRIMARY KEY
        CONSTRAINT fk_billing_profiles_organization_id_organizations REFERENCES organizations (id),
    emails text[] NOT NULL,
    legal_name text NOT NULL,
    address_line1 text NOT NULL,
    address_line2 text NOT NULL,
    city text NOT NULL,
    postal_code text NOT NULL,
    state text NOT NULL,
    country text NOT NULL,
    tax_id text NOT NULL,
    language text NOT NULL,
    updated_at timestamptz DEFAULT now() NOT NULL
);

-- Facts of a month at its close, and the digests of its usage reports.
CREATE TABLE month_closings (
    organization_id uuid,
    month date,
    organization_name text NOT NULL,
    currency_code text NOT NULL,
    carried_in_picos numeric(38, 0) NOT NULL,
    report_format bigint NOT NULL,
    json_sha256 bytea NOT NULL,
    csv_sha256 bytea NOT NULL,
    receipts_root text DEFAULT '' NOT NULL,
    billing_profile jsonb,
    CONSTRAINT ck_month_closings_digest_size
        CHECK (octet_length(json_sha256) = 32 AND octet_length(csv_sha256) = 32),
    CONSTRAINT pk_month_closings PRIMARY KEY (organization_id, month),
    CONSTRAINT fk_month_closings_organization_id_month_billing_months
        FOREIGN KEY (organization_id, month) REFERENCES billing_months (organization_id, month)
);

-- Document numbers without gaps: each number is the previous one plus one.
CREATE TABLE document_series (
    series text CONSTRAINT pk_document_series PRIMARY KEY,
    last_ordinal bigint DEFAULT '0' NOT NULL,
    CONSTRAINT ck_document_series_series_known CHECK (series IN ('INV', 'CN'))
);
CREATE TRIGGER document_series_append_only BEFORE DELETE OR TRUNCATE ON document_series
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE FUNCTION document_series_consecutive() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.series <> OLD.series OR NEW.last_ordinal <> OLD.last_ordinal + 1 THEN
        RAISE EXCEPTION 'document_series: the numbers of % must be consecutive', OLD.series
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER document_series_consecutive BEFORE UPDATE ON document_series
    FOR EACH ROW EXECUTE FUNCTION document_series_consecutive();

CREATE TABLE invoices (
    id uuid CONSTRAINT pk_invoices PRIMARY KEY,
    ordinal bigint NOT NULL CONSTRAINT uq_invoices_ordinal UNIQUE,
    number text NOT NULL CONSTRAINT uq_invoices_number UNIQUE,
    organization_id uuid NOT NULL
        CONSTRAINT fk_invoices_organization_id_organizations REFERENCES organizations (id),
    month date NOT NULL,
    organization_name text NOT NULL,
    currency_code text NOT NULL,
    issued_at timestamptz NOT NULL,
    issued_by text NOT NULL,
    line_count bigint NOT NULL,
    exact_picos numeric(38, 0) NOT NULL,
    carried_in_picos numeric(38, 0) NOT NULL,
    carried_out_picos numeric(38, 0) NOT NULL,
    total_picos numeric(38, 0) NOT NULL,
    CONSTRAINT ck_invoices_adds_up
        CHECK (total_picos + carried_out_picos = exact_picos + carried_in_picos),
    CONSTRAINT ck_invoices_has_lines CHECK (line_count > 0),
    CONSTRAINT uq_invoices_organization_id_month UNIQUE (organization_id, month),
    CONSTRAINT fk_invoices_organization_id_month_billing_months
        FOREIGN KEY (organization_id, month) REFERENCES billing_months (organization_id, month)
);

CREATE TABLE invoice_lines (
    invoice_id uuid CONSTRAINT fk_invoice_lines_invoice_id_invoices REFERENCES invoices (id),
    position bigint,
    kind text NOT NULL,
    description text NOT NULL,
    exact_picos numeric(38, 0) NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    model text NOT NULL,
    price_version_id bigint
        CONSTRAINT fk_invoice_lines_price_version_id_price_versions REFERENCES price_versions (id),
    token_kind text,
    token_count bigint,
    unit_price_picos bigint,
    usage_month text NOT NULL,
    source_id uuid,
    CONSTRAINT ck_invoice_lines_kind_known CHECK (kind IN (
        'usage', 'late_usage', 'allowance', 'graduated', 'volume', 'commitment', 'adjustment',
        'credit')),
    CONSTRAINT pk_invoice_lines PRIMARY KEY (invoice_id, position)
);

-- One statement writes all lines of an invoice. Their number and sums, exact and rounded, must be
-- those of the invoice.
CREATE FUNCTION invoice_adds_up() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken text;
BEGIN
    SELECT i.number
    INTO broken
    FROM invoices i
    JOIN invoice_lines l ON l.invoice_id = i.id
    WHERE i.id IN (SELECT invoice_id FROM added)
    GROUP BY i.id
    HAVING count(*) <> i.line_count
        OR sum(l.exact_picos) <> i.exact_picos
        OR sum(l.amount_picos) <> i.total_picos
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'invoice_lines: the lines of invoice % do not add up to its totals', broken
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER invoice_lines_add_up AFTER INSERT ON invoice_lines REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION invoice_adds_up();

-- Letterhead of an invoice, as first printed.
CREATE TABLE invoice_letterheads (
    invoice_id uuid CONSTRAINT pk_invoice_letterheads PRIMARY KEY
        CONSTRAINT fk_invoice_letterheads_invoice_id_invoices REFERENCES invoices (id),
    name text NOT NULL,
    address text[] NOT NULL,
    tax_id text NOT NULL,
    contact text NOT NULL,
    payment text[] NOT NULL,
    recorded_at timestamptz DEFAULT now() NOT NULL
);
"""
# The author is part of the foreign key, so that the four-eyes constraint compares the approver with
# the author of the adjustment.
ADJUSTMENTS = """
CREATE TABLE adjustments (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_adjustments PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_adjustments_organization_id_organizations REFERENCES organizations (id),
    invoice_id uuid CONSTRAINT fk_adjustments_invoice_id_invoices REFERENCES invoices (id),
    currency_code text NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    reason text NOT NULL,
    author text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_adjustments_amount_sign CHECK (invoice_id IS NULL OR amount_picos < 0),
    CONSTRAINT ck_adjustments_reason_and_author CHECK (reason <> '' AND author <> ''),
    CONSTRAINT uq_adjustments_id_author UNIQUE (id, author)
);
CREATE INDEX ix_adjustments_organization_id ON adjustments (organization_id);
CREATE INDEX ix_adjustments_invoice_id ON adjustments (invoice_id) WHERE invoice_id IS NOT NULL;

CREATE TABLE adjustment_decisions (
    adjustment_id uuid CONSTRAINT pk_adjustment_decisions PRIMARY KEY,
    author text NOT NULL,
    approved boolean NOT NULL,
    decided_by text NOT NULL,
    decided_at timestamptz DEFAULT now() NOT NULL,
    billing_month date,
    credit_note_ordinal bigint CONSTRAINT uq_adjustment_decisions_credit_note_ordinal UNIQUE,
    credit_note_number text CONSTRAINT uq_adjustment_decisions_credit_note_number UNIQUE,
    CONSTRAINT ck_adjustment_decisions_four_eyes CHECK (NOT approved OR decided_by <> author),
    CONSTRAINT ck_adjustment_decisions_posted_if_approved
        CHECK (approved = (billing_month IS NOT NULL)),
    CONSTRAINT ck_adjustment_decisions_number_complete
        CHECK (num_nulls(credit_note_ordinal, credit_note_number) IN (0, 2)
               AND (approved OR credit_note_number IS NULL)),
    CONSTRAINT fk_adjustment_decisions_adjustment_id_author_adjustments
        FOREIGN KEY (adjustment_id, author) REFERENCES adjustments (id, author)
);

-- Usage events with a wrong cost, and the adjustment that bills them instead.
CREATE TABLE usage_corrections (
    hold_id uuid,
    part smallint,
    settled_at timestamptz,
    adjustment_id uuid NOT NULL
        CONSTRAINT fk_usage_corrections_adjustment_id_adjustment_decisions
        REFERENCES adjustment_decisions (adjustment_id),
    corrected_by text NOT NULL,
    corrected_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_usage_corrections PRIMARY KEY (hold_id, part, settled_at)
);
"""
APPEND_ONLY_TABLES = (
    *("plan_versions", "plan_assignments", "credit_grants", "credit_applications"),
    *("month_closings", "invoices", "invoice_lines", "invoice_letterheads"),
    *("adjustments", "adjustment_decisions", "usage_corrections"),
)


def upgrade() -> None:
    op.execute(PLANS_AND_CREDIT)
    op.execute(INVOICES)
    op.execute(ADJUSTMENTS)
    for table in APPEND_ONLY_TABLES:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


def downgrade() -> None:
    op.execute(f"DROP TABLE {', '.join(APPEND_ONLY_TABLES)}, document_series, billing_profiles")
    op.execute("DROP FUNCTION credit_within_grant, document_series_consecutive, invoice_adds_up")
