"""Incidents: unexpected failures, each logged under an id, counted, and retried with backoff.

A background loop works through items: reports, notifications, webhooks, batches, rows. `Retries.survive` makes the failure of one
item an incident of that item, so that the loop goes on with the others and comes back to this one later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog

from common.backoff import backoff_s

SHORTEST_S = 1.0  # before an item is tried again; doubled by each failure
LONGEST_S = 300.0  # an incident is repeated in the log no more often than this once its cause lasts
ITEMS_MAX = 10_000  # that a loop remembers as failed; the oldest failures are forgotten first, and so are tried again at once

log = structlog.get_logger("weir.incidents")
T = TypeVar("T")

# Incidents of this process since its start, by source. A source stands here with 0 before its first incident: a counter that
# appears with the value 1 has no increase that an alert could see.
INCIDENT_COUNTS: Counter[str] = Counter()


def log_incident(error: BaseException, **facts: object) -> str:
    """Log an unexpected error with its traceback under a new id, and return the id."""
    incident_id = uuid.uuid4().hex[:12]
    # As text: a logger that formats it may show the values of variables, secrets among them.
    log.error("incident", incident_id=incident_id, exception="".join(traceback.format_exception(error)).rstrip(), **facts)
    return incident_id


@dataclass(slots=True)
class _Failure:
    count: int
    due_at: float  # by the clock of the `Retries`


class Retries:
    """Failures of one background loop by item: which items are to be left alone for now."""

    def __init__(
        self,
        source: str,
        *,
        shortest_s: float = SHORTEST_S,
        longest_s: float = LONGEST_S,
        passing: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """source: names the loop in metrics and in the log. passing: errors that are not the item's fault, such as an outage."""
        self.source = source
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._passing = passing
        self._clock = clock
        self._failures: OrderedDict[Hashable, _Failure] = OrderedDict()
        INCIDENT_COUNTS.setdefault(source, 0)

    def is_due(self, item: Hashable = None) -> bool:
        """False while the item rests after a failure."""
        return self.wait_s(item) <= 0.0

    def wait_s(self, item: Hashable = None) -> float:
        """Return the seconds until the item may be tried again; 0 for one that has not failed."""
        failure = self._failures.get(item)
        return 0.0 if failure is None else max(failure.due_at - self._clock(), 0.0)

    @contextlib.contextmanager
    def survive(self, item: Hashable = None) -> Iterator[None]:
        """Work on one item. An exception becomes an incident and does not leave the block; cancellation does."""
        try:
            yield
        except self._passing:
            raise
        except Exception as error:
            self.failed(error, item)
        else:
            self._failures.pop(item, None)

    def failed(self, error: BaseException, item: Hashable = None) -> str:
        """Log and count a failure of the item, let the item rest, and return the incident's id."""
        now = self._clock()
        failure = self._failures.pop(item, None)
        if failure is None or now - failure.due_at > self._longest_s:
            failure = _Failure(0, now)
        delay_s = backoff_s(failure.count + 1, self._shortest_s, self._longest_s)
        self._failures[item] = _Failure(failure.count + 1, now + delay_s)
        if len(self._failures) > ITEMS_MAX:
            self._failures.popitem(last=False)
        INCIDENT_COUNTS[self.source] += 1
        named = {} if item is None else {"item": str(item)}
        return log_incident(error, source=self.source, failure_count=failure.count + 1, retry_in_s=delay_s, **named)

    def resting(self) -> list[Hashable]:
        """Return the items that are not due."""
        return [item for item in self._failures if not self.is_due(item)]

    async def keep_running(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until it returns or is cancelled; start it again, after its rest, whenever it raises."""
        while True:
            with self.survive():
                await work()
                return
            await asyncio.sleep(self.wait_s())


class IncidentTaskGroup(asyncio.TaskGroup):
    """Task group in which an exception of one task is an incident and ends neither the group nor the other tasks.

    The process is one such group: what ends a task unexpectedly must not end the requests of everybody else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._retries = Retries("task")

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        """Start a task. One that fails has the result None."""
        task = super().create_task(self._contained(coro, options.get("name")), **options)
        task.add_done_callback(lambda _: coro.close())  # of a task cancelled before its first step: it was never awaited
        return task

    async def _contained(self, coro: Coroutine[Any, Any, T], name: str | None) -> T:
        with self._retries.survive(name):
            return await coro
        return cast(T, None)


def sole_cause(error: BaseException) -> BaseException:
    """Return the only error inside nested task groups; the innermost group that holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
