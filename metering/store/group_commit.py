"""Group commit: all operations that wait while one batch is in the database go out together in the next.

No timer: an idle store answers at once, a busy one batches by itself. One batch is under way at a time, so operations of one
process never contend with each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Op = TypeVar("Op")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GroupCommitStatistics:
    """Counts since the start. Peaks in operations."""

    operation_count: int
    batch_count: int
    waiting_count: int
    waiting_count_peak: int
    batch_size_peak: int

    def plus(self, other: GroupCommitStatistics) -> GroupCommitStatistics:
        """Of both together; of the peaks the higher."""
        return GroupCommitStatistics(
            self.operation_count + other.operation_count,
            self.batch_count + other.batch_count,
            self.waiting_count + other.waiting_count,
            max(self.waiting_count_peak, other.waiting_count_peak),
            max(self.batch_size_peak, other.batch_size_peak),
        )


@dataclass(slots=True)
class Waiting(Generic[Op, Result]):
    """One operation and the future of whoever waits for it; None if nobody ever did."""

    op: Op
    future: asyncio.Future[Result] | None

    @property
    def cancelled(self) -> bool:
        """Whether somebody waited and does not any more."""
        return self.future is not None and self.future.cancelled()


class GroupCommit(Generic[Op, Result]):
    """Collects operations and hands them to `execute` in batches, in order of arrival.

    execute: answers each operation of a batch with a result or an exception, in order; raising fails the whole batch.
    orphaned: told of each answer, result or error, that nobody takes: of a posted operation, or of one whose caller was cancelled
    after its batch began. So nothing that it obtained is lost, and nothing that it had to do.
    droppable: whether an operation may be left out when its caller was cancelled before its batch began.
    fair_share: how many operations the next batch may take, where the rest is better left for the one after; None: all that wait.
    measured: told of each batch how many operations it had, and how many seconds it took.
    """

    def __init__(
        self,
        execute: Callable[[Sequence[Op]], Awaitable[Sequence[Result | Exception]]],
        *,
        orphaned: Callable[[Op, Result | Exception], None],
        droppable: Callable[[Op], bool],
        batch_size_max: int,
        waiting_count_max: int,
        overflow: Callable[[], Exception],
        fair_share: Callable[[], int] | None = None,
        measured: Callable[[int, float], None] | None = None,
    ) -> None:
        self._execute = execute
        self._measured = measured
        self._orphaned = orphaned
        self._droppable = droppable
        self._batch_size_max = batch_size_max
        self._waiting_count_max = waiting_count_max
        self._overflow = overflow
        self._fair_share = fair_share
        self._under_way_count = 0
        self._queue: deque[Waiting[Op, Result]] = deque()
        self._arrived = asyncio.Event()
        self._closed: Exception | None = None
        self._operation_count = 0
        self._batch_count = 0
        self._waiting_count_peak = 0
        self._batch_size_peak = 0

    async def submit(self, op: Op) -> Result:
        """Run one operation in the next batch.

        Raises: what `execute` answered; `overflow()` if too many wait and the operation is droppable (others are always taken,
        since their number is bounded by what was admitted before); what `close` was given, from then on.
        """
        if self._closed is not None:
            raise self._closed
        if len(self._queue) >= self._waiting_count_max and self._droppable(op):
            raise self._overflow()
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._append(Waiting(op, future))
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled between the answer and the wake-up: the answer was given, and nobody has taken it.
            if future.done() and not future.cancelled():
                error = future.exception()
                if error is None:
                    self._orphaned(op, future.result())
                elif isinstance(error, Exception):
                    self._orphaned(op, error)
            raise

    def post(self, op: Op) -> None:
        """Run one operation without waiting for its answer, which goes to `orphaned`."""
        self._append(Waiting(op, None))

    def close(self, error: Exception) -> None:
        """Answer everything that waits, and all that is submitted later, with the error: no batch will run any more."""
        self._closed = error
        while self._queue:
            self._answer(self._queue.popleft(), error)

    def _append(self, waiting: Waiting[Op, Result]) -> None:
        self._queue.append(waiting)
        self._waiting_count_peak = max(self._waiting_count_peak, len(self._queue))
        self._arrived.set()

    async def run_batch(self) -> None:
        """Wait until something waits, then run one batch."""
        await self._arrived.wait()
        batch = self._take()
        if not batch:
            return
        self._batch_count += 1
        self._operation_count += len(batch)
        self._batch_size_peak = max(self._batch_size_peak, len(batch))
        self._under_way_count = len(batch)
        began_at = time.monotonic()
        try:
            results = await self._execute([waiting.op for waiting in batch])
        except Exception as error:
            results = [error] * len(batch)
        except BaseException:
            self._queue.extendleft(reversed(batch))  # for `close` to answer
            raise
        finally:
            self._under_way_count = 0
            if self._measured is not None:
                self._measured(len(batch), time.monotonic() - began_at)
        for waiting, result in zip(batch, results, strict=True):
            self._answer(waiting, result)

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    @property
    def open_count(self) -> int:
        """Operations that wait or are under way."""
        return len(self._queue) + self._under_way_count

    def statistics(self) -> GroupCommitStatistics:
        """Counts and peaks so far."""
        return GroupCommitStatistics(
            operation_count=self._operation_count,
            batch_count=self._batch_count,
            waiting_count=len(self._queue),
            waiting_count_peak=self._waiting_count_peak,
            batch_size_peak=self._batch_size_peak,
        )

    def _take(self) -> list[Waiting[Op, Result]]:
        """The next batch, without operations that nobody waits for any more."""
        batch: list[Waiting[Op, Result]] = []
        size_max = self._batch_size_max if self._fair_share is None else min(self._batch_size_max, self._fair_share())
        while self._queue and len(batch) < size_max:
            waiting = self._queue.popleft()
            if not (waiting.cancelled and self._droppable(waiting.op)):
                batch.append(waiting)
        if not self._queue:
            self._arrived.clear()
        return batch

    def _answer(self, waiting: Waiting[Op, Result], answer: Result | Exception) -> None:
        if waiting.future is None or waiting.future.cancelled():
            self._orphaned(waiting.op, answer)
        elif isinstance(answer, Exception):
            waiting.future.set_exception(answer)
        else:
            waiting.future.set_result(answer)
