"""Limits on rolling windows: never exceeded in any of their minutes, on any path and any clock."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admitted, Extend, Extended, HoldAnswer, HoldOperation, Void
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import NOON, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants
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
