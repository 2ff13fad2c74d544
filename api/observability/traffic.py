"""Traffic of the models for charts: writes what this process counted, and adds up all processes.

The counts are those of the metrics (`observer.py`), so that a chart and a scrape agree. Owns the
counts at the last write. Reading is numpy on at most some hundred rows per model, one model at a
time, so that it does not delay requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from api.observability.observer import (
    FINE_FIRST_TOKEN_BOUNDS_MS,
    TOKEN_BOUNDS_MS,
    RequestCounts,
    merged,
)
from metering.control.traffic import (
    SAMPLE_S,
    SPREAD_S,
    Counts,
    Increment,
    Period,
    Step,
    TrafficRows,
    add_traffic,
    forget_old_traffic,
    read_traffic,
)
from metering.core.errors import DatabaseUnavailable
from metering.core.models import Outcome
from metering.store.db import Sessions, patience

WAITING_PHASES = frozenset({"preparing", "queued", "loading"})
RAN = frozenset(each.value for each in Outcome)
ANSWER_WAIT_S = 5.0  # far above the duration of the statement; the next one adds the same counts
MODELS_MAX = 100  # of a report; the total has all
SHARES = (0.5, 0.99)
TOKEN_KINDS = ("input", "cached_input", "output", "embedding")
Array = np.ndarray[Any, np.dtype[np.int64]]
# Model and phase of a running or waiting request
Live = tuple[str, str]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Counted:
    """Everything counted for one model since the start of the process."""

    counts: Array = field(default_factory=lambda: np.zeros(len(Counts._fields), np.int64))
    first_token: Array = field(
        default_factory=lambda: np.zeros(len(FINE_FIRST_TOKEN_BOUNDS_MS) + 1, np.int64)
    )
    inter_token: Array = field(default_factory=lambda: np.zeros(len(TOKEN_BOUNDS_MS) + 1, np.int64))
    errors: Counter[str] = field(default_factory=Counter)

    def since(self, before: Counted, live: Counter[bool], model: str) -> Increment:
        """Return what was added after `before`. `live` counts requests by whether they wait."""
        return Increment(
            model,
            (self.counts - before.counts).tolist(),
            live[False],
            live[True],
            (self.first_token - before.first_token).tolist(),
            (self.inter_token - before.inter_token).tolist(),
            dict(self.errors - before.errors),
        )


def counted(counts: RequestCounts) -> dict[str, Counted]:
    """Add up the metrics of a process by model. The result does not change with them."""
    found: dict[str, Counted] = {}
    for (model, _, outcome), number in counts.ends.items():
        of = found.setdefault(model, Counted())
        of.counts[0] += number
        if outcome not in RAN and number:
            of.counts[1] += number
            of.errors[outcome.upper()] += number
    for (model, kind), number in counts.tokens.items():
        found.setdefault(model, Counted()).counts[2 + TOKEN_KINDS.index(kind)] += number
    for (model, *_), times in counts.times.items():
        of = found.setdefault(model, Counted())
        first = merged([times.first_token], FINE_FIRST_TOKEN_BOUNDS_MS)
        of.first_token += np.array(first.counts)
        of.inter_token += np.array(times.inter_token.counts)
    return found


class TrafficRecorder:
    """Writer of the traffic of this process."""

    def __init__(
        self, sessions: Sessions, counts: RequestCounts, live: Callable[[], Iterable[Live]]
    ) -> None:
        """`live` returns model and phase of each running and waiting request."""
        self._sessions = sessions
        self._counts = counts
        self._live = live
        self._written: dict[str, Counted] = {}

    async def run(self) -> None:
        """Write after the end of each step, until cancelled."""
        delay_s = random.uniform(0.0, SPREAD_S)
        while True:
            await asyncio.sleep(SAMPLE_S - time.time() % SAMPLE_S + delay_s)
            await self.write()

    async def write(self) -> None:
        """Write what was counted since the last write. If that fails, the next one has it too."""
        now, increments = self._increments()
        try:
            with patience(ANSWER_WAIT_S):
                if increments:
                    async with self._sessions.begin() as session:
                        await add_traffic(session, increments)
                    self._written = now
                async with self._sessions.begin() as session:
                    await forget_old_traffic(session)
        except DatabaseUnavailable as away:
            log.info("traffic_not_written", cause=str(away))

    def _increments(self) -> tuple[dict[str, Counted], list[Increment]]:
        now = counted(self._counts)
        live: dict[str, Counter[bool]] = {}
        for model, phase in self._live():
            live.setdefault(model, Counter())[phase in WAITING_PHASES] += 1
        increments = [
            now.get(model, Counted()).since(
                self._written.get(model, Counted()), live.get(model, Counter()), model
            )
            for model in sorted({*now, *live})
        ]
        return now, [each for each in increments if any(each.counts) or each.model in live]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles of a duration in ms, in each step and in the whole period; 0 without values."""

    p50_ms: list[float]
    p99_ms: list[float]
    period_p50_ms: float
    period_p99_ms: float


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """Traffic of one model. `counts` has a list for each of `Counts`, by step."""

    model: str
    counts: list[list[int]]
    running: list[float]
    waiting: list[float]
    first_token: Latencies
    inter_token: Latencies
    errors: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of a period: the sum, and the models with most requests first."""

    start_s: float
    period: Period
    total: ModelTraffic
    models: list[ModelTraffic]


class _Sums:
    """Arrays of one or several models, by step."""

    def __init__(self, period: Period) -> None:
        count = period.step_count
        self.counts = np.zeros((count, len(Counts._fields)), np.int64)
        self.live = np.zeros((count, 2))
        self.first_token = np.zeros((count, len(FINE_FIRST_TOKEN_BOUNDS_MS) + 1), np.int64)
        self.inter_token = np.zeros((count, len(TOKEN_BOUNDS_MS) + 1), np.int64)
        self.errors: Counter[str] = Counter()

    def add(self, steps: Sequence[Step]) -> None:
        for each in steps:
            self.counts[each.index] += each.counts
            self.live[each.index] += each.running, each.waiting
            self.first_token[each.index] += each.first_token
            self.inter_token[each.index] += each.inter_token
            self.errors.update(each.errors)

    def add_sums(self, other: _Sums) -> None:
        self.counts += other.counts
        self.live += other.live
        self.first_token += other.first_token
        self.inter_token += other.inter_token
        self.errors.update(other.errors)

    def traffic(self, model: str) -> ModelTraffic:
        running, waiting = np.round(self.live.T, 3).tolist()
        return ModelTraffic(
            model,
            self.counts.T.tolist(),
            running,
            waiting,
            latencies(self.first_token, FINE_FIRST_TOKEN_BOUNDS_MS),
            latencies(self.inter_token, TOKEN_BOUNDS_MS),
            self.errors.most_common(),
        )


def latencies(buckets: Array, bounds: Sequence[float]) -> Latencies:
    """Compute the percentiles of histograms, one per row, and of their sum."""
    of_steps = [percentiles(buckets, bounds, share).tolist() for share in SHARES]
    summed = buckets.sum(axis=0, keepdims=True)
    of_period = [float(percentiles(summed, bounds, share)[0]) for share in SHARES]
    return Latencies(*of_steps, *of_period)


def percentiles(
    buckets: Array, bounds: Sequence[float], share: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Compute the value of rank `share` in each row of buckets, interpolated within its bucket.

    Values above the last bound count as that bound, as in Prometheus. Rows without values give 0.
    """
    below = buckets.cumsum(axis=1)
    total = below[:, -1]
    rank = np.ceil(share * total)
    index = (below < rank[:, None]).sum(axis=1)
    rows = np.arange(len(buckets))
    edges = np.array([0.0, *bounds, bounds[-1]])
    count = buckets[rows, index]
    before = below[rows, index] - count
    part = np.divide(rank - before, count, out=np.zeros(len(buckets)), where=count > 0)
    found = edges[index] + (edges[index + 1] - edges[index]) * part
    return np.where(total > 0, np.round(found, 2), 0.0)


async def traffic_of(sessions: Sessions, period: Period) -> Traffic:
    """Read the traffic of all processes in a period. Raises: DatabaseUnavailable."""
    async with sessions() as session:
        rows = await read_traffic(session, period)
    return await summed(rows, period)


async def summed(rows: TrafficRows, period: Period) -> Traffic:
    """Add up the rows of all models, and compute percentiles; the event loop runs in between."""
    total = _Sums(period)
    models = []
    for model, steps in rows.models.items():
        sums = _Sums(period)
        sums.add(steps)
        total.add_sums(sums)
        models.append(sums.traffic(model))
        await asyncio.sleep(0)
    models.sort(key=lambda each: (-sum(each.counts[0]), each.model))
    return Traffic(rows.start_s, period, total.traffic(""), models[:MODELS_MAX])
