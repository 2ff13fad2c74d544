"""Weights of organizations in the fair queue, and reports that api processes exchange about it.

The reports are worthless after a crash of the server, so their table is not logged.
"""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

WEIGHTS = """
CREATE TABLE queue_weights (
    organization_id uuid CONSTRAINT pk_queue_weights PRIMARY KEY
        CONSTRAINT fk_queue_weights_organization_id_organizations REFERENCES organizations (id),
    weight_milli integer NOT NULL
        CONSTRAINT ck_queue_weights_weight_milli_in_range
            CHECK (weight_milli BETWEEN 10 AND 100000),
    updated_at timestamptz DEFAULT now() NOT NULL
);
"""
# Rows are replaced several times a second: pages with free space take the new version in place.
REPORTS = """
CREATE UNLOGGED TABLE queue_reports (
    process_id uuid CONSTRAINT pk_queue_reports PRIMARY KEY,
    pools text[] NOT NULL,
    report bytea NOT NULL,
    written_at timestamptz NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200);
"""


def upgrade() -> None:
    op.execute(WEIGHTS)
    op.execute(REPORTS)


def downgrade() -> None:
    op.execute("DROP TABLE queue_reports, queue_weights")
