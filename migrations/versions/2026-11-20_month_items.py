"""Invoice items at Stripe that bring its invoice of a closed month to the total of ours."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
TIME = sa.DateTime(timezone=True)

# The amount due never changes; the settlement is written once.
SETTLED_ONCE = """
CREATE FUNCTION stripe_month_settled_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - '{invoiced_minor,late_minor,settled_at}'::text[]
        IS DISTINCT FROM to_jsonb(OLD) - '{invoiced_minor,late_minor,settled_at}'::text[] OR OLD.settled_at IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_month_settlements: what is owed never changes, and is settled once'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
# An item never changes, except that its Stripe ids are written once.
KEEPS_AMOUNT = """
CREATE FUNCTION stripe_month_item_keeps_amount() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - '{stripe_id,invoice_stripe_id}'::text[]
        IS DISTINCT FROM to_jsonb(OLD) - '{stripe_id,invoice_stripe_id}'::text[]
        OR OLD.stripe_id IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_month_items: an item never changes, and is created once' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
GUARDS = {"stripe_month_settlements": "stripe_month_settled_once", "stripe_month_items": "stripe_month_item_keeps_amount"}


def upgrade() -> None:
    op.create_table(
        "stripe_month_settlements",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("due_picos", sa.Numeric(38, 0), nullable=False),
        sa.Column("carried_in_picos", sa.Numeric(38, 0), nullable=False),
        sa.Column("due_minor", sa.BigInteger(), nullable=False),
        sa.Column("invoiced_minor", sa.BigInteger(), nullable=True),
        sa.Column("late_minor", sa.BigInteger(), nullable=True),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.Column("settled_at", TIME, nullable=True),
        sa.CheckConstraint(
            "num_nulls(invoiced_minor, late_minor, settled_at) IN (0, 3)", name=op.f("ck_stripe_month_settlements_settled_whole")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id", "month"],
            ["billing_months.organization_id", "billing_months.month"],
            name=op.f("fk_stripe_month_settlements_organization_id_month_billing_months"),
        ),
        sa.PrimaryKeyConstraint("organization_id", "month", name=op.f("pk_stripe_month_settlements")),
    )
    op.create_table(
        "stripe_month_items",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("stripe_id", sa.Text(), nullable=True),
        sa.Column("invoice_stripe_id", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint("amount_minor <> 0", name=op.f("ck_stripe_month_items_of_something")),
        sa.ForeignKeyConstraint(
            ["organization_id", "month"],
            ["stripe_month_settlements.organization_id", "stripe_month_settlements.month"],
            name=op.f("fk_stripe_month_items_organization_id_month_stripe_month_settlements"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_month_items")),
        sa.UniqueConstraint(
            "organization_id", "month", "position", name=op.f("uq_stripe_month_items_organization_id_month_position")
        ),
    )
    op.add_column("export_progress", sa.Column("month_items_since", TIME, server_default=NOW, nullable=False))
    op.add_column("stripe_invoices", sa.Column("total_minor", sa.BigInteger(), nullable=True))
    for function in (SETTLED_ONCE, KEEPS_AMOUNT):
        op.execute(function)
    for table, function in GUARDS.items():
        op.execute(f"CREATE TRIGGER {table}_guarded BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()")
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


def downgrade() -> None:
    """Refuse if any month was reconciled: the previous schema cannot store amounts due.

    After another upgrade, those months would count as older ones and would never be reconciled.
    """
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM stripe_month_settlements) THEN
                RAISE EXCEPTION 'there are invoice items or amounts due of closed months, which a downgrade would lose';
            END IF;
        END $$
    """)
    op.drop_column("stripe_invoices", "total_minor")
    op.drop_column("export_progress", "month_items_since")
    op.drop_table("stripe_month_items")
    op.drop_table("stripe_month_settlements")
    for function in GUARDS.values():
        op.execute(f"DROP FUNCTION {function}")
