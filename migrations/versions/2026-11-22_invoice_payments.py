"""Payment status of Stripe's invoices, and alerts on payments."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

WHEN = sa.DateTime(timezone=True)
PAYMENT_STATE = """
CASE WHEN paid_at IS NOT NULL THEN 'paid' WHEN voided_at IS NOT NULL THEN 'void'
     WHEN uncollectible_at IS NOT NULL THEN 'uncollectible' WHEN payment_failed_at IS NOT NULL THEN 'failed'
     WHEN overdue_at IS NOT NULL THEN 'overdue' ELSE 'open' END
"""


def upgrade() -> None:
    for name in ("voided_at", "uncollectible_at", "overdue_at"):
        op.add_column("stripe_invoices", sa.Column(name, WHEN, nullable=True))
    for name in ("stripe_number", "hosted_url"):
        op.add_column("stripe_invoices", sa.Column(name, sa.Text(), nullable=True))
    state = sa.Column("payment_state", sa.Text(), sa.Computed(PAYMENT_STATE, persisted=True), nullable=False)
    op.add_column("stripe_invoices", state)
    op.create_index(
        "ix_stripe_invoices_unpaid",
        "stripe_invoices",
        ["period_start"],
        postgresql_where=sa.text("payment_state IN ('failed', 'overdue', 'uncollectible')"),
    )
    op.add_column("alerts", sa.Column("stripe_invoice_id", sa.Text(), nullable=True))
    op.add_column("alerts", sa.Column("invoice_event", sa.Text(), nullable=True))
    op.add_column("alerts", sa.Column("invoice", postgresql.JSONB(), nullable=True))
    op.create_check_constraint(
        op.f("ck_alerts_of_an_invoice_whole"), "alerts", "num_nulls(stripe_invoice_id, invoice_event, invoice) IN (0, 3)"
    )
    op.create_check_constraint(op.f("ck_alerts_of_one_thing"), "alerts", "num_nulls(quota_id, stripe_invoice_id) > 0")
    op.create_check_constraint(
        op.f("ck_alerts_invoice_event_known"), "alerts", "invoice_event IN ('invoice_payment_failed', 'invoice_paid')"
    )
    op.create_index("uq_alerts_once_per_invoice", "alerts", ["stripe_invoice_id", "invoice_event"], unique=True)


def downgrade() -> None:
    """Delete alerts on payments, as the revision that created the tables deletes all alerts."""
    op.execute("ALTER TABLE alerts DISABLE TRIGGER alerts_append_only")
    op.execute("DELETE FROM alert_deliveries d USING alerts a WHERE a.id = d.alert_id AND a.stripe_invoice_id IS NOT NULL")
    op.execute("DELETE FROM alerts WHERE stripe_invoice_id IS NOT NULL")
    op.execute("ALTER TABLE alerts ENABLE TRIGGER alerts_append_only")
    op.drop_index("uq_alerts_once_per_invoice", table_name="alerts")
    for name in ("invoice_event_known", "of_one_thing", "of_an_invoice_whole"):
        op.drop_constraint(op.f(f"ck_alerts_{name}"), "alerts")
    for name in ("invoice", "invoice_event", "stripe_invoice_id"):
        op.drop_column("alerts", name)
    op.drop_index("ix_stripe_invoices_unpaid", table_name="stripe_invoices")
    for name in ("payment_state", "hosted_url", "stripe_number", "overdue_at", "uncollectible_at", "voided_at"):
        op.drop_column("stripe_invoices", name)
