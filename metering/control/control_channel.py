"""Control channel between the api processes of one database: a LISTEN connection in each, and
periodic polls.

Notifications make it fast, the polls make it reliable: an order whose notification was lost is
applied within `LOOK_INTERVAL_S`, and within `LOOK_INTERVAL_S` + `ANSWER_TIMEOUT_S` +
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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg
import structlog

from common.backoff import Backoff
from common.incidents import Retries
from metering.control.live import CHANNEL, PEERS, REPORT, DrainOrder, StopOrder
from metering.store.db import KEEPALIVES, BoundedConnection, connection_options, patience, psycopg_conninfo

GOSSIP_CHANNEL = "weir_gossip"
BYTES_MAX = 7000  # of one text in UTF-8: PostgreSQL's limit is 8,000 including the message header
INTERVAL_S = 1.0  # between two broadcasts of one process


class Gossip(Protocol):
    """Broadcasts of one process, and its receiver of all broadcasts, including its own."""

    def told(self) -> str:
        """Return news since the last call, at most `BYTES_MAX`; empty for none. The news returned
        are removed.
        """
        ...

    def heard(self, text: str) -> None:
        """Process a broadcast. Never raises."""
        ...


LOOK_INTERVAL_S = 1.0  # two small queries a second per process
ANSWER_TIMEOUT_S = 2.0  # above the interval; a small query that takes longer has lost its server
CONNECT_TIMEOUT_S = 2  # the minimum of libpq
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 2.0
# Above the duration of any transaction that writes an order: older orders are all visible.
SETTLED_AGE = "60 seconds"

# A read-only server has just been replaced by another primary.
AWAY = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction, OSError)

SELECT_FLOOR = f"SELECT coalesce(max(id), 0) FROM stop_orders WHERE ordered_at < clock_timestamp() - interval '{SETTLED_AGE}'"
# Ids are drawn before the commit, so a smaller one may appear after a larger one: recent orders are
# read repeatedly.
SELECT_ORDERS = f"""
SELECT id, request_id, project_id, api_key_id, reason, changed_key_id, coalesce(allowed_networks, '{{}}'),
    coalesce(ended_secrets, '{{}}'),
    ordered_at < clock_timestamp() - interval '{SETTLED_AGE}'
FROM stop_orders WHERE id > %s ORDER BY id
"""
WRITE_REPORT = """
INSERT INTO live_reports (owner_id, owner_name, peer_address, peer_certificate, reported_at, requests, replicas)
VALUES (%s, %s, %s, %s, clock_timestamp(), %s::jsonb, %s::jsonb)
ON CONFLICT (owner_id) DO UPDATE
SET owner_name = excluded.owner_name, peer_address = excluded.peer_address, peer_certificate = excluded.peer_certificate,
    reported_at = excluded.reported_at, requests = excluded.requests, replicas = excluded.replicas
RETURNING xmax = 0
"""
SELECT_CERTIFICATES = "SELECT peer_certificate FROM live_reports"
SELECT_DRAINS = """
SELECT model, replica, coalesce(clock_timestamp() >= drained_at + move_after_ms * interval '1 millisecond', false)
FROM replica_drains
"""

log = structlog.get_logger(__name__)


class ControlChannel:
    """Control channel of one process. `run` must run for orders to be applied and reports to be
    written.
    """

    def __init__(
        self,
        database_url: str,
        owner_id: uuid.UUID,
        owner_name: str,
        *,
        peer: tuple[str, str] = ("", ""),
        peers: Callable[[Sequence[str]], None] = lambda _: None,
        stop: Callable[[StopOrder], None],
        report: Callable[[], Sequence[dict[str, Any]]],
        drain: Callable[[Sequence[DrainOrder]], None],
        report_replicas: Callable[[], Sequence[dict[str, Any]]],
        gossip: Gossip | None = None,
    ) -> None:
        """stop: applies an order; called once per order. report: returns the running requests as
        JSON values.

        drain: called at each poll with all drained replicas. report_replicas: returns the states of
        all replicas. peer: "host:port" at which other processes reach this one, and its certificate
        there. peers: called with the certificates of all processes when one was added. gossip:
        broadcasts over the same connection; None to neither send nor receive any.
        """
        self._conninfo = psycopg_conninfo(database_url)
        self._owner = (owner_id, owner_name, *peer)
        self._peers = peers
        self._stop = stop
        self._report = report
        self._drain = drain
        self._report_replicas = report_replicas
        self._gossip = gossip
        self._told_at = -math.inf  # a monotonic clock may start at any value
        # All orders up to this id have been read, and no further ones can appear below it.
        self._floor: int | None = None
        self._applied: set[int] = set()  # applied orders above the floor
        # One item each: an order, a request of a report, a broadcast, the connection as a whole.
        self._retries = Retries("control_channel_items", shortest_s=LOOK_INTERVAL_S, passing=AWAY)
        self.connected = False

    async def run(self) -> None:
        """Listen until cancelled. Reconnect with backoff whenever the connection breaks.

        An unexpected error is an incident and costs at most a connection.
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
            except AWAY as away:
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
            self._conninfo, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options(), **KEEPALIVES
        )

    async def _serve(self, connection: BoundedConnection) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        if self._gossip is not None:
            await connection.execute(f"LISTEN {GOSSIP_CHANNEL}")
        asked = {REPORT, PEERS}  # unasked: the row lets others wait for this process
        while True:
            # Always: orders may have been issued while nothing listened.
            await self._apply(connection)
            if REPORT in asked:
                with self._retries.survive("live report"):
                    await self._write_report(connection)
            if PEERS in asked:
                with self._retries.survive("certificates"):
                    cursor = await connection.execute(SELECT_CERTIFICATES)
                    self._peers([certificate for (certificate,) in await cursor.fetchall()])
            with self._retries.survive("broadcast"):
                await self._tell(connection)
            notices = [notice async for notice in connection.notifies(timeout=LOOK_INTERVAL_S, stop_after=1)]
            asked = set()
            for notice in notices:
                with self._retries.survive("broadcast"):
                    if notice.channel == GOSSIP_CHANNEL and self._gossip is not None:
                        self._gossip.heard(notice.payload)
                    else:
                        asked.add(notice.payload)

    async def _tell(self, connection: BoundedConnection) -> None:
        """Send a broadcast if there is news and the interval has passed."""
        if self._gossip is None or time.monotonic() - self._told_at < INTERVAL_S:
            return
        if text := self._gossip.told():
            self._told_at = time.monotonic()
            await connection.execute("SELECT pg_notify(%s, %s)", (GOSSIP_CHANNEL, text))

    async def _write_report(self, connection: BoundedConnection) -> None:
        """Write the report of running requests, without any request that PostgreSQL rejects."""
        replicas = json.dumps(self._report_replicas())
        requests = [each for each in self._report() if self._retries.is_due(each.get("request_id"))]
        try:
            cursor = await connection.execute(WRITE_REPORT, (*self._owner, json.dumps(requests), replicas))
        except (psycopg.DataError, TypeError, ValueError):  # JSON that PostgreSQL, or Python, cannot write
            accepted = []
            for each in requests:
                with self._retries.survive(each.get("request_id")):
                    await connection.execute("SELECT %s::jsonb", (json.dumps(each),))
                    accepted.append(each)
            cursor = await connection.execute(WRITE_REPORT, (*self._owner, json.dumps(accepted), replicas))
        # A new row: other processes do not accept our certificate yet.
        if await cursor.fetchone() == (True,):
            await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, PEERS))

    async def _apply(self, connection: BoundedConnection) -> None:
        """Apply the orders issued since the last poll. Orders from before this process started are
        skipped.
        """
        if self._floor is None:
            row = await (await connection.execute(SELECT_FLOOR.encode())).fetchone()
            assert row is not None, "an aggregate has one row"
            self._floor = int(row[0])
        cursor = await connection.execute(SELECT_ORDERS, (self._floor,))
        for number, request_id, project_id, api_key_id, reason, changed_key_id, networks, ended, is_old in await cursor.fetchall():
            item = ("order", number)
            if number not in self._applied and self._retries.is_due(item):
                order = StopOrder(number, request_id, project_id, api_key_id, reason, changed_key_id, tuple(networks), tuple(ended))
                with self._retries.survive(item):
                    self._stop(order)
                    self._applied.add(number)
            if is_old:
                self._floor = number
        self._applied = {number for number in self._applied if number > self._floor}
        cursor = await connection.execute(SELECT_DRAINS)
        with self._retries.survive("drain"):
            self._drain([DrainOrder(*row) for row in await cursor.fetchall()])
