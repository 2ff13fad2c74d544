"""Indexes of the limits that lists show, beside those of a million end users.

Those set one by one are found by the organization, project or key within which they count; removed
ones by their end user, whose alerts they have.
"""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE INDEX ix_quotas_listed ON quotas (coalesce(within_id, subject_id))
    WHERE selector_id IS NULL AND subject <> 'end_user' AND deleted_at IS NULL;
CREATE INDEX ix_quotas_removed ON quotas (subject_id)
    WHERE within_id IS NOT NULL AND deleted_at IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("DROP INDEX ix_quotas_removed, ix_quotas_listed")
