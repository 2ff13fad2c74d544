"""Versions of the fleet: appended one after the other, and followed over lost connections."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from metering.control.fleet_versions import (
    FleetRecord,
    StoredFleet,
    add_version,
    find_version,
    fleet_processes,
    list_versions,
    lock_newest,
    read_newest,
)
from metering.core.errors import InvalidValue, NotFound
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.test_control_channel import listening, until


class Follower:
    """Fleet of one process, which serves what it gets at once."""

    def __init__(self) -> None:
        self.followed: list[StoredFleet | None] = []
        self.state = (0, "not served yet")

    def follow(self, stored: StoredFleet | None) -> None:
        """Implement `Fleet.follow`."""
        self.followed.append(stored)
        if stored is not None:
            self.state = (stored.number, "")


async def add(sessions: Sessions, document: str, reason: str = "") -> FleetRecord:
    """Add a version after the newest one."""
    async with sessions.begin() as session:
        newest = await lock_newest(session)
        return await add_version(
            session, document=document, newest=newest, reason=reason, actor="test"
        )


async def test_versions_are_numbered_in_the_order_of_their_commits(sessions: Sessions) -> None:
    await asyncio.gather(*(add(sessions, f"document {n}") for n in range(8)))

    async with sessions() as session:
        listed = await list_versions(session)
        page = await list_versions(session, page_size=2, before_number=5)
        third = await find_version(session, 3)
        with pytest.raises(NotFound, match="fleet version"):
            await find_version(session, 9)
    assert [each.number for each in listed] == list(range(8, 0, -1))
    assert [each.number for each in page] == [4, 3]
    assert third is not None
    assert third.document.startswith("document")


@pytest.mark.parametrize(
    "statement",
    ["UPDATE fleet_versions SET document = ''", "DELETE FROM fleet_versions"],
)
async def test_a_version_never_changes(
    sessions: Sessions, database_url: str, statement: str
) -> None:
    await add(sessions, "document")

    with (
        psycopg.connect(psycopg_conninfo(database_url)) as connection,
        pytest.raises(psycopg.Error, match="append-only"),
    ):
        connection.execute(statement.encode())


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines"])
async def test_a_reason_is_one_short_line(sessions: Sessions, reason: str) -> None:
    with pytest.raises(InvalidValue, match="reason"):
        await add(sessions, "document", reason)


async def test_a_process_follows_each_new_version_and_reports_it(
    sessions: Sessions, database_url: str
) -> None:
    async with listening(database_url) as listener:
        listener.channel.fleet = follower = Follower()
        await add(sessions, "one")
        await until(lambda: follower.state[0] == 1, "version 1")
        await add(sessions, "two")
        await until(lambda: follower.state[0] == 2, "version 2")
        found = await fleet_processes(sessions)

    assert follower.followed == [StoredFleet(1, "one"), StoredFleet(2, "two")]
    [process] = found.processes
    assert (process.process_name, process.number, process.fault) == ("here:1", 2, "")


async def test_a_version_stored_without_a_connection_is_followed_when_it_is_back(
    sessions: Sessions, database_url: str
) -> None:
    async with CuttingProxy(database_url).listening() as proxy, listening(proxy.url) as listener:
        listener.channel.fleet = follower = Follower()
        await add(sessions, "one")
        await until(lambda: follower.state[0] == 1, "version 1")
        proxy.refusing = True
        proxy.cut_now()
        await until(lambda: not listener.channel.connected, "the loss of the connection")
        await add(sessions, "two")
        await add(sessions, "three")
        assert follower.state[0] == 1, "the last version is kept"
        proxy.refusing = False
        await until(lambda: follower.state[0] == 3, "the newest version")

    assert [each and each.number for each in follower.followed] == [1, 3]


async def test_the_newest_version_is_read_before_a_process_starts(
    sessions: Sessions, database_url: str
) -> None:
    assert await read_newest(database_url) is None
    await add(sessions, "one")
    assert await read_newest(database_url) == StoredFleet(1, "one")
    assert await read_newest("postgresql://127.0.0.1:1/none") is None, "the database is away"
