"""Limits on rolling windows and lifetimes: never exceeded, on any path and any clock."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds import read as reading
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admitted, Extend, Extended, HoldAnswer, HoldOperation, Void
from metering.proof.check import Moment
from metering.quotas.quota_admin import delete_past_counters, is_whole, set_quota
from metering.quotas.quota_rules import Payer, QuotaState, bucket_of
from metering.quotas.quota_states import limits_of_member
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
from metering.store.pipeline import Connection, Statement, run_pipeline
from metering.tenants.usage_subjects import archive_idle
from tests.metering.hold_world import NOON, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen
from tests.metering.test_hold_concurrency import SEEDS, admit_all, running_stores

MINUTE = timedelta(minutes=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TOKENS, REQUESTS = QuotaDimension.TOKENS_PER_WINDOW, QuotaDimension.REQUESTS_PER_WINDOW
SENT, SLICE = 10, 20


@asynccontextmanager
async def connections(url: str, count: int) -> AsyncIterator[list[HoldConnection]]:
    """Open one connection per process."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(HoldConnection(url, uuid.uuid4(), expiry_s=10**8))
            for _ in range(count)
        ]


@dataclass
class Request:
    """Request of the oracle: the tokens that count at each time, and the lease that is left."""

    owner: int
    at: datetime
    left: int = SLICE
    posted: int = 0
    is_extended: bool = False
    charges: dict[datetime, int] = field(default_factory=dict)


class Oracle:
    """Sums over a list of requests: which are counted, by the times of their charges."""

    def __init__(self, minutes: int, limit: int) -> None:
        self.minutes, self.limit = minutes, limit
        self.bucket = -(-minutes // 60) * MINUTE
        self.requests: dict[uuid.UUID, Request] = {}

    def charges(self) -> list[tuple[datetime, int]]:
        return [charge for each in self.requests.values() for charge in each.charges.items()]

    def start(self, at: datetime) -> datetime:
        return at - (at - EPOCH) % self.bucket

    def first(self, now: datetime) -> datetime:
        """Return the first bucket that counts."""
        return self.start(now) - self.minutes * MINUTE

    def counted(self, now: datetime) -> int:
        """Sum what the limit counts: buckets from a window before the present one on."""
        first = self.first(now)
        return sum(amount for at, amount in self.charges() if self.start(at) >= first)

    def check(self) -> None:
        """No window of these minutes has more than the limit, wherever it ends."""
        charges = sorted(self.charges())
        for end, _ in charges:
            total = sum(amount for at, amount in charges if end - self.minutes * MINUTE < at <= end)
            assert total <= self.limit, f"{total} of {self.limit} in the minutes up to {end}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("minutes", [1, 7, 120, 300])
async def test_no_window_has_more_than_the_limit_and_no_request_that_fits_is_refused(
    world: HoldWorld, minutes: int, seed: int
) -> None:
    """Random admissions, extensions, settlements and cancels of four processes, whose clock also
    steps back, against sums over a list."""
    rng, payer = random.Random(f"{minutes} {seed}"), world.tenant()
    oracle = Oracle(minutes, 5 * (SENT + SLICE) + 7)
    world.quota(payer, TOKENS, oracle.limit, window_minutes=minutes)
    outcomes: set[str] = set()

    async with connections(world.url, 4) as processes:

        async def execute(owner: int, op: HoldOperation) -> HoldAnswer | Exception:
            [answer] = await processes[owner].execute([op])
            return answer

        for _ in range(100):
            step = rng.random()
            if step < 0.5:
                owner = rng.randrange(4)
                fits = oracle.counted(world.now) + SENT + SLICE <= oracle.limit
                answer = await execute(owner, op := admit(payer, least_tokens=SLICE))
                assert isinstance(answer, Admitted if fits else QuotaExceeded), answer
                if fits:
                    request = Request(owner, world.now, charges={world.now: SENT + SLICE})
                    oracle.requests[op.hold_id] = request
                elif "QuotaExceeded" not in outcomes:  # no room is reserved for others yet
                    assert isinstance(answer, QuotaExceeded)
                    check_retry_after(oracle, world.now, answer)
                outcomes.add(type(answer).__name__)
            elif step < 0.75 and (live := [k for k, each in oracle.requests.items() if each.left]):
                hold_id = rng.choice(live)
                request = oracle.requests[hold_id]
                delivered = SLICE - request.left + rng.randint(0, request.left)
                match rng.choice(["settle", "void", "extend", "extend"]):
                    case "void" if not request.is_extended:
                        await execute(request.owner, Void(hold_id))
                        request.charges, request.left = {}, 0
                    case "extend" if not request.is_extended:
                        is_counted = oracle.start(request.at) >= oracle.first(world.now)
                        growth = 1 if is_counted else SLICE + 1 - delivered
                        fits = oracle.counted(world.now) + growth <= oracle.limit
                        answer = await execute(request.owner, Extend(hold_id, delivered, 0, 1))
                        assert isinstance(answer, Extended if fits else QuotaExceeded), answer
                        if isinstance(answer, Extended):
                            outcomes.add("Extended")
                            post(request, world.now, delivered, answer.leased_token_count)
                    case _:
                        delivered = max(delivered, request.posted)
                        await execute(request.owner, settle(hold_id, delivered, input_tokens=SENT))
                        total = SENT + delivered
                        *before, last = request.charges
                        request.charges[last] = total - sum(request.charges[k] for k in before)
                        request.left = 0
            elif step < 0.95:
                world.advance(rng.choice([1, 20, 61, 60 * minutes / 7, 60 * minutes]))
            else:
                world.advance(-rng.choice([1, 61, 60 * minutes / 7]))
            oracle.check()

    check_invariants(world.url)
    assert outcomes >= {"Admitted", "QuotaExceeded", "Extended"}


def post(request: Request, now: datetime, delivered: int, leased: int) -> None:
    """Leave the delivered tokens where they were charged, and charge the rest now."""
    del request.charges[request.at]
    request.charges[request.at] = SENT + delivered
    request.charges[now] = request.charges.get(now, 0) + leased - delivered
    request.posted, request.left, request.is_extended = delivered, leased - delivered, True


def check_retry_after(oracle: Oracle, now: datetime, error: QuotaExceeded) -> None:
    """It says when enough has left the window, if nothing ends before."""
    needed = oracle.counted(now) + SENT + SLICE - oracle.limit
    leaving = sorted((oracle.start(at), amount) for at, amount in oracle.charges())
    first = oracle.first(now)
    gone = 0
    for start, amount in leaving:
        if start >= first:
            gone += amount
            if gone >= needed:
                at = start + oracle.minutes * MINUTE + oracle.bucket
                assert 0 < error.retry_after_s <= (at - now).total_seconds() + 5.1
                return
    raise AssertionError("the limit is smaller than the request")


@pytest.mark.parametrize("dimension", [TOKENS, REQUESTS])
async def test_a_burst_over_the_border_of_a_bucket_admits_no_more(
    world: HoldWorld, dimension: QuotaDimension
) -> None:
    """Four stores at once; the clock moves to the next bucket while they admit."""
    payer = world.tenant()
    limit = 50 * (30 if dimension is TOKENS else 1)
    quota_id = world.quota(payer, dimension, limit, subject=QuotaSubject.API_KEY)
    world.set_time(NOON - timedelta(seconds=0.5))

    async with running_stores(world.url, 4) as stores:
        burst = [admit(payer, least_tokens=20) for _ in range(200)]
        first = asyncio.create_task(admit_all(stores, burst[:100]))
        await asyncio.sleep(0)
        await asyncio.to_thread(world.set_time, NOON + timedelta(seconds=0.5))
        answers = [*await first, *await admit_all(stores, burst[100:])]

    assert len(of_type(Admitted, answers)) == 50
    assert len(of_type(QuotaExceeded, answers)) == 150
    assert sum(used + held for used, held in world.counters(quota_id)) == limit
    check_invariants(world.url)


async def test_what_was_used_leaves_the_window_a_bucket_late_at_most(world: HoldWorld) -> None:
    """With 300 minutes and buckets of 5, across a leap day, in a database of another zone."""
    payer = world.tenant()
    database = world.one("SELECT quote_ident(current_database())")
    world.execute(f"ALTER DATABASE {database} SET TimeZone = 'Pacific/Kiritimati'")  # UTC+14
    world.quota(payer, REQUESTS, 1)
    began = datetime(2028, 2, 28, 23, 58, tzinfo=UTC)
    world.set_time(began)
    [first] = await world.run(op := admit(payer))
    await world.run(settle(op.hold_id, 5))

    world.set_time(began + timedelta(minutes=301, seconds=59))
    [refused] = await world.run(admit(payer))
    world.set_time(began + timedelta(minutes=302))
    [second] = await world.run(admit(payer))

    assert isinstance(first, Admitted)
    assert isinstance(second, Admitted)
    assert isinstance(refused, QuotaExceeded)
    assert "1 request in any 300 minutes and has made 1" in str(refused)
    assert refused.failing[0].used == 1
    assert 0 < refused.retry_after_s <= 1 + 5
    check_invariants(world.url)


async def test_a_lifetime_is_not_reset_archived_or_deleted(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    dimension = QuotaDimension.TOKENS_PER_LIFETIME
    selector = await set_limit(sessions, payer, QuotaKey(dimension, for_each="end_user"), 45)
    [first] = await world.run(op := admit(payer, end_user="alice", least_tokens=20))
    await world.run(settle(op.hold_id, 5))

    world.advance(timedelta(days=4000).total_seconds())
    async with sessions.begin() as session:
        assert await archive_idle(session, timedelta(days=100)) == 1
        await delete_past_counters(session)
    [refused, held] = await world.run(
        admit(payer, end_user="alice", slice_tokens=21, least_tokens=21),
        last := admit(payer, end_user="alice", least_tokens=20),
    )
    [full] = await world.run(admit(payer, end_user="alice"))

    assert isinstance(first, Admitted)
    assert isinstance(held, Admitted)
    assert isinstance(refused, QuotaExceeded)
    assert isinstance(full, QuotaExceeded)
    assert "may use 45 tokens in total and has 30 left; this request needs 31" in str(refused)
    assert "ask an administrator to raise the limit" in str(full)
    assert full.failing[0].resets_at is None
    await world.run(settle(last.hold_id, 20))
    async with sessions.begin() as session:
        [state] = await limits_of_member(session, organization="acme", end_user="alice")
    assert (state.used, state.held, state.resets_at) == (45, 0, None)
    assert state.rule.selector_id == selector.quota_id
    check_invariants(world.url, all_ended=True)


async def test_buckets_are_deleted_once_no_late_report_can_correct_them(
    world: HoldWorld, sessions: Sessions
) -> None:
    """They were created by requests or by a recount; those of a week stay for a week."""
    payer = world.tenant()
    short, long = (
        world.quota(payer, REQUESTS, 100, window_minutes=minutes) for minutes in (1, 10_080)
    )
    for _ in range(4):
        await world.run(op := admit(payer))
        await world.run(settle(op.hold_id, 5))
        world.advance(300 * 60)
    counted = await set_limit(sessions, payer, QuotaKey(REQUESTS, "", window_minutes=1200), 100)
    left = {}
    for days in (0, 2, 1, 7):
        world.advance(timedelta(days=days).total_seconds())
        async with sessions.begin() as session:
            await delete_past_counters(session)
        left[days] = [len(world.counters(each)) for each in (short, counted.quota_id, long)]

    assert left == {0: [4, 4, 4], 2: [0, 4, 4], 1: [0, 0, 4], 7: [0, 0, 0]}


async def test_a_request_reads_the_buckets_of_the_window_once_for_each_bucket(
    world: HoldWorld,
) -> None:
    """All others check and change one row, as those of a calendar window."""
    payer = world.tenant()
    world.quota(payer, REQUESTS, 1000)
    opened: list[Statement] = []

    async with connections(world.url, 1) as [process]:

        async def noted(connection: Connection, statements: Sequence[Statement]) -> Any:
            opened.extend(each for each in statements if each[0] == reading.LOCK_BUCKETS)
            return await run_pipeline(connection, statements)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "run_pipeline", noted)
            for _ in range(3):
                for _ in range(5):
                    [answer] = await process.execute([op := admit(payer)])
                    assert isinstance(answer, Admitted)
                    await process.execute([settle(op.hold_id, 5)])
                world.advance(300)

    # For a bucket that does not exist yet: once to find that, and once after inserting it.
    assert len(opened) == 6


@pytest.mark.parametrize(
    ("dimension", "minutes", "message"),
    [
        (TOKENS, 0, "needs the length of its window, 1 to 44640 minutes, got 0"),
        (TOKENS, 44_641, "1 to 44640 minutes, got 44641"),
        (TOKENS, -5, "got -5"),
        (TOKENS, 61, "counted in steps of 2 minutes, .* give 60 or 62"),
        (TOKENS, 361, "counted in steps of 7 minutes, .* give 360 or 364"),
        (QuotaDimension.TOKENS_PER_DAY, 5, "tokens-per-day has no window of minutes"),
        (QuotaDimension.TOKENS_PER_LIFETIME, 5, "tokens-per-lifetime has no window of minutes"),
    ],
)
async def test_a_window_that_cannot_be_counted_is_refused(
    world: HoldWorld, sessions: Sessions, dimension: QuotaDimension, minutes: int, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message) as refused:
        await set_limit(sessions, world.tenant(), QuotaKey(dimension, window_minutes=minutes), 5)

    assert refused.value.field == "window_minutes"


def test_lengths_that_are_suggested_are_accepted() -> None:
    whole = [minutes for minutes in range(1, 44_641) if is_whole(minutes)]

    assert whole[:60] == list(range(1, 61))
    assert {90, 300, 1440, 10_080, 44_640} <= set(whole)
    assert all(bucket_of(minutes) * 60 >= minutes * MINUTE for minutes in whole)


async def test_fsck_finds_a_bucket_that_carries_too_little_and_one_that_is_exceeded(
    world: HoldWorld,
) -> None:
    payer = world.tenant()
    world.quota(payer, TOKENS, 100)
    await world.run(admit(payer))
    world.advance(300)
    await world.run(admit(payer))
    planted = faults("""
        open-buckets-carry-others | UPDATE quota_counters SET carried = carried - 1
                                  | WHERE carried > 0
        is open, and so is        | UPDATE quota_counters SET carried = 30
        counters-within-limits    | UPDATE quotas SET limit_value = 50
        counters-equal-holds      | UPDATE quota_counters SET used = used + 1 WHERE carried IS NULL
        is missing                | DELETE FROM quota_counters WHERE carried IS NULL
    """)

    assert unseen(world.url, planted, Moment.ALWAYS) == []


async def set_limit(
    sessions: Sessions, payer: Payer, key: QuotaKey, limit_value: int
) -> QuotaState:
    """Set a limit of the organization as an admin does."""
    async with sessions.begin() as session:
        return await set_quota(
            session,
            subject=QuotaSubject.ORGANIZATION,
            subject_ref=str(payer.organization_id),
            key=key,
            terms=QuotaTerms(limit_value),
            actor="test",
        )
