"""What the rest of the process tells operators through: the few calls that requests make when something of them has ended.

Whoever calls waits for nothing and never sees an error. Prompts and answers do not come here.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from api.core.statuses import reason_of
from api.observability.counts import UNKNOWN_MODEL, Histogram, RequestCounts
from api.observability.spans import Record, Spans, TraceContext
from metering.core.models import Outcome, ServiceTier
from metering.holds.operations import Settled
from metering.quotas.quota_rules import Payer

BATCH_SECONDS_BOUNDS_MS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
INTERVAL_S = 0.05  # between two looks: some 20 µs of CPU each
LAG_BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)

log = structlog.get_logger(__name__)

HTTP = "http"  # the call of what comes through the door for OpenAI's clients


class HoldBatches:
    """How the writes of holds were batched. `measured` is what `HoldStore` tells."""

    def __init__(self) -> None:
        self.sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.durations = Histogram(BATCH_SECONDS_BOUNDS_MS)

    def measured(self, operation_count: int, duration_s: float) -> None:
        """One batch was written, or failed."""
        self.sizes.observe(operation_count)
        self.durations.observe(duration_s * 1000)


class LoopLag:
    """Measured by a timer, and by how much later than asked it comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self.lags = Histogram(LAG_BOUNDS_MS)
        self._clock = clock

    async def measure(self, late: Callable[[float], None] = lambda _: None, interval_s: float = INTERVAL_S) -> None:
        """Until cancelled. late: told of each lag, in seconds."""
        while True:
            due_at = self._clock() + interval_s
            await asyncio.sleep(interval_s)
            lag_s = max(self._clock() - due_at, 0.0)
            self.lags.observe(lag_s * 1000)
            late(lag_s)


class Asking(Protocol):
    """The part of a caller that is counted. trace: the one that its request belongs to."""

    @property
    def payer(self) -> Payer: ...

    @property
    def trace(self) -> TraceContext: ...


class Asked(Protocol):
    """The part of a request that is counted, of any kind. operation: by OpenTelemetry's names."""

    @property
    def request_id(self) -> uuid.UUID: ...

    @property
    def model(self) -> str: ...

    @property
    def tier(self) -> ServiceTier: ...

    @property
    def operation(self) -> str: ...


@dataclass(slots=True)
class Ending:
    """How one request has ended. Not changed by anybody; `frozen` would cost a microsecond for each.

    start: what was asked, under the model's own name if there is such a model. outcome: of one that ran. broken: what it was
    refused or has failed with. timings: as `Stopwatch` has them. settled: what is billed; None if nothing is. choice_count: outputs
    side by side; 0 if they did not come token by token.
    """

    caller: Asking
    start: Asked
    outcome: Outcome | None
    broken: Exception | None
    timings: Mapping[str, float]
    settled: Settled | None
    choice_count: int
    migration_count: int = 0


class Observer:
    """Counts what it is told."""

    def __init__(self, models: Iterable[str], spans: Spans | None = None) -> None:
        """models: by their own names. spans: where each request that ends is told, too."""
        self.counts = RequestCounts(models)
        self.spans = spans
        self.batches = HoldBatches()
        self.loop_lag = LoopLag()

    def ended(self, ending: Ending) -> None:
        """A request has ended, or was refused after it had been parsed."""
        try:
            self._count(ending)
            if self.spans is not None:
                self.spans.put(record_of(ending))
        except Exception:  # whatever is wrong here, the request has nothing to do with it
            log.exception("request_not_counted")

    def _count(self, ending: Ending) -> None:
        counts, start = self.counts, ending.start
        counts.migration_count += ending.migration_count
        if ending.broken is not None:
            counts.failed(start.model, start.tier, ending.broken, ending.settled)
        elif ending.outcome is not None:
            counts.finished(start.model, start.tier, ending.outcome, ending.timings, ending.settled, ending.choice_count)

    def start_refused(self, error: Exception) -> None:
        """What asked for a request was refused before there was one."""
        self.counts.failed(UNKNOWN_MODEL, ServiceTier.INTERACTIVE, error, None)

    def call_failed(self, method: str, error: BaseException) -> None:
        """A whole call was refused, or broke. method: its path, as gRPC names it."""
        self.counts.failed_calls[method.rpartition("/")[2], reason_of(error)] += 1

    def http_failed(self, code: str) -> None:
        """Something was wrong with a call as HTTP. code: as its error body has it."""
        self.counts.failed_calls[HTTP, code.upper()] += 1


def record_of(ending: Ending) -> Record:
    """What its spans are made of: none of what was asked or answered."""
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
    )
