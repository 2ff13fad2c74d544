"""Group commit: all operations that wait while one batch is in the database go out together in the next.

No timer: an idle store answers at once, a busy one batches by itself. One batch is under way at a time, so operations of one
process never contend with each other.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.incidents import Retries

Op = TypeVar("Op")
Result = TypeVar("Result")
# An operation, the future of its caller (None if it was posted) and the time by the loop's clock at which it came.
Waiting = tuple[Op, asyncio.Future[Result] | None, float]


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


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an operation waits for its answer at most, and the error that it gets then. The answer is orphaned."""

    wait_s: float
    error: Callable[[], Exception]


class GroupCommit(Generic[Op, Result]):
    """Collects operations and hands them to `execute` in batches, in order of arrival.

    A caller waits for one future of its own, which the answer to its batch sets: nothing else belongs to an operation.

    execute: answers each operation of a batch with a result or an exception, in order; raising fails the whole batch.
    orphaned: told of each answer, result or error, that nobody takes: of a posted operation, or of one whose caller was cancelled
    after its batch began, or has lost patience. So nothing that it obtained is lost, and nothing that it had to do.
    droppable: whether an operation may be left out when its caller was cancelled before its batch began.
    patience: None: whoever waits waits until there is an answer.
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
        patience: Patience | None = None,
    ) -> None:
        self._execute = execute
        self._measured = measured
        self._orphaned = orphaned
        self._droppable = droppable
        self._batch_size_max = batch_size_max
        self._waiting_count_max = waiting_count_max
        self._overflow = overflow
        self._fair_share = fair_share
        self._patience = patience
        self._overdue_check: asyncio.TimerHandle | None = None
        self._queue: deque[Waiting[Op, Result]] = deque()
        self._under_way: list[Waiting[Op, Result]] = []
        self._arrived: asyncio.Future[None] | None = None  # while `run` waits for an operation
        self._closed: Exception | None = None
        self._operation_count = 0
        self._batch_count = 0
        self._waiting_count_peak = 0
        self._batch_size_peak = 0
        self._answers = Retries("batch_answers")

    async def submit(self, op: Op) -> Result:
        """Run one operation in the next batch.

        Raises: what `execute` answered; the error of `patience`; `overflow()` if too many wait and the operation is droppable
        (others are always taken, since their number is bounded by what was admitted before); what `close` was given, from then on.
        """
        if self._closed is not None:
            raise self._closed
        if len(self._queue) >= self._waiting_count_max and self._droppable(op):
            raise self._overflow()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.append((op, future, loop.time()))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if self._patience is not None and self._overdue_check is None:
            self._overdue_check = loop.call_later(self._patience.wait_s, self._answer_overdue, self._patience)
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
        self._queue.append((op, None, 0.0))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self, error: Exception) -> None:
        """Answer everything that waits, and all that is submitted later, with the error: no batch will run any more."""
        self._closed = error
        self._note_peak()
        batch = list(self._queue)
        self._queue.clear()
        self._answer(batch, [error] * len(batch))

    def _answer_overdue(self, patience: Patience) -> None:
        """One look for all: a timer for each operation would cost as much as answering it.

        Who is answered leaves the queue, so that no later look has to pass him, and that he takes nobody's place in it.
        """
        loop = asyncio.get_running_loop()
        self._overdue_check = None
        self._note_peak()
        latest = loop.time() - patience.wait_s
        for _, future, since in itertools.chain(self._under_way, self._queue):  # who waits longest comes first
            if future is None or future.done():
                continue
            if since > latest:
                self._overdue_check = loop.call_at(since + patience.wait_s, self._answer_overdue, patience)
                break
            future.set_exception(patience.error())
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        """Take out of the front of the queue what may be left out, up to the first that somebody waits for."""
        queue = self._queue
        kept: list[Waiting[Op, Result]] = []
        while queue and ((future := queue[0][1]) is None or future.done()):
            waiting = queue.popleft()
            if future is None or not self._droppable(waiting[0]):
                kept.append(waiting)
        queue.extendleft(reversed(kept))

    async def run(self) -> None:
        """Run one batch after the other until cancelled."""
        while True:
            if not self._queue:
                self._arrived = asyncio.get_running_loop().create_future()
                await self._arrived
            batch = self._take()
            if not batch:
                continue
            self._batch_count += 1
            self._operation_count += len(batch)
            self._batch_size_peak = max(self._batch_size_peak, len(batch))
            began_at = time.monotonic()
            self._under_way = batch
            try:
                answers = await self._execute([op for op, _, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            except BaseException:
                self._queue.extendleft(reversed(batch))  # for `close` to answer
                raise
            finally:
                self._under_way = []
                if self._measured is not None:
                    self._measured(len(batch), time.monotonic() - began_at)
            self._answer(batch, answers)

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    @property
    def open_count(self) -> int:
        """Operations that wait or are under way."""
        return len(self._queue) + len(self._under_way)

    def statistics(self) -> GroupCommitStatistics:
        """Counts and peaks so far."""
        self._note_peak()
        return GroupCommitStatistics(
            operation_count=self._operation_count,
            batch_count=self._batch_count,
            waiting_count=len(self._queue),
            waiting_count_peak=self._waiting_count_peak,
            batch_size_peak=self._batch_size_peak,
        )

    def _take(self) -> list[Waiting[Op, Result]]:
        """The next batch, without operations that nobody waits for any more."""
        self._note_peak()
        size_max = self._batch_size_max if self._fair_share is None else min(self._batch_size_max, self._fair_share())
        queue = self._queue
        batch: list[Waiting[Op, Result]] = []
        while queue and len(batch) < size_max:
            waiting = queue.popleft()
            future = waiting[1]
            if future is None or not (future.done() and self._droppable(waiting[0])):
                batch.append(waiting)
        return batch

    def _note_peak(self) -> None:
        """Called wherever the queue is about to become shorter."""
        self._waiting_count_peak = max(self._waiting_count_peak, len(self._queue))

    def _answer(self, batch: Sequence[Waiting[Op, Result]], answers: Sequence[Result | Exception]) -> None:
        for (op, future, _), answer in zip(batch, answers, strict=True):
            try:
                if future is None or future.done():
                    self._orphaned(op, answer)
                elif isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            except Exception as error:  # the others are answered all the same
                self._answers.failed(error)
