"""Usage export: batches of tokens for a biller, export progress, and Stripe's state of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

NOW = sa.text("now()")
TIME = sa.DateTime(timezone=True)

# Tokens are written once; a state only advances, and never leaves `cancelled`.
BATCH_KEEPS_TOKENS = """
CREATE FUNCTION meter_batch_keeps_tokens() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.organization_id, NEW.price_version_id, NEW.token_kind, NEW.hour, NEW.part, NEW.token_count, NEW.created_at)
        IS DISTINCT FROM
       (OLD.id, OLD.organization_id, OLD.price_version_id, OLD.token_kind, OLD.hour, OLD.part, OLD.token_count, OLD.created_at)
    THEN
        RAISE EXCEPTION 'meter_batches: tokens never change: write another part' USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.state <> NEW.state AND (OLD.state, NEW.state) NOT IN (
        ('pending', 'sent'), ('pending', 'rejected'),
        ('sent', 'pending'), ('sent', 'delivered'), ('sent', 'rejected'), ('sent', 'parked'),
        ('delivered', 'rejected'), ('delivered', 'cancelling'), ('cancelling', 'delivered'), ('cancelling', 'cancelled'),
        ('cancelling', 'parked'),
        ('rejected', 'cancelled'), ('parked', 'delivered'), ('parked', 'rejected'), ('parked', 'cancelled'))
    THEN
        RAISE EXCEPTION 'meter batch %: from % to % is no way', OLD.id, OLD.state, NEW.state USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
# An event is never changed; its outcome is stored in other columns.
EVENT_KEEPS_PAYLOAD = """
CREATE FUNCTION stripe_event_keeps_payload() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.type, NEW.payload, NEW.received_at) IS DISTINCT FROM (OLD.id, OLD.type, OLD.payload, OLD.received_at)
        OR OLD.handled_at IS NOT NULL
    THEN
        RAISE EXCEPTION 'stripe_events: an event never changes, and is handled once' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""
GUARDED = {"meter_batches": "meter_batch_keeps_tokens", "stripe_events": "stripe_event_keeps_payload"}


def create_batches() -> None:
    op.create_table(
        "meter_batches",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("price_version_id", sa.BigInteger(), nullable=False),
        sa.Column("token_kind", sa.Text(), nullable=False),
        sa.Column("hour", TIME, nullable=False),
        sa.Column("part", sa.SmallInteger(), nullable=False),
        sa.Column("token_count", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("attempt_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", TIME, server_default=NOW, nullable=False),
        sa.Column("sent_at", TIME, nullable=True),
        sa.Column("delivered_at", TIME, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint("token_kind IN ('input', 'cached_input', 'output')", name=op.f("ck_meter_batches_token_kind_known")),
        sa.CheckConstraint(
            "state IN ('pending', 'sent', 'delivered', 'rejected', 'parked', 'cancelling', 'cancelled')",
            name=op.f("ck_meter_batches_state_known"),
        ),
        sa.CheckConstraint("token_count > 0", name=op.f("ck_meter_batches_tokens_positive")),
        sa.CheckConstraint("part >= 0", name=op.f("ck_meter_batches_part_not_negative")),
        sa.CheckConstraint("hour = date_trunc('hour', hour, 'UTC')", name=op.f("ck_meter_batches_whole_hour")),
        sa.CheckConstraint("(state = 'delivered') <= (delivered_at IS NOT NULL)", name=op.f("ck_meter_batches_delivered_when")),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_meter_batches_organization_id_organizations")
        ),
        sa.ForeignKeyConstraint(
            ["price_version_id"], ["price_versions.id"], name=op.f("fk_meter_batches_price_version_id_price_versions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_meter_batches")),
        sa.UniqueConstraint(
            "organization_id",
            "price_version_id",
            "token_kind",
            "hour",
            "part",
            name=op.f("uq_meter_batches_organization_id_price_version_id_token_kind_hour_part"),
        ),
    )
    waiting = sa.text("state IN ('pending', 'sent')")
    op.create_index("ix_meter_batches_waiting", "meter_batches", ["next_attempt_at"], postgresql_where=waiting)


def create_progress() -> None:
    op.create_table(
        "export_progress",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("closed_until", TIME, nullable=False),
        sa.Column("scanned_until", TIME, nullable=False),
        sa.Column("failure_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("paused_until", TIME, nullable=True),
        sa.Column("pause_reason", sa.Text(), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_export_progress_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export_progress")),
    )


def create_stripe_tables() -> None:
    op.create_table(
        "stripe_objects",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("stripe_id", sa.Text(), nullable=False),
        sa.Column("seen_at", TIME, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("account", "kind", "ref", name=op.f("pk_stripe_objects")),
    )
    op.create_table(
        "stripe_events",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("received_at", TIME, server_default=NOW, nullable=False),
        sa.Column("attempt_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("handled_at", TIME, nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_events")),
    )
    unhandled = sa.text("handled_at IS NULL")
    op.create_index("ix_stripe_events_unhandled", "stripe_events", ["received_at"], postgresql_where=unhandled)
    op.create_table(
        "stripe_invoices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=True),
        sa.Column("customer_id", sa.Text(), nullable=False),
        sa.Column("currency_code", sa.Text(), nullable=False),
        sa.Column("period_start", TIME, nullable=False),
        sa.Column("period_end", TIME, nullable=False),
        sa.Column("amount_due_minor", sa.BigInteger(), nullable=False),
        sa.Column("amount_paid_minor", sa.BigInteger(), nullable=False),
        sa.Column("finalized_at", TIME, nullable=True),
        sa.Column("paid_at", TIME, nullable=True),
        sa.Column("payment_failed_at", TIME, nullable=True),
        sa.Column("told_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_stripe_invoices_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_invoices")),
    )
    op.create_index("ix_stripe_invoices_organization_id", "stripe_invoices", ["organization_id"])


def upgrade() -> None:
    create_batches()
    create_progress()
    create_stripe_tables()
    for statement in (BATCH_KEEPS_TOKENS, EVENT_KEEPS_PAYLOAD):
        op.execute(statement)
    for table, function in GUARDED.items():
        op.execute(f"CREATE TRIGGER {table}_guarded BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()")
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    # Late usage is found by rating time among all events: a BRIN index costs the hot table little.
    op.create_index(
        "ix_usage_events_rated_at", "usage_events", ["rated_at"], postgresql_using="brin", postgresql_with={"autosummarize": "true"}
    )


def downgrade() -> None:
    op.drop_index("ix_usage_events_rated_at", table_name="usage_events")
    op.drop_index("ix_stripe_invoices_organization_id", table_name="stripe_invoices")
    op.drop_table("stripe_invoices")
    op.drop_index("ix_stripe_events_unhandled", table_name="stripe_events")
    op.drop_table("stripe_events")
    op.drop_table("stripe_objects")
    op.drop_table("export_progress")
    op.drop_index("ix_meter_batches_waiting", table_name="meter_batches")
    op.drop_table("meter_batches")
    for function in GUARDED.values():
        op.execute(f"DROP FUNCTION {function}()")
