"""Control channel between the api processes of one database: a LISTEN connection in each, and
periodic polls.

Notifications make it fast, the polls make it reliable: a command whose notification was lost is
applied within `POLL_INTERVAL_S`, and within `POLL_INTERVAL_S` + `ANSWER_TIMEOUT_S` +
`CONNECT_TIMEOUT_S`, five seconds, if the connection had died silently.

Broadcasts are short texts that nothing depends on: no row is written, processes that do not listen
at that moment miss them, and each process sends at most one per second.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import psycopg
import structlog

from common.backoff import Backoff
from common.incidents import Retries
from metering.control.fleet_versions import StoredFleet
from metering.control.live import (
    CHANNEL,
    LAUNCHES,
    PEERS,
    REPORT,
    WEIGHTS,
    CancelCommand,
    DrainCommand,
)
from metering.store.db import (
    KEEPALIVES,
    BoundedConnection,
    patience,
    psycopg_conninfo,
)
from metering.store.refusals import AWAY

BROADCAST_CHANNEL = "weir_broadcast"
BYTES_MAX = 7000  # of one text in UTF-8: PostgreSQL's limit is 8,000 including the message header
INTERVAL_S = 1.0  # between two broadcasts of one process

POLL_INTERVAL_S = 1.0  # three small queries a second per process
WEIGHTS_INTERVAL_S = 60.0  # there may be thousands, and a change is announced
ANSWER_TIMEOUT_S = 2.0  # above the interval; a small query that takes longer has lost its server
CONNECT_TIMEOUT_S = 2  # the minimum of libpq
# Above the duration of any transaction that writes a command: older commands are all visible.
VISIBLE_AGE = "60 seconds"
LOST = (*AWAY, OSError)


class Broadcaster(Protocol):
    """Source and receiver of broadcasts of one process. It also receives its own."""

    def next_broadcast(self) -> str:
        """Remove and return text to broadcast, at most `BYTES_MAX` bytes; empty for none."""
        ...

    def receive(self, text: str) -> None:
        """Process a broadcast of any process. Never raises."""
        ...


class Fleet(Protocol):
    """Fleet of this process, which follows the stored versions."""

    def follow(self, stored: StoredFleet | None) -> None:
        """Take note of a new version, or that none is stored. Never blocks."""

    @property
    def state(self) -> tuple[int, str]:
        """Number of the version that is served, and why a newer one is not."""


class NoFleet:
    """Fleet that never changes."""

    state = (0, "")

    def follow(self, stored: StoredFleet | None) -> None:
        """Implement `Fleet.follow`."""


RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 2.0


SELECT_FLOOR = f"""
SELECT coalesce(max(id), 0)
FROM cancel_commands
WHERE created_at < clock_timestamp() - interval '{VISIBLE_AGE}'
"""
# Ids are drawn before the commit, so a smaller one may appear after a larger one: recent commands
# are read repeatedly.
SELECT_COMMANDS = f"""
SELECT id, request_id, project_id, api_key_id, reason, changed_key_id, owner_id,
       suspended_by_operator, closes,
       coalesce(allowed_networks, '{{}}'),
       coalesce(ended_secrets, '{{}}'),
       created_at < clock_timestamp() - interval '{VISIBLE_AGE}'
FROM cancel_commands
WHERE id > %s
ORDER BY id
"""
WRITE_REPORT = """
INSERT INTO live_reports
    (process_id, process_name, peer_address, peer_certificate, reported_at, requests, replicas,
     fleet_number, fleet_fault)
VALUES (%s, %s, %s, %s, clock_timestamp(), %s::jsonb, %s::jsonb, %s, %s)
ON CONFLICT (process_id) DO UPDATE
SET process_name = excluded.process_name,
    peer_address = excluded.peer_address,
    peer_certificate = excluded.peer_certificate,
    reported_at = excluded.reported_at,
    requests = excluded.requests,
    replicas = excluded.replicas,
    fleet_number = excluded.fleet_number,
    fleet_fault = excluded.fleet_fault
RETURNING xmax = 0
"""
SELECT_CERTIFICATES = "SELECT peer_certificate FROM live_reports"
SELECT_WEIGHTS = "SELECT organization_id, weight_milli FROM queue_weights"
SELECT_DRAINS = """
SELECT model, replica,
       coalesce(
           clock_timestamp() >= drained_at + move_after_ms * interval '1 millisecond', false
       )
FROM replica_drains
"""
SELECT_FLEET = """
SELECT number, document FROM fleet_versions WHERE number > %s ORDER BY number DESC LIMIT 1
"""

log = structlog.get_logger(__name__)


class ControlChannel:
    """Channel on which this process gets cancel and drain commands and reports its requests.

    Nothing is received or sent unless `run` runs.
    """

    def __init__(
        self,
        database_url: str,
        process_id: uuid.UUID,
        process_name: str,
        *,
        peer: tuple[str, str] = ("", ""),
        peers: Callable[[Sequence[str]], None] = lambda _: None,
        stop: Callable[[CancelCommand], None],
        report: Callable[[], Sequence[dict[str, Any]]],
        drain: Callable[[Sequence[DrainCommand]], None],
        report_replicas: Callable[[], Sequence[dict[str, Any]]],
        broadcaster: Broadcaster | None = None,
    ) -> None:
        """Prepare the channel; `run` connects.

        `stop` applies a cancel command and is called once per command. `report` returns the running
        requests as JSON values, `report_replicas` the states of all replicas. `drain` is called at
        each poll with all drained replicas. `peer` is the "host:port" at which other processes
        reach this one, and the certificate it shows there. `peers` is called with the certificates
        of all processes when one is added. `broadcaster` None disables broadcasts.
        """
        self._conninfo = psycopg_conninfo(database_url)
        self._owner = (process_id, process_name, *peer)
        self._peers = peers
        self._stop = stop
        self._report = report
        self._drain = drain
        self._report_replicas = report_replicas
        # Called with the queue weights in thousandths, by organization, when one may have changed.
        self.on_weights: Callable[[Mapping[uuid.UUID, int]], None] = lambda _: None
        self._weights_read_at = -math.inf  # a monotonic clock may start at any value
        self._broadcaster = broadcaster
        # Called after a change of launched replicas; set by who follows them.
        self.launches_changed: Callable[[], None] = lambda: None
        self.fleet: Fleet = NoFleet()  # gets each new version; set it before `run`
        self._fleet_number = -1  # of the newest version read; -1 before the first poll
        self._sent_at = -math.inf  # a monotonic clock may start at any value
        # All commands up to this id have been read, and no further ones can appear below it.
        self._floor: int | None = None
        self._applied: set[int] = set()  # applied commands above the floor
        # One item each: a command, a request of a report, a broadcast, the connection as a whole.
        self._retries = Retries("control_channel_items", shortest_s=POLL_INTERVAL_S, passing=LOST)
        self.connected = False

    async def run(self) -> None:
        """Receive commands until cancelled; reconnect with backoff when the connection breaks.

        An unexpected error is counted as an incident and at most breaks the connection.
        """
        backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S)
        while True:
            rest_s = 0.0
            try:
                with patience(ANSWER_TIMEOUT_S):
                    async with await self._connect() as connection:
                        self.connected = True
                        backoff.reset()
                        await self._serve(connection)
            except LOST as away:
                # Once per outage, not once per attempt.
                level = log.info if self.connected else log.debug
                level("control_channel_lost", cause=str(away).strip() or type(away).__name__)
                if isinstance(away, psycopg.errors.ReadOnlySqlTransaction):
                    rest_s = RECONNECT_MAX_S  # such a server accepts connections, but no writes
            except Exception as error:
                self._retries.failed(error)
            finally:
                self.connected = False
            await asyncio.sleep(max(backoff.next_s(), self._retries.wait_s(), rest_s))

    async def _connect(self) -> BoundedConnection:
        return await BoundedConnection.connect(
            self._conninfo,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            **KEEPALIVES,
        )

    async def _serve(self, connection: BoundedConnection) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        if self._broadcaster is not None:
            await connection.execute(f"LISTEN {BROADCAST_CHANNEL}")
        # Unrequested: the row lets others wait for this process, and weights may have changed.
        requested = {REPORT, PEERS, WEIGHTS}
        while True:
            # Always: commands may have been issued while nothing listened.
            await self._apply(connection)
            if REPORT in requested:
                with self._retries.survive("live report"):
                    await self._write_report(connection)
            if PEERS in requested:
                with self._retries.survive("certificates"):
                    cursor = await connection.execute(SELECT_CERTIFICATES)
                    self._peers([certificate for (certificate,) in await cursor.fetchall()])
            if WEIGHTS in requested or self._weights_are_old():
                with self._retries.survive("weights"):
                    await self._read_weights(connection)
            with self._retries.survive("broadcast"):
                await self._broadcast(connection)
            notices = [
                notice
                async for notice in connection.notifies(timeout=POLL_INTERVAL_S, stop_after=1)
            ]
            requested = set()
            for notice in notices:
                with self._retries.survive("broadcast"):
                    if notice.channel == BROADCAST_CHANNEL and self._broadcaster is not None:
                        self._broadcaster.receive(notice.payload)
                    elif notice.payload == LAUNCHES:
                        self.launches_changed()
                    else:
                        requested.add(notice.payload)

    def _weights_are_old(self) -> bool:
        return time.monotonic() - self._weights_read_at >= WEIGHTS_INTERVAL_S

    async def _read_weights(self, connection: BoundedConnection) -> None:
        cursor = await connection.execute(SELECT_WEIGHTS)
        self.on_weights(dict(await cursor.fetchall()))
        self._weights_read_at = time.monotonic()

    async def _broadcast(self, connection: BoundedConnection) -> None:
        """Send a broadcast if there is one and the interval has passed."""
        if self._broadcaster is None or time.monotonic() - self._sent_at < INTERVAL_S:
            return
        if text := self._broadcaster.next_broadcast():
            self._sent_at = time.monotonic()
            await connection.execute("SELECT pg_notify(%s, %s)", (BROADCAST_CHANNEL, text))

    async def _write_report(self, connection: BoundedConnection) -> None:
        """Write the report of running requests, leaving out any that PostgreSQL rejects."""
        replicas = json.dumps(self._report_replicas())
        requests = [each for each in self._report() if self._retries.is_due(each.get("request_id"))]
        try:
            cursor = await connection.execute(
                WRITE_REPORT, (*self._owner, json.dumps(requests), replicas, *self.fleet.state)
            )
        # A value that PostgreSQL or Python cannot write as JSON.
        except (psycopg.DataError, TypeError, ValueError):
            accepted = []
            for each in requests:
                with self._retries.survive(each.get("request_id")):
                    await connection.execute("SELECT %s::jsonb", (json.dumps(each),))
                    accepted.append(each)
            cursor = await connection.execute(
                WRITE_REPORT, (*self._owner, json.dumps(accepted), replicas, *self.fleet.state)
            )
        # A new row: other processes do not accept our certificate yet.
        if await cursor.fetchone() == (True,):
            await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, PEERS))

    async def _apply(self, connection: BoundedConnection) -> None:
        """Apply the commands issued since the last poll.

        The first poll applies those of the last minute.
        """
        if self._floor is None:
            row = await (await connection.execute(SELECT_FLOOR.encode())).fetchone()
            assert row is not None, "an aggregate has one row"
            self._floor = int(row[0])
        cursor = await connection.execute(SELECT_COMMANDS, (self._floor,))
        rows = await cursor.fetchall()
        for number, *values, networks, secrets, is_old in rows:
            item = ("command", number)
            if number not in self._applied and self._retries.is_due(item):
                fields = (number, *values, tuple(networks), tuple(secrets))
                with self._retries.survive(item):
                    self._stop(CancelCommand(*fields))
                    self._applied.add(number)
            if is_old:
                self._floor = number
        self._applied = {number for number in self._applied if number > self._floor}
        cursor = await connection.execute(SELECT_DRAINS)
        with self._retries.survive("drain"):
            self._drain([DrainCommand(*row) for row in await cursor.fetchall()])
        with self._retries.survive("fleet"):
            cursor = await connection.execute(SELECT_FLEET, (max(self._fleet_number, 0),))
            newest = await cursor.fetchone()
            if newest is not None or self._fleet_number < 0:
                self.fleet.follow(None if newest is None else StoredFleet(*newest))
                self._fleet_number = 0 if newest is None else newest[0]
