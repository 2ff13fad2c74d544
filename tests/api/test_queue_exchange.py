"""Exchange of queue reports through PostgreSQL, between processes in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import psycopg
import pytest
from structlog.testing import capture_logs

from api.core.settings import QueueSettings
from api.generation.request.queue_exchange import QueueExchange
from api.queue import exchange
from api.queue.exchange import Exchange
from api.queue.fair_queue import FairQueue, QueueEntry
from inference.engine import EngineStatistics
from metering.control.queue_reports import QueueReportRow
from metering.store.db import psycopg_conninfo
from tests.api.queue_world import POOL
from tests.api.test_fair_queue import arrival, do_nothing
from tests.metering.test_control_channel import until

ROWS = "SELECT process_id, written_at FROM queue_reports ORDER BY process_id"


class Member:
    """Process with a queue before a shared engine, whose window takes nothing."""

    def __init__(self, url: str, pool: str = POOL, limits: QueueSettings | None = None) -> None:
        self.id = uuid.uuid4()
        self.queue = FairQueue(limits or QueueSettings(), EngineStatistics)
        self.queue.window.has_room = lambda rank: False  # type: ignore[method-assign]
        self.exchange = QueueExchange(url, self.id)
        self.exchange.become({pool: self.queue})
        self.exchange.note_processes(2)
        self.task: asyncio.Task[None]

    def send(self, tenant: str, count: int = 1) -> list[QueueEntry]:
        entries = [self.queue.enter(arrival(tenant)) for _ in range(count)]
        for entry in entries:
            entry.join(do_nothing)
        return entries

    def waiting_elsewhere(self) -> int:
        return self.queue.waiting.elsewhere_total


@contextlib.asynccontextmanager
async def members(url: str, *pools: str) -> AsyncIterator[list[Member]]:
    """Run processes, each before the named pool."""
    found = [Member(url, pool) for pool in pools]
    async with asyncio.TaskGroup() as tasks:
        for member in found:
            member.task = tasks.create_task(member.exchange.run())
        yield found
        for member in found:
            member.task.cancel()


def rows(url: str) -> dict[uuid.UUID, object]:
    with psycopg.connect(psycopg_conninfo(url)) as connection:
        return dict(connection.execute(ROWS).fetchall())


async def test_processes_know_each_others_backlog_while_they_have_requests(
    database_url: str,
) -> None:
    async with members(database_url, POOL, POOL, "another") as (one, two, apart):
        entries = one.send("a", 3)
        two.send("b", 2)
        apart.send("c", 1)
        await until(lambda: two.waiting_elsewhere() == 3, "the backlog of the first")
        await until(lambda: one.waiting_elsewhere() == 2, "the backlog of the second")
        a = two.queue.interactive.line.find(entries[0].arrival.tenant_id)
        assert a is not None
        assert a.backlog()[0] == 3
        assert apart.waiting_elsewhere() == 0

        for entry in entries:
            entry.leave()
        await until(lambda: two.waiting_elsewhere() == 0, "the end of the first's requests")
        last = rows(database_url)[one.id]
        await asyncio.sleep(3 * exchange.INTERVAL_S)
        assert rows(database_url)[one.id] == last, "an idle process writes nothing"
        assert one.waiting_elsewhere() == 0, "nor does it keep what it does not read"


async def test_the_first_request_waits_for_the_first_exchange_but_not_for_long(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would precede the requests of all other processes."""
    async with members(database_url, POOL) as (one,):
        del one.queue.window.has_room  # it has room
        [first] = one.send("a")
        assert not first.is_dispatched
        await until(lambda: first.is_dispatched, "its turn")
        [second] = one.send("a")
        assert second.is_dispatched, "while the process exchanges, nothing waits"
        for entry in (first, second):
            entry.leave()
        await until(lambda: not one.exchange._work.is_set(), "the end of the exchanges")

        async def hang(pools: object, report: bytes, silent_s: float) -> list[QueueReportRow]:
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(one.exchange._reports, "exchange", hang)
        [third] = one.send("a")
        assert not third.is_dispatched
        await until(lambda: third.is_dispatched, "the end of the pause")


async def test_a_process_that_is_alone_writes_nothing(database_url: str) -> None:
    async with members(database_url, POOL) as (one,):
        one.exchange.note_processes(1)
        one.send("a")
        await asyncio.sleep(2 * exchange.INTERVAL_S)
        assert not rows(database_url)

        one.exchange.note_processes(2)
        await until(lambda: rows(database_url), "the report")


async def test_a_dead_process_is_forgotten_and_its_service_is_not(database_url: str) -> None:
    async with members(database_url, POOL, POOL) as (one, two):
        one.send("a", 3)
        two.send("b")
        await until(lambda: two.waiting_elsewhere() == 3, "the backlog of the first")
        one.task.cancel()  # as a kill: it says nothing more
        await until(lambda: two.waiting_elsewhere() == 0, "the end of its row")

        assert not two.queue.reports
        assert two.queue.window.process_count == 1


async def test_a_database_that_is_away_leaves_each_process_its_own_order(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with members(database_url, POOL, POOL) as (one, two):
        one.send("a", 3)
        two.send("b")
        await until(lambda: two.waiting_elsewhere() == 3, "the backlog of the first")
        honest = two.exchange._reports.exchange

        async def away(pools: object, report: bytes, silent_s: float) -> list[QueueReportRow]:
            await two.exchange._reports.close()
            raise psycopg.OperationalError("gone")

        monkeypatch.setattr(two.exchange._reports, "exchange", away)
        with capture_logs() as logs:
            await until(lambda: two.waiting_elsewhere() == 0, "local order")
        assert [each["event"] for each in logs] == ["queue_exchange_failed"], "once per outage"
        monkeypatch.setattr(two.exchange._reports, "exchange", honest)
        await until(lambda: two.waiting_elsewhere() == 3, "the reports again")


def test_a_report_of_another_release_is_left_out() -> None:
    queue = FairQueue(QueueSettings(), EngineStatistics)
    known = Exchange({POOL: queue}, uuid.uuid4())
    other = uuid.uuid4()

    for report in (b"", b"\xff", b"\x81\xa4pool\x93\x01\x02\x03"):
        assert list(known.take([QueueReportRow(other, report, float(len(report)), 0.0)])) == [None]
        assert not queue.reports
