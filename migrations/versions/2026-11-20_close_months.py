"""Closing of months: frozen totals, gapless invoice numbers, adjustments approved by two people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
NOW = sa.text("now()")
PICOS = sa.Numeric(precision=38, scale=0)
LINE_KINDS = ("usage", "late_usage", "allowance", "graduated", "volume", "commitment", "adjustment", "credit")
APPEND_ONLY_TABLES = ("month_closings", "invoices", "invoice_lines", "adjustments", "adjustment_decisions")

# One statement writes all lines of an invoice: count, exact sum and rounded sum match the invoice.
INVOICE_ADDS_UP = """
CREATE FUNCTION invoice_adds_up() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE broken text;
BEGIN
    SELECT i.number INTO broken
    FROM invoices i JOIN invoice_lines l ON l.invoice_id = i.id
    WHERE i.id IN (SELECT invoice_id FROM added)
    GROUP BY i.id
    HAVING count(*) <> i.line_count OR sum(l.exact_picos) <> i.exact_picos OR sum(l.amount_picos) <> i.total_picos
    LIMIT 1;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'invoice_lines: the lines of invoice % do not add up to it', broken USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$
"""
# A number is drawn by incrementing the last one.
SERIES_COUNTS_ON = """
CREATE FUNCTION document_series_counts_on() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.series <> OLD.series OR NEW.last_ordinal <> OLD.last_ordinal + 1 THEN
        RAISE EXCEPTION 'document_series: numbers of % follow each other', OLD.series USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
# Months are closed in order; the first close also covers all earlier months.
MONTHS_CLOSE_IN_ORDER = """
CREATE FUNCTION billing_months_close_in_order() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> 'open' AND EXISTS (
        SELECT FROM billing_months m
        WHERE m.organization_id = NEW.organization_id AND m.month > NEW.month AND m.state = 'closed')
    THEN
        RAISE EXCEPTION 'billing_months: a month after % is closed, and this one with it', to_char(NEW.month, 'YYYY-MM')
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
LANE = "1466263923, get_byte(uuid_send({}.organization_id), 15) % 64"


def ledger_months_open(comparison: str) -> str:
    """Return the ledger's guard function, refusing months that compare so with a closed one."""
    return f"""
CREATE OR REPLACE FUNCTION ledger_months_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE closed record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({LANE.format("lanes")})
    FROM (SELECT DISTINCT ON (get_byte(uuid_send(organization_id), 15) % 64) organization_id FROM added
          ORDER BY get_byte(uuid_send(organization_id), 15) % 64) lanes;
    SELECT a.organization_id, a.billing_month INTO closed
    FROM (SELECT DISTINCT organization_id, billing_month FROM added) a
    JOIN billing_months m ON m.organization_id = a.organization_id AND m.month {comparison} a.billing_month
    WHERE m.state = 'closed' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger_transactions: % of organization % is closed: post to a later month',
            to_char(closed.billing_month, 'YYYY-MM'), closed.organization_id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    op.create_table(
        "document_series",
        sa.Column("series", sa.Text(), nullable=False),
        sa.Column("last_ordinal", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("series IN ('INV', 'CN')", name=op.f("ck_document_series_series_known")),
        sa.PrimaryKeyConstraint("series", name=op.f("pk_document_series")),
    )
    op.create_table(
        "month_closings",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("organization_name", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("carried_in_picos", PICOS, nullable=False),
        sa.Column("report_format", sa.BigInteger(), nullable=False),
        sa.Column("json_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("csv_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("receipts_root", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint(
            "octet_length(json_sha256) = 32 AND octet_length(csv_sha256) = 32", name=op.f("ck_month_closings_digest_size")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id", "month"],
            ["billing_months.organization_id", "billing_months.month"],
            name=op.f("fk_month_closings_organization_id_month_billing_months"),
        ),
        sa.PrimaryKeyConstraint("organization_id", "month", name=op.f("pk_month_closings")),
    )
    create_invoices()
    create_adjustments()
    create_triggers()


def create_invoices() -> None:
    op.create_table(
        "invoices",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Text(), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("organization_name", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("issued_at", TIME, nullable=False),
        sa.Column("issued_by", sa.Text(), nullable=False),
        sa.Column("line_count", sa.BigInteger(), nullable=False),
        sa.Column("exact_picos", PICOS, nullable=False),
        sa.Column("carried_in_picos", PICOS, nullable=False),
        sa.Column("carried_out_picos", PICOS, nullable=False),
        sa.Column("total_picos", PICOS, nullable=False),
        sa.CheckConstraint("total_picos + carried_out_picos = exact_picos + carried_in_picos", name=op.f("ck_invoices_adds_up")),
        sa.CheckConstraint("line_count > 0", name=op.f("ck_invoices_has_lines")),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name=op.f("fk_invoices_organization_id_organizations")),
        sa.ForeignKeyConstraint(
            ["organization_id", "month"],
            ["billing_months.organization_id", "billing_months.month"],
            name=op.f("fk_invoices_organization_id_month_billing_months"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("ordinal", name=op.f("uq_invoices_ordinal")),
        sa.UniqueConstraint("number", name=op.f("uq_invoices_number")),
        sa.UniqueConstraint("organization_id", "month", name=op.f("uq_invoices_organization_id_month")),
    )
    op.create_table(
        "invoice_lines",
        sa.Column("invoice_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("exact_picos", PICOS, nullable=False),
        sa.Column("amount_picos", PICOS, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("price_version_id", sa.BigInteger(), nullable=True),
        sa.Column("token_kind", sa.Text(), nullable=True),
        sa.Column("token_count", sa.BigInteger(), nullable=True),
        sa.Column("unit_price_picos", sa.BigInteger(), nullable=True),
        sa.Column("usage_month", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Uuid(), nullable=True),
        sa.CheckConstraint(f"kind IN ({', '.join(map(repr, LINE_KINDS))})", name=op.f("ck_invoice_lines_kind_known")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_lines_invoice_id_invoices")),
        sa.ForeignKeyConstraint(
            ["price_version_id"], ["price_versions.id"], name=op.f("fk_invoice_lines_price_version_id_price_versions")
        ),
        sa.PrimaryKeyConstraint("invoice_id", "position", name=op.f("pk_invoice_lines")),
    )


def create_adjustments() -> None:
    op.create_table(
        "adjustments",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("invoice_id", sa.Uuid(), nullable=True),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("amount_picos", PICOS, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "amount_picos <> 0 AND (invoice_id IS NULL OR amount_picos < 0)", name=op.f("ck_adjustments_amount_sign")
        ),
        sa.CheckConstraint("reason <> '' AND author <> ''", name=op.f("ck_adjustments_told")),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_adjustments_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_adjustments_invoice_id_invoices")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adjustments")),
        sa.UniqueConstraint("id", "author", name=op.f("uq_adjustments_id_author")),
    )
    op.create_index("ix_adjustments_organization_id", "adjustments", ["organization_id"])
    op.create_index("ix_adjustments_invoice_id", "adjustments", ["invoice_id"], postgresql_where=sa.text("invoice_id IS NOT NULL"))
    op.create_table(
        "adjustment_decisions",
        sa.Column("adjustment_id", sa.Uuid(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("approved", sa.Boolean(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("decided_at", TIME, server_default=NOW, nullable=False),
        sa.Column("billing_month", sa.Date(), nullable=True),
        sa.Column("credit_note_ordinal", sa.BigInteger(), nullable=True),
        sa.Column("credit_note_number", sa.Text(), nullable=True),
        sa.CheckConstraint("NOT approved OR decided_by <> author", name=op.f("ck_adjustment_decisions_four_eyes")),
        sa.CheckConstraint("approved = (billing_month IS NOT NULL)", name=op.f("ck_adjustment_decisions_posted_if_approved")),
        sa.CheckConstraint(
            "num_nulls(credit_note_ordinal, credit_note_number) IN (0, 2) AND (approved OR credit_note_number IS NULL)",
            name=op.f("ck_adjustment_decisions_number_complete"),
        ),
        sa.ForeignKeyConstraint(
            ["adjustment_id", "author"],
            ["adjustments.id", "adjustments.author"],
            name=op.f("fk_adjustment_decisions_adjustment_id_author_adjustments"),
        ),
        sa.PrimaryKeyConstraint("adjustment_id", name=op.f("pk_adjustment_decisions")),
        sa.UniqueConstraint("credit_note_ordinal", name=op.f("uq_adjustment_decisions_credit_note_ordinal")),
        sa.UniqueConstraint("credit_note_number", name=op.f("uq_adjustment_decisions_credit_note_number")),
    )


def create_triggers() -> None:
    for function in (INVOICE_ADDS_UP, SERIES_COUNTS_ON, MONTHS_CLOSE_IN_ORDER, ledger_months_open(">=")):
        op.execute(function)
    for table in APPEND_ONLY_TABLES:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    op.execute(
        "CREATE TRIGGER document_series_append_only BEFORE DELETE OR TRUNCATE ON document_series "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )
    op.execute(
        "CREATE TRIGGER document_series_count_on BEFORE UPDATE ON document_series "
        "FOR EACH ROW EXECUTE FUNCTION document_series_counts_on()"
    )
    op.execute(
        "CREATE TRIGGER invoice_lines_add_up AFTER INSERT ON invoice_lines REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION invoice_adds_up()"
    )
    op.execute(
        "CREATE TRIGGER billing_months_close_in_order BEFORE INSERT OR UPDATE ON billing_months "
        "FOR EACH ROW EXECUTE FUNCTION billing_months_close_in_order()"
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER billing_months_close_in_order ON billing_months")
    op.execute(ledger_months_open("="))
    for table in ("adjustment_decisions", "adjustments", "invoice_lines", "invoices", "month_closings", "document_series"):
        op.drop_table(table)
    for function in ("invoice_adds_up", "document_series_counts_on", "billing_months_close_in_order"):
        op.execute(f"DROP FUNCTION {function}")
