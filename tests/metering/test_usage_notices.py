"""Fast rating: few notices, a reconnecting listener, and a schedule."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psycopg
import pytest

from metering.holds import usage_notices
from metering.holds.usage_notices import CHANNEL, UsageNotices
from metering.store.db import Sessions, create_engine, create_sessions
from metering.worker import APPLICATION, TaskRequest, UsageListener
from tests.metering.usage import Acme, Consumed
from tests.metering.workers import wait_until, worker

LISTENING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname ="
    " current_database()"
)
END_LISTENING = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE application_name = %s AND datname = current_database()
"""


def count(connection: psycopg.Connection[tuple[int]], query: str, *parameters: str) -> int:
    """Return the single number of a query."""
    row = connection.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]


async def test_many_settlements_are_one_notice(
    sessions: Sessions, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_notices, "NOTICE_INTERVAL_S", 3600.0)
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as listening,
        asyncio.TaskGroup() as tasks,
    ):
        await listening.execute(f"LISTEN {CHANNEL}")
        notices = UsageNotices(sessions)
        running = tasks.create_task(notices.run())
        for _ in range(1_000):
            notices.used()
        assert [
            notice.channel async for notice in listening.notifies(timeout=30, stop_after=1)
        ] == [CHANNEL]
        notices.used()
        await asyncio.sleep(0)
        assert [notice async for notice in listening.notifies(timeout=0)] == []
        running.cancel()


async def test_notices_survive_a_missing_database(sessions: Sessions, database_url: str) -> None:
    away = create_engine("postgresql://nobody@127.0.0.1:1/weir")
    notices = UsageNotices(create_sessions(away))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(notices.run())
        notices.used()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
    await away.dispose()


def test_a_task_that_was_requested_is_not_requested_again_until_it_has_begun() -> None:
    requested: list[int] = []
    request = TaskRequest(lambda: requested.append(1), again_after_s=3600.0)
    for _ in range(3):
        request()
    assert len(requested) == 1

    request.begun()
    for _ in range(3):
        request()
    assert len(requested) == 2

    impatient = TaskRequest(lambda: requested.append(1), again_after_s=0.0)
    impatient()
    impatient()
    assert len(requested) == 4


def test_the_listener_comes_back_when_its_connection_breaks(database_url: str) -> None:
    heard: list[int] = []
    listener = UsageListener(database_url, lambda: heard.append(1))
    listener.start()
    try:
        with psycopg.connect(database_url, autocommit=True) as connection:
            wait_until(lambda: len(heard) == 1, "the listener to listen")
            connection.execute(f"NOTIFY {CHANNEL}")
            wait_until(lambda: len(heard) == 2, "the listener to hear")
            assert count(connection, END_LISTENING, APPLICATION) == 1
            wait_until(lambda: len(heard) == 3, "the listener to listen again")
            connection.execute(f"NOTIFY {CHANNEL}")
            wait_until(lambda: len(heard) == 4, "the listener to hear again")
    finally:
        listener.stop()
        listener.join()


@pytest.mark.faults
async def test_a_worker_without_schedule_rates_announced_and_missed_usage(
    tmp_path: Path, database_url: str, acme: Acme
) -> None:
    """Only the listener sends tasks; missed usage is rated after reconnecting."""
    pending = "SELECT count(*) FROM unrated_usage"

    async def use(event_count: int) -> None:
        await acme.use(*([Consumed(3, 1, 2)] * event_count))

    with (
        worker(tmp_path, database_url, {}, clock=False),
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        wait_until(lambda: count(connection, LISTENING, APPLICATION) == 1, "the worker to listen")
        await use(3)
        connection.execute(f"NOTIFY {CHANNEL}")
        wait_until(
            lambda: count(connection, pending) == 0, "the worker to rate what it was told of"
        )
        await use(4)
        assert count(connection, END_LISTENING, APPLICATION) == 1
        wait_until(
            lambda: count(connection, pending) == 0, "the worker to rate what it was not told of"
        )
        await use(1)
        began = time.monotonic()
        connection.execute(f"NOTIFY {CHANNEL}")
        wait_until(
            lambda: count(connection, pending) == 0, "the worker to rate what it was told of again"
        )
        print(f"in the ledger {time.monotonic() - began:.3f} s after the notice")
