"""Traffic for charts: several processes in one sum, steps, percentiles, and shared reads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
from sqlalchemy import text

from api.access.servicer import SharedReads
from api.observability.observer import (
    FINE_FIRST_TOKEN_BOUNDS_MS,
    TOKEN_BOUNDS_MS,
    Histogram,
    RequestCounts,
)
from api.observability.traffic import TrafficRecorder, latencies, traffic_of
from metering.control.traffic import Period
from metering.core.errors import DatabaseUnavailable
from metering.core.models import ServiceTier
from metering.store.db import Sessions, create_engine, create_sessions
from tests.conftest import as_application

SERIES = "tiny", ServiceTier.INTERACTIVE, "chat", ""
# Moves all rows into the past by a multiple of the longest step, so that they are complete.
AGE = text("UPDATE traffic SET started_at = started_at - interval '15 minutes'")


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    engine = create_engine(as_application(database_url))
    yield create_sessions(engine)
    await engine.dispose()


async def age(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await session.execute(AGE)


def counts_of(first_token_ms: list[float], gaps_ms: list[float], end: str) -> RequestCounts:
    """Return the metrics of a process whose requests all ended with `end`."""
    counts = RequestCounts(["tiny"])
    counts.ends["tiny", ServiceTier.INTERACTIVE, end] += len(first_token_ms)
    for kind, number in (("input", 7), ("cached_input", 5), ("output", 3)):
        counts.tokens["tiny", kind] += number * len(first_token_ms)
    for value in first_token_ms:
        counts.times[SERIES].first_token.observe(value)
    for value in gaps_ms:
        counts.times[SERIES].inter_token.observe(value)
    return counts


async def test_percentiles_of_two_processes_are_those_of_all_their_requests(
    sessions: Sessions,
) -> None:
    """A busy, quick process and a slow one: an average of their percentiles would be far off."""
    dice = random.Random(3)
    quick = [dice.uniform(1, 9) for _ in range(990)]
    slow = [dice.uniform(2000, 4000) for _ in range(30)]
    for values, end in ((quick, "stop"), (slow, "QUOTA_EXCEEDED".lower())):
        await TrafficRecorder(sessions, counts_of(values, values, end), lambda: ()).write()
    await age(sessions)

    found = await traffic_of(sessions, Period.DAY)

    exact = latencies(np.array([histogram([*quick, *slow])]), FINE_FIRST_TOKEN_BOUNDS_MS)
    assert found.total.first_token.period_p50_ms == exact.period_p50_ms < 10
    assert found.total.first_token.period_p99_ms == exact.period_p99_ms > 2000
    assert found.total.inter_token.period_p99_ms > 2000
    [model] = found.models
    assert model.model == "tiny"
    assert [sum(each) for each in model.counts] == [1020, 30, 7140, 5100, 3060, 0]
    assert model.errors == [("QUOTA_EXCEEDED", 30)]


def histogram(values: list[float]) -> list[int]:
    made = Histogram(FINE_FIRST_TOKEN_BOUNDS_MS)
    for value in values:
        made.observe(value)
    return made.counts


@pytest.mark.parametrize("count", [1, 2, 99, 1000])
def test_a_percentile_is_in_the_bucket_of_the_exact_one(count: int) -> None:
    dice = random.Random(count)
    values = sorted(dice.lognormvariate(2, 2) for _ in range(count))
    buckets = Histogram(TOKEN_BOUNDS_MS)
    for value in values:
        buckets.observe(value)

    found = latencies(np.array([buckets.counts, [0] * len(buckets.counts)]), TOKEN_BOUNDS_MS)

    for share, shown in ((0.5, found.p50_ms), (0.99, found.p99_ms)):
        exact = values[int(np.ceil(share * count)) - 1]
        above = [bound for bound in TOKEN_BOUNDS_MS if bound >= exact]
        below = [bound for bound in TOKEN_BOUNDS_MS if bound < exact]
        assert (below[-1] if below else 0) < shown[0] <= (above[0] if above else below[-1])
        assert shown[1] == 0.0, "nothing was measured"


async def test_processes_that_write_at_once_lose_nothing(sessions: Sessions) -> None:
    recorders = [
        TrafficRecorder(
            sessions,
            counts_of([20.0], [], "stop"),
            lambda: [("tiny", "queued"), ("b", "streaming")],
        )
        for _ in range(8)
    ]

    await asyncio.gather(*(each.write() for each in recorders))
    await age(sessions)
    found = await traffic_of(sessions, Period.DAY)

    assert sum(found.total.counts[0]) == 8
    assert sum(found.total.waiting) == pytest.approx(8 * 15 / 900, abs=0.001)
    assert sum(found.total.running) == pytest.approx(8 * 15 / 900, abs=0.001)
    assert [each.model for each in found.models] == ["tiny", "b"]


async def test_counts_of_a_failed_write_are_in_the_next_one(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = TrafficRecorder(sessions, counts_of([1.0, 2.0], [], "stop"), lambda: ())

    async def away(*_: object) -> None:
        raise DatabaseUnavailable("cut off")

    with monkeypatch.context() as cut:
        cut.setattr("api.observability.traffic.add_traffic", away)
        await recorder.write()
    await recorder.write()
    await recorder.write()
    await age(sessions)

    assert sum((await traffic_of(sessions, Period.DAY)).total.counts[0]) == 2


async def test_only_complete_steps_are_shown_and_old_ones_deleted(sessions: Sessions) -> None:
    recorder = TrafficRecorder(sessions, counts_of([1.0], [], "stop"), lambda: ())
    await recorder.write()

    shown = [sum((await traffic_of(sessions, each)).total.counts[0]) for each in Period]
    async with sessions.begin() as session:
        await session.execute(text("UPDATE traffic SET started_at = started_at - interval '7 day'"))
    await recorder.write()
    async with sessions() as session:
        kept = (await session.execute(text("SELECT count(*) FROM traffic"))).scalar_one()

    assert shown == [0, 0, 0], "the step of the write is not over"
    assert kept == 0


async def test_a_hundred_readers_cost_one_read() -> None:
    made = 0

    async def make() -> int:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return made

    shared, kept = SharedReads(), SharedReads(age_max_s=60)
    first = await asyncio.gather(*(shared.read("", make) for _ in range(100)))
    assert set(first) <= {1, 2}, "callers during a read share the next one"
    assert await shared.read("", make) == made, "a later caller gets no older result"
    made = 0
    assert {await kept.read("", make) for _ in range(100)} == {1}


async def test_a_caller_that_leaves_or_fails_leaves_no_other_waiting() -> None:
    shared = SharedReads()
    begun = asyncio.Event()

    async def slow() -> str:
        begun.set()
        await asyncio.sleep(3600)
        return "never"

    async def quick() -> str:
        return "quick"

    async def broken() -> str:
        raise DatabaseUnavailable("cut off")

    leader = asyncio.create_task(shared.read("", slow))
    await begun.wait()
    waiting = asyncio.create_task(shared.read("", quick))
    leader.cancel()
    assert await waiting == "quick"
    with pytest.raises(DatabaseUnavailable):
        await shared.read("", broken)
    assert await shared.read("", quick) == "quick"
