"""Control of processes: their reports, cancel commands, drained replicas, worker incidents."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLES = """
-- The last report of each process about its requests and replicas. The table is unlogged, since a
-- process writes its report again within seconds.
CREATE UNLOGGED TABLE live_reports (
    process_id uuid CONSTRAINT pk_live_reports PRIMARY KEY,
    process_name text NOT NULL,
    reported_at timestamptz NOT NULL,
    requests jsonb NOT NULL,
    peer_address text DEFAULT '' NOT NULL,
    peer_certificate text DEFAULT '' NOT NULL,
    replicas jsonb DEFAULT '[]' NOT NULL
);

-- Cancels one request, all requests of a revoked key, or those requests of a changed key that came
-- from a network it no longer allows or were begun with a secret that has ended.
CREATE TABLE cancel_commands (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_cancel_commands PRIMARY KEY,
    request_id uuid,
    project_id uuid CONSTRAINT fk_cancel_commands_project_id_projects REFERENCES projects (id),
    api_key_id uuid CONSTRAINT fk_cancel_commands_api_key_id_api_keys REFERENCES api_keys (id),
    reason text NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    changed_key_id uuid
        CONSTRAINT fk_cancel_commands_changed_key_id_api_keys REFERENCES api_keys (id),
    allowed_networks text[],
    ended_secrets bytea[],
    CONSTRAINT ck_cancel_commands_one_target
        CHECK (num_nonnulls(request_id, api_key_id, changed_key_id) = 1),
    CONSTRAINT ck_cancel_commands_request_of_project
        CHECK ((request_id IS NULL) = (project_id IS NULL)),
    CONSTRAINT ck_cancel_commands_networks_of_key
        CHECK ((changed_key_id IS NULL) = (allowed_networks IS NULL))
);
CREATE INDEX ix_cancel_commands_created_at ON cancel_commands (created_at);

CREATE TABLE replica_drains (
    model text,
    replica text,
    reason text NOT NULL,
    move_after_ms bigint,
    drained_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT ck_replica_drains_move_after_not_negative CHECK (move_after_ms >= 0),
    CONSTRAINT pk_replica_drains PRIMARY KEY (model, replica)
);

-- Counted per background loop, since a billing worker serves no metrics.
CREATE TABLE worker_incidents (
    source text CONSTRAINT pk_worker_incidents PRIMARY KEY,
    incident_count bigint NOT NULL,
    last_at timestamptz DEFAULT now() NOT NULL
);
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE worker_incidents, replica_drains, cancel_commands, live_reports")
