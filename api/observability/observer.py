"""Counts of ended, refused and failed requests, in memory.

No call blocks or raises. Labels are names of models, tiers, reasons and kinds, a few dozen in a
deployment; never a caller or a request. Counting takes some microseconds per request; a token only
adds the measurement of its gap.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from time import monotonic
from typing import Any, Protocol

import msgspec
import numpy as np
import structlog

from api.core.errors import Interrupted
from api.core.statuses import reason_of
from api.observability.spans import STAGES, Record, Spans, TraceContext
from common.loop_watch import BEAT_S, LoopWatch
from metering.core.models import Outcome, ServiceTier
from metering.holds.operations import Settled
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded

# Milliseconds, from a lookup in memory to the longest wait of any client. Two or three per decade,
# so that a quantile is exact to a third.
BOUNDS_TO_10_S = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
STAGE_BOUNDS_MS = (0.5, 1, 2.5, 5, *BOUNDS_TO_10_S, 30_000, 60_000, 120_000)
TOTAL_BOUNDS_MS = (*BOUNDS_TO_10_S, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000)
TOKEN_BOUNDS_MS = (
    *(1, 2.5, 5, 7.5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 250, 300, 400, 500, 750),
    *(1000, 2500, 5000, 10_000),
)
# Bounds of the semantic conventions for generative AI, in ms, and of tokens per request.
CONVENTIONAL_TOTAL_BOUNDS_MS = tuple(10 * 2**step for step in range(14))
CONVENTIONAL_FIRST_TOKEN_BOUNDS_MS = (
    *(1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10_000),
)
CONVENTIONAL_TOKEN_BOUNDS_MS = (*(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500),)
USAGE_BOUNDS = tuple(4**step for step in range(14))
# Counted by the bounds of both, so that each is exact.
FINE_TOTAL_BOUNDS_MS = tuple(sorted({*TOTAL_BOUNDS_MS, *CONVENTIONAL_TOTAL_BOUNDS_MS}))
FINE_FIRST_TOKEN_BOUNDS_MS = tuple(sorted({*STAGE_BOUNDS_MS, *CONVENTIONAL_FIRST_TOKEN_BOUNDS_MS}))
TOKEN_BOUNDS_S = (*(bound / 1000 for bound in TOKEN_BOUNDS_MS), math.inf)
# Ascending bounds of a request with many gaps: from 10 µs to 11 minutes, at most 9 % apart.
GAP_BOUNDS_MS = np.unique([*TOKEN_BOUNDS_MS, *(0.01 * 2 ** (step / 8) for step in range(209))])
GAPS_EXACT_MAX = 512  # of a request, kept as they are: 4 kB
# A shorter wait is not a cold start: no engine starts so quickly, and a busy process reads its
# clock late.
COLD_START_MS_MIN = 10.0
GAP_NAMES = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms")  # as in `weir.v1.Timings`
WARM_STAGES = tuple(stage for stage in STAGES if stage != "cold_start")
TIME_NAMES = (*(f"{stage}_ms" for stage in WARM_STAGES), "total_ms")
TIME_BOUNDS_MS = (*(STAGE_BOUNDS_MS for _ in WARM_STAGES), FINE_TOTAL_BOUNDS_MS)
GAP_SHARES = (0.5, 0.99, 1.0)
# Label of requests for unknown models: a client's text must not become a label.
UNKNOWN_MODEL = ""
# Incidents of other calls are visible from their second one on.
WATCHED_CALLS = ("Generate", "Embed", "http")
INCIDENT = "INTERNAL"
EMBEDDINGS = "embeddings"  # operation without output tokens
Labels = tuple[str, ...]
# Model that has taken the request, tier, operation, and requested model if it was another one.
Series = tuple[str, ServiceTier, str, str]

BATCH_SECONDS_BOUNDS_MS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LAG_BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)
HTTP = "http"  # name for calls of the HTTP API


class Histogram:
    """Histogram: counts of values by the smallest bound that is not exceeded, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend. One more bucket counts larger values."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def copy(self) -> Histogram:
        made = Histogram(self.bounds)
        made.counts, made.sum = self.counts[:], self.sum
        return made

    def buckets(self, unit: float = 1.0) -> list[tuple[str, float]]:
        """Return Prometheus buckets: each bound times `unit`, and its cumulative count."""
        found, below = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            found.append((f"{bound * unit:.12g}", float(below)))
        found.append(("+Inf", float(below + self.counts[-1])))
        return found


def merged(histograms: Iterable[Histogram], bounds: Sequence[float]) -> Histogram:
    """Add up histograms, by `bounds`, all of which they must have."""
    made = Histogram(bounds)
    for each in histograms:
        for bound, count in zip((*each.bounds, math.inf), each.counts, strict=True):
            made.counts[bisect_left(bounds, bound)] += count
        made.sum += each.sum
    return made


class Gaps:
    """Times between consecutive messages with tokens of one request, measured per choice.

    Memory is bounded: the first gaps are stored exactly, further ones only as counts by
    `GAP_BOUNDS_MS`.
    """

    # Of a request without gaps, which needs no attributes of its own.
    _first_at: float | None = None  # last message of the first choice, monotonic
    _later_at: dict[int, float] | None = None  # of other choices
    _found: array[float] = array("d")  # in seconds
    _counts: np.ndarray[Any, np.dtype[np.int64]] | None = None  # of those before `_found`
    _sum_s = _max_s = 0.0
    _sorted: Sequence[float] = ()  # a copy of `_found`, made by `facts`

    def note(self, choice_index: int) -> float:
        """Record that a message with tokens is sent now; return the time. Takes some 0.2 µs."""
        now = monotonic()
        if choice_index:
            if self._later_at is None:
                self._later_at = {}
            before = self._later_at.get(choice_index)
            self._later_at[choice_index] = now
        else:
            before, self._first_at = self._first_at, now
        if before is not None:
            found = self._found
            if not found:
                found = self._found = array("d")
            found.append(now - before)
            if len(found) >= GAPS_EXACT_MAX:
                self._fold()
        return now

    def facts(self) -> dict[str, float]:
        """Compute percentiles of the gaps in ms, as in `weir.v1.Timings`; empty without gaps."""
        if self._counts is None:
            if not self._found:
                return {}
            ordered = self._sorted = sorted(self._found)
            ranks = [math.ceil(share * len(ordered)) - 1 for share in GAP_SHARES]
            return dict(zip(GAP_NAMES, [ordered[rank] * 1000 for rank in ranks], strict=True))
        below = np.cumsum(self._all_counts())
        longest_ms = max(self._max_s, *self._found, 0.0) * 1000
        ranks = np.searchsorted(below, [share * below[-1] for share in GAP_SHARES]).tolist()
        bounds = [*GAP_BOUNDS_MS.tolist(), longest_ms]
        ends = [min(bounds[rank], longest_ms) for rank in ranks]
        return dict(zip(GAP_NAMES, ends, strict=True))

    def add_to(self, histogram: Histogram) -> None:
        """Add all gaps to a histogram whose bounds are `TOKEN_BOUNDS_MS`."""
        if self._counts is None:
            if not self._found:
                return
            ordered, begin = self._sorted, 0
            if len(ordered) != len(self._found):
                ordered = sorted(self._found)
            while begin < len(ordered):  # most buckets stay empty
                index = bisect_left(TOKEN_BOUNDS_S, ordered[begin])
                end = bisect_right(ordered, TOKEN_BOUNDS_S[index])
                histogram.counts[index] += end - begin
                begin = end
        else:
            cumulated = np.cumsum(self._all_counts())
            bins = np.searchsorted(GAP_BOUNDS_MS, TOKEN_BOUNDS_MS)
            below = [*cumulated[bins].tolist(), int(cumulated[-1])]
            for index, (end, begin) in enumerate(zip(below, [0, *below], strict=False)):
                histogram.counts[index] += end - begin
        histogram.sum += (self._sum_s + sum(self._found)) * 1000

    def _all_counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Count all gaps by `GAP_BOUNDS_MS`; the last count is of longer gaps."""
        bins = np.searchsorted(GAP_BOUNDS_MS, np.array(self._found) * 1000)
        counts = np.bincount(bins, minlength=len(GAP_BOUNDS_MS) + 1)
        return counts if self._counts is None else counts + self._counts

    def _fold(self) -> None:
        """Replace the stored gaps by counts."""
        found = np.frombuffer(self._found)
        self._counts = self._all_counts()
        self._sum_s += float(found.sum())
        self._max_s = max(self._max_s, float(found.max()))
        self._found = array("d")


class Times:
    """Histograms of the requests of one series: durations in ms, and tokens."""

    def __init__(self) -> None:
        self._stages = {stage: Histogram(STAGE_BOUNDS_MS) for stage in STAGES}
        self.first_token = Histogram(FINE_FIRST_TOKEN_BOUNDS_MS)
        self.inter_token = Histogram(TOKEN_BOUNDS_MS)
        self.per_output_token = Histogram(CONVENTIONAL_TOKEN_BOUNDS_MS)  # mean of each request
        self.input_tokens, self.output_tokens = Histogram(USAGE_BOUNDS), Histogram(USAGE_BOUNDS)
        self._total = Histogram(FINE_TOTAL_BOUNDS_MS)
        self._every_time = [*(self._stages[stage] for stage in WARM_STAGES), self._total]
        self._counts = [histogram.counts for histogram in self._every_time]
        self._sums_ms = [0.0] * len(self._every_time)

    @property
    def stages(self) -> dict[str, Histogram]:
        """Durations of each stage by its name. Later requests are not always in their sums."""
        self._set_sums()
        return self._stages

    @property
    def total(self) -> Histogram:
        """Durations of whole requests. Later requests are not always in the sum."""
        self._set_sums()
        return self._total

    def _set_sums(self) -> None:
        for histogram, sum_ms in zip(self._every_time, self._sums_ms, strict=True):
            histogram.sum = sum_ms

    def copy(self) -> Times:
        made = Times()
        for stage, histogram in self._stages.items():
            made._stages[stage].counts[:] = histogram.counts
        made._stages["cold_start"].sum = self._stages["cold_start"].sum
        made._total.counts[:] = self._total.counts
        made._sums_ms = self._sums_ms
        made.first_token, made.inter_token = self.first_token.copy(), self.inter_token.copy()
        made.per_output_token = self.per_output_token.copy()
        made.input_tokens, made.output_tokens = self.input_tokens.copy(), self.output_tokens.copy()
        return made

    def add(self, timings: Mapping[str, float], gaps: Gaps | None) -> None:
        """Add an ended request. `gaps` is None if it was not generated token by token."""
        # As `Histogram.observe`, without a call for each stage.
        times_ms = list(map(timings.__getitem__, TIME_NAMES))
        buckets = map(bisect_left, TIME_BOUNDS_MS, times_ms)
        for counts, bucket in zip(self._counts, buckets, strict=True):
            counts[bucket] += 1
        self._sums_ms = list(map(add, self._sums_ms, times_ms))
        if timings["cold_start_ms"] >= COLD_START_MS_MIN:
            self._stages["cold_start"].observe(timings["cold_start_ms"])
        if "ttft_ms" in timings:
            self.first_token.observe(timings["ttft_ms"])
        if (per_second := timings.get("tokens_per_second")) is not None:
            self.per_output_token.observe(1000 / per_second)
        if gaps is not None:
            gaps.add_to(self.inter_token)


class RequestCounts:
    """All metrics of requests. Not thread-safe: use it on one event loop."""

    def __init__(self, models: Iterable[str]) -> None:
        """`models` are canonical names. Requests for any other name count for one unknown model."""
        self._models = frozenset(models)
        self.ends: dict[Labels, int] = defaultdict(int)  # by model, tier and outcome
        # Keys: model, reason, and the quota's dimension and subject
        self.refusals: dict[Labels, int] = defaultdict(int)
        self.tokens: dict[Labels, int] = defaultdict(int)  # by model and kind
        self.failed_calls: dict[Labels, int] = defaultdict(int)  # by call and reason
        self.times: dict[Series, Times] = defaultdict(Times)
        # Durations of refused and failed requests, by model, tier, operation and reason
        self.broken_times: dict[tuple[str, ServiceTier, str, str], Histogram] = defaultdict(
            lambda: Histogram(FINE_TOTAL_BOUNDS_MS)
        )
        self.migration_count = 0
        # Series of incidents start at zero: an alert on growth would miss one that starts at 1.
        for model in [*self._models, UNKNOWN_MODEL]:
            self.ends[model, ServiceTier.INTERACTIVE, INCIDENT.lower()] = 0
        for call in WATCHED_CALLS:
            self.failed_calls[call, INCIDENT] = 0

    def know(self, models: Iterable[str]) -> None:
        """Count requests for these models by name from now on, and still for those known before."""
        added = frozenset(models) - self._models
        self._models |= added
        for model in added:
            self.ends[model, ServiceTier.INTERACTIVE, INCIDENT.lower()] = 0

    def copy(self) -> RequestCounts:
        """Take a snapshot, for readers that are too slow for the event loop."""
        made = RequestCounts(self._models)
        made.ends, made.refusals = self.ends.copy(), self.refusals.copy()
        made.tokens, made.failed_calls = self.tokens.copy(), self.failed_calls.copy()
        made.times.update((of, times.copy()) for of, times in self.times.items())
        made.broken_times.update((of, times.copy()) for of, times in self.broken_times.items())
        made.migration_count = self.migration_count
        return made

    def finished(
        self,
        series: Series,
        outcome: str,
        timings: Mapping[str, float],
        settled: Settled | None,
        gaps: Gaps | None = None,
    ) -> None:
        """Count a request that ran to its end. `gaps` is None if it sent no single tokens."""
        model, tier, *_ = series
        self.ends[model, tier, outcome] += 1
        times = self.times[series]
        if settled is not None:
            self._add_tokens(series, settled)
        times.add(timings, gaps)

    def failed(
        self,
        series: Series,
        error: Exception,
        settled: Settled | None,
        timings: Mapping[str, float] | None = None,
    ) -> None:
        """Count a refused or failed request, an interrupted one by the cause.

        `settled` is its billed usage, None if refused. `timings` is None if it was never parsed.
        """
        model, tier, operation, requested_model = series
        model = model if model in self._models else UNKNOWN_MODEL
        reason = error.cause if isinstance(error, Interrupted) else reason_of(error)
        self.ends[model, tier, reason.lower()] += 1
        if timings is not None:
            self.broken_times[model, tier, operation, reason].observe(timings["total_ms"])
        if settled is not None:
            self._add_tokens((model, tier, operation, requested_model), settled)
            return
        dimension = subject = ""
        if isinstance(error, QuotaExceeded):
            first = error.failing[0]
            dimension, subject = first.dimension.spelling, first.subject.spelling
        self.refusals[model, reason, dimension, subject] += 1

    def _add_tokens(self, series: Series, settled: Settled) -> None:
        """Count billed tokens. Cached and computed input are separate; their sum is the prompt."""
        model, _, operation, _ = series
        tokens, cached = self.tokens, settled.cached_input_token_count
        tokens[model, "input"] += settled.input_token_count - cached
        tokens[model, "cached_input"] += cached
        tokens[model, "output"] += settled.delivered_token_count
        if settled.embedding_token_count:
            tokens[model, "embedding"] += settled.embedding_token_count
        times = self.times[series]
        times.input_tokens.observe(settled.input_token_count + settled.embedding_token_count)
        if operation != EMBEDDINGS:
            times.output_tokens.observe(settled.delivered_token_count)


log = structlog.get_logger(__name__)


class HoldBatches:
    """Histograms of the sizes and durations of batches of hold operations."""

    def __init__(self) -> None:
        self.sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.durations = Histogram(BATCH_SECONDS_BOUNDS_MS)

    def measured(self, operation_count: int, duration_s: float) -> None:
        """Record a batch that was written or failed. Called by `HoldStore`."""
        self.sizes.observe(operation_count)
        self.durations.observe(duration_s * 1000)


class LoopLag:
    """Lag of the event loop: how late a timer fires."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.lags = Histogram(LAG_BOUNDS_MS)
        self.watch = LoopWatch()
        self._clock = clock

    async def measure(
        self, late: Callable[[float], None] = lambda _: None, interval_s: float = BEAT_S
    ) -> None:
        """Measure the lag every `interval_s` until cancelled, at about 20 µs of CPU time each.

        `late` is called with each lag, in seconds.
        """
        while True:
            due_at = self._clock() + interval_s
            await asyncio.sleep(interval_s)
            lag_s = max(self._clock() - due_at, 0.0)
            self.lags.observe(lag_s * 1000)
            self.watch.beat(lag_s)
            late(lag_s)


class CountedCaller(Protocol):
    """Properties of a caller that the observer reads. `trace` is the trace of its request."""

    @property
    def payer(self) -> Payer: ...
    @property
    def trace(self) -> TraceContext: ...


class CountedRequest(Protocol):
    """Properties of a request that the observer reads. `operation` is its name in OpenTelemetry."""

    @property
    def request_id(self) -> uuid.UUID: ...
    @property
    def model(self) -> str: ...
    @property
    def tier(self) -> ServiceTier: ...
    @property
    def operation(self) -> str: ...
    @property
    def end_user(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


class Ending(msgspec.Struct, frozen=True):
    """End of one request.

    `start` is the request, with the canonical model name if the model exists. `outcome` is set if
    it ran; `broken` is its refusal or failure. `timings` are those of `Stopwatch`. `settled` is its
    billed usage, or None. `gaps` is None if it was not generated token by token. `requested_model`
    is set if the request was for another model than the one that has taken it.
    """

    caller: CountedCaller
    start: CountedRequest
    outcome: Outcome | None
    broken: Exception | None
    timings: Mapping[str, float]
    settled: Settled | None
    gaps: Gaps | None = None
    migration_count: int = 0
    requested_model: str = ""


class Observer:
    """Counter of ended requests, refusals and failures, and source of their spans."""

    def __init__(self, models: Iterable[str], spans: Spans | None = None) -> None:
        """`models` are canonical names. `spans`, if set, also receives each ended request."""
        self.counts = RequestCounts(models)
        self.spans = spans
        self.batches = HoldBatches()
        self.loop_lag = LoopLag()

    def know(self, models: Iterable[str]) -> None:
        """Count requests for these models too."""
        self.counts.know(models)

    def ended(self, ending: Ending) -> None:
        """Record a request that has ended, or was refused after parsing."""
        counts, start = self.counts, ending.start
        try:
            series = start.model, start.tier, start.operation, ending.requested_model
            counts.migration_count += ending.migration_count
            if ending.broken is not None:
                counts.failed(series, ending.broken, ending.settled, ending.timings)
            elif ending.outcome is not None:
                counts.finished(series, ending.outcome, ending.timings, ending.settled, ending.gaps)
            if self.spans is not None:
                self.spans.put(record_of(ending))
        except Exception:  # an error here must not affect the request
            log.exception("request_not_counted")

    def start_refused(self, error: Exception) -> None:
        """Record a refusal of a request that could not be parsed."""
        self.counts.failed((UNKNOWN_MODEL, ServiceTier.INTERACTIVE, "", ""), error, None)

    def call_failed(self, method: str, error: BaseException) -> None:
        """Record a refused or failed call. `method` is its gRPC path."""
        self.counts.failed_calls[method.rpartition("/")[2], reason_of(error)] += 1

    def http_failed(self, code: str) -> None:
        """Record an HTTP error of a call. `code` is the one in the error body."""
        self.counts.failed_calls[HTTP, code.upper()] += 1


def record_of(ending: Ending) -> Record:
    """Build the record of a request for its spans. It has neither prompt nor output."""
    caller, start, broken = ending.caller, ending.start, ending.broken
    return Record(
        request_id=start.request_id,
        organization_id=caller.payer.organization_id,
        project_id=caller.payer.project_id,
        operation=start.operation,
        model=start.model,
        tier=start.tier.value,
        outcome=ending.outcome or "",
        reason="" if broken is None else reason_of(broken),
        timings=ending.timings,
        settled=ending.settled,
        migration_count=ending.migration_count,
        trace=caller.trace,
        ended_at_ns=time.time_ns(),
        end_user=start.end_user,
        labels=start.labels,
        requested_model=ending.requested_model,
    )
