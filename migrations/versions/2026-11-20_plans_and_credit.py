"""Plans, prepaid credit, and organizations limited to their credit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
NOW = sa.text("now()")
APPEND_ONLY_TABLES = ("plan_versions", "plan_assignments", "credit_grants", "credit_applications")
DIMENSIONS = (
    "concurrent_requests",
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "cost_picos_per_day",
    "cost_picos_per_month",
)
# Locks the row of the grant first, so that concurrent applications see each other.
CREDIT_WITHIN_GRANT = """
CREATE FUNCTION credit_within_grant() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE granted record;
BEGIN
    SELECT * INTO granted FROM credit_grants WHERE id = NEW.grant_id FOR NO KEY UPDATE;
    IF (SELECT sum(amount_picos) FROM credit_applications WHERE grant_id = NEW.grant_id) > granted.amount_picos THEN
        RAISE EXCEPTION 'credit_applications: grant % has no % picos left', NEW.grant_id, NEW.amount_picos
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.billing_month NOT BETWEEN granted.first_month AND granted.last_month THEN
        RAISE EXCEPTION 'credit_applications: grant % is not for %', NEW.grant_id, NEW.billing_month
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$
"""


def whole(table: str, *columns: str, name: str = "whole_month", more: str = "") -> sa.CheckConstraint:
    """Return a check that a month column holds the first day of a month."""
    condition = " AND ".join(f"extract(day FROM {column}) = 1" for column in columns) + more
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def upgrade() -> None:
    """Create the tables and guards, and a kind of quota without a window."""
    op.create_table(
        "plan_versions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("rules", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name=op.f("ck_plan_versions_name_form")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan_versions")),
        sa.UniqueConstraint("name", "version", name=op.f("uq_plan_versions_name_version")),
    )
    op.create_table(
        "plan_assignments",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("first_month", sa.Date(), nullable=False),
        sa.Column("plan_version_id", sa.BigInteger(), nullable=True),
        sa.Column("assigned_by", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        whole("plan_assignments", "first_month"),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_plan_assignments_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(
            ["plan_version_id"], ["plan_versions.id"], name=op.f("fk_plan_assignments_plan_version_id_plan_versions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan_assignments")),
    )
    op.create_index("ix_plan_assignments_organization_id_first_month", "plan_assignments", ["organization_id", "first_month", "id"])
    create_credit()
    for table in APPEND_ONLY_TABLES:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    op.execute(CREDIT_WITHIN_GRANT)
    op.execute(
        "CREATE TRIGGER credit_applications_within_grant AFTER INSERT ON credit_applications "
        "FOR EACH ROW EXECUTE FUNCTION credit_within_grant()"
    )
    op.create_table(
        "prepaid_organizations",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("quota_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        whole("prepaid_organizations", "month"),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_prepaid_organizations_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(["quota_id"], ["quotas.id"], name=op.f("fk_prepaid_organizations_quota_id_quotas")),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_prepaid_organizations")),
        sa.UniqueConstraint("quota_id", name=op.f("uq_prepaid_organizations_quota_id")),
    )
    set_dimensions((*DIMENSIONS, "prepaid_credit_picos"))


def create_credit() -> None:
    """Create the tables of credit grants and of their applications."""
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("amount_picos", sa.BigInteger(), nullable=False),
        sa.Column("first_month", sa.Date(), nullable=False),
        sa.Column("last_month", sa.Date(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("granted_by", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint("amount_picos > 0", name=op.f("ck_credit_grants_more_than_nothing")),
        whole("credit_grants", "first_month", "last_month", name="whole_months", more=" AND first_month <= last_month"),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_credit_grants_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_grants")),
    )
    op.create_index("ix_credit_grants_organization_id", "credit_grants", ["organization_id"])
    op.create_table(
        "credit_applications",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grant_id", sa.Uuid(), nullable=False),
        sa.Column("billing_month", sa.Date(), nullable=False),
        sa.Column("amount_picos", sa.Numeric(38, 0), nullable=False),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint("amount_picos > 0", name=op.f("ck_credit_applications_more_than_nothing")),
        whole("credit_applications", "billing_month"),
        sa.ForeignKeyConstraint(["grant_id"], ["credit_grants.id"], name=op.f("fk_credit_applications_grant_id_credit_grants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_applications")),
        sa.UniqueConstraint("grant_id", "billing_month", name=op.f("uq_credit_applications_grant_id_billing_month")),
    )


def set_dimensions(dimensions: tuple[str, ...]) -> None:
    """Set the allowed dimensions of quotas."""
    op.drop_constraint(op.f("ck_quotas_dimension_known"), "quotas", type_="check")
    op.create_check_constraint(op.f("ck_quotas_dimension_known"), "quotas", f"dimension IN ({', '.join(map(repr, dimensions))})")


def downgrade() -> None:
    """Delete quotas of the new kind, and remove them from live holds."""
    op.drop_table("prepaid_organizations")
    op.drop_table("credit_applications")
    op.execute("DROP FUNCTION credit_within_grant")
    for table in ("credit_grants", "plan_assignments", "plan_versions"):
        op.drop_table(table)
    of_credit = "SELECT id FROM quotas WHERE dimension = 'prepaid_credit_picos'"
    op.execute(f"UPDATE holds SET quota_ids = ARRAY(SELECT unnest(quota_ids) EXCEPT {of_credit}) WHERE state = 'held'")
    op.execute(f"DELETE FROM quota_counters WHERE quota_id IN ({of_credit})")
    op.execute("DELETE FROM quotas WHERE dimension = 'prepaid_credit_picos'")
    set_dimensions(DIMENSIONS)
