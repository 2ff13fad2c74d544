"""Replicas that Weir starts elsewhere: their states, the demand for them, their lifetimes."""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision: str | None = "0029"
branch_labels = None
depends_on = None

TABLES = """
-- One row for each replica that was ever started, written by the elected scaler only.
CREATE TABLE launched_replicas (
    served text,
    number int,
    state text NOT NULL,
    lifetime uuid NOT NULL,
    host text NOT NULL,
    address text DEFAULT '' NOT NULL,
    error text DEFAULT '' NOT NULL,
    changed_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    ready_at timestamptz,
    retry_at timestamptz,
    failure_count int DEFAULT 0 NOT NULL,
    load_ms bigint,
    CONSTRAINT pk_launched_replicas PRIMARY KEY (served, number),
    CONSTRAINT ck_launched_replicas_number_not_negative CHECK (number >= 0),
    CONSTRAINT ck_launched_replicas_state_is_known CHECK (
        state IN (
            'starting', 'waking', 'ready', 'leaving', 'pausing', 'sleeping', 'stopping', 'stopped',
            'failed'
        )
    )
);

-- Replicas that each api process wants now. Unlogged, since a process writes its row again within
-- seconds.
CREATE UNLOGGED TABLE replica_demands (
    process_id uuid CONSTRAINT pk_replica_demands PRIMARY KEY,
    host text NOT NULL,
    written_at timestamptz NOT NULL,
    demands jsonb NOT NULL
);

-- Times for which replicas ran, to compute what they cost.
CREATE TABLE replica_runs (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_replica_runs PRIMARY KEY,
    served text NOT NULL,
    number int NOT NULL,
    lifetime uuid NOT NULL,
    cost_per_hour numeric NOT NULL,
    started_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    ready_at timestamptz,
    ended_at timestamptz,
    end_reason text DEFAULT '' NOT NULL,
    CONSTRAINT ck_replica_runs_cost_not_negative CHECK (cost_per_hour >= 0)
);
CREATE UNIQUE INDEX uq_replica_runs_open ON replica_runs (served, number)
    WHERE ended_at IS NULL;
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE replica_runs, replica_demands, launched_replicas")
