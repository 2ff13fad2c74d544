"""Let roles that own no tables create the partitions of usage events.

`create_usage_partitions` runs with the rights of its owner. It takes only a number of months, and
resolves all names in `public`, where the application role cannot create objects.
"""

from __future__ import annotations

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER FUNCTION create_usage_partitions(int) SECURITY DEFINER SET search_path = public, pg_temp")
    op.execute("REVOKE EXECUTE ON FUNCTION create_usage_partitions(int), create_usage_partition(date) FROM PUBLIC")


def downgrade() -> None:
    op.execute("GRANT EXECUTE ON FUNCTION create_usage_partitions(int), create_usage_partition(date) TO PUBLIC")
    op.execute("ALTER FUNCTION create_usage_partitions(int) SECURITY INVOKER RESET search_path")
