"""What the rest of the process tells operators through: the few calls that requests make when something of them has ended.

Whoever calls waits for nothing and never sees an error. Prompts and answers do not come here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from api.core.statuses import reason_of
from api.observability.hold_batches import HoldBatches
from api.observability.loop_lag import LoopLag
from api.observability.request_counts import UNKNOWN_MODEL, RequestCounts
from api.observability.spans import Record, Spans
from metering.core.models import Outcome, ServiceTier
from metering.holds.operations import Settled

if TYPE_CHECKING:
    from api.embedding.embedding import EmbedCaller
    from api.embedding.embedding_wire import ValidEmbed
    from api.requests.live import Caller
    from api.requests.start_frame import ValidStart

log = structlog.get_logger(__name__)

HTTP = "http"  # the call of what comes through the door for OpenAI's clients


@dataclass(slots=True)
class Ending:
    """How one request has ended. Not changed by anybody; `frozen` would cost a microsecond for each.

    start: what was asked, under the model's own name if there is such a model. outcome: of one that ran. broken: what it was
    refused or has failed with. timings: as `Stopwatch` has them. settled: what is billed; None if nothing is. choice_count: outputs
    side by side; 0 if they did not come token by token.
    """

    caller: Caller | EmbedCaller
    start: ValidStart | ValidEmbed
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
