"""Launched replicas of one api process: writes what it wants, follows the rows, scales if elected.

One loop on one connection does all of that, at most every `TICK_S_MIN` seconds, and only on a
change or once a second. Launchers run in tasks, at most one per replica, and only while this
process is the scaler: the tasks end with the connection that holds the election.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from api.fleet.launch_plan import LaunchTerms, Pool, merged, moved, plan
from api.fleet.launcher_reader import FleetLauncher
from common.backoff import Backoff, backoff_s
from common.incidents import IncidentTaskGroup, Retries
from inference.adapters.launched_replica import LaunchedReplica, Standing
from inference.launchers.launcher import LaunchedId, Launcher, LaunchFailed
from inference.routing.on_demand import ManagedEngine
from metering.control.control_channel import ANSWER_TIMEOUT_S, LOST
from metering.control.launches import (
    HEARTBEAT_S,
    Demand,
    Key,
    LaunchConnection,
    LaunchedRow,
    LaunchState,
    Move,
)
from metering.store.db import patience

TICK_S_MIN = 0.1
POLL_S = 1.0
CHECK_S = 2.0  # between two checks whether a ready server still runs
STOP_AGAIN_S = 5.0  # before a stop that failed is repeated
# Between starts that fail in a row. A server that ran for `STABLE_S` starts again at once.
RETRY_S_MIN, RETRY_S_MAX = 5.0, 300.0
STABLE_S = 60.0
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.05, 2.0
WAIT_POLLS_MAX = round(HEARTBEAT_S / POLL_S) + 3  # a live process writes meanwhile
CLOSE_TIMEOUT_S = 55.0  # for servers that end with the service
ELSEWHERE = (
    "its server runs on the machine {}: run all api processes of a model with a `process` launcher"
    " on one machine, or use a launcher of another kind"
)
RUNNING = (LaunchState.STARTING, LaunchState.WAKING, LaunchState.READY, LaunchState.LEAVING)
STARTED, FAILED = "started", "failed"

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LaunchCounts:
    """Starts that this process has made as the scaler, by model and outcome, and the seconds that
    successful ones took. `is_scaler` says whether it is the scaler now.
    """

    starts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    is_scaler: bool = False


@dataclass(slots=True)
class LaunchedVersion:
    """Version whose servers a launcher starts. `members` are its engines, by number.

    `source` is what the fleet says of the launcher. If `is_local`, its servers run on the machine
    of the scaler, for processes of that machine. With `ends_with_service`, the last api process
    that ends stops its servers.
    """

    served: str
    launcher: Launcher
    terms: LaunchTerms
    is_local: bool = False
    ends_with_service: bool = False
    members: list[tuple[LaunchedReplica, ManagedEngine]] = field(default_factory=list)
    source: FleetLauncher | None = None


class Launching:
    """Launched replicas of this process. `run` does everything."""

    def __init__(
        self,
        database_url: str,
        process_id: uuid.UUID,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Launch nothing before `become`."""
        self._database_url = database_url
        self._process_id = process_id
        self._versions: dict[str, LaunchedVersion] = {}
        # Successors of versions of the last fleet, for when their servers have ended; None: none
        self._successors: dict[str, LaunchedVersion | None] = {}
        self._pools: Mapping[str, Pool] = {}
        self._clock = clock
        self._woken = asyncio.Event()
        self._closing = asyncio.Event()
        self._closed = asyncio.Event()
        self._written: list[tuple[Key, bool]] | None = None  # demands, with whether each is idle
        self._written_at_s = -math.inf
        self._loading: dict[Key, tuple[uuid.UUID, float]] = {}  # lifetime, and since when
        self._acting: dict[Key, asyncio.Task[None]] = {}
        self._outcomes: deque[tuple[Key, Move | None]] = deque()
        self._checked_at_s: dict[Key, float] = {}
        self._retries = Retries("launching", passing=LOST)
        self.counts = LaunchCounts()

    def become(self, versions: Sequence[LaunchedVersion], pools: Mapping[str, Pool]) -> None:
        """Launch servers for these versions from now on.

        A version that is gone, or has another launcher, keeps its launcher until its servers have
        ended. A successor of the same name starts no server before.
        """
        self._pools = pools
        named = {version.served: version for version in versions}
        self._successors = dict.fromkeys(self._versions.keys() - named.keys())
        for served, version in named.items():
            present = self._versions.get(served)
            if present is None or present.source == version.source:
                self._versions[served] = version
            else:
                self._successors[served] = version
            self.counts.seconds.setdefault(served, 0.0)
            for outcome in (STARTED, FAILED):
                self.counts.starts.setdefault((served, outcome), 0)
            for launched, _ in version.members:
                launched.demand_changed = self.wake
        self.wake()

    def _succeed(self, rows: Sequence[LaunchedRow]) -> None:
        """Replace the versions that are gone and have no server left."""
        busy = {row.served for row in rows if has_server(row)}
        for served in self._successors.keys() - busy:
            successor = self._successors.pop(served)
            del self._versions[served]
            if successor is not None:
                self._versions[served] = successor
            self.wake()

    def wake(self) -> None:
        """Look at demands and rows again, soon."""
        self._woken.set()

    async def close(self) -> None:
        """Withdraw all demands and, as the last process, stop servers that end with the service.

        Call it when all engines are closed, while `run` runs.
        """
        self._closing.set()
        self.wake()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._closed.wait()
        except TimeoutError:
            log.warning("launched_replicas_left", remedy="end their servers, or start Weir again")

    async def run(self) -> None:
        """Write, follow and scale until closed; reconnect with backoff."""
        backoff = Backoff(RECONNECT_S_MIN, RECONNECT_S_MAX)
        while not self._closed.is_set():
            if not self._versions:
                await self._woken.wait()
                self._woken.clear()
                if self._closing.is_set() and not self._versions:
                    self._closed.set()
                continue
            try:
                with patience(ANSWER_TIMEOUT_S):
                    connection = await LaunchConnection.connect(
                        self._database_url, self._process_id
                    )
                    try:
                        backoff.reset()
                        await self._serve(connection)
                    finally:
                        self.counts.is_scaler = False
                        await connection.close()
            except* LOST as away:
                log.info("launch_connection_lost", cause=str(away.exceptions[0]).strip())
            except* Exception as error:
                self._retries.failed(error)
            if not self._closed.is_set():
                await asyncio.sleep(max(backoff.next_s(), self._retries.wait_s()))

    async def _serve(self, connection: LaunchConnection) -> None:
        self._written = None
        try:
            async with IncidentTaskGroup() as tasks:
                while self._versions and not self._closing.is_set():
                    await self._tick(connection, tasks)
                    await asyncio.sleep(TICK_S_MIN)
                    try:
                        async with asyncio.timeout(POLL_S):
                            await self._woken.wait()
                    except TimeoutError:
                        pass
                for task in self._acting.values():
                    task.cancel()
            await self._leave(connection)
            if self._closing.is_set():
                self._closed.set()
        finally:
            self._acting.clear()
            self._outcomes.clear()

    async def _tick(self, connection: LaunchConnection, tasks: asyncio.TaskGroup) -> None:
        self._woken.clear()
        has_changed = await self._write_demands(connection)
        if await connection.elect():
            if not self.counts.is_scaler:
                log.info("launch_scaler_elected")
            self.counts.is_scaler = True
            has_changed |= await self._scale(connection, tasks)
        rows = await connection.rows()
        self._follow(rows, connection.host)
        self._succeed(rows)
        if has_changed:
            await connection.notify()

    async def _write_demands(self, connection: LaunchConnection) -> bool:
        """Write what this process wants, if it has changed; return whether it has."""
        now_s = self._clock()
        demands = []
        for version in self._versions.values():
            for launched, managed in version.members:
                if (since_s := launched.wanted_since_s) is None:
                    continue
                idle_since_s = managed.idle_since_s()
                idle_s = None if idle_since_s is None else max(now_s - idle_since_s, 0.0)
                demands.append(Demand(launched.served, launched.number, now_s - since_s, idle_s))
        written = [(each.key, each.idle_s is None) for each in demands]
        has_changed = written != self._written
        if has_changed or now_s - self._written_at_s >= HEARTBEAT_S:
            await connection.want(demands)
            self._written, self._written_at_s = written, now_s
        return has_changed

    def _follow(self, rows: Sequence[LaunchedRow], host: str) -> None:
        """Tell the engines of this process what the rows say."""
        found = {row.key: row for row in rows}
        for version in self._versions.values():
            for launched, managed in version.members:
                row = found.get((launched.served, launched.number))
                if row is not None and self._is_elsewhere(row, host) and has_server(row):
                    launched.follow(Standing(failure=ELSEWHERE.format(row.host)))
                else:
                    launched.follow(self._standing(row))
                is_leaving = row is not None and row.state is LaunchState.LEAVING
                if is_leaving and managed.idle_since_s() is not None:
                    managed.evict()

    def _is_elsewhere(self, row: LaunchedRow, host: str) -> bool:
        """Return whether a replica is on another machine, which nothing here reaches."""
        version = self._versions.get(row.served)
        return version is not None and version.is_local and row.host != host

    def _standing(self, row: LaunchedRow | None) -> Standing:
        if row is None:
            return Standing()
        load_time_s = row.load_s or 0.0
        match row.state:
            case LaunchState.STARTING | LaunchState.WAKING:
                lifetime, since_s = self._loading.get(row.key, (None, 0.0))
                if lifetime != row.lifetime:
                    since_s = self._clock() - row.age_s
                    self._loading[row.key] = row.lifetime, since_s
                return Standing("", "its server starts", "", since_s, load_time_s)
            case LaunchState.READY | LaunchState.LEAVING:
                return Standing(row.address, "", "", None, load_time_s)
            case LaunchState.FAILED if row.retry_in_s > 0:
                return Standing("", row.error, row.error, None, load_time_s)
        self._loading.pop(row.key, None)
        return Standing(load_time_s=load_time_s)

    async def _scale(self, connection: LaunchConnection, tasks: asyncio.TaskGroup) -> bool:
        """Record what launchers have done, decide what to do next, and begin it.

        Returns whether a row may have changed.
        """
        has_changed = False
        while self._outcomes:
            key, move = self._outcomes[0]
            if move is not None:
                await connection.apply(move)
                has_changed = True
            self._outcomes.popleft()
            del self._acting[key]
        rows, elsewhere = await self._own_rows(connection)
        terms = {served: version.terms for served, version in self._versions.items()}
        wanted = merged(await connection.demands())
        for key in elsewhere:
            wanted.pop(key, None)
        moves = plan(terms, self._pools, rows, wanted)
        for move in moves:
            log.info(
                "launched_replica_moves",
                replica=f"{move.served}#{move.number}",
                before=move.before and move.before.value,
                after=move.after.value,
            )
            await connection.apply(move)
        if moves:
            rows, _ = await self._own_rows(connection)
        for version in self._versions.values():
            own = [row for row in rows if row.served == version.served]
            version.launcher.expect(frozenset(row.number for row in own if row.state in RUNNING))
            for row in own:
                if row.key not in self._acting:
                    self._act(version, row, tasks)
        return has_changed or bool(moves)

    async def _own_rows(self, connection: LaunchConnection) -> tuple[list[LaunchedRow], set[Key]]:
        """Read the replicas that this scaler can handle, and the keys of those on other machines.

        If no process lives on such a machine, the replica is lost, and can be started here.
        """
        rows = await connection.rows()
        away = [row for row in rows if self._is_elsewhere(row, connection.host) and has_server(row)]
        if not away:
            return rows, set()
        hosts = await connection.hosts()
        for row in away:
            if row.host not in hosts:
                log.error("launched_replica_lost", replica=f"{row.served}#{row.number}")
                await connection.apply(failed(row, f"its machine {row.host} has gone"))
        keys = {row.key for row in away}
        return [row for row in rows if row.key not in keys], keys

    def _act(self, version: LaunchedVersion, row: LaunchedRow, tasks: asyncio.TaskGroup) -> None:
        """Begin what the state of a row asks for."""
        replica = LaunchedId(row.served, row.number, str(row.lifetime))
        action: Coroutine[Any, Any, Move | None]
        match row.state:
            case LaunchState.STARTING:
                action = self._start(row, lambda: version.launcher.start(replica), version, replica)
            case LaunchState.WAKING:
                action = self._start(
                    row, lambda: version.launcher.wake(replica, row.address), version, replica
                )
            case LaunchState.PAUSING:
                action = self._pause(row, version.launcher, replica)
            case LaunchState.STOPPING:
                action = self._stop(row, version.launcher, replica)
            case LaunchState.READY | LaunchState.LEAVING:
                now_s = self._clock()
                if now_s - self._checked_at_s.get(row.key, now_s - CHECK_S) < CHECK_S:
                    return
                self._checked_at_s[row.key] = now_s
                action = self._check(row, version.launcher, replica)
            case _:
                return
        self._acting[row.key] = tasks.create_task(
            self._finish(row, action), name=f"launcher of {replica}"
        )

    async def _finish(self, row: LaunchedRow, action: Coroutine[Any, Any, Move | None]) -> None:
        """Keep the outcome of an action until it is recorded. An unexpected error is a failure."""
        try:
            move = await action
        except Exception as error:
            incident_id = self._retries.failed(error, row.key)
            move = failed(row, f"unexpected error, incident {incident_id}")
        self._outcomes.append((row.key, move))
        if move is not None:
            self.wake()

    async def _start(
        self,
        row: LaunchedRow,
        call: Callable[[], Awaitable[str]],
        version: LaunchedVersion,
        replica: LaunchedId,
    ) -> Move:
        began_at_s = self._clock()
        try:
            address = await call()
        except LaunchFailed as error:
            self.counts.starts[row.served, FAILED] += 1
            log.error("launched_replica_failed", replica=str(replica), reason=str(error))
            try:
                await version.launcher.stop(replica)
            except LaunchFailed as left:  # the next start ends what is left
                log.error("launched_replica_not_stopped", replica=str(replica), reason=str(left))
            return failed(row, str(error))
        self.counts.starts[row.served, STARTED] += 1
        self.counts.seconds[row.served] += self._clock() - began_at_s
        return replace(moved(row, LaunchState.READY), address=address, error="")

    async def _pause(self, row: LaunchedRow, launcher: Launcher, replica: LaunchedId) -> Move:
        try:
            await launcher.sleep(replica)
        except LaunchFailed as error:
            log.error("launched_replica_awake", replica=str(replica), reason=str(error))
            return replace(moved(row, LaunchState.STOPPING), error=str(error))
        return moved(row, LaunchState.SLEEPING)

    async def _stop(self, row: LaunchedRow, launcher: Launcher, replica: LaunchedId) -> Move:
        """Stop the server, and try again until it has ended: it takes its room till then."""
        while True:
            try:
                await launcher.stop(replica)
                return moved(row, LaunchState.STOPPED)
            except LaunchFailed as error:
                log.error("launched_replica_not_stopped", replica=str(replica), reason=str(error))
                await asyncio.sleep(STOP_AGAIN_S)

    async def _check(
        self, row: LaunchedRow, launcher: Launcher, replica: LaunchedId
    ) -> Move | None:
        try:
            if await launcher.runs(replica, row.address):
                return None
        except LaunchFailed as error:
            log.warning("launched_replica_unknown", replica=str(replica), reason=str(error))
            return None
        log.error("launched_replica_lost", replica=str(replica), address=row.address)
        await self._stop(row, launcher, replica)
        reason = "its server has ended"
        if row.ready_s is not None and row.ready_s >= STABLE_S:
            return replace(moved(row, LaunchState.FAILED), error=reason, failure_count=0)
        return failed(row, f"{reason} soon after its start")

    async def _leave(self, connection: LaunchConnection) -> None:
        """Withdraw the demands; as the last process, stop the servers that end with the service."""
        await connection.withdraw()
        await connection.notify()
        if not await self._ending(connection) or await is_another_alive(connection):
            return
        if not await connection.elect():
            return
        async with asyncio.TaskGroup() as stops:
            ending = []
            for row, version in await self._ending(connection):
                await connection.apply(moved(row, LaunchState.STOPPING))
                replica = LaunchedId(row.served, row.number, str(row.lifetime))
                stopping = replace(row, state=LaunchState.STOPPING)
                stop = self._stop(stopping, version.launcher, replica)
                ending.append(stops.create_task(stop, name=f"end of {replica}"))
        for task in ending:
            await connection.apply(task.result())

    async def _ending(
        self, connection: LaunchConnection
    ) -> list[tuple[LaunchedRow, LaunchedVersion]]:
        """Read the replicas that the last process must stop."""
        return [
            (row, version)
            for row in await connection.rows()
            if (version := self._versions.get(row.served)) is not None
            and version.ends_with_service
            and has_server(row)
            and not self._is_elsewhere(row, connection.host)
        ]


async def is_another_alive(connection: LaunchConnection) -> bool:
    """Return whether another process lives, after this one has withdrawn its demands.

    The demands of a process that was killed stay for a while, so only a new write is a sign of
    life. A server would run for ever if each process took a dead one for the last.
    """
    before = await connection.writes()
    if not before:
        return False
    for _ in range(WAIT_POLLS_MAX):
        await asyncio.sleep(POLL_S)
        now = await connection.writes()
        if not now:
            return False
        if any(before.get(process_id) != written_at for process_id, written_at in now.items()):
            return True
    return False


def has_server(row: LaunchedRow) -> bool:
    """Return whether a server may exist."""
    return row.state not in (LaunchState.STOPPED, LaunchState.FAILED)


def failed(row: LaunchedRow, reason: str) -> Move:
    """Build the move of a replica whose start has failed, with the delay before the next one."""
    count = row.failure_count + 1
    retry_in_s = backoff_s(count, RETRY_S_MIN, RETRY_S_MAX)
    change = moved(row, LaunchState.FAILED)
    return replace(change, error=reason, failure_count=count, retry_in_s=retry_in_s)
