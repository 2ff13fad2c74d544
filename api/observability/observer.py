"""What the rest of the process tells operators through: the few calls that requests make when something of them has ended.

Whoever calls waits for nothing and never sees an error. Prompts and answers do not come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from api.observability.hold_batches import HoldBatches
from api.observability.request_counts import UNKNOWN_MODEL, RequestCounts
from api.statuses import reason_of
from metering.models import ServiceTier
from metering.operations import Outcome, Settled

log = structlog.get_logger(__name__)

HTTP = "http"  # the call of what comes through the door for OpenAI's clients


@dataclass(slots=True)
class Ending:
    """How one request has ended. Not changed by anybody; `frozen` would cost a microsecond for each.

    model: its own name, or what the client wrote if there is no such model. outcome: of one that ran; broken: what it was refused
    or has failed with. timings: as `Stopwatch` has them. settled: what is billed; None if nothing is. choice_count: outputs side by
    side; 0 if they did not come token by token.
    """

    model: str
    tier: ServiceTier
    outcome: Outcome | None
    broken: Exception | None
    timings: Mapping[str, float]
    settled: Settled | None
    choice_count: int
    migration_count: int = 0


class Observer:
    """Counts what it is told."""

    def __init__(self, models: Iterable[str]) -> None:
        """models: by their own names."""
        self.counts = RequestCounts(models)
        self.batches = HoldBatches()

    def ended(self, ending: Ending) -> None:
        """A request has ended, or was refused after it had been parsed."""
        try:
            self._count(ending)
        except Exception:  # whatever is wrong here, the request has nothing to do with it
            log.exception("request_not_counted", model=ending.model)

    def _count(self, ending: Ending) -> None:
        counts = self.counts
        counts.migration_count += ending.migration_count
        if ending.broken is not None:
            counts.failed(ending.model, ending.tier, ending.broken, ending.settled)
        elif ending.outcome is not None:
            counts.finished(ending.model, ending.tier, ending.outcome, ending.timings, ending.settled, ending.choice_count)

    def start_refused(self, error: Exception) -> None:
        """What asked for a request was refused before there was one."""
        self.counts.failed(UNKNOWN_MODEL, ServiceTier.INTERACTIVE, error, None)

    def call_failed(self, method: str, error: BaseException) -> None:
        """A whole call was refused, or broke. method: its path, as gRPC names it."""
        self.counts.failed_calls[method.rpartition("/")[2], reason_of(error)] += 1

    def http_failed(self, code: str) -> None:
        """Something was wrong with a call as HTTP. code: as its error body has it."""
        self.counts.failed_calls[HTTP, code.upper()] += 1
