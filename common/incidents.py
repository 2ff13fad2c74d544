"""Incidents: unexpected failures, each logged under an id, counted, and retried with backoff.

A background loop processes items: reports, notifications, webhooks, batches, rows. With
`Retries.survive`, the failure of one item becomes an incident of that item; the loop continues with
the others and retries this one later.
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
from common.logs import without_details

SHORTEST_S = 1.0  # delay before an item is retried; doubled by each failure
LONGEST_S = 300.0  # longest delay, and so the interval of repeated incidents in the log
ITEMS_MAX = 10_000  # failed items of a loop; above it the oldest are forgotten and retried at once

log = structlog.get_logger("weir.incidents")
T = TypeVar("T")

# Incidents of this process by source. Sources are added with 0: a counter that appears with 1 has
# no increase that an alert could detect.
INCIDENT_COUNTS: Counter[str] = Counter()


def log_incident(error: BaseException, **facts: object) -> str:
    """Log an unexpected error with its traceback under a new id, and return the id."""
    incident_id = uuid.uuid4().hex[:12]
    # As text: a logger that formats it may include the values of variables, even secrets.
    log.error(
        "incident",
        incident_id=incident_id,
        exception=without_details("".join(traceback.format_exception(error)).rstrip()),
        **facts,
    )
    return incident_id


@dataclass(slots=True)
class _Failure:
    count: int
    due_at: float  # on the clock of the `Retries`


class Retries:
    """Failed items of one background loop, with the time at which each may be tried again."""

    def __init__(
        self,
        source: str,
        *,
        shortest_s: float = SHORTEST_S,
        longest_s: float = LONGEST_S,
        passing: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without failures. `source` names the loop in metrics and in the log.

        `passing` lists errors that are not the item's fault, such as an outage; `survive` lets them
        through.
        """
        self.source = source
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._passing = passing
        self._clock = clock
        self._failures: OrderedDict[Hashable, _Failure] = OrderedDict()
        INCIDENT_COUNTS.setdefault(source, 0)

    def is_due(self, item: Hashable = None) -> bool:
        """Return whether the item may be tried now; False while its delay after a failure lasts."""
        return self.wait_s(item) <= 0.0

    def wait_s(self, item: Hashable = None) -> float:
        """Return the seconds until the item may be tried again; 0 if it is due."""
        failure = self._failures.get(item)
        return 0.0 if failure is None else max(failure.due_at - self._clock(), 0.0)

    @contextlib.contextmanager
    def survive(self, item: Hashable = None) -> Iterator[None]:
        """Turn an exception in the block into an incident of the item; cancellation passes."""
        try:
            yield
        except self._passing:
            raise
        except Exception as error:
            self.failed(error, item)
        else:
            self._failures.pop(item, None)

    def failed(self, error: BaseException, item: Hashable = None) -> str:
        """Log and count a failure of the item, delay its retry, and return the incident's id."""
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
        return log_incident(
            error, source=self.source, failure_count=failure.count + 1, retry_in_s=delay_s, **named
        )

    def resting(self) -> list[Hashable]:
        """Return the items whose delay after a failure still lasts."""
        return [item for item in self._failures if not self.is_due(item)]

    async def keep_running(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until it returns or is cancelled; restart it after a delay if it raises."""
        while True:
            with self.survive():
                await work()
                return
            await asyncio.sleep(self.wait_s())


class IncidentTaskGroup(asyncio.TaskGroup):
    """Task group in which an exception of one task becomes an incident and does not cancel the
    others.

    The whole process runs in one such group: an unexpected error must not end unrelated requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._retries = Retries("task")

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        """Start a task. If it fails, its result is None."""
        task = super().create_task(self._contained(coro, options.get("name")), **options)
        task.add_done_callback(lambda _: coro.close())  # for tasks cancelled before starting
        return task

    async def _contained(self, coro: Coroutine[Any, Any, T], name: str | None) -> T:
        with self._retries.survive(name):
            return await coro
        return cast(T, None)


def sole_cause(error: BaseException) -> BaseException:
    """Unwrap nested exception groups to the only error, or to the innermost group of several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
