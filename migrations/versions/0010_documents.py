"""Documents of closed months and credit notes, and lines of rounding on invoices."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# A month closed before this revision gets its row with its first export.
DOCUMENTS = """
CREATE TABLE issued_documents (
    organization_id uuid
        CONSTRAINT fk_issued_documents_organization_id_organizations REFERENCES organizations (id),
    name text,
    issuer jsonb NOT NULL,
    pdf bytea NOT NULL,
    pdf_sha256 bytea NOT NULL,
    issued_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT ck_issued_documents_name_form CHECK (name ~ '^([0-9]{4}-[0-9]{2}|CN-[0-9]{6,})$'),
    CONSTRAINT ck_issued_documents_digest_size CHECK (octet_length(pdf_sha256) = 32),
    CONSTRAINT pk_issued_documents PRIMARY KEY (organization_id, name)
);
CREATE TRIGGER issued_documents_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON issued_documents
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""
LINE_KINDS = """
ALTER TABLE invoice_lines DROP CONSTRAINT ck_invoice_lines_kind_known;
ALTER TABLE invoice_lines ADD CONSTRAINT ck_invoice_lines_kind_known CHECK (kind IN (
    'usage', 'late_usage', 'allowance', 'graduated', 'volume', 'commitment', 'adjustment',
    'credit'{more})){valid};
"""


def upgrade() -> None:
    op.execute(DOCUMENTS)
    op.execute(LINE_KINDS.format(more=", 'rounding'", valid=""))


def downgrade() -> None:
    # Lines of rounding that were written stay.
    op.execute(LINE_KINDS.format(more="", valid=" NOT VALID"))
    op.execute("DROP TABLE issued_documents")
