"""Operations in one round trip: any batch equals the slow path, after any change in between."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core import errors
from metering.core.models import Outcome, Quota, QuotaDimension, QuotaSubject
from metering.holds import fast_path, slow_path
from metering.holds.decide import BatchReads, Decisions, Hold, HoldTerms
from metering.holds.hold_cache import cache_of
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    HoldAnswer,
    HoldOperation,
    Renew,
    Settle,
    Settled,
    Void,
)
from metering.pricing.prices import TokenPrices, embedding_terms
from metering.quotas import quotas
from metering.quotas.quota_recount import recount
from metering.quotas.quota_rules import NO_WINDOW, Charge, Payer, QuotaRule, Weights, money_scale
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.store.db import create_engine, create_sessions, psycopg_conninfo
from tests.metering.hold_world import HoldWorld, admit, settle, until_idle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_concurrency import running_stores

LIMIT = 10_000

NOON = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)
# Shortly before it a minute, a day and a month end.
YEAR_END = datetime(2027, 12, 31, 23, 58, 30, tzinfo=UTC)
EXAMPLES = int(os.environ.get("WEIR_TEST_EXAMPLES", "12"))
WAITS = st.sampled_from([0, 0, 0, 1, 20, 61])


@pytest.fixture
def year_end(database_url: str) -> Iterator[HoldWorld]:
    with HoldWorld(database_url, now=YEAR_END) as world:
        yield world


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


@dataclass(frozen=True)
class Act:
    """Operation of a drawn batch on a request. `of` reduces its numbers to possible ones."""

    kind: str
    request: int
    tokens: int
    cached: int
    wanted: int

    def of(self, payer: Payer, hold_id: uuid.UUID, leased: int, delivered: int) -> HoldOperation:
        """Return the operation. leased, delivered: of the hold before."""
        done = delivered + self.tokens % (leased - delivered + 1)
        match self.kind:
            case "admit":
                return admit(
                    payer,
                    hold_id=hold_id,
                    input_tokens=self.tokens,
                    slice_tokens=self.wanted,
                    embedding=self.cached > 8,
                )
            case "extend":
                return Extend(hold_id, done, self.cached % 2, self.wanted)
            case "settle":
                return settle(
                    hold_id, done, input_tokens=self.tokens, cached_tokens=self.cached % 3
                )
        return Void(hold_id)


class Twins:
    """Equal requests of two tenants: one operates from its cache, the other on the slow path."""

    def __init__(self, world: HoldWorld, holds: HoldConnection, limit: int) -> None:
        self.world, self.holds, self.first = world, holds, uuid.uuid4().int >> 66
        names = f"quick-{self.first}", f"slow-{self.first}"
        self.payers = [limited(world, name, limit) for name in names]
        self.numbers = itertools.count()
        self.live: dict[int, tuple[Act, int, int]] = {}  # admission, leased, delivered, by request

    def possible(self, acts: Sequence[Act]) -> list[Act]:
        """Return the acts that are possible in one batch, at most one of each request."""
        chosen: dict[int, Act] = {}
        for act in acts:
            if act.kind == "admit":
                number = next(self.numbers)
                chosen[number] = replace(act, request=number)
            elif self.live:
                number = [*self.live][act.request % len(self.live)]
                admitted, _, delivered = self.live[number]
                kind = "settle" if act.kind == "void" and delivered else act.kind
                kind = "settle" if kind == "extend" and admitted.cached > 8 else kind
                tokens = act.tokens if kind == "extend" else admitted.tokens
                chosen[number] = replace(act, kind=kind, request=number, tokens=tokens)
        return [*chosen.values()]

    async def run(self, acts: Sequence[Act]) -> list[HoldAnswer | Exception]:
        """Run one batch for each, and compare answers, holds, counters and usage events."""
        acts = self.possible(acts)
        quick, slow = (
            [
                act.of(
                    payer,
                    uuid.UUID(int=(self.first << 66) + (side << 65) + act.request),
                    *self.live.get(act.request, (act, 0, 0))[1:],
                )
                for act in acts
            ]
            for side, payer in enumerate(self.payers)
        )
        answers = await self.holds.execute(quick)
        expected = await self.world.run(*slow)
        assert [*map(reported, answers)] == [*map(reported, expected)]
        assert state(self.world, self.payers[0]) == state(self.world, self.payers[1])
        for act, op, answer in zip(acts, quick, answers, strict=True):
            match answer:
                case Admitted():
                    self.live[act.request] = act, answer.leased_token_count, 0
                case Extended():
                    assert isinstance(op, Extend)
                    leased = answer.leased_token_count
                    self.live[act.request] = (
                        self.live[act.request][0],
                        leased,
                        op.delivered_token_count,
                    )
                case Settled() | Ended():
                    del self.live[act.request]
        return answers


def limited(world: HoldWorld, name: str, limit: int) -> Payer:
    """Return a tenant with limits of every kind: weighed, raised for 90 seconds, only watched."""
    payer = world.tenant(name)
    key, project, organization = QuotaSubject.API_KEY, QuotaSubject.PROJECT, None
    quota_ids = {
        dimension: world.quota(
            payer, dimension, limit * factor // 4, subject=level or QuotaSubject.ORGANIZATION
        )
        for dimension, level, factor in (
            (QuotaDimension.CONCURRENT_REQUESTS, key, 4),
            (QuotaDimension.REQUESTS_PER_MINUTE, project, 4),
            (QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, key, 4),
            (QuotaDimension.TOKENS_PER_MINUTE, project, 1),
            (QuotaDimension.TOKENS_PER_DAY, project, 8),
            (QuotaDimension.TOKENS_PER_MONTH, organization, 2),
            (QuotaDimension.COST_PICOS_PER_MONTH, organization, 48),
        )
    }
    world.execute(
        "UPDATE quotas SET enforced = false WHERE id = %s",
        quota_ids[QuotaDimension.TOKENS_PER_MINUTE],
    )
    world.execute(
        "UPDATE quotas SET input_weight_milli = 1001, cached_input_weight_milli = 333,"
        " output_weight_milli = 1500 WHERE id = %s",
        quota_ids[QuotaDimension.TOKENS_PER_DAY],
    )
    world.execute(
        "UPDATE quotas SET override_limit_value = limit_value * 3, override_until = %s,"
        " override_reason = 'load' WHERE id = %s",
        world.now + timedelta(seconds=90),
        quota_ids[QuotaDimension.TOKENS_PER_MONTH],
    )
    return payer


def state(world: HoldWorld, payer: Payer) -> list[list[Any]]:
    """Return all values of a tenant's holds, counters and usage events except ids."""
    columns = """state, input_token_count, cached_input_token_count, leased_token_count,
        delivered_token_count, posted_token_count, posted_cost_picos, posted_minutes, charged_at,
        expires_at, cardinality(quota_ids)"""
    used = """part, outcome, input_token_count, cached_input_token_count, generated_token_count,
        billed_token_count, timings::text, recovered, migration_count"""
    return [
        world.rows(
            f"SELECT {columns} FROM holds WHERE project_id = %s ORDER BY id", payer.project_id
        ),
        world.rows(
            "SELECT q.dimension, c.window_start, c.used, c.held FROM quota_counters c JOIN quotas q"
            " ON q.id = c.quota_id WHERE q.subject_id = ANY(%s) ORDER BY 1, 2",
            [*payer.subject_ids],
        ),
        sorted(
            world.rows(f"SELECT {used} FROM usage_events WHERE project_id = %s", payer.project_id)
        ),
    ]


def reported(answer: HoldAnswer | Exception) -> object:
    """Return the comparable part of an answer."""
    match answer:
        case Admitted() | Extended():
            return answer.leased_token_count
        case Settled():
            return replace(answer, hold_id=uuid.UUID(int=0))
        case QuotaExceeded():
            return str(answer)
    return type(answer)


acts = st.builds(
    Act,
    st.sampled_from(["admit", "admit", "extend", "extend", "settle", "void"]),
    st.integers(0, 20),
    st.integers(1, 60),
    st.integers(0, 9),
    st.sampled_from([1, 20, 60, 200]),
)


@given(
    batches=st.lists(
        st.tuples(st.lists(acts, min_size=1, max_size=6), WAITS), min_size=6, max_size=14
    ),
    is_tight=st.booleans(),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # minimizing would take minutes
)
async def test_any_batch_has_the_same_effect_as_on_the_slow_path(
    year_end: HoldWorld, batches: list[tuple[list[Act], int]], is_tight: bool
) -> None:
    """Check single operations where limits bind: the order within a batch is not promised."""
    world = year_end
    world.set_time(YEAR_END)
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        twins = Twins(world, holds, 400 if is_tight else 10**6)
        await twins.run([Act("admit", 0, 10, 0, 60)])
        for batch, wait_s in batches:
            await twins.run(batch[:1] if is_tight else batch)
            if wait_s:
                world.advance(wait_s)
        for number in [*twins.live]:
            await twins.run([Act("settle", [*twins.live].index(number), 1, 0, 1)])
    raised = world.rows("SELECT id FROM quotas WHERE override_until IS NOT NULL")
    check_invariants(world.url, over=[row[0] for row in raised])


async def test_settlements_of_own_holds_read_none_of_them(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, _ = tenant(world)
    ops = [admit(payer), admit(payer, input_tokens=7), admit(payer, embedding=True)]
    await holds.execute(ops)
    read.clear()

    answers = await holds.execute(
        [
            Settle(
                ops[0].hold_id, 10, 4, 21, 20, Outcome.LENGTH, {"queued": 0.5}, migration_count=2
            ),
            settle(ops[1].hold_id, 3, input_tokens=7),
            settle(ops[2].hold_id, 0, cached_tokens=2),
        ]
    )

    assert read == []
    assert all(isinstance(answer, Settled) and len(answer.receipts) == 1 for answer in answers)
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


@pytest.mark.parametrize(
    "change",
    [expired, settled, extended, charged_to_one_more_quota, weighed_anew],
    ids=lambda each: each.__name__,
)
async def test_a_hold_that_has_changed_meanwhile_is_extended_as_it_is(
    world: HoldWorld, holds: HoldConnection, read: list[int], change: Change
) -> None:
    payer = limited(world, "acme", 10**6)
    op, other = admit(payer), admit(payer)
    await holds.execute([op, other])
    await holds.execute([Extend(op.hold_id, 10, 0, 5), Extend(other.hold_id, 10, 0, 5)])
    # It would refuse the statement's change.
    world.execute("ALTER TABLE holds DISABLE TRIGGER holds_end_once")
    await change(world, op, payer)
    if change is expired:
        world.advance(-61)  # the minute is the same again: only the hold itself differs
    read.clear()

    [answer] = await holds.execute([Extend(op.hold_id, 20, 0, 5)])
    [again] = await holds.execute([Extend(other.hold_id, 20, 0, 5)])

    assert len(read) >= 1
    assert (
        isinstance(answer, errors.HoldEnded)
        if change in (expired, settled)
        else isinstance(answer, Extended)
    ), answer
    assert again == Extended(30)
    assert not isinstance(answer, Extended) or answer == Extended(50 if change is extended else 30)
    world.execute("ALTER TABLE holds ENABLE TRIGGER holds_end_once")
    check_invariants(world.url)


async def test_extensions_of_one_batch_add_up_and_the_one_beyond_the_limit_gets_what_is_left(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, 200)
    ops = [admit(payer) for _ in range(4)]
    await holds.execute(ops)
    await holds.execute([Extend(op.hold_id, 0, 0, 1) for op in ops])
    read.clear()

    answers = await holds.execute([Extend(op.hold_id, 10, 0, 40) for op in ops])

    assert read == [2]
    assert answers[:2] == [Extended(61), Extended(61)]
    assert answers[2] == Extended(21 + 200 - 2 * 61 - 2 * 21)
    assert isinstance(answers[3], QuotaExceeded)
    assert world.counters(quota_id) == [(30, 170)]
    check_invariants(world.url)


async def test_room_taken_by_another_request_is_not_given_twice(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, 200)
    op = admit(payer)
    await holds.execute([op])
    await holds.execute([Extend(op.hold_id, 0, 0, 5)])
    await world.run(admit(payer, slice_tokens=150))
    read.clear()

    [answer] = await holds.execute([Extend(op.hold_id, 10, 0, 100)])

    assert read == [1]
    assert answer == Extended(50)
    assert world.counters(quota_id) == [(10, 190)]
    check_invariants(world.url)


async def test_an_end_and_extensions_of_one_batch_are_each_done_once_in_their_order(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = limited(world, "acme", 10**6)
    ops = [admit(payer) for _ in range(3)]
    await holds.execute(ops)
    await holds.execute([Extend(op.hold_id, 5, 0, 5) for op in ops])
    read.clear()
    first, second, third = (op.hold_id for op in ops)

    answers = await holds.execute(
        [
            Extend(first, 9, 0, 5),
            settle(second, 6),
            Extend(second, 6, 0, 5),
            Extend(first, 12, 0, 5),
            Extend(third, 25, 0, 7),
        ]
    )

    assert [type(answer) for answer in answers] == [
        Extended,
        Settled,
        errors.HoldEnded,
        Extended,
        Extended,
    ]
    assert [answer.leased_token_count for answer in answers if isinstance(answer, Extended)] == [
        30,
        35,
        32,
    ]
    assert read == [2]
    check_invariants(world.url)


@pytest.mark.parametrize("wanted", [0, -1])
async def test_a_lease_does_not_grow_by_nothing(
    world: HoldWorld, holds: HoldConnection, wanted: int
) -> None:
    """An unchanged lease would hide the change of the hold."""
    payer = limited(world, "acme", 10**6)
    op = admit(payer)
    await holds.execute([op])
    await holds.execute([Extend(op.hold_id, 5, 0, 5)])
    before = world.contents()

    [answer] = await holds.execute([Extend(op.hold_id, 9, 0, wanted)])

    assert isinstance(answer, errors.InvariantViolated)
    assert world.contents() == before


async def one(holds: HoldConnection, op: Admit) -> HoldAnswer | Exception:
    [answer] = await holds.execute([op])
    return answer


async def test_the_second_admission_of_a_key_takes_the_fast_path_and_counts_the_same(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer, quotas = tenant(world)

    first = await one(holds, admit(payer))
    quick = await holds.execute([admit(payer) for _ in range(3)])

    assert read == [1]
    for count, answer in enumerate([first, *quick], 1):
        assert isinstance(answer, Admitted)
        assert {(state.rule.dimension, state.used, state.held) for state in answer.quotas} == {
            (QuotaDimension.CONCURRENT_REQUESTS, 0, count),
            (QuotaDimension.REQUESTS_PER_MINUTE, count, 0),
            (QuotaDimension.TOKENS_PER_MINUTE, 0, 30 * count),
            (QuotaDimension.TOKENS_PER_MONTH, 0, 40 * count),
            (QuotaDimension.COST_PICOS_PER_MONTH, 0, 170 * count),
        }
        assert answer.admitted_at == world.now
    assert world.counters(quotas[QuotaDimension.TOKENS_PER_MONTH]) == [(0, 160)]
    check_invariants(world.url)


def revoke(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", payer.api_key_id)


def expire_key(world: HoldWorld, payer: Payer) -> None:
    """Let the key expire before the minute ends."""
    world.advance(1)


def lower(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE quotas SET limit_value = 1 WHERE subject_id = %s", payer.api_key_id)


def add_quota(world: HoldWorld, payer: Payer) -> None:
    world.quota(payer, QuotaDimension.TOKENS_PER_DAY, 5)


def fill_elsewhere(world: HoldWorld, payer: Payer) -> None:
    world.execute("UPDATE quota_counters SET used = used + %s", LIMIT)


def end_raise(world: HoldWorld, payer: Payer) -> None:
    """End a raise; more was admitted under it."""
    world.advance(10)


RULE_CHANGES: list[tuple[Callable[[HoldWorld, Payer], None], type[Exception]]] = [
    (revoke, errors.KeyInvalid),
    (expire_key, errors.KeyInvalid),
    (lower, QuotaExceeded),
    (add_quota, QuotaExceeded),
    (fill_elsewhere, QuotaExceeded),
    (end_raise, QuotaExceeded),
]


@pytest.mark.parametrize(
    ("change", "refusal"), RULE_CHANGES, ids=[change.__name__ for change, _ in RULE_CHANGES]
)
async def test_a_change_counts_for_the_very_next_admission(
    world: HoldWorld,
    holds: HoldConnection,
    change: Callable[[HoldWorld, Payer], None],
    refusal: type[Exception],
) -> None:
    payer, quotas = tenant(world)
    if change is expire_key:
        world.execute(
            "UPDATE api_keys SET expires_at = now() + interval '1 second' WHERE id = %s",
            payer.api_key_id,
        )
    if change is end_raise:
        world.execute(
            "UPDATE quotas SET limit_value = 1, override_limit_value = 50, override_until = now() +"
            " interval '10 seconds', override_reason = 'test' WHERE id = %s",
            quotas[QuotaDimension.CONCURRENT_REQUESTS],
        )
    for _ in range(3):
        assert isinstance(await one(holds, admit(payer)), Admitted)

    change(world, payer)

    assert isinstance(await one(holds, admit(payer)), refusal)
    assert world.hold_count() == 3


async def test_a_new_price_counts_at_once(world: HoldWorld, holds: HoldConnection) -> None:
    payer, _ = tenant(world)
    for _ in range(2):
        await one(holds, admit(payer))

    version = world.set_price(5, 5, 5)

    answer = await one(holds, admit(payer))
    assert isinstance(answer, Admitted)
    assert answer.prices.version == version


async def test_a_price_set_for_later_counts_then(world: HoldWorld, holds: HoldConnection) -> None:
    payer, _ = tenant(world)
    world.execute(
        "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
        " cached_input_picos_per_token, output_picos_per_token, effective_at) VALUES ('demo',"
        " 'USD', 5, 5, 5, now() + interval '2 seconds')"
    )
    for _ in range(2):
        before = await one(holds, admit(payer))

    world.advance(2)
    after = await one(holds, admit(payer))

    assert isinstance(before, Admitted)
    assert isinstance(after, Admitted)
    assert (before.prices.input_picos_per_token, after.prices.input_picos_per_token) == (3, 5)


async def test_another_minute_has_its_own_window(world: HoldWorld, holds: HoldConnection) -> None:
    payer, quotas = tenant(world)
    for _ in range(2):
        await one(holds, admit(payer))

    world.advance(60)
    await one(holds, admit(payer))
    await one(holds, admit(payer))

    assert world.counters(quotas[QuotaDimension.REQUESTS_PER_MINUTE]) == [(2, 0), (2, 0)]
    check_invariants(world.url)


async def test_a_request_id_is_taken_once_a_batch(world: HoldWorld, holds: HoldConnection) -> None:
    payer, _ = tenant(world)
    op = admit(payer)
    await one(holds, op)

    again = msgspec.structs.replace(op, hold_id=uuid.uuid4())
    other = msgspec.structs.replace(
        op, hold_id=uuid.uuid4(), payload_hash=op.payload_hash[:4] + b"x" * 28
    )
    twice = admit(payer)
    answers = await holds.execute(
        [again, other, twice, msgspec.structs.replace(twice, hold_id=uuid.uuid4()), admit(payer)]
    )

    assert [type(each) for each in answers] == [
        errors.RequestInFlight,
        errors.RequestIdReused,
        Admitted,
        errors.RequestInFlight,
        Admitted,
    ]
    check_invariants(world.url)


async def test_a_request_repeated_during_its_settlement_neither_waits_nor_blocks(
    world: HoldWorld, holds: HoldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would hold the counters that the settlement waits for."""
    payer, _ = tenant(world)
    ops = [admit(payer) for _ in range(3)]
    ended, may_go_on = asyncio.Event(), asyncio.Event()
    run_pipeline = vars(fast_path)["run_pipeline"]

    async def paused(connection: Any, statements: Sequence[Any]) -> Any:
        if statements[-1][0] == "COMMIT" and not ended.is_set():  # the settlement's commit
            ended.set()
            await may_go_on.wait()
        return await run_pipeline(connection, statements)

    async with HoldConnection(world.url, uuid.uuid4(), own=holds._own) as ending:
        await holds.execute(ops[:1])
        await holds.execute(ops[1:])
        await ending.execute([settle(ops[0].hold_id, 1)])
        monkeypatch.setattr(fast_path, "run_pipeline", paused)
        settling = asyncio.create_task(ending.execute([settle(ops[1].hold_id, 1)]))
        await ended.wait()
        again, other = await holds.execute(
            [msgspec.structs.replace(ops[1], hold_id=uuid.uuid4()), admit(payer)]
        )
        may_go_on.set()
        [settled] = await settling

    assert isinstance(again, errors.RequestInFlight)
    assert isinstance(other, Admitted)
    assert isinstance(settled, Settled)
    check_invariants(world.url)


async def test_a_request_that_does_not_fit_is_refused_and_blocks_no_other(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    (full, _), (roomy, _) = tenant(world, "full"), tenant(world, "roomy")
    world.execute("UPDATE quotas SET limit_value = 2 WHERE subject_id = %s", full.api_key_id)
    await holds.execute([admit(full), admit(roomy)])
    await holds.execute([admit(full), admit(roomy)])
    read.clear()

    answers = await holds.execute([admit(payer) for payer in (full, roomy, full, roomy)])

    assert [type(each) for each in answers] == [QuotaExceeded, Admitted, QuotaExceeded, Admitted]
    assert read == [2]
    check_invariants(world.url)


async def test_a_change_that_is_committed_after_a_later_one_is_seen(
    world: HoldWorld, holds: HoldConnection
) -> None:
    """The query asks for unseen rows, since commits may be out of order."""
    (first, _), (second, _) = tenant(world, "first"), tenant(world, "second")
    await holds.execute([admit(first), admit(second)])
    with psycopg.connect(psycopg_conninfo(world.url)) as slow:
        slow.execute("UPDATE quotas SET limit_value = 1 WHERE subject_id = %s", (first.api_key_id,))
        lower(world, second)
        assert isinstance(await one(holds, admit(second)), QuotaExceeded)
        # An uncommitted row does not count.
        assert isinstance(await one(holds, admit(first)), Admitted)
        slow.commit()

    assert isinstance(await one(holds, admit(first)), QuotaExceeded)


async def test_a_holds_end_follows_changed_weights(world: HoldWorld, holds: HoldConnection) -> None:
    """After a recount: counters rewritten with the new weights while the holds are locked."""
    payer, quotas = tenant(world)
    op = admit(payer)
    await one(holds, admit(payer))
    await one(holds, op)
    quota = quotas[QuotaDimension.TOKENS_PER_MONTH]
    world.execute("UPDATE quotas SET output_weight_milli = 2000 WHERE id = %s", quota)
    world.execute("UPDATE quota_counters SET held = 2 * (10 + 2 * 20) WHERE quota_id = %s", quota)

    await holds.execute([settle(op.hold_id, 5)])

    assert world.counters(quota) == [(10 + 2 * 5, 10 + 2 * 20)]


async def test_an_end_whose_counter_is_gone_takes_no_other_down_with_it(
    world: HoldWorld, holds: HoldConnection
) -> None:
    (gone, quotas), (there, _) = tenant(world, "gone"), tenant(world, "there")
    ops = [admit(gone), admit(there)]
    await holds.execute(ops)
    world.execute(
        "DELETE FROM quota_counters WHERE quota_id = %s", quotas[QuotaDimension.REQUESTS_PER_MINUTE]
    )

    answers = await holds.execute([Void(op.hold_id) for op in ops])

    assert [type(each) for each in answers] == [errors.InvariantViolated, Ended]
    assert world.hold_count("voided") == 1


async def test_after_a_long_silence_everything_is_read_again(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    """Rows of changes are deleted after a while."""
    payer, _ = tenant(world)
    await holds.execute([admit(payer)])
    assert holds._connection is not None
    cache = cache_of(holds._connection)
    cache.clock = lambda: cache._changes_read_at_s + 3600
    lower(world, payer)
    world.execute("DELETE FROM rule_changes")
    world.advance(3600)

    assert isinstance(await one(holds, admit(payer)), QuotaExceeded)
    assert read == [1, 1]


async def test_a_renewal_voids_holds_that_it_does_not_name(
    world: HoldWorld,
) -> None:
    payer, quotas = tenant(world)
    process_id = uuid.uuid4()
    async with HoldConnection(world.url, process_id) as holds:
        await holds.execute([admit(payer)])
        await holds.execute([admit(payer), admit(payer)])
        await holds.execute([Renew(process_id, frozenset())])

    assert world.hold_count("voided") == 3
    assert world.counters(quotas[QuotaDimension.REQUESTS_PER_MINUTE]) == [(0, 0)]
    check_invariants(world.url, all_ended=True)


async def test_an_uncharged_counter_keeps_no_other_key_from_the_fast_path(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    """A free request leaves no row in a quota on money."""
    world.set_price(0, 0, 0)
    free, other = world.tenant("free"), world.tenant("other")
    world.quota(free, QuotaDimension.COST_PICOS_PER_MONTH, 1000)
    world.quota(other, QuotaDimension.REQUESTS_PER_MINUTE, LIMIT)
    await holds.execute([admit(free), admit(other)])
    read.clear()

    answers = await holds.execute([admit(free), admit(other)])

    assert [type(each) for each in answers] == [Admitted, Admitted]
    assert read == [1]
    check_invariants(world.url)


async def test_an_unexpected_error_gives_each_admission_its_own_hold(
    world: HoldWorld, holds: HoldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated fast batch would answer with the hold of another request."""
    (first, _), (second, _) = tenant(world, "first"), tenant(world, "second")
    await holds.execute([admit(first), admit(second)])
    failures = [psycopg.errors.InternalError_("tuple concurrently updated")] * 2

    write_batch = vars(fast_path)["write_batch"]

    async def failing(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await write_batch(*arguments, **named)

    monkeypatch.setattr(fast_path, "write_batch", failing)
    ops = [admit(first), admit(second), admit(first)]
    answers = await holds.execute(ops)

    assert [each.hold_id for each in answers if isinstance(each, Admitted)] == [
        op.hold_id for op in ops
    ]
    assert world.hold_count() == 5
    check_invariants(world.url)


async def test_revoked_keys_are_forgotten(world: HoldWorld, holds: HoldConnection) -> None:
    payer, _ = tenant(world)
    for _ in range(3):
        key = replace(payer, api_key_id=world.key(payer.project_id))
        assert isinstance(await one(holds, admit(key)), Admitted)
        revoke(world, key)
    await one(holds, admit(payer))

    assert holds._connection is not None
    cache = cache_of(holds._connection)
    assert {key for keys in cache._terms_of.values() for key in keys} == cache.terms.keys()
    assert len(cache.terms) == 1


@given(
    dimension=st.sampled_from(QuotaDimension),
    weights=st.builds(Weights, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)),
    prices=st.builds(
        TokenPrices,
        st.just(1),
        st.just("USD"),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    tokens=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
)
def test_a_rule_weighs_a_new_claim_as_the_long_way_does(
    dimension: QuotaDimension, weights: Weights, prices: TokenPrices, tokens: tuple[int, int]
) -> None:
    rule = QuotaRule(
        uuid.uuid4(), QuotaSubject.API_KEY, uuid.uuid4(), "", dimension, 2**62, weights
    )
    charge = Charge(prices, tokens[0], 0, tokens[1], 0, NO_WINDOW, NO_WINDOW)
    row = Counter(0, 0)

    assert quotas.admit_whole(
        Counters(NO_WINDOW, {rule.key(NO_WINDOW): row}), [rule], money_scale(prices), *tokens
    )

    assert row.used + row.held == quotas.admission_amount(rule, charge)
