"""Several stores on one database: limits are exact, each request counts once."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import psycopg
import pytest

from metering.core.errors import (
    DatabaseUnavailable,
    HoldEnded,
    MeteringError,
    RequestIdReused,
    RequestInFlight,
)
from metering.core.models import Outcome, QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds import operations
from metering.quotas.quota_admin import SUBJECT_TABLES, set_quota
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.hold_world import (
    INPUT_PICOS,
    OUTPUT_PICOS,
    AwaitedStore,
    HoldWorld,
    admit,
    of_type,
    settle,
    until_idle,
)
from tests.metering.invariants import check_invariants

# Each request has 10 tokens of input and 20 of output.
AMOUNTS = {
    "concurrent_requests": 1,
    "requests": 1,
    "tokens": 30,
    "input_tokens": 10,
    "output_tokens": 20,
    "cost_picos": 10 * INPUT_PICOS + 20 * OUTPUT_PICOS,
    "prepaid_credit_picos": 10 * INPUT_PICOS + 20 * OUTPUT_PICOS,
}
ROOM_FOR_50 = {each: 50 * AMOUNTS[each.partition("_per_")[0]] for each in QuotaDimension}
# One of each measure, and each window: the next measure has the next window.
BY_MEASURE = [
    [each for each in QuotaDimension if each.partition("_per_")[0] == measure]
    for measure in AMOUNTS
]
ONE_OF_EACH = [each[index % len(each)] for index, each in enumerate(BY_MEASURE)]
SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3").split(",")]


@asynccontextmanager
async def running_stores(
    database_url: str, count: int = 1, *, expiry_s: float = 60.0
) -> AsyncIterator[list[AwaitedStore]]:
    """Open one store per process."""
    stores = [AwaitedStore(database_url, uuid.uuid4(), expiry_s=expiry_s) for _ in range(count)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(store.run()) for store in stores]
        yield stores
        for task in running:
            task.cancel()


async def admit_all(
    stores: Sequence[AwaitedStore], requests: Sequence[operations.Admit]
) -> list[operations.Admitted | BaseException]:
    """Submit all at once, distributed over the stores."""
    return await asyncio.gather(
        *(stores[index % len(stores)].admit(op) for index, op in enumerate(requests)),
        return_exceptions=True,
    )


@pytest.mark.parametrize("dimension", ONE_OF_EACH)
async def test_of_200_requests_against_a_quota_for_50_exactly_50_are_admitted(
    world: HoldWorld, dimension: QuotaDimension
) -> None:
    """From four processes at once; with a fixed output length, whose slice must fit whole, and
    without one, where any slice fits.

    LiteLLM #18730, #34732, envoyproxy/ai-gateway#680: concurrent requests passed a limit together;
    bifrost #3547: one limit per replica.
    """
    fixed, open_ended = world.tenant("fixed"), world.tenant("open-ended")
    quotas = [
        world.quota(payer, dimension, ROOM_FOR_50[dimension], subject=subject)
        for payer, subject in (
            (fixed, QuotaSubject.API_KEY),
            (open_ended, QuotaSubject.ORGANIZATION),
        )
    ]

    async with running_stores(world.url, 4) as stores:
        answers = await admit_all(
            stores,
            [
                admit(payer, least_tokens=least)
                for _ in range(200)
                for payer, least in ((fixed, 20), (open_ended, 1))
            ],
        )

    for payer, quota in zip((0, 1), quotas, strict=True):
        mine = answers[payer::2]
        assert len(of_type(operations.Admitted, mine)) == 50
        assert len(of_type(QuotaExceeded, mine)) == 150
        [(used, held)] = world.counters(quota)
        assert used + held == ROOM_FOR_50[dimension]
    assert world.hold_count() == 100
    check_invariants(world.url)


@pytest.mark.parametrize(
    "dimension", [each for each in ONE_OF_EACH if each != QuotaDimension.PREPAID_CREDIT_PICOS]
)
async def test_of_100_first_requests_of_an_end_user_or_label_value_exactly_50_are_admitted(
    world: HoldWorld, sessions: Sessions, dimension: QuotaDimension
) -> None:
    """From four processes at once, with the limit that a selector gives."""
    end_user, label = world.tenant("end-user"), world.tenant("label")
    async with sessions.begin() as session:
        for payer, for_each in ((end_user, "end_user"), (label, "label:team")):
            await set_quota(
                session,
                subject=QuotaSubject.PROJECT,
                subject_ref=str(payer.project_id),
                key=QuotaKey(dimension, for_each=for_each),
                terms=QuotaTerms(ROOM_FOR_50[dimension]),
                actor="test",
            )

    async with running_stores(world.url, 4) as stores:
        answers = await admit_all(
            stores,
            [
                op
                for _ in range(100)
                for op in (
                    admit(end_user, end_user="alice"),
                    admit(label, least_tokens=20, labels={"team": "search"}),
                )
            ],
        )

    for mine in (answers[::2], answers[1::2]):
        assert len(of_type(operations.Admitted, mine)) == 50
        assert len(of_type(QuotaExceeded, mine)) == 50
    counters = "SELECT used + held FROM quota_counters"
    assert world.rows(counters) == [(ROOM_FOR_50[dimension],)] * 2
    check_invariants(world.url)


async def test_many_tenants_at_once_each_get_exactly_their_own_quota(world: HoldWorld) -> None:
    tenants = [world.tenant(f"t{number}") for number in range(20)]
    for payer in tenants:
        world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 5)
        world.quota(payer, QuotaDimension.TOKENS_PER_MINUTE, 10_000, subject=QuotaSubject.PROJECT)
    requests = [admit(payer) for _ in range(10) for payer in tenants]
    random.Random(1).shuffle(requests)

    async with running_stores(world.url, 4) as stores:
        answers = await admit_all(stores, requests)

    admitted = Counter(
        op.payer
        for op, answer in zip(requests, answers, strict=True)
        if isinstance(answer, operations.Admitted)
    )
    assert admitted == dict.fromkeys(tenants, 5)
    check_invariants(world.url)


async def test_demand_that_remains_fills_what_others_give_back(world: HoldWorld) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)

    async def client(store: AwaitedStore) -> int:
        """Send requests of 10 + 5 tokens, holding 10 + 20, until there is no room."""
        done = 0
        while True:
            op = admit(payer, least_tokens=5)
            try:
                await store.admit(op)
            except QuotaExceeded as refusal:
                if refusal.failing[0].held == 0:
                    return done
                await asyncio.sleep(0)
                continue
            await store.settle(settle(op.hold_id, 5))
            done += 1

    async with running_stores(world.url, 3) as stores:
        done = await asyncio.gather(*(client(stores[index % 3]) for index in range(12)))

    assert sum(done) == 1_000 // 15
    assert world.counters(quota) == [(1_000 // 15 * 15, 0)]
    check_invariants(world.url, all_ended=True)


SPECIAL = """
UPDATE quotas SET input_weight_milli = %s, cached_input_weight_milli = %s, output_weight_milli = %s,
    enforced = %s WHERE id = %s
"""
RAISE = """
UPDATE quotas SET override_limit_value = %s, override_until = now() + make_interval(secs => %s),
    override_reason = 'test' WHERE id = %s
"""


@pytest.mark.parametrize("seed", SEEDS)
async def test_invariants_hold_under_any_mix_of_operations_from_several_processes(
    world: HoldWorld, seed: int
) -> None:
    """Mixed batches with repetitions, contradictions, cancels and clock jumps."""
    chance = random.Random(seed)
    payers = [world.tenant(f"t{number}") for number in range(3)]
    payers.append(replace(payers[0], api_key_id=world.key(payers[0].project_id)))
    limits = dict.fromkeys(QuotaDimension, 900) | {
        QuotaDimension.CONCURRENT_REQUESTS: 12,
        QuotaDimension.PREPAID_CREDIT_PICOS: 9_000,
    }
    for each in QuotaDimension:
        if each.startswith(("requests_per_", "cost_")):
            limits[each] = 25 if each.startswith("requests") else 6_000
    for payer in payers[:3]:
        for dimension in QuotaDimension:
            if chance.random() < 0.7:
                limit, subject = (
                    limits[dimension] // chance.choice([1, 2]),
                    chance.choice(list(SUBJECT_TABLES)),
                )
                quota_id = world.quota(payer, dimension, limit, subject=subject)
                weights = (
                    [chance.choice([0, 250, 1000, 1500]) for _ in range(3)]
                    if "tokens" in dimension
                    else [1000] * 3
                )
                world.execute(SPECIAL, *weights, chance.random() < 0.8, quota_id)
                if chance.random() < 0.3:
                    world.execute(RAISE, limit * 2, chance.choice([30, 7_200, 100_000]), quota_id)
    open_holds: list[tuple[operations.Admit, int]] = []

    async with running_stores(world.url, 3) as stores:

        async def request(store: AwaitedStore) -> None:
            sent, wanted, embeds = (
                chance.randint(0, 30),
                chance.randint(1, 40),
                chance.random() < 0.2,
            )
            op = admit(
                chance.choice(payers), input_tokens=sent, slice_tokens=wanted, embedding=embeds
            )
            leased = (await store.admit(op)).leased_token_count
            delivered = 0
            for _ in range(0 if embeds else chance.randint(0, 3)):
                delivered = chance.randint(delivered, leased)
                leased = (
                    await store.extend(
                        operations.Extend(op.hold_id, delivered, 0, chance.randint(1, 30))
                    )
                ).leased_token_count
            match chance.choice(["settle", "settle", "settle", "twice", "void", "forget"]):
                case "settle":
                    await store.settle(
                        settle(
                            op.hold_id,
                            chance.randint(delivered, leased),
                            input_tokens=op.input_token_count,
                        )
                    )
                case "twice":
                    end = settle(
                        op.hold_id,
                        chance.randint(delivered, leased),
                        input_tokens=op.input_token_count,
                    )
                    answers = await asyncio.gather(
                        store.settle(end), chance.choice(stores).settle(end)
                    )
                    assert answers[0] == answers[1]
                case "void" if not delivered:
                    await store.void(op.hold_id)
                case _:
                    open_holds.append((op, delivered))

        for _ in range(6):
            tasks = [
                asyncio.ensure_future(request(chance.choice(stores)))
                for _ in range(chance.randint(5, 60))
            ]
            for task in chance.sample(tasks, len(tasks) // 6):
                await asyncio.sleep(0)
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert error is None or isinstance(error, QuotaExceeded | asyncio.CancelledError), (
                    repr(error)
                )
            check_invariants(world.url)
            world.advance(chance.choice([1, 20, 61, 3_600, 86_400, 20 * 86_400]))

    overdue = world.rows("SELECT id FROM holds WHERE state = 'held' AND expires_at <= now()")
    await world.run(*(operations.Expire(row[0]) for row in overdue))
    for op, delivered in open_holds:  # owners wake up and settle delivered tokens
        (answer,) = await world.run(
            settle(op.hold_id, delivered, input_tokens=op.input_token_count)
        )
        assert isinstance(answer, operations.Settled | HoldEnded), answer
    for store in stores:
        await world.run(operations.Renew(store.process_id, frozenset()))
    check_invariants(world.url)
    assert not world.rows("SELECT 1 FROM quota_counters WHERE used < 0 OR held < 0")


async def test_one_request_sent_to_four_processes_is_admitted_once(world: HoldWorld) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 100)
    request_id = uuid.uuid4()

    async with running_stores(world.url, 4) as stores:
        same = await admit_all(stores, [admit(payer, request_id=request_id) for _ in range(12)])
        other = await admit_all(
            stores, [admit(payer, request_id=request_id, payload=b"other") for _ in range(4)]
        )
        [admitted] = of_type(operations.Admitted, same)
        await stores[3].settle(settle(admitted.hold_id, 7))
        again = await admit_all(stores, [admit(payer, request_id=request_id) for _ in range(4)])

    assert len(of_type(RequestInFlight, same)) == 11
    assert len(of_type(RequestIdReused, other)) == 4
    assert [
        answer.settled.delivered_token_count for answer in of_type(operations.RequestSettled, again)
    ] == [7] * 4
    assert world.counters(quota) == [(1, 0)]


@pytest.mark.parametrize("first", ["settle", "expire"])
async def test_a_caller_whose_hold_ended_elsewhere_sees_usage(world: HoldWorld, first: str) -> None:
    """It must see an event that is newer than its snapshot."""
    op = admit(world.tenant())
    await world.run(op)
    await world.run(operations.Extend(op.hold_id, 3, 0, 5))
    world.advance(60)
    async with await psycopg.AsyncConnection.connect(psycopg_conninfo(world.url)) as blocker:
        await blocker.execute("SELECT 1 FROM holds FOR UPDATE")
        one = asyncio.ensure_future(
            world.run(settle(op.hold_id, 9) if first == "settle" else operations.Expire(op.hold_id))
        )
        await waiting_for_locks(world, 1)
        two = asyncio.ensure_future(world.run(settle(op.hold_id, 9)))
        await waiting_for_locks(world, 2)
        await blocker.rollback()
    answers = [(await one)[0], (await two)[0]]

    assert not of_type(MeteringError, answers)
    assert answers[1] == operations.Settled(
        op.hold_id, 10, 0, 9, 9, 9, 10 * INPUT_PICOS + 9 * OUTPUT_PICOS, "USD", "stop", 0, 9
    )
    assert sum(delivered for _, _, delivered, _ in world.events()) == 9
    check_invariants(world.url, all_ended=True)


async def waiting_for_locks(world: HoldWorld, count: int) -> None:
    """Wait until this many connections of the database wait for a row."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
        " wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(10):
        while world.one(query) != count:  # noqa: ASYNC110 another process's doing: nothing here could set an event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("act", ["admit", "extend", "settle", "void"])
async def test_a_caller_cancelled_at_any_await_orphans_no_hold(world: HoldWorld, act: str) -> None:
    """LiteLLM #30522, otari #128: cancelled streams leaked holds. The end of a hold always runs."""
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 1000)
    async with running_stores(world.url) as [store]:
        for ticks in range(40):
            op = admit(payer)
            # Otherwise every turn below could be one of waiting for the batch before.
            await until_idle(store, payer)
            if act != "admit":
                await store.admit(op)
            task = asyncio.ensure_future(call(store, act, op))
            for _ in range(ticks + 1):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if act == "admit" and not task.cancelled():
                await store.void(op.hold_id)
            if act == "extend":
                await store.settle(settle(op.hold_id, 3))
        await until_idle(store, payer)

        assert store.statistics().live_hold_count == 0
    assert world.counters(quota) == [(0, 0)]
    if act in ("extend", "settle"):
        assert world.events() == [(0, 10, 3, "stop")] * 40
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("ticks", range(0, 40, 8))
async def test_only_an_answered_admission_keeps_its_hold(world: HoldWorld, ticks: int) -> None:
    """Abandoned at any turn: before, during or after its batch."""
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 10)
    answers: list[operations.Admitted | Exception] = []
    async with running_stores(world.url, expiry_s=6_000) as [store]:
        for _ in range(3):  # the first opens the connection, the second takes the full path
            pending = store.begin_admit(admit(payer), answers.append)
            assert answers == []
            for _ in range(ticks):
                await asyncio.sleep(0.0001)
            pending.abandon()
            pending.abandon()
            reported = len(answers)
            for admitted in of_type(operations.Admitted, answers):
                await store.void(admitted.hold_id)
            await until_idle(store, payer)
            assert len(answers) == reported
            answers.clear()

        assert store.statistics().live_hold_count == 0
    assert world.counters(quota) == [(0, 0)]
    check_invariants(world.url, all_ended=True)


async def test_answers_arrive_in_order_and_one_callback_harms_no_other(world: HoldWorld) -> None:
    payer = world.tenant()
    ops = [admit(payer) for _ in range(3)]
    reported: list[object] = []

    def break_down(_: object) -> None:
        raise RuntimeError("broken")

    async with running_stores(world.url) as [store]:
        for op, done in zip(ops, (reported.append, break_down, reported.append), strict=True):
            store.begin_admit(op, done)
        assert reported == []
        await until_idle(store, payer)
        assert [answer.hold_id for answer in of_type(operations.Admitted, reported)] == [
            ops[0].hold_id,
            ops[2].hold_id,
        ]

        reported.clear()
        store.begin_settle(settle(ops[0].hold_id, 3), reported.append)
        store.begin_settle(settle(ops[1].hold_id, 3), break_down)
        store.begin_void(ops[2].hold_id, reported.append)
        await store.void(uuid.uuid4())
        assert [type(answer) for answer in reported] == [operations.Settled, operations.Ended]

        store.begin_admit(admit(payer, request_id=ops[0].request_id), reported.append)
        await until_idle(store, payer)
        assert isinstance(reported[2], operations.RequestSettled)
    assert len(world.events()) == 2
    check_invariants(world.url, all_ended=True)


async def test_an_end_that_the_database_refuses_leaves_its_hold_to_expiry(world: HoldWorld) -> None:
    """It is not voided, which would lose delivered tokens, and not renewed endlessly."""
    op = admit(world.tenant())
    async with running_stores(world.url, expiry_s=0.2) as [store]:  # renews every 50 ms
        await store.admit(op)
        await store.extend(operations.Extend(op.hold_id, 4, 0, 10))
        impossible = operations.Settle(
            op.hold_id, 10, 0, 4, 4, Outcome.STOP, timings={"total_ms": float("nan")}
        )
        with pytest.raises(MeteringError, match="Settle failed"):
            await store.settle(impossible)
        batches = store.statistics().group_commit.batch_count
        async with asyncio.timeout(10):
            while store.statistics().group_commit.batch_count < batches + 3:  # noqa: ASYNC110 the store's own timer
                await asyncio.sleep(0.01)
    world.advance(60)

    (expired,) = await world.run(operations.Expire(op.hold_id))

    assert expired.done  # type: ignore[union-attr]
    assert world.events() == [(0, 10, 4, "failed")]


async def test_after_run_has_ended_no_caller_blocks(world: HoldWorld) -> None:
    async with running_stores(world.url) as [store]:
        op = admit(world.tenant())
        await store.admit(op)

    with pytest.raises(MeteringError, match="shutting down"):
        await store.settle(settle(op.hold_id, 1))
    with pytest.raises(MeteringError, match="shutting down"):
        await store.void(op.hold_id)
    reported: list[object] = []
    store.begin_admit(op, reported.append)
    store.begin_settle(settle(op.hold_id, 1), reported.append)
    assert reported == []
    await asyncio.sleep(0)
    assert [type(error) for error in reported] == [DatabaseUnavailable, DatabaseUnavailable]


async def call(store: AwaitedStore, act: str, op: operations.Admit) -> None:
    """Call a method of the store by name."""
    match act:
        case "admit":
            await store.admit(op)
        case "extend":
            await store.extend(operations.Extend(op.hold_id, 2, 0, 10))
        case "settle":
            await store.settle(settle(op.hold_id, 3))
        case _:
            await store.void(op.hold_id)
