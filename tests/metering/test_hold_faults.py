"""Lost, silent and killed databases: nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from metering.core.errors import DatabaseUnavailable, MeteringError
from metering.core.models import QuotaDimension
from metering.holds import hold_connection
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Extend, HoldAnswer, HoldOperation, Settled
from metering.holds.recovery import sweep_expired_holds
from metering.quotas.quotas import QuotaExceeded
from metering.store import embedded_postgres
from metering.store.migrations_runner import migrate
from metering.store.pipeline import Connection
from tests.metering.cutting_proxy import CuttingProxy, Side
from tests.metering.hold_world import AwaitedStore, HoldWorld, admit, settle, until_idle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_concurrency import running_stores

pytestmark = pytest.mark.faults

SIDES: list[Side] = ["client", "server"]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process or the store's own timer brings about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 nothing here could set an event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("side", SIDES)
async def test_an_admission_cut_at_any_message_is_refused_and_leaves_no_hold(
    world: HoldWorld, side: Side
) -> None:
    payer = world.tenant()
    quotas = [world.quota(payer, dimension, 10**6) for dimension in QuotaDimension]
    async with (
        CuttingProxy(world.url).listening() as proxy,
        running_stores(proxy.url, expiry_s=0.8) as [store],
    ):
        held = admit(payer)
        await store.admit(held)
        number, whole = 1, False
        while not whole:
            proxy.cut_before(side, number)
            op = admit(payer)
            try:
                await store.admit(op)
            except DatabaseUnavailable:
                # Refused without an attempt, right after the cut before.
                number += not proxy.armed()
                await until(lambda: store.gate.away_s is None)
                continue
            whole = proxy.armed()  # otherwise the cut has hit a renewal: repeat
            proxy.disarm()
            await store.void(op.hold_id)
        # If only the answer was lost, the next renewal voids it, every 0.2 s.
        await until(lambda: world.hold_count() == 1)

        assert proxy.cut_count > 15
        assert store.statistics().live_hold_count == 1
        await store.settle(settle(held.hold_id, 4))
    assert {tuple(world.counters(quota)) for quota in quotas} == {
        ((used, 0),) for used in (0, 1, 4, 10, 14, 58)
    }
    check_invariants(world.url, all_ended=True)


async def test_a_request_whose_admission_lost_its_answer_may_be_sent_again_at_once(
    world: HoldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt's hold is released before the next regular renewal."""
    payer = world.tenant()
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 1)
    op, execute_in_time = admit(payer), HoldConnection._execute_in_time

    async def unanswered(self: HoldConnection, run: Any, batch: Sequence[Any]) -> list[Any]:
        answers = await execute_in_time(self, run, batch)
        if op in batch:
            raise psycopg.OperationalError("the connection broke after the commit")
        return answers

    monkeypatch.setattr(HoldConnection, "_execute_in_time", unanswered)
    async with running_stores(world.url, expiry_s=6_000) as [store]:
        await until_idle(store, payer)
        with pytest.raises(DatabaseUnavailable):
            await store.admit(op)

        await until(lambda: world.hold_count() == 0)

        again = replace(op, hold_id=uuid.uuid4())
        await store.admit(again)
        await store.settle(settle(again.hold_id, 4))
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("side", SIDES)
async def test_a_settlement_cut_anywhere_is_written_once(world: HoldWorld, side: Side) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 10**6)
    async with CuttingProxy(world.url).listening() as proxy, running_stores(proxy.url) as [store]:
        count = 0
        while not proxy.armed():
            count += 1
            op = admit(payer)
            await store.admit(op)
            proxy.cut_before(side, count)

            settled = await store.settle(settle(op.hold_id, 5))

            assert settled == Settled(
                op.hold_id, 10, 0, 5, 5, 5, 10 * 3 + 5 * 7, "USD", "stop", 0, 5
            )
        proxy.disarm()

        assert proxy.cut_count == count - 1 > 10
        assert store.statistics().live_hold_count == 0
    assert world.events() == [(0, 10, 5, "stop")] * count
    assert world.counters(quota) == [(count * 15, 0)]
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("news", [False, True], ids=["in one round trip", "the long way"])
async def test_an_extension_cut_at_any_message_is_granted(
    world: HoldWorld, side: Side, news: bool
) -> None:
    """The lease in the database counts, and unused tokens are released."""
    payer = world.tenant()
    async with CuttingProxy(world.url).listening() as proxy, running_stores(proxy.url) as [store]:
        number, cut = 0, True
        while cut:
            number += 1
            op = admit(payer)
            leased = (await store.admit(op)).leased_token_count
            if news:
                world.execute("INSERT INTO rule_changes DEFAULT VALUES")
            proxy.cut_before(side, number)
            leased = (await store.extend(Extend(op.hold_id, 2, 0, 10))).leased_token_count
            cut = not proxy.armed()
            proxy.disarm()

            settled = await store.settle(settle(op.hold_id, leased))

            assert settled.delivered_token_count == leased
            assert leased in ((30, 40) if cut else (30,))
        # Two statements that the connection has already prepared.
        assert number > (15 if news else 7)
    check_invariants(world.url, all_ended=True)


async def test_an_abandoned_settlement_is_written_after_the_outage(world: HoldWorld) -> None:
    """BerriAI/litellm #34820: a cancelled flush lost entries."""
    op, abandoned = (admit(world.tenant(name)) for name in ("a", "b"))
    async with (
        CuttingProxy(world.url).listening() as proxy,
        running_stores(proxy.url, expiry_s=0.4) as [store],
    ):
        await store.admit(op)
        await store.admit(abandoned)
        proxy.refusing = True
        proxy.cut_now()
        tasks = [
            asyncio.ensure_future(store.settle(settle(op.hold_id, 5))),
            asyncio.ensure_future(store.void(abandoned.hold_id)),
        ]
        batches = store.statistics().group_commit.batch_count
        await until(lambda: store.statistics().group_commit.batch_count > batches + 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        proxy.refusing = False

        await until(lambda: world.hold_count() == 0)
        await until(lambda: store.statistics().live_hold_count == 0)
    assert world.events() == [(0, 10, 5, "stop")]
    check_invariants(world.url, all_ended=True)


async def test_ends_by_calls_are_tried_until_the_database_answers(world: HoldWorld) -> None:
    ops = [admit(world.tenant(name)) for name in "abc"]
    reported: list[object] = []
    async with CuttingProxy(world.url).listening() as proxy:
        async with running_stores(proxy.url) as [store]:
            for op in ops:
                await store.admit(op)
            proxy.refusing = True
            proxy.cut_now()
            store.begin_settle(settle(ops[0].hold_id, 5), reported.append)
            store.begin_void(ops[1].hold_id, reported.append)
            await until(lambda: store.statistics().owed_end_count == 2)
            assert reported == []
            proxy.refusing = False
            await until(lambda: len(reported) == 2)
            assert sorted(type(answer).__name__ for answer in reported) == ["Ended", "Settled"]
            assert store.statistics().owed_end_count == 0

            proxy.refusing = True
            proxy.cut_now()
            store.begin_settle(settle(ops[2].hold_id, 5), reported.append)
            await until(lambda: store.statistics().owed_end_count == 1)
        await until(lambda: len(reported) == 3)
        assert isinstance(reported[2], DatabaseUnavailable)
    await world.run(settle(ops[2].hold_id, 5))  # as recovery from the journal does
    check_invariants(world.url, all_ended=True)


async def test_a_silent_network_is_distinguished_from_a_slow_database(
    world: HoldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_connection, "BATCH_TIMEOUT_S", 0.2)
    op = admit(world.tenant())
    async with CuttingProxy(world.url).listening() as proxy, running_stores(proxy.url) as [store]:
        await store.admit(op)
        proxy.deaf = proxy.refusing = True

        with pytest.raises(DatabaseUnavailable):
            await store.admit(admit(op.payer))

        proxy.deaf = proxy.refusing = False
        assert (await store.settle(settle(op.hold_id, 5))).delivered_token_count == 5


async def test_killing_postgresql_under_load_loses_and_doubles_nothing(postgres_home: Path) -> None:
    """kill -9 of every server process, three times, under load."""
    directory = postgres_home / "postgres"
    server = embedded_postgres.start(directory)
    migrate(server.url)
    answered: list[Settled] = []
    with HoldWorld(server.url, now=None) as world:
        payers = [world.tenant(f"t{number}") for number in range(4)]
        for payer in payers:
            world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 3_000)
            world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 6)

    async def client(store: AwaitedStore, number: int, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            op = admit(payers[number % 4])
            try:
                # Less than a slice if nothing more is left.
                leased = (await store.admit(op)).leased_token_count
            except (QuotaExceeded, DatabaseUnavailable):
                await asyncio.sleep(0.002)
                continue
            with contextlib.suppress(QuotaExceeded, DatabaseUnavailable):
                leased = (
                    await store.extend(Extend(op.hold_id, min(2, leased), 0, 5))
                ).leased_token_count
            answered.append(await store.settle(settle(op.hold_id, min(3 + number % 9, leased))))

    stopping = asyncio.Event()
    async with running_stores(server.url, 2, expiry_s=4.0) as stores:
        clients = [
            asyncio.ensure_future(client(stores[number % 2], number, stopping))
            for number in range(24)
        ]
        for _ in range(3):
            seen = len(answered)
            await until(lambda seen=seen: len(answered) > seen + 20)  # type: ignore[misc]
            await kill_server(directory)
            await asyncio.to_thread(embedded_postgres.start, directory)
        seen = len(answered)
        await until(lambda: len(answered) > seen + 20)
        stopping.set()
        await asyncio.gather(*clients)
        with HoldWorld(server.url, now=None, priced=False) as world:
            await until(lambda: world.hold_count() == 0)
            assert sorted(
                row[0] for row in world.rows("SELECT hold_id FROM usage_events")
            ) == sorted(settled.hold_id for settled in answered)
            total = world.one("SELECT sum(delivered_token_count) FROM usage_events")
    assert total == sum(settled.delivered_token_count for settled in answered)
    check_invariants(server.url, all_ended=True)


def server_processes(directory: Path) -> list[int]:
    """Return the postmaster and its children."""
    postmaster = int((directory / "postmaster.pid").read_text().splitlines()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, children)]


async def kill_server(directory: Path) -> None:
    """Send SIGKILL to every process of the server, and wait for their ends."""
    pids = server_processes(directory)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(map(runs, pids)))


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_batch_that_conflicts_repeatedly_is_refused_eventually(
    world: HoldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conflicting(*_: object, **__: object) -> list[object]:
        raise psycopg.errors.DeadlockDetected("again")

    monkeypatch.setattr(hold_connection, "execute_slow", conflicting)

    (answer,) = await world.run(admit(world.tenant(), hold_id=uuid.uuid4()))

    assert isinstance(answer, MeteringError)
    assert answer.reason == "WRITE_CONFLICT"


@pytest.mark.parametrize("side", SIDES)
async def test_a_renewal_cut_anywhere_keeps_known_holds_alone(world: HoldWorld, side: Side) -> None:
    payer = world.tenant()
    async with (
        CuttingProxy(world.url).listening() as proxy,
        running_stores(proxy.url, expiry_s=0.4) as [store],
    ):
        held = admit(payer)
        await store.admit(held)
        for number in range(1, 40):
            lost = admit(payer)
            await world.run(lost, process_id=store.process_id)  # as if the answer were lost
            world.advance(0.1)
            proxy.cut_before(side, number)

            await until(lambda: world.hold_count() == 1)

            await until(lambda: store.gate.away_s is None)
            if proxy.armed():
                break
        proxy.disarm()

        assert proxy.cut_count > 5
        await store.settle(settle(held.hold_id, 4))
    assert world.events() == [(0, 10, 4, "stop")]
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("side", SIDES)
async def test_a_sweep_cut_anywhere_is_finished_by_the_next(world: HoldWorld, side: Side) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 10**6)
    async with CuttingProxy(world.url).listening() as proxy:
        count = 0
        while not proxy.armed():
            count += 1
            op = admit(payer)
            await world.run(op)
            await world.run(Extend(op.hold_id, 2, 0, 5))
            world.advance(61)
            proxy.cut_before(side, count)
            with contextlib.suppress(DatabaseUnavailable, psycopg.OperationalError):
                await sweep_expired_holds(proxy.url)

            await sweep_expired_holds(world.url)

            assert world.hold_count() == 0
        proxy.disarm()
        assert proxy.cut_count == count - 1 > 10
    assert world.events() == [(0, 10, 2, "failed")] * count
    assert world.counters(quota) == [(35 * count, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_frozen_process_releases_counters_before_any_timeout(world: HoldWorld) -> None:
    """The server ends its transaction; when resumed, the process repeats the batch."""
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 10**6)
    ended = admit(payer)
    await world.run(ended)
    locked, awake = asyncio.Event(), asyncio.Event()

    async def sleep_in_transaction(
        connection: Connection, batch: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        await connection.execute("BEGIN")
        await connection.execute(
            "SELECT FROM quota_counters WHERE quota_id = %s FOR UPDATE", (quota,)
        )
        locked.set()
        await awake.wait()
        await connection.execute("SELECT 1")
        return []

    async with (
        HoldConnection(world.url, uuid.uuid4()) as frozen,
        running_stores(world.url) as [store],
    ):
        batch = asyncio.ensure_future(
            frozen._execute(sleep_in_transaction, [settle(ended.hold_id, 5)])
        )
        await locked.wait()

        op = admit(payer)
        await store.admit(op)  # it would be refused after waiting five seconds
        awake.set()

        [answer] = await batch
        assert isinstance(answer, DatabaseUnavailable), (
            "not that an invariant is violated: then the settlement would be given up"
        )
        assert [type(again) for again in await frozen.execute([settle(ended.hold_id, 5)])] == [
            Settled
        ]
        await store.void(op.hold_id)
    check_invariants(world.url, all_ended=True)
