"""Outages, as callers of sessions see them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from metering.core.errors import DatabaseUnavailable
from metering.store.db import (
    BoundedConnection,
    DatabaseUrlInvalid,
    Sessions,
    create_engine,
    create_sessions,
    lock_holder,
    psycopg_conninfo,
    sqlalchemy_url,
)
from tests.metering.queries import execute, fetch_value

PATIENCE_S = 60.0


async def test_a_database_that_cannot_be_reached_is_away() -> None:
    engine = create_engine("postgresql://somebody:secret@127.0.0.1:1/weir")

    with pytest.raises(DatabaseUnavailable) as outage:
        async with create_sessions(engine)() as session:
            await session.execute(text("SELECT 'private'"))

    await engine.dispose()
    assert str(outage.value) == "the database does not answer"


@pytest.mark.parametrize("form", ["authority", "query"])
async def test_of_several_hosts_the_writable_one_is_used(database_url: str, form: str) -> None:
    named = conninfo_to_dict(psycopg_conninfo(database_url))
    user, name, there = named["user"], named["dbname"], quote(str(named["host"]), safe="")
    port = named.get("port") or ""
    url = {
        "authority": f"postgresql://{user}@127.0.0.1:1,{there}:{port}/{name}",
        "query": f"postgresql://{user}@/{name}?host=127.0.0.1,{there}&port=1,{port}",
    }[form]

    engine = create_engine(url)
    async with create_sessions(engine)() as session:
        found = (await session.execute(text("SELECT current_database()"))).scalar_one()
    await engine.dispose()
    with psycopg.connect(psycopg_conninfo(url)) as connection:
        again = connection.execute("SELECT current_database()").fetchone()

    assert (found, again) == (name, (name,))


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("postgresql://u:p@a:1,b:2/d", "a,b", "1,2"),
        ("postgres://u:p@a,b:2/d", "a,b", ",2"),
        ("postgresql+psycopg://u:p%40@[::1]:1,[::2]:2/d", "::1,::2", "1,2"),
        ("postgresql://u:p@/d?host=a,b&port=5", "a,b", "5"),
        ("postgresql://a,b/d?target_session_attrs=primary", "a,b", ","),
    ],
)
def test_hosts_of_a_url_reach_both_drivers(url: str, host: str, port: str) -> None:
    attributes = "primary" if "primary" in url else "read-write"

    query = dict(sqlalchemy_url(url).query)
    named = conninfo_to_dict(psycopg_conninfo(url))

    for each in (query, named):
        assert (each["host"], each["target_session_attrs"]) == (host, attributes)
        assert each.get("port") == port
    assert named["dbname"] == "d"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://u:secret@h/d", "host1:5432,host2:5432"),
        ("host=h dbname=d", "must be a PostgreSQL database"),
        ("postgresql://u:secret@a:1,b:2,c/d?port=1,2", "one port from 1 to 65535"),
        ("postgresql://u:secret@a:0/d", "one port from 1 to 65535"),
        ("postgresql://u:secret@a,b:x/d", "one port from 1 to 65535"),
        ("postgresql://u:secret@a/d?unknown=1", "not a URL that libpq can read"),
        ("postgresql://u:secret@a,b/d?target_session_attrs=standby", "any, read-write, primary"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(DatabaseUrlInvalid, match=words) as refusal:
        sqlalchemy_url(url)

    assert "secret" not in str(refusal.value)


async def test_a_cut_connection_is_an_outage_and_is_replaced(sessions: Sessions) -> None:
    with pytest.raises(DatabaseUnavailable):
        await execute(sessions, "SELECT pg_terminate_backend(pg_backend_pid())")
    assert await fetch_value(sessions, "SELECT 1") == 1


async def test_a_slow_statement_is_an_outage_a_broken_rule_not(sessions: Sessions) -> None:
    async with sessions() as session:
        await session.execute(text("SET LOCAL statement_timeout = 1"))
        with pytest.raises(DatabaseUnavailable):
            await session.execute(text("SELECT pg_sleep(5)"))
    async with sessions() as session:
        with pytest.raises(IntegrityError):
            await session.execute(
                text("INSERT INTO organizations (name, currency_code) VALUES ('UPPER', 'USD')")
            )


async def test_locks_end_with_their_block_and_hide_no_broken_connection(sessions: Sessions) -> None:
    taken, free = (
        text("SELECT pg_try_advisory_lock(7)"),
        text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"),
    )
    async with lock_holder(sessions) as locks:
        assert await locks.scalar(taken)
    async with sessions() as session:
        assert await session.scalar(free) == 0

    with pytest.raises(DatabaseUnavailable):
        await break_while_locked(sessions)


async def break_while_locked(sessions: Sessions) -> None:
    """End the connection that holds a lock."""
    async with lock_holder(sessions) as locks:
        await locks.execute(text("SELECT pg_advisory_lock(7)"))
        await locks.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


async def test_a_cancelled_attempt_to_connect_closes_its_socket(tmp_path: Path) -> None:
    """Without a garbage collection: there may be hundreds of such attempts."""
    came, closed = asyncio.Event(), asyncio.Event()

    async def accept_silently(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()
        closed.set()
        writer.close()

    gc.collect()
    gc.disable()
    try:
        async with (
            await asyncio.start_unix_server(accept_silently, tmp_path / ".s.PGSQL.5432"),
            asyncio.TaskGroup() as tasks,
        ):
            attempt = tasks.create_task(
                BoundedConnection.connect(host=str(tmp_path), user="nobody", connect_timeout=60)
            )
            await came.wait()
            attempt.cancel()
            async with asyncio.timeout(PATIENCE_S):
                await closed.wait()
    finally:
        gc.enable()


@contextlib.asynccontextmanager
async def silent_host(directory: Path) -> AsyncIterator[asyncio.Event]:
    """Run a server that accepts connections and says nothing, as a lost machine does.

    Yield an event that is set when it has a connection. All are lost at the end of the block.
    """
    came = asyncio.Event()

    async def accept_silently(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()
        writer.close()

    await asyncio.to_thread(directory.mkdir)
    async with await asyncio.start_unix_server(accept_silently, directory / ".s.PGSQL.5432"):
        yield came


def several_hosts(database_url: str, *others: Path) -> str:
    """Return a connection string whose hosts are those, then the database's own."""
    named = conninfo_to_dict(psycopg_conninfo(database_url))
    hosts = ",".join([*map(str, others), str(named["host"])])
    return make_conninfo("", **named | {"host": hosts, "target_session_attrs": "read-write"})


async def test_a_silent_host_does_not_delay_the_next(database_url: str, tmp_path: Path) -> None:
    conninfo = several_hosts(database_url, tmp_path / "silent")

    async with (
        asyncio.timeout(PATIENCE_S),
        silent_host(tmp_path / "silent"),
        await BoundedConnection.connect(conninfo, connect_timeout=1000) as connection,
    ):
        await connection.execute("SELECT 1")


async def test_a_host_that_refuses_is_asked_again_while_another_is_silent(
    database_url: str, tmp_path: Path
) -> None:
    """A standby is promoted while the lost primary still has time to answer."""
    silent, standby = tmp_path / "silent", tmp_path / "standby"
    standby.mkdir()
    named = conninfo_to_dict(several_hosts(database_url, silent))
    own = Path(str(named["host"]).rpartition(",")[2])
    conninfo = make_conninfo("", **named | {"host": f"{standby},{silent}"})

    async with (
        asyncio.timeout(PATIENCE_S),
        silent_host(silent) as asked,
        asyncio.TaskGroup() as tasks,
    ):
        attempt = tasks.create_task(BoundedConnection.connect(conninfo, connect_timeout=1000))
        await asked.wait()
        (standby / ".s.PGSQL.5432").symlink_to(own / ".s.PGSQL.5432")
        await (await attempt).close()


async def test_the_failures_of_all_hosts_are_named(tmp_path: Path) -> None:
    hosts = [str(tmp_path / "one"), str(tmp_path / "two")]

    with pytest.raises(psycopg.OperationalError, match="no host takes writes") as failure:
        await BoundedConnection.connect(host=",".join(hosts), user="nobody")

    assert all(host in str(failure.value) for host in hosts)


async def test_an_attempt_that_is_cancelled_when_a_host_has_accepted_closes_its_connection(
    database_url: str, tmp_path: Path
) -> None:
    opened: list[BoundedConnection] = []

    class Cancelled(BoundedConnection):
        @classmethod
        async def _connect_to(cls, conninfo: str, *args: Any, **parameters: Any) -> Self:
            connection = await super()._connect_to(conninfo, *args, **parameters)
            opened.append(connection)
            attempt.cancel()
            return connection

    attempt = asyncio.create_task(Cancelled.connect(several_hosts(database_url, tmp_path / "gone")))
    with pytest.raises(asyncio.CancelledError):
        await attempt

    assert [connection.closed for connection in opened] == [True]
