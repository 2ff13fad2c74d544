"""A settlement without reading the hold equals one that reads it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import Outcome, Quota, QuotaDimension, QuotaSubject
from metering.holds import slow_path
from metering.holds.decide import BatchReads, Decisions, Hold, HoldTerms
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Expire, Extend, HoldAnswer, Settle, Settled, Void
from metering.pricing.prices import TokenPrices, embedding_terms
from metering.quotas import quotas
from metering.quotas.quota_recount import recount
from metering.quotas.quota_rules import Charge, Payer, QuotaRule, Weights
from metering.quotas.quotas import Counters
from metering.store.db import create_engine, create_sessions
from tests.metering.hold_world import HoldWorld, admit, settle, until_idle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_concurrency import running_stores

LIMIT = 10_000

NOON = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)


def tenant(world: HoldWorld, name: str = "acme") -> tuple[Payer, dict[QuotaDimension, uuid.UUID]]:
    """Create a tenant with a limit at each level, and one that counts in thousandths."""
    payer = world.tenant(name)
    levels = {
        QuotaDimension.CONCURRENT_REQUESTS: QuotaSubject.API_KEY,
        QuotaDimension.REQUESTS_PER_MINUTE: QuotaSubject.PROJECT,
        QuotaDimension.TOKENS_PER_MINUTE: QuotaSubject.PROJECT,
        QuotaDimension.TOKENS_PER_MONTH: QuotaSubject.ORGANIZATION,
        QuotaDimension.COST_PICOS_PER_MONTH: QuotaSubject.ORGANIZATION,
    }
    quota_ids = {
        each: world.quota(payer, each, LIMIT, subject=level) for each, level in levels.items()
    }
    world.execute(
        "UPDATE quotas SET cached_input_weight_milli = 333, output_weight_milli = 1500 WHERE id"
        " = %s",
        quota_ids[QuotaDimension.TOKENS_PER_MONTH],
    )
    return payer, quota_ids


def without_id(answer: HoldAnswer | Exception) -> Settled:
    assert isinstance(answer, Settled), answer
    return replace(answer, hold_id=uuid.UUID(int=0))


async def test_settlements_of_own_holds_read_none_of_them_and_leave_what_the_long_way_leaves(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    (quick, quick_quotas), (slow, slow_quotas) = tenant(world, "quick"), tenant(world, "slow")
    taken = [
        [admit(payer), admit(payer, input_tokens=7), admit(payer, embedding=True)]
        for payer in (quick, slow)
    ]

    def ends(ops: Sequence[Admit]) -> list[Settle]:
        first, second, embedded = ops
        done = Settle(
            first.hold_id, 10, 4, 21, 20, Outcome.LENGTH, {"queued": 0.5}, migration_count=2
        )
        return [
            done,
            settle(second.hold_id, 3, input_tokens=7),
            settle(embedded.hold_id, 0, cached_tokens=2),
        ]

    for ops in taken:
        await holds.execute(ops)
    read.clear()
    unread = await holds.execute(ends(taken[0]))
    assert read == []
    answers = await world.run(*ends(taken[1]))

    assert read == [3]
    assert all(isinstance(answer, Settled) and len(answer.receipts) == 1 for answer in unread)
    assert [without_id(answer) for answer in unread] == [without_id(answer) for answer in answers]
    assert [world.counters(each) for each in quick_quotas.values()] == [
        world.counters(each) for each in slow_quotas.values()
    ]
    columns = (
        "part, outcome, input_token_count, cached_input_token_count, generated_token_count,"
        " billed_token_count, timings::text"
    )
    rows = [
        world.rows(
            f"SELECT {columns}, recovered, migration_count FROM usage_events WHERE project_id = %s",
            p.project_id,
        )
        for p in (quick, slow)
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    check_invariants(world.url, all_ended=True)


async def test_holds_extended_over_a_minute_are_settled_unread(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, quota_ids = tenant(world)
    op = admit(payer)
    await holds.execute([op])
    await holds.execute([Extend(op.hold_id, 15, 4, 20)])
    world.advance(60)
    await holds.execute([Extend(op.hold_id, 30, 4, 20)])
    read.clear()

    [answer] = await holds.execute([settle(op.hold_id, 33, cached_tokens=4)])

    assert isinstance(answer, Settled)
    assert read == []
    assert world.counters(quota_ids[QuotaDimension.TOKENS_PER_MINUTE]) == [(40, 0), (3, 0)]
    check_invariants(world.url, all_ended=True)


async def test_cached_tokens_known_after_an_extension_lower_what_it_posted(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, quota_ids = tenant(world)
    op, other = admit(payer), admit(payer)
    await holds.execute([op, other])
    await holds.execute([Extend(op.hold_id, 15, 0, 20)])
    read.clear()

    ends = [settle(op.hold_id, 20, cached_tokens=6), settle(other.hold_id, 5)]
    [answer, _] = await holds.execute(ends)

    assert isinstance(answer, Settled)
    assert (answer.cached_input_token_count, answer.cost_picos) == (6, 4 * 3 + 6 + 20 * 7)
    assert read == [1], "only this hold is read"
    cost = answer.cost_picos + 10 * 3 + 5 * 7
    assert world.counters(quota_ids[QuotaDimension.COST_PICOS_PER_MONTH]) == [(cost, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_store_settles_unread_on_one_connection_what_it_has_taken_on_the_other(
    world: HoldWorld, read: list[int]
) -> None:
    payer, _ = tenant(world)
    ops = [admit(payer) for _ in range(3)]
    async with running_stores(world.url) as [store]:
        await until_idle(store, payer)  # both connections are open
        read.clear()

        for op in ops:
            await store.admit(op)
            await store.settle(settle(op.hold_id, 5))

        assert not any(read)  # a probe reads none
        assert len(store._own) == 0
    check_invariants(world.url, all_ended=True)


Change = Callable[[HoldWorld, Admit, Payer], Coroutine[Any, Any, None]]


async def expired(world: HoldWorld, op: Admit, payer: Payer) -> None:
    world.advance(61)
    await world.run(Expire(op.hold_id))


async def settled(world: HoldWorld, op: Admit, payer: Payer) -> None:
    await world.run(settle(op.hold_id, 12))


async def extended(world: HoldWorld, op: Admit, payer: Payer) -> None:
    """Extend by room only: nothing was delivered since, so nothing is posted."""
    await world.run(Extend(op.hold_id, 10, 0, 20))


async def charged_to_one_more_quota(world: HoldWorld, op: Admit, payer: Payer) -> None:
    """Set a limit while the hold runs: the hold is charged to it from then on."""
    quota_id = world.quota(payer, QuotaDimension.TOKENS_PER_DAY, LIMIT)
    world.execute(
        "INSERT INTO audit_log (actor, action, subject_id) VALUES ('test', 'quota.set', %s)",
        str(quota_id),
    )
    await recounted(world, quota_id, payer)


async def weighed_anew(world: HoldWorld, op: Admit, payer: Payer) -> None:
    quota_id = world.one("SELECT id FROM quotas WHERE dimension = 'tokens_per_minute'")
    world.execute("UPDATE quotas SET output_weight_milli = 2500 WHERE id = %s", quota_id)
    await recounted(world, quota_id, payer)


async def recounted(world: HoldWorld, quota_id: uuid.UUID, payer: Payer) -> None:
    engine = create_engine(world.url)
    async with create_sessions(engine).begin() as session:
        await count_anew(session, quota_id, payer)
    await engine.dispose()


async def count_anew(session: AsyncSession, quota_id: uuid.UUID, payer: Payer) -> None:
    quota = await session.get_one(Quota, quota_id)
    await recount(session, [(quota, payer.organization_id)])


CHANGES: list[tuple[Change, list[int]]] = [
    (expired, [1]),
    (settled, [1]),
    (extended, [1]),
    (charged_to_one_more_quota, [1]),
    (weighed_anew, [1]),  # it ends by the current rules
]


@pytest.mark.parametrize(
    ("change", "long"), CHANGES, ids=[change.__name__ for change, _ in CHANGES]
)
async def test_a_hold_that_has_changed_meanwhile_is_settled_as_it_is(
    world: HoldWorld, holds: HoldConnection, read: list[int], change: Change, long: list[int]
) -> None:
    payer, _ = tenant(world)
    before, op, other = admit(payer), admit(payer), admit(payer)
    await holds.execute([before, op, other])
    await holds.execute([Extend(op.hold_id, 10, 0, 5)])
    await holds.execute([settle(before.hold_id, 1)])  # its rules are cached now
    await change(world, op, payer)
    read.clear()

    answers = await holds.execute([settle(op.hold_id, 15)])
    rest = await holds.execute([settle(other.hold_id, 20)])

    assert all(isinstance(answer, Settled) for answer in [*answers, *rest]), answers
    assert read[:1] == long
    check_invariants(world.url, all_ended=True)


@pytest.mark.parametrize("change", [expired, settled])
async def test_a_hold_that_has_ended_is_not_ended_again_even_if_no_trigger_refuses_that(
    world: HoldWorld, holds: HoldConnection, read: list[int], change: Change
) -> None:
    """The counters accept it, since another hold keeps enough in them."""
    payer, _ = tenant(world)
    op, other = admit(payer), admit(payer)
    await holds.execute([op, other])
    world.execute("ALTER TABLE holds DISABLE TRIGGER holds_end_once")
    await change(world, op, payer)
    world.advance(1)
    read.clear()

    [answer] = await holds.execute([settle(op.hold_id, 15)])

    assert isinstance(answer, Settled)
    assert read == [1]
    world.execute("ALTER TABLE holds ENABLE TRIGGER holds_end_once")
    check_invariants(world.url)


async def test_one_that_has_changed_keeps_no_other_from_its_end_and_each_is_settled_once(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, quota_ids = tenant(world)
    ops = [admit(payer) for _ in range(4)]
    await holds.execute(ops)
    await world.run(settle(ops[0].hold_id, 5))
    read.clear()

    ends = [settle(op.hold_id, 5) for op in ops[:3]]
    answers = await holds.execute([*ends, ends[1], Void(ops[3].hold_id)])
    again = await holds.execute(ends)

    assert read == [4, 3]
    assert [type(answer).__name__ for answer in answers] == ["Settled"] * 4 + ["Ended"]
    assert again == answers[:3]
    assert world.counters(quota_ids[QuotaDimension.TOKENS_PER_MINUTE]) == [(45, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_counter_that_is_gone_is_made_again_by_the_long_way(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, quota_ids = tenant(world)
    op = admit(payer)
    await holds.execute([op])
    world.execute(
        "DELETE FROM quota_counters WHERE quota_id = %s",
        quota_ids[QuotaDimension.TOKENS_PER_MINUTE],
    )
    read.clear()

    [answer] = await holds.execute([settle(op.hold_id, 5)])

    # Nothing was held there that could be released: the rows were tampered with.
    assert not isinstance(answer, Settled)
    assert read == [1, 1]
    assert world.hold_count() == 1


async def test_nothing_is_remembered_of_holds_that_have_ended_or_that_no_request_has(
    world: HoldWorld, holds: HoldConnection
) -> None:
    payer, _ = tenant(world)
    standing_id = uuid.uuid4()
    ops = [
        admit(payer),
        admit(payer),
        admit(payer),
        admit(payer, hold_id=standing_id, request_id=standing_id),
    ]
    await holds.execute(ops)
    assert len(holds._own) == 3

    await holds.execute(
        [settle(ops[0].hold_id, 1), Void(ops[1].hold_id), settle(ops[2].hold_id, 999)]
    )

    assert len(holds._own) == 0


async def test_a_quota_that_is_set_while_a_late_settlement_is_written_counts_what_that_leaves(
    world: HoldWorld, holds: HoldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hold has expired, so queries of live holds do not wait for it."""
    payer, _ = tenant(world)
    op = admit(payer)
    await holds.execute([op])
    await expired(world, op, payer)
    decided = asyncio.Event()
    run_pipeline = vars(slow_path)["run_pipeline"]

    async def paused(connection: Any, statements: Sequence[Any]) -> Any:
        if statements[-1][0] == "COMMIT":
            decided.set()
            await until_somebody_waits_or(world, setting)
        return await run_pipeline(connection, statements)

    async def set_meanwhile() -> None:
        await decided.wait()
        await charged_to_one_more_quota(world, op, payer)

    monkeypatch.setattr(slow_path, "run_pipeline", paused)
    setting = asyncio.create_task(set_meanwhile())
    [answer] = await holds.execute([settle(op.hold_id, 15)])
    await setting

    assert isinstance(answer, Settled)
    assert world.counters(
        world.one("SELECT id FROM quotas WHERE dimension = 'tokens_per_day'")
    ) == [(25, 0)]
    check_invariants(world.url, all_ended=True)


async def until_somebody_waits_or(world: HoldWorld, task: asyncio.Task[None]) -> None:
    """Wait for a transaction that sets a quota, or for the end of the task."""
    waiting = """
        SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    while not task.done() and not world.one(waiting):  # noqa: ASYNC110  # no notification
        await asyncio.sleep(0.01)


tokens = st.integers(0, 3000)


@st.composite
def ends(
    draw: st.DrawFn,
) -> tuple[tuple[bool, int, int, int, int, datetime], tuple[int, int, int, int]]:
    """Draw a hold and how it ends; cached tokens that are known later take the slow path."""
    sent, leased = draw(tokens), draw(tokens)
    cached, delivered = draw(st.integers(0, sent)), draw(st.integers(0, leased))
    posted = draw(st.just(0) | st.integers(sent, sent + delivered))
    charged_at = NOON + timedelta(minutes=draw(st.integers(0, 1)))
    known = draw(st.integers(0, cached if posted else sent))
    return (draw(st.booleans()), sent, cached, leased, posted, charged_at), (
        draw(st.just(sent) | st.just(0)),
        known,
        delivered,
        draw(st.integers(0, delivered)),
    )


@given(
    rules=st.lists(
        st.tuples(
            st.sampled_from(QuotaDimension),
            st.builds(Weights, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)),
        ),
        min_size=1,
        max_size=5,
    ),
    prices=st.builds(TokenPrices, st.just(1), st.just("USD"), *[st.integers(0, 9)] * 5),
    all_ends=st.lists(ends(), min_size=1, max_size=8),
)
def test_ends_in_one_statement_release_what_the_full_path_releases(
    rules: list[tuple[QuotaDimension, Weights]], prices: TokenPrices, all_ends: list[Any]
) -> None:
    charged = [
        QuotaRule(uuid.uuid4(), QuotaSubject.API_KEY, uuid.uuid4(), "", each, LIMIT, weights)
        for each, weights in rules
    ]
    numbers = tuple(rule.number for rule in charged)
    terms = {
        embedding: HoldTerms(bytes(48), "m", embedding, prices, numbers)
        for embedding in (False, True)
    }
    counters = Counters(NOON, unlocked=True)
    decisions = Decisions(BatchReads(NOON), Counters(NOON, unlocked=True))
    for (embedding, sent, cached, leased, posted, charged_at), (
        billed,
        known,
        delivered,
        reasoning,
    ) in all_ends:
        hold = Hold(
            uuid.uuid4(),
            uuid.uuid4(),
            terms[embedding],
            charged,
            *(sent, cached, leased, 0, posted, ()),
            admitted_at=NOON,
            charged_at=charged_at,
        )
        decisions.reads.holds[hold.id.int] = hold
        decisions.decide(
            Settle(
                hold.id,
                billed,
                known,
                delivered,
                delivered,
                Outcome.STOP,
                reasoning_token_count=reasoning,
            )
        )
        if not embedding:
            cached = cached if posted else max(cached, known)
        paid = embedding_terms(prices) if embedding else prices
        charge = Charge(paid, sent, cached, leased, posted, NOON, charged_at)
        quotas.settle(counters, charged, charge, (billed, delivered, reasoning))

    assert decisions.counters.all_increments() == counters.all_increments()
