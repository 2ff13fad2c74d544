"""Traffic of each model in steps of a fixed length, summed over all api processes."""

from __future__ import annotations

from alembic import op

revision = "0044"
down_revision = "0042"
branch_labels = None
depends_on = None

# Lists have the counts of a histogram's buckets: `api/observability/traffic.py` has their bounds.
UPGRADE = """
CREATE TABLE traffic (
    step_s integer NOT NULL,
    started_at timestamptz NOT NULL,
    model text NOT NULL,
    counts bigint[] NOT NULL,
    running double precision NOT NULL,
    waiting double precision NOT NULL,
    first_token bigint[] NOT NULL,
    inter_token bigint[] NOT NULL,
    errors jsonb NOT NULL,
    CONSTRAINT pk_traffic PRIMARY KEY (step_s, started_at, model)
) WITH (fillfactor = 50);
"""


def upgrade() -> None:
    op.execute(UPGRADE)
    # Tables of the service have a view without rows: no organization sees them.
    op.execute(
        "CREATE VIEW organization_border.traffic AS SELECT * FROM traffic WHERE false"
        " WITH CHECK OPTION"
    )


def downgrade() -> None:
    op.execute("DROP VIEW organization_border.traffic")
    op.execute("DROP TABLE traffic")
