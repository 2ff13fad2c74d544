"""Log of changes of quotas, keys and prices, which invalidates cached ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Table, event, subject of the rows; NULL: all subjects. New keys are in no cache.
TOLD = (
    ("quotas", "insert", "subject_id"),
    ("quotas", "update", "subject_id"),
    ("quotas", "delete", "subject_id"),
    ("api_keys", "update", "id"),
    ("price_versions", "insert", "NULL::uuid"),
)


def upgrade() -> None:
    op.create_table(
        "rule_changes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("transaction_id", sa.BigInteger(), server_default=sa.text("pg_current_xact_id()::text::bigint"), nullable=False),
        sa.Column("subject_id", sa.Uuid(), nullable=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rule_changes")),
    )
    op.create_index("ix_rule_changes_transaction_id", "rule_changes", ["transaction_id"])
    for table, event, subject in TOLD:
        name = f"{table}_{event}_told"
        op.execute(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"INSERT INTO rule_changes (subject_id) SELECT DISTINCT {subject} FROM changed; RETURN NULL; END $$"
        )
        rows = "OLD" if event == "delete" else "NEW"
        op.execute(
            f"CREATE TRIGGER {name} AFTER {event} ON {table} REFERENCING {rows} TABLE AS changed "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
        )


def downgrade() -> None:
    for table, event, _ in TOLD:
        op.execute(f"DROP TRIGGER {table}_{event}_told ON {table}")
        op.execute(f"DROP FUNCTION {table}_{event}_told()")
    op.drop_table("rule_changes")
