"""The part of an api process that writes demands, follows rows and scales, on real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import psycopg
import pytest

from api.fleet.launch_plan import LaunchTerms, moved
from api.fleet.launcher_reader import FleetLauncher
from api.fleet.launching import LaunchedVersion, Launching
from inference.adapters.launched_replica import LaunchedReplica
from inference.launchers.launcher import LaunchedId, LaunchFailed
from inference.routing.on_demand import ManagedEngine
from metering.control.launches import SERVER_PATIENCE, LaunchConnection, LaunchState, Move
from tests.conftest import ask
from tests.faults.scaler_process import WantingEngine
from tests.service import until

ADDRESS = "vllm://127.0.0.1:1"


class Servers:
    """Launcher that keeps its servers in memory; `faults` are raised by the next calls."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.calls: list[str] = []
        self.faults: dict[str, BaseException] = {}

    def expect(self, numbers: frozenset[int]) -> None:
        pass

    def note(self, name: str) -> None:
        self.calls.append(name)
        if (fault := self.faults.pop(name, None)) is not None:
            raise fault

    async def start(self, replica: LaunchedId) -> str:
        self.note("start")
        self.running.add(replica.lifetime)
        return ADDRESS

    async def wake(self, replica: LaunchedId, address: str) -> str:
        self.note("wake")
        return address

    async def stop(self, replica: LaunchedId) -> None:
        self.note("stop")
        self.running.discard(replica.lifetime)

    async def sleep(self, replica: LaunchedId) -> None:
        self.note("sleep")

    async def runs(self, replica: LaunchedId, address: str) -> bool:
        return replica.lifetime in self.running


class World:
    """One process that may want one replica."""

    def __init__(self, database_url: str, *, is_local: bool = False, sleeps: bool = False) -> None:
        self.database_url = database_url
        self.servers, self.launched = Servers(), LaunchedReplica("chat", 0)
        terms = LaunchTerms(can_sleep=sleeps)
        version = LaunchedVersion(
            "chat", self.servers, terms, is_local=is_local, ends_with_service=is_local
        )
        version.members.append((self.launched, cast(ManagedEngine, cast(Any, WantingEngine()))))
        self.launching = Launching(database_url, uuid.uuid4())
        self.launching.become([version], {})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.launching.run())
            yield
            running.cancel()

    def row(self) -> dict[str, Any]:
        answer = ask(self.database_url, "SELECT * FROM launched_replicas")
        names = [column.name for column in answer.description or ()]
        return dict(zip(names, answer.fetchone() or [None] * len(names), strict=True))

    async def reaches(self, state: str) -> None:
        await until(lambda: self.row()["state"] == state, state)


async def test_a_replica_comes_with_the_demand_and_goes_with_it(database_url: str) -> None:
    world = World(database_url)
    async with world.running():
        world.launched.want()
        await until(lambda: world.launched.standing.address == ADDRESS, "the address")
        world.launched.leave()
        await world.reaches("stopped")
        assert not world.launched.standing.address

    assert world.servers.calls == ["start", "stop"]
    assert dict(world.launching.counts.starts) == {
        ("chat", "started"): 1,
        ("chat", "failed"): 0,
    }


async def test_another_launcher_starts_servers_when_those_of_the_first_have_ended(
    database_url: str,
) -> None:
    """The servers of a name are those of one launcher, so the first one stops what it started."""
    world, later = World(database_url), World(database_url)
    [(launched, engine)] = later.launching._versions["chat"].members
    successor = replace(
        LaunchedVersion("chat", later.servers, LaunchTerms()),
        source=cast(FleetLauncher, "another"),
        members=[(launched, engine)],
    )
    async with world.running():
        world.launched.want()
        await world.reaches("ready")
        launched.want()
        world.launching.become([successor], {})
        await until(lambda: world.launched.standing.address == ADDRESS, "requests may still run")
        await asyncio.sleep(0.3)
        assert not later.servers.calls

        world.launched.leave()
        await until(lambda: launched.standing.address == ADDRESS, "the other server")
        assert world.servers.calls == ["start", "stop"]

        launched.leave()
        world.launching.become([], {})
        await until(lambda: not world.launching._versions, "nothing to launch")
        await world.launching.close()

    assert later.servers.calls == ["start", "stop"]


async def test_an_unexpected_error_of_a_launcher_fails_its_replica_only(database_url: str) -> None:
    world = World(database_url)
    world.servers.faults["start"] = ZeroDivisionError()
    async with world.running():
        world.launched.want()
        await until(lambda: world.launched.standing.failure, "the failure")

    assert "unexpected error, incident" in world.launched.standing.failure


async def test_a_stop_that_fails_is_repeated(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica keeps its room until then."""
    monkeypatch.setattr("api.fleet.launching.STOP_AGAIN_S", 0.01)
    world = World(database_url)
    world.servers.faults["stop"] = LaunchFailed("busy")
    async with world.running():
        world.launched.want()
        await world.reaches("ready")
        world.launched.leave()
        await world.reaches("stopped")

    assert world.servers.calls == ["start", "stop", "stop"]


async def test_a_server_that_cannot_sleep_is_stopped(database_url: str) -> None:
    world = World(database_url, sleeps=True)
    world.servers.faults["sleep"] = LaunchFailed("no such call")
    async with world.running():
        world.launched.want()
        await world.reaches("ready")
        world.launched.leave()
        await world.reaches("stopped")

    assert world.servers.calls == ["start", "sleep", "stop"]
    assert world.row()["error"] == "no such call"


async def test_work_goes_on_after_the_connection_was_cut(database_url: str) -> None:
    """The next election is this process's own, if it is the only one."""
    world = World(database_url)
    async with world.running():
        world.launched.want()
        await world.reaches("ready")
        ask(
            database_url,
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE application_name LIKE 'weir_scaler_%%'""",
        )
        world.launched.leave()
        await world.reaches("stopped")

    assert world.servers.calls == ["start", "stop"]


async def test_the_last_process_stops_servers_of_its_machine(database_url: str) -> None:
    one, other = World(database_url, is_local=True), World(database_url, is_local=True)
    async with one.running():
        one.launched.want()
        await one.reaches("ready")
        async with other.running():
            other.launched.want()
            await until(lambda: other.launched.standing.address, "the address in the other process")
            await other.launching.close()
        assert one.row()["state"] == "ready"
        await one.launching.close()

    assert one.row()["state"] == "stopped"
    assert one.servers.calls == ["start", "stop"]


async def test_a_server_of_another_machine_is_not_used(database_url: str) -> None:
    """Not even stopped, as long as a process lives there."""
    ask(
        database_url,
        """INSERT INTO launched_replicas (served, number, state, lifetime, host, address)
           VALUES ('chat', 0, 'ready', gen_random_uuid(), 'elsewhere', %s)""",
        ADDRESS,
    )
    ask(
        database_url,
        """INSERT INTO replica_demands (process_id, host, written_at, demands)
           VALUES (%s, 'elsewhere', clock_timestamp() + interval '1 hour', %s::jsonb)""",
        uuid.uuid4(),
        json.dumps([]),
    )
    world = World(database_url, is_local=True)
    async with world.running():
        world.launched.want()
        await until(lambda: world.launched.standing.failure, "the failure")
        assert "its server runs on the machine elsewhere" in world.launched.standing.failure
        assert world.row()["state"] == "ready"

        ask(database_url, "DELETE FROM replica_demands WHERE host = 'elsewhere'")
        await world.reaches("failed")
        assert world.row()["error"] == "its machine elsewhere has gone"
        ask(database_url, "UPDATE launched_replicas SET retry_at = clock_timestamp()")
        await until(lambda: world.launched.standing.address == ADDRESS, "a start here")

    assert world.servers.calls == ["start"]


async def test_one_connection_is_elected_until_it_ends(database_url: str) -> None:
    first = await LaunchConnection.connect(database_url, uuid.uuid4())
    second = await LaunchConnection.connect(database_url, uuid.uuid4())
    try:
        assert await first.elect()
        assert not await second.elect()
        await first.close()
        await elected(second)
    finally:
        await second.close()


async def test_the_server_ends_the_connection_of_a_frozen_process(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is free then, although its machine still answers."""
    assert "idle_session_timeout=15s" in SERVER_PATIENCE
    monkeypatch.setattr("metering.control.launches.SERVER_PATIENCE", ("idle_session_timeout=500",))
    frozen = await LaunchConnection.connect(database_url, uuid.uuid4())
    assert await frozen.elect()
    monkeypatch.undo()
    other = await LaunchConnection.connect(database_url, uuid.uuid4())
    try:
        await elected(other)
        with pytest.raises(psycopg.OperationalError):
            await frozen.rows()
    finally:
        await other.close()
        await frozen.close()


async def elected(connection: LaunchConnection) -> None:
    """Wait until the connection is elected."""
    while not await connection.elect():  # noqa: ASYNC110  # depends on the server
        await asyncio.sleep(0.01)


async def test_a_move_that_expects_another_state_changes_nothing(database_url: str) -> None:
    """Neither that of an earlier lifetime, nor one that was made already."""
    store = await LaunchConnection.connect(database_url, uuid.uuid4())
    try:
        assert await store.elect()
        first = Move("chat", 0, None, None, LaunchState.STARTING)
        for _ in range(2):
            await store.apply(first)
        [row] = await store.rows()
        ready = replace(moved(row, LaunchState.READY), address=ADDRESS)
        stale = replace(ready, lifetime=uuid.uuid4(), after=LaunchState.FAILED)
        for move in (stale, ready, ready, replace(stale, before=LaunchState.READY)):
            await store.apply(move)
        [row] = await store.rows()
        assert (row.state, row.address) == (LaunchState.READY, ADDRESS)
        await store.apply(moved(row, LaunchState.STOPPED))
        again = replace(first, lifetime=row.lifetime, before=LaunchState.STOPPED)
        for _ in range(2):
            await store.apply(again)
        [row_again] = await store.rows()
        assert row_again.lifetime != row.lifetime
    finally:
        await store.close()
    runs = ask(database_url, "SELECT ended_at IS NULL FROM replica_runs ORDER BY id").fetchall()
    assert runs == [(False,), (True,)]
