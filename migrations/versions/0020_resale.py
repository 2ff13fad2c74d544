"""Resale: price lists of customers for their end users, and statements of end users."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

PRICES = """
-- An empty model is for all models without a version of their own. A null price means the markup.
CREATE TABLE resale_prices (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_resale_prices PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_resale_prices_organization_id_organizations REFERENCES organizations (id),
    model text NOT NULL,
    markup_milli bigint NOT NULL,
    input_picos_per_token bigint,
    cached_input_picos_per_token bigint,
    output_picos_per_token bigint,
    reasoning_picos_per_token bigint,
    embedding_picos_per_token bigint,
    request_picos bigint NOT NULL,
    withdrawn boolean DEFAULT false NOT NULL,
    effective_at timestamptz NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT uq_resale_prices_effective_at UNIQUE (organization_id, model, effective_at),
    CONSTRAINT ck_resale_prices_not_negative CHECK (least(
        markup_milli, request_picos, input_picos_per_token, cached_input_picos_per_token,
        output_picos_per_token, reasoning_picos_per_token, embedding_picos_per_token) >= 0)
);
CREATE TRIGGER resale_prices_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON resale_prices
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""
# The name of an end user stands in `usage_subjects` only, where it never changes but is erased.
STATEMENTS = """
CREATE TABLE resale_statements (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_resale_statements PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_resale_statements_organization_id_organizations
        REFERENCES organizations (id),
    month date NOT NULL,
    end_user_id uuid
        CONSTRAINT fk_resale_statements_end_user_id_usage_subjects REFERENCES usage_subjects (id),
    cost_picos numeric(38, 0) NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    carried_in_picos numeric(38, 0) NOT NULL,
    total_rounded_picos numeric(38, 0) NOT NULL,
    CONSTRAINT uq_resale_statements_month
        UNIQUE NULLS NOT DISTINCT (organization_id, end_user_id, month)
);
CREATE INDEX ix_resale_statements_month ON resale_statements (organization_id, month);
CREATE TRIGGER resale_statements_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON resale_statements
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE resale_statement_lines (
    statement_id bigint
        CONSTRAINT fk_resale_statement_lines_statement_id_resale_statements
        REFERENCES resale_statements (id),
    position integer,
    usage_month date NOT NULL,
    model text NOT NULL,
    item text NOT NULL,
    resale_price_id bigint
        CONSTRAINT fk_resale_statement_lines_resale_price_id_resale_prices
        REFERENCES resale_prices (id),
    quantity numeric(38, 0) NOT NULL,
    cost_picos numeric(38, 0) NOT NULL,
    amount_picos numeric(38, 0) NOT NULL,
    CONSTRAINT pk_resale_statement_lines PRIMARY KEY (statement_id, position)
);
CREATE TRIGGER resale_statement_lines_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON resale_statement_lines
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    op.execute(PRICES)
    op.execute(STATEMENTS)


def downgrade() -> None:
    op.execute("DROP TABLE resale_statement_lines, resale_statements, resale_prices")
