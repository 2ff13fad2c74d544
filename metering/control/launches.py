"""Launched replicas as rows: what each api process wants, and what the elected scaler has done.

Every api process that has launchers keeps one connection. It writes there which replicas it wants,
and reads the states of all. One of the connections holds an advisory lock: its process is the
scaler, the only one that changes states. All changes go over the connection that holds the lock, so
a process that has lost it cannot write. PostgreSQL frees the lock when the connection ends: with
`kill -9` at once, and within half a minute if the process is frozen or its machine lost.

A state is committed before the launcher acts, so that the next scaler finds what was begun.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self

import psycopg

from metering.control.live import CHANNEL, LAUNCHES
from metering.store.db import KEEPALIVES, BoundedConnection, psycopg_conninfo

# The server ends the connection of a process that is frozen, or whose machine has gone: its own
# defaults would keep the lock for two hours, or for ever.
SERVER_PATIENCE = (
    "idle_session_timeout=15s",
    "tcp_keepalives_idle=10",
    "tcp_keepalives_interval=5",
    "tcp_keepalives_count=3",
)
SCALER_LOCK_ID = 7_355_609  # arbitrary, but the same in all versions that share a database
CONNECT_TIMEOUT_S = 2  # the minimum of libpq
# A process that has not written for so long is dead, or cannot settle requests either.
DEMAND_EXPIRES = "30 seconds"
HEARTBEAT_S = 5.0  # between two writes of unchanged demands


class LaunchState(StrEnum):
    """State of a launched replica. LEAVING still serves, until no process wants it."""

    STARTING = "starting"
    WAKING = "waking"
    READY = "ready"
    LEAVING = "leaving"
    PAUSING = "pausing"
    SLEEPING = "sleeping"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


SERVING = (LaunchState.READY, LaunchState.LEAVING)
ENDED = (LaunchState.STOPPED, LaunchState.FAILED)
Key = tuple[str, int]  # served name and number of a replica


@dataclass(frozen=True, slots=True)
class LaunchedRow:
    """State of one replica. `host` is the machine of the scaler that has started it.

    `age_s` is the time in this state, `ready_s` since it became ready, `retry_in_s` until a failed
    start may be repeated. `load_s` is the duration of its last start; None if there was none.
    """

    served: str
    number: int
    state: LaunchState
    lifetime: uuid.UUID
    host: str
    address: str
    error: str
    failure_count: int
    age_s: float
    ready_s: float | None
    retry_in_s: float
    load_s: float | None

    @property
    def key(self) -> Key:
        return self.served, self.number


@dataclass(frozen=True, slots=True)
class Demand:
    """Replica that a process wants, since `wanted_s` seconds.

    `idle_s` is the time since its last request there; None while it is in use.
    """

    served: str
    number: int
    wanted_s: float
    idle_s: float | None

    @property
    def key(self) -> Key:
        return self.served, self.number


@dataclass(frozen=True, slots=True)
class Move:
    """Change of a replica's state. Nothing changes unless it still has `lifetime` and `before`.

    `lifetime` is None for the first start of a replica.
    """

    served: str
    number: int
    lifetime: uuid.UUID | None
    before: LaunchState | None
    after: LaunchState
    address: str | None = None
    error: str = ""
    failure_count: int = 0
    retry_in_s: float = 0.0
    cost_per_hour: Decimal = Decimal(0)

    @property
    def key(self) -> Key:
        return self.served, self.number


SELECT_ROWS = """
SELECT served, number, state, lifetime, host, address, error, failure_count,
       extract(epoch FROM clock_timestamp() - changed_at)::float8,
       extract(epoch FROM clock_timestamp() - ready_at)::float8,
       coalesce(extract(epoch FROM retry_at - clock_timestamp())::float8, 0),
       load_ms / 1000.0::float8
FROM launched_replicas
"""
WRITE_DEMAND = """
INSERT INTO replica_demands (process_id, host, written_at, demands)
VALUES (%s, %s, clock_timestamp(), %s::jsonb)
ON CONFLICT (process_id) DO UPDATE
SET written_at = excluded.written_at, demands = excluded.demands
"""
WITHDRAW = "DELETE FROM replica_demands WHERE process_id = %s"
SELECT_DEMANDS = f"""
SELECT process_id, demands
FROM replica_demands
WHERE written_at > clock_timestamp() - interval '{DEMAND_EXPIRES}'
"""
SELECT_MACHINES = f"""
SELECT DISTINCT host
FROM replica_demands
WHERE written_at > clock_timestamp() - interval '{DEMAND_EXPIRES}'
"""
FORGET_DEAD = f"""
DELETE FROM replica_demands
WHERE written_at < clock_timestamp() - 10 * interval '{DEMAND_EXPIRES}'
"""
LOCK = "SELECT pg_try_advisory_lock(%s)"
# A start from nothing has a new lifetime; a lifetime begins with it, and with waking up.
START = """
WITH started AS (
    INSERT INTO launched_replicas AS r (served, number, state, lifetime, host)
    VALUES (%(served)s, %(number)s, 'starting', gen_random_uuid(), %(host)s)
    ON CONFLICT (served, number) DO UPDATE
    SET state = 'starting', lifetime = excluded.lifetime, host = excluded.host,
        address = '', error = '',
        changed_at = clock_timestamp(), ready_at = NULL, retry_at = NULL
    WHERE r.lifetime = %(lifetime)s AND r.state = %(before)s
    RETURNING served, number, lifetime
)
INSERT INTO replica_runs (served, number, lifetime, cost_per_hour)
SELECT served, number, lifetime, %(cost_per_hour)s FROM started
"""
WAKE = """
WITH woken AS (
    UPDATE launched_replicas
    SET state = 'waking', error = '', changed_at = clock_timestamp(), ready_at = NULL
    WHERE served = %(served)s AND number = %(number)s
      AND lifetime = %(lifetime)s AND state = %(before)s
    RETURNING served, number, lifetime
)
INSERT INTO replica_runs (served, number, lifetime, cost_per_hour)
SELECT served, number, lifetime, %(cost_per_hour)s FROM woken
"""
# The lifetime of a row ends when its server has ended, or sleeps.
CHANGE = """
WITH changed AS (
    UPDATE launched_replicas
    SET state = %(after)s,
        address = coalesce(%(address)s, address),
        error = %(error)s,
        failure_count = %(failure_count)s,
        changed_at = clock_timestamp(),
        ready_at = CASE
            WHEN %(after)s = 'ready' AND %(before)s <> 'leaving' THEN clock_timestamp()
            ELSE ready_at
        END,
        retry_at = clock_timestamp() + %(retry_in_s)s * interval '1 second',
        load_ms = CASE
            WHEN %(after)s = 'ready' AND %(before)s = 'starting'
            THEN round(extract(epoch FROM clock_timestamp() - changed_at) * 1000)::bigint
            ELSE load_ms
        END
    WHERE served = %(served)s AND number = %(number)s
      AND lifetime = %(lifetime)s AND state = %(before)s
    RETURNING served, number, lifetime, state, ready_at
)
UPDATE replica_runs l
SET ready_at = coalesce(l.ready_at, c.ready_at),
    ended_at = CASE
        WHEN c.state IN ('stopped', 'failed', 'sleeping') THEN clock_timestamp()
    END,
    end_reason = CASE
        WHEN c.state = 'failed' THEN %(error)s
        WHEN c.state IN ('stopped', 'sleeping') THEN c.state
        ELSE ''
    END
FROM changed c
WHERE l.served = c.served AND l.number = c.number AND l.lifetime = c.lifetime AND l.ended_at IS NULL
"""
NOTIFY = "SELECT pg_notify(%s, %s)"


class LaunchConnection:
    """Connection of one api process to the rows of launched replicas. Not for concurrent calls."""

    def __init__(self, connection: BoundedConnection, process_id: uuid.UUID) -> None:
        self._connection = connection
        self._process_id = process_id
        self.host = socket.gethostname()
        self.is_scaler = False  # once the lock is held, until the connection ends

    @classmethod
    async def connect(cls, database_url: str, process_id: uuid.UUID) -> Self:
        """Open a connection. Raises: psycopg.OperationalError."""
        connection = await BoundedConnection.connect(
            psycopg_conninfo(database_url),
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            settings=(*SERVER_PATIENCE, f"application_name=weir_scaler_{os.getpid()}"),
            **KEEPALIVES,
        )
        return cls(connection, process_id)

    async def close(self) -> None:
        """Close the connection, which frees the lock."""
        await self._connection.close()

    async def elect(self) -> bool:
        """Become the scaler if no other process is; return whether this process is it now."""
        if not self.is_scaler:
            [(self.is_scaler,)] = await self._all(LOCK, (SCALER_LOCK_ID,))
            if self.is_scaler:
                await self._connection.execute(FORGET_DEAD)
        return self.is_scaler

    async def want(self, demands: Sequence[Demand]) -> None:
        """Replace the demands of this process."""
        values = [[each.served, each.number, each.wanted_s, each.idle_s] for each in demands]
        await self._connection.execute(
            WRITE_DEMAND, (self._process_id, self.host, json.dumps(values))
        )

    async def withdraw(self) -> None:
        """Remove the demands of this process."""
        await self._connection.execute(WITHDRAW, (self._process_id,))

    async def rows(self) -> list[LaunchedRow]:
        """Read the states of all replicas."""
        rows = await self._all(SELECT_ROWS)
        return [LaunchedRow(row[0], row[1], LaunchState(row[2]), *row[3:]) for row in rows]

    async def demands(self) -> dict[uuid.UUID, list[Demand]]:
        """Read the demands of all live processes."""
        rows = await self._all(SELECT_DEMANDS)
        return {process_id: [Demand(*each) for each in found] for process_id, found in rows}

    async def hosts(self) -> set[str]:
        """Return the machines with live processes."""
        return {host for (host,) in await self._all(SELECT_MACHINES)}

    async def apply(self, move: Move) -> None:
        """Change a state, if it is still the one that the move expects. For the scaler only."""
        assert self.is_scaler, "only the scaler changes states"
        values: dict[str, Any] = {
            "served": move.served,
            "number": move.number,
            "host": self.host,
            "lifetime": move.lifetime,
            "before": move.before and move.before.value,
            "after": move.after.value,
            "address": move.address,
            "error": move.error,
            "failure_count": move.failure_count,
            "retry_in_s": move.retry_in_s,
            "cost_per_hour": move.cost_per_hour,
        }
        statement = {LaunchState.STARTING: START, LaunchState.WAKING: WAKE}.get(move.after, CHANGE)
        await self._connection.execute(statement.encode(), values)

    async def notify(self) -> None:
        """Wake the processes, since demands or states have changed."""
        await self._connection.execute(NOTIFY, (CHANNEL, LAUNCHES))

    async def _all(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor: psycopg.AsyncCursor[tuple[Any, ...]] = await self._connection.execute(
            statement.encode(), values
        )
        return await cursor.fetchall()
