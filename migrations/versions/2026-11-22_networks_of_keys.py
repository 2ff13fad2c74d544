"""Allowed networks of an API key, and orders that tell every process of a changed key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; an empty list allows all networks. The previous release ignores orders."""
    op.add_column("api_keys", sa.Column("allowed_networks", sa.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False))
    op.create_check_constraint(op.f("ck_api_keys_allowed_networks_are"), "api_keys", "allowed_networks::cidr[] IS NOT NULL")
    op.add_column("stop_orders", sa.Column("changed_key_id", sa.Uuid(), nullable=True))
    op.add_column("stop_orders", sa.Column("allowed_networks", sa.ARRAY(sa.Text()), nullable=True))
    op.create_foreign_key(op.f("fk_stop_orders_changed_key_id_api_keys"), "stop_orders", "api_keys", ["changed_key_id"], ["id"])
    op.drop_constraint(op.f("ck_stop_orders_one_target"), "stop_orders")
    one = "num_nonnulls(request_id, api_key_id, changed_key_id) = 1"
    op.create_check_constraint(op.f("ck_stop_orders_one_target"), "stop_orders", one)
    both = "(changed_key_id IS NULL) = (allowed_networks IS NULL)"
    op.create_check_constraint(op.f("ck_stop_orders_networks_of_key"), "stop_orders", both)


def downgrade() -> None:
    """Refuse if an active key is limited, since it would become valid everywhere; delete orders."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM api_keys WHERE allowed_networks <> '{}' AND revoked_at IS NULL) THEN "
        "RAISE EXCEPTION 'keys are limited to networks, which the previous schema cannot store: revoke them first'; END IF; END $$"
    )
    op.execute("DELETE FROM stop_orders WHERE changed_key_id IS NOT NULL")
    op.drop_constraint(op.f("ck_stop_orders_networks_of_key"), "stop_orders")
    op.drop_constraint(op.f("ck_stop_orders_one_target"), "stop_orders")
    op.create_check_constraint(op.f("ck_stop_orders_one_target"), "stop_orders", "(request_id IS NULL) <> (api_key_id IS NULL)")
    op.drop_constraint(op.f("fk_stop_orders_changed_key_id_api_keys"), "stop_orders")
    op.drop_column("stop_orders", "allowed_networks")
    op.drop_column("stop_orders", "changed_key_id")
    op.drop_constraint(op.f("ck_api_keys_allowed_networks_are"), "api_keys")
    op.drop_column("api_keys", "allowed_networks")
