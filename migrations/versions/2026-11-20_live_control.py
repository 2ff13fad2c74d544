"""Live control: replaced secrets, ids of administrative calls, stop orders, reports of requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NOW = sa.text("now()")


def upgrade() -> None:
    op.create_table(
        "superseded_secrets",
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("superseded_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("octet_length(secret_hash) = 32", name=op.f("ck_superseded_secrets_secret_hash_size")),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_superseded_secrets_api_key_id_api_keys")),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f("pk_superseded_secrets")),
    )
    op.create_index("ix_superseded_secrets_api_key_id", "superseded_secrets", ["api_key_id"])
    op.create_table(
        "admin_requests",
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("payload_hash", sa.LargeBinary(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.CheckConstraint("octet_length(payload_hash) = 32", name=op.f("ck_admin_requests_payload_hash_size")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_admin_requests")),
    )
    op.create_index("ix_admin_requests_created_at", "admin_requests", ["created_at"])
    op.create_table(
        "stop_orders",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=True),
        sa.Column("project_id", sa.Uuid(), nullable=True),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("ordered_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("(request_id IS NULL) <> (api_key_id IS NULL)", name=op.f("ck_stop_orders_one_target")),
        sa.CheckConstraint("(request_id IS NULL) = (project_id IS NULL)", name=op.f("ck_stop_orders_request_of_project")),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_stop_orders_api_key_id_api_keys")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_stop_orders_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stop_orders")),
    )
    op.create_index("ix_stop_orders_ordered_at", "stop_orders", ["ordered_at"])
    op.create_table(
        "live_reports",
        sa.Column("owner_id", sa.Uuid(), nullable=False),
        sa.Column("owner_name", sa.Text(), nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("requests", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("owner_id", name=op.f("pk_live_reports")),
        prefixes=["UNLOGGED"],
    )


def downgrade() -> None:
    op.drop_table("live_reports")
    op.drop_index("ix_stop_orders_ordered_at", table_name="stop_orders")
    op.drop_table("stop_orders")
    op.drop_index("ix_admin_requests_created_at", table_name="admin_requests")
    op.drop_table("admin_requests")
    op.drop_index("ix_superseded_secrets_api_key_id", table_name="superseded_secrets")
    op.drop_table("superseded_secrets")
