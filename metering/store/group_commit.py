"""Group commit: all operations that wait during one batch are sent to the database together in the
next.

There is no timer: an idle store answers at once, a busy one forms batches by itself. One batch runs
at a time, so operations of one process never contend with each other.

A small batch costs the database and this process nearly as much as a large one. So a small batch
waits for a few iterations of the event loop while these do other work, which may add operations.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from common.incidents import Retries

# Operations; from this size on a longer wait would not reduce the cost per operation.
WORTHWHILE_COUNT = 32

GATHER_TICKS = 10  # iterations of the event loop; more hardly enlarge the batches
# Seconds of one in which nothing else had work: waiting longer would only use the processor.
IDLE_TICK_S = 50e-6

Op = TypeVar("Op")
Result = TypeVar("Result")
Answered = Callable[[Any], None]  # receives a result or an exception


class Entry(msgspec.Struct, Generic[Op], eq=False):
    """One operation until it is answered.

    `done` is called with the answer, unless it is None. `since` is the time of arrival on
    the monotonic clock. `attempt_count` counts how often it was put off.
    """

    op: Op
    done: Answered | None
    since: float
    attempt_count: int = 0
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Discard the answer: `done` is not called; a result goes to `orphaned`."""
        self.done = None
        self.is_abandoned = True


@dataclass(frozen=True, slots=True)
class GroupCommitStatistics:
    """Counts since the start, and peaks of waiting operations and batch sizes."""

    operation_count: int
    batch_count: int
    waiting_count: int
    waiting_count_peak: int
    batch_size_peak: int

    def plus(self, other: GroupCommitStatistics) -> GroupCommitStatistics:
        """Add two statistics; peaks become the maximum."""
        return GroupCommitStatistics(
            self.operation_count + other.operation_count,
            self.batch_count + other.batch_count,
            self.waiting_count + other.waiting_count,
            max(self.waiting_count_peak, other.waiting_count_peak),
            max(self.batch_size_peak, other.batch_size_peak),
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limit, in seconds, for an answer, and the error that is the answer after that."""

    wait_s: float
    error: Callable[[], Exception]


@dataclass(frozen=True, slots=True)
class Backlog:
    """Maximum number of waiting operations, and the error for droppable ones beyond it."""

    count_max: int
    error: Callable[[], Exception]


class Pending(Protocol):
    """An operation that has not been answered."""

    def abandon(self) -> None:
        """Discard the answer: `done` is not called, and the result is released."""


@types.coroutine
def next_iteration() -> Generator[None, None, None]:
    """Wait for the next iteration of the event loop, as `asyncio.sleep(0)`."""
    yield


class GroupCommit(Generic[Op, Result]):
    """Queue that passes operations to `execute` in batches, in order of arrival.

    Answers are delivered by callbacks, those of a batch in one iteration of the loop, while the
    next batch runs; never within the call that submits the operation. A callback that raises is an
    incident and affects no other.

    `execute` returns a result or an exception for each operation of a batch, in order; if it
    raises, the whole batch fails. `orphaned` receives the answers without a caller, of operations
    posted without a callback, or abandoned or timed out after their batch began: no result is lost.
    `droppable` tells whether an operation may be skipped if it is abandoned before its batch
    begins. `refused` returns the error with which new operations are refused at present, or None.
    `put_off` tells whether a failed operation is retried through `again`; its error is then not
    delivered. `patience` is the time limit of callers, None for no limit. `fair_share` returns the
    maximum size of the next batch, None for no such limit; smaller ones than WORTHWHILE_COUNT have
    no effect. `measured` receives the number of operations and the seconds of each batch.
    """

    def __init__(
        self,
        execute: Callable[[Sequence[Op]], Awaitable[Sequence[Result | Exception]]],
        *,
        orphaned: Callable[[Op, Result | Exception], None],
        droppable: Callable[[Op], bool],
        batch_size_max: int,
        backlog: Backlog,
        refused: Callable[[], Exception | None] | None = None,
        put_off: Callable[[Entry[Op], Exception], bool] = lambda entry, error: False,
        fair_share: Callable[[], int] | None = None,
        measured: Callable[[int, float], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._execute = execute
        self._measured = measured
        self._orphaned = orphaned
        self._droppable = droppable
        self._batch_size_max = batch_size_max
        self._backlog = backlog
        self._refused = refused
        self._put_off = put_off
        self._fair_share = fair_share
        self._patience = patience
        self._overdue_check: asyncio.TimerHandle | None = None
        self._queue: deque[Entry[Op]] = deque()
        self._under_way: list[Entry[Op]] = []
        self._arrived: asyncio.Future[None] | None = None  # while `run` waits for an operation
        self._closed: Exception | None = None
        self._operation_count = 0
        self._batch_count = 0
        self._waiting_count_peak = 0
        self._batch_size_peak = 0
        self._answers = Retries("batch_answers")

    def begin(self, op: Op, done: Answered | None) -> Entry[Op]:
        """Run one operation in the next batch. `done` None sends its answer to `orphaned`.

        The answer is that of `execute`, an error of `refused` or `patience`, the error passed to
        `close`, or the error of the backlog if it is full and the operation is droppable. Other
        operations are always accepted: the admitted ones bound their number.
        """
        entry = Entry(op, done, time.monotonic())
        self.again(entry)
        return entry

    def again(self, entry: Entry[Op]) -> None:
        """Queue an operation that is new or was put off."""
        refusal = self._closed
        if refusal is None and self._refused is not None:
            refusal = self._refused()
        if (
            refusal is None
            and len(self._queue) >= self._backlog.count_max
            and self._droppable(entry.op)
        ):
            refusal = self._backlog.error()
        if refusal is not None:
            self._answer([entry], [refusal])
            return
        self._queue.append(entry)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if self._patience is not None and self._overdue_check is None:
            loop = asyncio.get_running_loop()
            self._overdue_check = loop.call_later(
                self._patience.wait_s, self._answer_overdue, self._patience
            )

    async def submit(self, op: Op) -> Result:
        """Run one operation in the next batch; return its answer or raise its error.

        If the caller is cancelled, the operation is abandoned.
        """
        result: Result = await awaited(partial(self.begin, op), partial(self._orphaned, op))
        return result

    def close(self, error: Exception) -> None:
        """Answer all waiting and future operations with the error. No further batch runs."""
        self._closed = error
        self._note_peak()
        batch = list(self._queue)
        self._queue.clear()
        self._answer(batch, [error] * len(batch))

    def _answer_overdue(self, patience: Patience) -> None:
        """Answer overdue operations. All share one timer: one each would cost as much as answering.

        Answered operations leave the queue, so that later checks skip them and they occupy no
        place.
        """
        loop = asyncio.get_running_loop()
        self._overdue_check = None
        self._note_peak()
        now = time.monotonic()
        overdue: list[Entry[Op]] = []
        for entry in itertools.chain(self._under_way, self._queue):  # the oldest first
            if entry.done is None:
                continue
            if (left_s := entry.since + patience.wait_s - now) > 0:
                self._overdue_check = loop.call_later(left_s, self._answer_overdue, patience)
                break
            overdue.append(entry)
            entry.is_abandoned = True  # a later result is orphaned
        self._drop_abandoned()
        for entry in overdue:
            if entry.done is not None:  # a previous callback may have changed it
                self._emit([(entry, patience.error())])

    def _drop_abandoned(self) -> None:
        """Remove abandoned, skippable operations in front of the first one with a caller."""
        queue = self._queue
        kept: list[Entry[Op]] = []
        while queue and (queue[0].done is None or queue[0].is_abandoned):
            entry = queue.popleft()
            if not (entry.is_abandoned and self._droppable(entry.op)):
                kept.append(entry)
        queue.extendleft(reversed(kept))

    async def run(self) -> None:
        """Run batches one after the other until cancelled."""
        while True:
            if not self._queue:
                self._arrived = asyncio.get_running_loop().create_future()
                await self._arrived
            for _ in range(GATHER_TICKS):
                if len(self._queue) >= min(WORTHWHILE_COUNT, self._batch_size_max):
                    break
                tick_at = time.monotonic()
                await next_iteration()
                if time.monotonic() - tick_at < IDLE_TICK_S:
                    break
            batch = self._take()
            if not batch:
                continue
            self._batch_count += 1
            self._operation_count += len(batch)
            self._batch_size_peak = max(self._batch_size_peak, len(batch))
            began_at = time.monotonic()
            self._under_way = batch
            try:
                answers = await self._execute([entry.op for entry in batch])
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

    @property
    def open_count(self) -> int:
        """Number of operations that wait or run."""
        return len(self._queue) + len(self._under_way)

    def statistics(self) -> GroupCommitStatistics:
        """Collect counts and peaks since the start."""
        self._note_peak()
        return GroupCommitStatistics(
            operation_count=self._operation_count,
            batch_count=self._batch_count,
            waiting_count=len(self._queue),
            waiting_count_peak=self._waiting_count_peak,
            batch_size_peak=self._batch_size_peak,
        )

    def _take(self) -> list[Entry[Op]]:
        """Take the next batch off the queue, without abandoned operations."""
        queue, size_max = self._queue, self._batch_size_max
        waiting_count = len(queue)
        if waiting_count > self._waiting_count_peak:
            self._waiting_count_peak = waiting_count
        if waiting_count > WORTHWHILE_COUNT and self._fair_share is not None:
            size_max = min(size_max, max(self._fair_share(), WORTHWHILE_COUNT))
        batch: list[Entry[Op]] = []
        while queue and len(batch) < size_max:
            entry = queue.popleft()
            if not (entry.is_abandoned and self._droppable(entry.op)):
                batch.append(entry)
        return batch

    def _note_peak(self) -> None:
        """Record the queue's peak; called wherever the queue is about to shrink."""
        self._waiting_count_peak = max(self._waiting_count_peak, len(self._queue))

    def _answer(self, batch: Sequence[Entry[Op]], answers: Sequence[Result | Exception]) -> None:
        """Deliver answers without a caller at once, the others while the next batch runs."""
        pairs: list[tuple[Entry[Op], Result | Exception]] = []
        for pair in zip(batch, answers, strict=True):
            if pair[0].done is None:
                self._emit((pair,))
            else:
                pairs.append(pair)
        asyncio.get_running_loop().call_soon(self._emit, pairs)

    def _emit(self, pairs: Sequence[tuple[Entry[Op], Result | Exception]]) -> None:
        for entry, answer in pairs:
            done = entry.done
            try:
                if isinstance(answer, Exception) and self._put_off(entry, answer):
                    continue
                if done is None:
                    self._orphaned(entry.op, answer)
                else:
                    entry.done = None
                    done(answer)
            except Exception as error:  # the other answers are delivered nonetheless
                self._answers.failed(error)


async def awaited(begin: Callable[[Answered], Pending], untaken: Callable[[Any], None]) -> Any:
    """Begin an operation and wait for its answer. Raises: the answer, if it is an exception.

    If the caller is cancelled, the operation is abandoned; an answer that has arrived by then goes
    to `untaken`.
    """
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def take(result: Any) -> None:
        if future.done():  # cancelled, and the caller has not run since
            untaken(result)
        else:
            future.set_result(result)

    pending = begin(take)
    try:
        result = await future
    except asyncio.CancelledError:
        pending.abandon()
        if future.done() and not future.cancelled():
            untaken(future.result())
        raise
    if isinstance(result, Exception):
        raise result
    return result
