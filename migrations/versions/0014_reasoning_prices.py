"""Prices of reasoning tokens, the reasoning tokens billed at them, and those known of a hold."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Not validated here: reading the rows would hold the lock. Revision 0015 does it.
KINDS = """
ALTER TABLE {table} DROP CONSTRAINT ck_{table}_token_kind_known;
ALTER TABLE {table} ADD CONSTRAINT ck_{table}_token_kind_known
    CHECK ({null}token_kind IN ('input', 'cached_input', 'output', 'embedding'{more})) NOT VALID;
"""
TABLES = {"ledger_entries": "token_kind IS NULL OR ", "meter_batches": ""}


def upgrade() -> None:
    op.execute("""
        ALTER TABLE price_versions
            ADD COLUMN reasoning_picos_per_token bigint,
            ADD CONSTRAINT ck_price_versions_reasoning_not_negative
                CHECK (reasoning_picos_per_token >= 0)
    """)
    op.execute("ALTER TABLE holds ADD COLUMN reasoning_token_count bigint DEFAULT 0 NOT NULL")
    op.execute(
        "ALTER TABLE usage_events ADD COLUMN billed_reasoning_token_count bigint DEFAULT 0 NOT NULL"
    )
    op.execute("SELECT guard_usage_events()")  # no rating may change the new column
    for table, null in TABLES.items():
        op.execute(KINDS.format(table=table, null=null, more=", 'reasoning'"))


def downgrade() -> None:
    for table, null in TABLES.items():
        op.execute(KINDS.format(table=table, null=null, more=""))
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")  # it reads the column
    op.execute("ALTER TABLE usage_events DROP COLUMN billed_reasoning_token_count")
    op.execute("SELECT guard_usage_events()")
    op.execute("ALTER TABLE holds DROP COLUMN reasoning_token_count")
    op.execute("ALTER TABLE price_versions DROP COLUMN reasoning_picos_per_token")
