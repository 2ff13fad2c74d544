"""Embedded tokens as a separate kind of usage; a flag for holds of embedding requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

KINDS = "token_kind IN ('input', 'cached_input', 'output', 'embedding')"
OLD_KINDS = "token_kind IN ('input', 'cached_input', 'output')"
NOTHING_EMBEDDED = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM holds WHERE embedding) OR EXISTS (SELECT FROM usage_events WHERE embedding_token_count > 0) THEN
        RAISE EXCEPTION 'there is usage of embeddings, which the previous schema cannot store' USING ERRCODE = 'restrict_violation';
    END IF;
END $$
"""


def know_kinds(condition: str, *, unread: bool) -> None:
    names = op.f("ck_ledger_entries_token_kind_known"), op.f("ck_meter_batches_token_kind_known")
    op.drop_constraint(names[0], "ledger_entries", type_="check")
    op.create_check_constraint(names[0], "ledger_entries", f"token_kind IS NULL OR {condition}", postgresql_not_valid=unread)
    op.drop_constraint(names[1], "meter_batches", type_="check")
    op.create_check_constraint(names[1], "meter_batches", condition, postgresql_not_valid=unread)


def upgrade() -> None:
    """Add the checks as NOT VALID: reading all rows under this lock would block all requests.

    Revision 0022 validates them with a weaker lock.
    """
    op.add_column("holds", sa.Column("embedding", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_check_constraint(
        op.f("ck_holds_embedding_has_no_output"),
        "holds",
        "NOT embedding OR leased_token_count + cached_input_token_count = 0",
        postgresql_not_valid=True,
    )
    op.add_column("usage_events", sa.Column("embedding_token_count", sa.BigInteger(), server_default="0", nullable=False))
    op.create_check_constraint(
        op.f("ck_usage_events_embedding_alone"),
        "usage_events",
        "embedding_token_count = 0 OR embedding_token_count > 0 AND input_token_count + generated_token_count = 0",
        postgresql_not_valid=True,
    )
    op.execute("SELECT guard_usage_events()")
    know_kinds(KINDS, unread=True)


def downgrade() -> None:
    """Refuse if there is usage of embeddings."""
    op.execute(NOTHING_EMBEDDED)
    know_kinds(OLD_KINDS, unread=False)
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")
    op.drop_constraint(op.f("ck_usage_events_embedding_alone"), "usage_events", type_="check")
    op.drop_column("usage_events", "embedding_token_count")
    op.execute("SELECT guard_usage_events()")
    op.drop_constraint(op.f("ck_holds_embedding_has_no_output"), "holds", type_="check")
    op.drop_column("holds", "embedding")
