"""Pipelined statements: exact values, matching answers, and errors end all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import psycopg
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from metering.store import pipeline
from metering.store.db import psycopg_conninfo
from metering.store.pipeline import (
    Connection,
    array,
    bytes_array,
    id_array,
    run_pipeline,
    text_array,
)
from tests.conftest import ask

texts = st.lists(
    st.none()
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    max_size=5,
)

FAREWELL = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to unexpected postmaster exit\0\0"


@pytest.fixture
async def connection(postgres_server: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(postgres_server), autocommit=True
    ) as opened:
        yield opened


async def test_each_statement_has_its_own_answer(connection: Connection) -> None:
    for _ in range(3):  # the first round prepares them
        answers = await run_pipeline(
            connection,
            [
                ("BEGIN", ()),
                ("SELECT %s::int + %s::int, '100 %%'", (2, "3")),
                ("SELECT 1 WHERE false", ()),
                ("SELECT g FROM generate_series(1, %s) g", (3,)),
                ("SELECT %s::float8, %s::text", (0.25, None)),
                ("COMMIT", ()),
            ],
        )

        assert answers == [[], [(5, "100 %")], [], [(1,), (2,), (3,)], [(0.25, None)], []]


@example(
    given_texts=["a\\b", "\\", 'say "no"', "{1,2}", "NULL", None, "", " x "],
    ids=[],
    blobs=[b"", b"\\\0"],
)
@given(
    given_texts=texts,
    ids=st.lists(st.uuids(), max_size=3),
    blobs=st.lists(st.binary(max_size=9), max_size=3),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
async def test_arrays_arrive_as_they_were(
    connection: Connection, given_texts: list[str | None], ids: list[uuid.UUID], blobs: list[bytes]
) -> None:
    numbers, times = [-1, 2**40], [datetime(2026, 11, 20, 1, 2, 3, 4, UTC)]

    [[row]] = await run_pipeline(
        connection,
        [
            (
                (
                    "SELECT %s::text[], %s::uuid[], %s::bytea[], %s::bigint[], %s::timestamptz[],"
                    " %s::bool[]"
                ),
                (
                    text_array(given_texts),
                    id_array(ids),
                    bytes_array(blobs),
                    array(numbers),
                    array(times),
                    array([True, False]),
                ),
            )
        ],
    )

    assert row == (given_texts, ids, blobs, numbers, times, [True, False])


async def test_an_error_is_raised_as_it_is_and_nothing_follows_it(connection: Connection) -> None:
    await connection.execute("CREATE TEMPORARY TABLE kept (n int PRIMARY KEY)")

    with pytest.raises(psycopg.errors.UniqueViolation):
        await run_pipeline(
            connection,
            [
                ("INSERT INTO kept VALUES (%s)", (1,)),
                ("INSERT INTO kept VALUES (%s)", (1,)),
                ("INSERT INTO kept VALUES (2)", ()),
            ],
        )


async def test_text_that_the_protocol_would_cut_short_is_refused(connection: Connection) -> None:
    with pytest.raises(ValueError, match="NUL"):
        await run_pipeline(connection, [("SELECT %s::text", ("a\0b",))])


async def test_a_lost_connection_is_reported(postgres_server: str) -> None:
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(postgres_server), autocommit=True
    ) as opened:
        with pytest.raises(psycopg.OperationalError):
            await run_pipeline(
                opened, [("SELECT pg_terminate_backend(pg_backend_pid())", ()), ("SELECT 1", ())]
            )


async def test_a_connection_that_goes_away_is_watched_no_more(
    postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new socket with the same descriptor must keep its watch."""
    loop, read = asyncio.get_running_loop(), pipeline._Channel.read
    still_watched: list[bool] = []
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(postgres_server), autocommit=True
    ) as lost:
        fd = lost.pgconn.socket

        def read_and_poll(channel: pipeline._Channel) -> None:
            watched = fd, channel._fd
            read(channel)
            if lost.pgconn.status == psycopg.pq.ConnStatus.BAD:
                still_watched.extend(map(loop.remove_reader, filter(None, watched)))

        monkeypatch.setattr(pipeline._Channel, "read", read_and_poll)
        with pytest.raises(psycopg.OperationalError):
            await run_pipeline(lost, [("SELECT pg_terminate_backend(pg_backend_pid())", ())])

    assert still_watched == [False, False]


async def test_pipelines_and_statements_of_the_driver_alternate(connection: Connection) -> None:
    for number in range(3):
        cursor = await connection.execute("SELECT %s::int", (number,))
        assert await cursor.fetchall() == [(number,)]
        assert await run_pipeline(connection, [("SELECT %s::int", (number,))]) == [[(number,)]]


async def test_a_lack_of_descriptors_is_reported_as_a_lost_connection(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", refuse)
        with pytest.raises(psycopg.OperationalError):
            await run_pipeline(connection, [("SELECT 1", ())])

    assert await run_pipeline(connection, [("SELECT 1", ())]) == [[(1,)]]


async def test_a_connection_that_is_closed_leaves_no_descriptor(postgres_server: str) -> None:
    """Nor does one that the server has closed while it was idle."""

    def open_count() -> int:
        return len(os.listdir("/dev/fd"))

    ask(postgres_server, "SELECT 1")  # opens a connection and keeps it
    before = open_count()
    for closed_by_server in (False, True):
        async with await psycopg.AsyncConnection.connect(
            psycopg_conninfo(postgres_server), autocommit=True
        ) as opened:
            [[(pid,)]] = await run_pipeline(opened, [("SELECT pg_backend_pid()", ())])
            if closed_by_server:
                ask(postgres_server, f"SELECT pg_terminate_backend({pid}, 5000)")
        async with asyncio.timeout(5):
            while open_count() > before:  # noqa: ASYNC110 (the end arrives as input)
                await asyncio.sleep(0.01)


async def test_failing_statements_are_not_kept_on_the_server(connection: Connection) -> None:
    failing = [("SELECT 1", ()), ("SELECT 1 / %s::int", (0,)), ("SELECT 2", ())]
    for _ in range(5):
        with pytest.raises(psycopg.errors.DivisionByZero):
            await run_pipeline(connection, failing)

    [[(count,)]] = await run_pipeline(
        connection, [("SELECT count(*)::int FROM pg_prepared_statements", ())]
    )
    assert count == 3  # the two that got that far, and this one
    assert await run_pipeline(
        connection, [failing[0], ("SELECT 1 / %s::int", (1,)), failing[2]]
    ) == [
        [(1,)],
        [(1,)],
        [(2,)],
    ]


@contextlib.contextmanager
def forwarding(postgres_server: str) -> Iterator[tuple[str, threading.Event]]:
    """Forward to the server, or stop reading and reset the connection."""
    info = psycopg.conninfo.conninfo_to_dict(psycopg_conninfo(postgres_server))
    reset = threading.Event()
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/.s.PGSQL.5432")
        listener.listen()

        def forward() -> None:
            client, _ = listener.accept()
            with client, socket.socket(socket.AF_UNIX) as server:
                server.connect(f"{info['host']}/.s.PGSQL.5432")
                while not reset.is_set():
                    for one, other in ((client, server), (server, client)):
                        if select.select([one], [], [], 0.005)[0] and not reset.is_set():
                            other.sendall(one.recv(1 << 16))
                select.select([client], [], [], 10)
                client.sendall(b"E" + (len(FAREWELL) + 4).to_bytes(4, "big") + FAREWELL)
            # Unread data at the close makes it a reset.

        thread = threading.Thread(target=forward)
        thread.start()
        yield psycopg.conninfo.make_conninfo("", **info | {"host": directory}), reset
        reset.set()
        thread.join()


def test_a_connection_that_is_reset_is_noticed(postgres_server: str) -> None:
    """The event loop reports the end once, and the socket is no longer watched."""

    async def ask(conninfo: str, reset: threading.Event) -> None:
        async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
            assert await run_pipeline(connection, [("SELECT 1", ())]) == [[(1,)]]
            reset.set()
            async with asyncio.timeout(5):
                await run_pipeline(connection, [("SELECT 2", ())])

    loops = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with (
        forwarding(postgres_server) as (conninfo, reset),
        loops as runner,
        pytest.raises(psycopg.OperationalError),
    ):
        runner.run(ask(conninfo, reset))
