"""Receipts: a chain per project, a hash per usage event, signatures and their public keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

APPEND_ONLY_TABLES = ("receipt_keys", "receipt_batches")
EVENT_COLUMNS = (
    ("receipt_sequence", sa.BigInteger()),
    ("previous_receipt_hash", sa.LargeBinary()),
    ("receipt_hash", sa.LargeBinary()),
    ("receipt_batch_id", sa.BigInteger()),
)
COMPLETE = "num_nulls(receipt_sequence, previous_receipt_hash, receipt_hash) IN (0, 3) AND receipt_sequence > 0"
CREATE_CHAIN = """
CREATE FUNCTION create_receipt_chain() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO receipt_chains (project_id) VALUES (NEW.id);
    RETURN NULL;
END $$
"""
# A chain never goes back, and no two receipts have the same position, even if the code has a bug.
GOES_BACK = (
    "NEW.project_id <> OLD.project_id OR NEW.last_sequence < OLD.last_sequence OR NEW.last_settled_at < OLD.last_settled_at "
    "OR (NEW.last_sequence = OLD.last_sequence) <> (NEW.last_hash = OLD.last_hash)"
)
REFUSE_GOING_BACK = """
CREATE FUNCTION refuse_chain_going_back() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the receipts of project % go forward only', OLD.project_id USING ERRCODE = 'restrict_violation';
END $$
"""


def upgrade() -> None:
    op.create_table(
        "receipt_chains",
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_hash", sa.LargeBinary(), server_default=sa.text("decode(repeat('00', 32), 'hex')"), nullable=False),
        sa.Column(
            "last_settled_at", sa.DateTime(timezone=True), server_default=sa.text("'1970-01-01 00:00:00+00'"), nullable=False
        ),
        sa.CheckConstraint("last_sequence >= 0", name=op.f("ck_receipt_chains_sequence_not_negative")),
        sa.CheckConstraint("octet_length(last_hash) = 32", name=op.f("ck_receipt_chains_hash_size")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_receipt_chains_project_id_projects")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_receipt_chains")),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "receipt_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("octet_length(public_key) = 32", name=op.f("ck_receipt_keys_public_key_size")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipt_keys")),
    )
    op.create_table(
        "receipt_batches",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("hashes", sa.LargeBinary(), nullable=False),
        sa.Column("signature", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint(
            "octet_length(hashes) > 0 AND octet_length(hashes) % 32 = 0", name=op.f("ck_receipt_batches_hashes_size")
        ),
        sa.CheckConstraint("octet_length(signature) = 64", name=op.f("ck_receipt_batches_signature_size")),
        sa.ForeignKeyConstraint(["key_id"], ["receipt_keys.id"], name=op.f("fk_receipt_batches_key_id_receipt_keys")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipt_batches")),
    )
    for name, kind in EVENT_COLUMNS:
        op.add_column("usage_events", sa.Column(name, kind, nullable=True))
    op.create_check_constraint(op.f("ck_usage_events_receipt_complete"), "usage_events", COMPLETE)
    op.execute("SELECT guard_usage_events()")
    op.execute("INSERT INTO receipt_chains (project_id) SELECT id FROM projects")
    create_triggers()


def create_triggers() -> None:
    for table in APPEND_ONLY_TABLES:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    op.execute(CREATE_CHAIN)
    op.execute(
        "CREATE TRIGGER projects_have_receipt_chains AFTER INSERT ON projects FOR EACH ROW EXECUTE FUNCTION create_receipt_chain()"
    )
    op.execute(REFUSE_GOING_BACK)
    op.execute(
        f"CREATE TRIGGER receipt_chains_go_forward BEFORE UPDATE ON receipt_chains FOR EACH ROW WHEN ({GOES_BACK}) "
        "EXECUTE FUNCTION refuse_chain_going_back()"
    )
    op.execute(
        "CREATE TRIGGER receipt_chains_kept BEFORE DELETE OR TRUNCATE ON receipt_chains "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER projects_have_receipt_chains ON projects")
    op.drop_constraint(op.f("ck_usage_events_receipt_complete"), "usage_events", type_="check")
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")  # lists every column
    for name, _ in reversed(EVENT_COLUMNS):
        op.drop_column("usage_events", name)
    op.execute("SELECT guard_usage_events()")
    for table in ("receipt_batches", "receipt_keys", "receipt_chains"):
        op.drop_table(table)
    for function in ("create_receipt_chain()", "refuse_chain_going_back()"):
        op.execute(f"DROP FUNCTION {function}")
