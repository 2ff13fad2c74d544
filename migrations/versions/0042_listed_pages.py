"""Indexes in the order of lists, so that a page reads its own rows only.

Keys are listed by time over all projects; credit grants of one organization by their last month,
and adjustments by time. The last two replace indexes on the organization alone.
"""

from __future__ import annotations

from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE INDEX ix_api_keys_created_at ON api_keys (created_at, id);
CREATE INDEX ix_credit_grants_listed ON credit_grants (organization_id, last_month, id);
DROP INDEX ix_credit_grants_organization_id;
CREATE INDEX ix_adjustments_listed ON adjustments (organization_id, created_at, id);
DROP INDEX ix_adjustments_organization_id;
"""
DOWNGRADE = """
CREATE INDEX ix_adjustments_organization_id ON adjustments (organization_id);
DROP INDEX ix_adjustments_listed;
CREATE INDEX ix_credit_grants_organization_id ON credit_grants (organization_id);
DROP INDEX ix_credit_grants_listed, ix_api_keys_created_at;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
