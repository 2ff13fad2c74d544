"""Alerts at shares of limits: stored once each, and sent to a webhook of the organization."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

USUALLY_ALERTING = "('tokens_per_day', 'tokens_per_month', 'cost_picos_per_day', 'cost_picos_per_month')"
WHEN = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("quotas", sa.Column("alert_at", postgresql.ARRAY(sa.BigInteger()), server_default="{}", nullable=False))
    op.add_column("quotas", sa.Column("changed_at", WHEN, server_default=sa.text("now()"), nullable=False))
    op.create_check_constraint(
        op.f("ck_quotas_alert_at_sane"), "quotas", "array_position(alert_at, NULL) IS NULL AND 0 < ALL (alert_at)"
    )
    op.execute(f"UPDATE quotas SET alert_at = '{{50,80,100}}' WHERE dimension IN {USUALLY_ALERTING} AND deleted_at IS NULL")
    op.execute(
        "CREATE FUNCTION quotas_tell_when() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "NEW.changed_at := now(); RETURN NEW; END $$"
    )
    op.execute(
        "CREATE TRIGGER quotas_tell_when BEFORE UPDATE ON quotas FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) "
        "EXECUTE FUNCTION quotas_tell_when()"
    )
    create_alerts()
    create_webhooks()


def create_alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("quota_id", sa.Uuid(), nullable=True),
        sa.Column("window_start", WHEN, nullable=True),
        sa.Column("threshold", sa.BigInteger(), nullable=True),
        sa.Column("limit_value", sa.BigInteger(), nullable=True),
        sa.Column("used", sa.BigInteger(), nullable=True),
        sa.Column("fired_at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "num_nulls(quota_id, window_start, threshold, limit_value, used) IN (0, 5)", name=op.f("ck_alerts_of_a_quota_or_a_test")
        ),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name=op.f("fk_alerts_organization_id_organizations")),
        sa.ForeignKeyConstraint(["quota_id"], ["quotas.id"], name=op.f("fk_alerts_quota_id_quotas")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index("uq_alerts_once", "alerts", ["quota_id", "window_start", "threshold", "limit_value"], unique=True)
    op.create_index("ix_alerts_organization_id_fired_at_id", "alerts", ["organization_id", "fired_at", "id"])
    op.create_index("ix_alerts_fired_at_id", "alerts", ["fired_at", "id"])
    op.execute(
        "CREATE TRIGGER alerts_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON alerts "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )


def create_webhooks() -> None:
    op.create_table(
        "alert_webhooks",
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.Column("failure_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rests_until", WHEN, nullable=True),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_alert_webhooks_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_alert_webhooks")),
    )
    op.create_table(
        "alert_deliveries",
        sa.Column("alert_id", sa.Uuid(), nullable=False),
        sa.Column("organization_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("attempt_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.Column("attempted_at", WHEN, nullable=True),
        sa.Column("ended_at", WHEN, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'failed')", name=op.f("ck_alert_deliveries_state_known")),
        sa.CheckConstraint("(state = 'pending') = (ended_at IS NULL)", name=op.f("ck_alert_deliveries_ended_once")),
        sa.ForeignKeyConstraint(["alert_id"], ["alerts.id"], name=op.f("fk_alert_deliveries_alert_id_alerts")),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name=op.f("fk_alert_deliveries_organization_id_organizations")
        ),
        sa.PrimaryKeyConstraint("alert_id", name=op.f("pk_alert_deliveries")),
    )
    op.create_index(
        "ix_alert_deliveries_pending",
        "alert_deliveries",
        ["organization_id", "created_at"],
        postgresql_where=sa.text("state = 'pending'"),
    )


def downgrade() -> None:
    """Delete all alerts; limits stay."""
    op.drop_table("alert_deliveries")
    op.drop_table("alert_webhooks")
    op.drop_table("alerts")
    op.execute("DROP TRIGGER quotas_tell_when ON quotas")
    op.execute("DROP FUNCTION quotas_tell_when()")
    op.drop_constraint(op.f("ck_quotas_alert_at_sane"), "quotas")
    op.drop_column("quotas", "changed_at")
    op.drop_column("quotas", "alert_at")
