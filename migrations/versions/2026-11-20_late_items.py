"""Invoice items for usage that was exported to Stripe after the invoice of its period."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
TIME = sa.DateTime(timezone=True)

# An item never changes, except that its Stripe id is written once.
KEEPS_AMOUNT = """
CREATE FUNCTION stripe_late_item_keeps_amount() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW) - 'stripe_id' IS DISTINCT FROM to_jsonb(OLD) - 'stripe_id' OR OLD.stripe_id IS NOT NULL THEN
        RAISE EXCEPTION 'stripe_late_items: an item never changes, and is created once' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
# A batch is invoiced by one item, permanently.
INVOICED_ONCE = """
CREATE FUNCTION meter_batch_invoiced_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'meter batch %: is invoiced by item % already', OLD.id, OLD.late_item_id USING ERRCODE = 'restrict_violation';
END $$
"""


def upgrade() -> None:
    op.create_table(
        "stripe_late_items",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("period_start", TIME, nullable=False),
        sa.Column("period_end", TIME, nullable=False),
        sa.Column("token_count", sa.BigInteger(), nullable=False),
        sa.Column("exact_picos", sa.Numeric(38, 0), nullable=False),
        sa.Column("carried_in_picos", sa.Numeric(38, 0), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("stripe_id", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "token_count > 0 AND exact_picos >= 0 AND amount_minor >= 0", name=op.f("ck_stripe_late_items_not_negative")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_stripe_late_items_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_late_items")),
        sa.UniqueConstraint("number", name=op.f("uq_stripe_late_items_number")),
    )
    op.create_index("ix_stripe_late_items_organization_id", "stripe_late_items", ["organization_id"])
    op.add_column("meter_batches", sa.Column("late_item_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(
        op.f("fk_meter_batches_late_item_id_stripe_late_items"), "meter_batches", "stripe_late_items", ["late_item_id"], ["id"]
    )
    op.add_column("export_progress", sa.Column("late_items_since", TIME, server_default=NOW, nullable=False))
    for function in (KEEPS_AMOUNT, INVOICED_ONCE):
        op.execute(function)
    op.execute(
        "CREATE TRIGGER stripe_late_items_guarded BEFORE UPDATE ON stripe_late_items "
        "FOR EACH ROW EXECUTE FUNCTION stripe_late_item_keeps_amount()"
    )
    op.execute(
        "CREATE TRIGGER stripe_late_items_append_only BEFORE DELETE OR TRUNCATE ON stripe_late_items "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )
    op.execute(
        "CREATE TRIGGER meter_batches_invoiced_once BEFORE UPDATE ON meter_batches FOR EACH ROW "
        "WHEN (OLD.late_item_id IS NOT NULL AND OLD.late_item_id IS DISTINCT FROM NEW.late_item_id) "
        "EXECUTE FUNCTION meter_batch_invoiced_once()"
    )


def downgrade() -> None:
    """Refuse if there are items: the previous schema cannot store them."""
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM stripe_late_items) THEN
                RAISE EXCEPTION 'there are invoice items for late usage, which a downgrade would lose';
            END IF;
        END $$
    """)
    op.execute("DROP TRIGGER meter_batches_invoiced_once ON meter_batches")
    op.drop_column("export_progress", "late_items_since")
    op.drop_column("meter_batches", "late_item_id")
    op.drop_table("stripe_late_items")
    for function in ("stripe_late_item_keeps_amount", "meter_batch_invoiced_once"):
        op.execute(f"DROP FUNCTION {function}")
