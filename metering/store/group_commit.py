"""Group commit: all operations that wait while one batch is in the database go out together in the next.

No timer: an idle store answers at once, a busy one batches by itself. One batch is under way at a time, so operations of one
process never contend with each other.

A small batch costs the database and this process nearly as much as a large one. So a batch waits for a few turns of the event loop
while it is small: an idle loop makes them in microseconds, and what a busy one brings meanwhile goes with it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from common.incidents import Retries

WORTHWHILE_COUNT = 32  # operations; in smaller batches the statements themselves cost more than the wait that is saved

GATHER_TURNS = 10  # of the event loop; with more, batches hardly become larger

Op = TypeVar("Op")
Result = TypeVar("Result")
Answered = Callable[[Any], None]  # told of a result or an exception


class Entry(msgspec.Struct, Generic[Op], eq=False):
    """One operation until it is answered.

    done: told of the answer; None if nobody takes it. since: when it came, by the loop's clock. attempt_count: how often it was
    put off.
    """

    op: Op
    done: Answered | None
    since: float
    attempt_count: int = 0
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Take no answer any more: `done` is not called, and what the operation obtains is given back. Idempotent."""
        self.done = None
        self.is_abandoned = True


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


class Pending(Protocol):
    """An operation whose answer is to come."""

    def abandon(self) -> None:
        """Take no answer any more: `done` is not called, and what the operation obtains is given back. Idempotent."""


class GroupCommit(Generic[Op, Result]):
    """Collects operations and hands them to `execute` in batches, in order of arrival.

    Answers are told by calls, those of a batch in one turn of the loop, while the next batch is in the database; never inside the
    call that submits the operation. A callback that raises is an incident and harms no other.

    execute: answers each operation of a batch with a result or an exception, in order; raising fails the whole batch.
    orphaned: told of each answer, result or error, that nobody takes: of a posted operation, or of one that was abandoned after its
    batch began, or has lost patience. So nothing that it obtained is lost, and nothing that it had to do.
    droppable: whether an operation may be left out when it is abandoned before its batch begins.
    refused: asked when an operation comes: why it is not even tried now.
    put_off: asked about each error whether the operation is tried again, by `again`; the error is not told then.
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
        refused: Callable[[], Exception | None] = lambda: None,
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
        self._waiting_count_max = waiting_count_max
        self._overflow = overflow
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
        """Run one operation in the next batch. done: None: its answer goes to `orphaned`.

        Told is what `execute` answers; or the errors of `refused` and `patience`; `overflow()` if too many wait and it is droppable
        (others are always taken, since their number is bounded by what was admitted before); what `close` was given, from then on.
        """
        entry = Entry(op, done, asyncio.get_running_loop().time())
        self.again(entry)
        return entry

    def again(self, entry: Entry[Op]) -> None:
        """Queue an operation, also one that was put off."""
        refusal = self._closed or self._refused()
        if refusal is None and len(self._queue) >= self._waiting_count_max and self._droppable(entry.op):
            refusal = self._overflow()
        if refusal is not None:
            self._answer([entry], [refusal])
            return
        self._queue.append(entry)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if self._patience is not None and self._overdue_check is None:
            loop = asyncio.get_running_loop()
            self._overdue_check = loop.call_later(self._patience.wait_s, self._answer_overdue, self._patience)

    async def submit(self, op: Op) -> Result:
        """Run one operation in the next batch, and wait for its answer. Raises: what `begin` would tell."""
        result: Result = await awaited(partial(self.begin, op), partial(self._orphaned, op))
        return result

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
        overdue: list[Entry[Op]] = []
        for entry in itertools.chain(self._under_way, self._queue):  # who waits longest comes first
            if entry.done is None:
                continue
            if entry.since > latest:
                self._overdue_check = loop.call_at(entry.since + patience.wait_s, self._answer_overdue, patience)
                break
            overdue.append(entry)
            entry.is_abandoned = True  # what it obtains later is for nobody
        self._drop_abandoned()
        for entry in overdue:
            if entry.done is not None:  # as what was told to others may have changed
                self._tell([(entry, patience.error())])

    def _drop_abandoned(self) -> None:
        """Take out of the front of the queue what may be left out, up to the first that somebody waits for."""
        queue = self._queue
        kept: list[Entry[Op]] = []
        while queue and (queue[0].done is None or queue[0].is_abandoned):
            entry = queue.popleft()
            if not (entry.is_abandoned and self._droppable(entry.op)):
                kept.append(entry)
        queue.extendleft(reversed(kept))

    async def run(self) -> None:
        """Run one batch after the other until cancelled."""
        while True:
            if not self._queue:
                self._arrived = asyncio.get_running_loop().create_future()
                await self._arrived
            for _ in range(GATHER_TURNS):
                if len(self._queue) >= min(WORTHWHILE_COUNT, self._batch_size_max):
                    break
                await asyncio.sleep(0)
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

    def _take(self) -> list[Entry[Op]]:
        """The next batch, without operations that nobody waits for any more."""
        self._note_peak()
        size_max = self._batch_size_max if self._fair_share is None else min(self._batch_size_max, self._fair_share())
        queue = self._queue
        batch: list[Entry[Op]] = []
        while queue and len(batch) < size_max:
            entry = queue.popleft()
            if not (entry.is_abandoned and self._droppable(entry.op)):
                batch.append(entry)
        return batch

    def _note_peak(self) -> None:
        """Called wherever the queue is about to become shorter."""
        self._waiting_count_peak = max(self._waiting_count_peak, len(self._queue))

    def _answer(self, batch: Sequence[Entry[Op]], answers: Sequence[Result | Exception]) -> None:
        """Deal at once with what nobody takes, and with the others soon: while the next batch is in the database."""
        pairs = list(zip(batch, answers, strict=True))
        self._tell([pair for pair in pairs if pair[0].done is None])
        asyncio.get_running_loop().call_soon(self._tell, [pair for pair in pairs if pair[0].done is not None])

    def _tell(self, pairs: Sequence[tuple[Entry[Op], Result | Exception]]) -> None:
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
            except Exception as error:  # the others are told all the same
                self._answers.failed(error)


async def awaited(begin: Callable[[Answered], Pending], untaken: Callable[[Any], None]) -> Any:
    """Begin an operation and wait for its answer. Raises: the answer, if it is an exception.

    untaken: told of the answer if the caller is cancelled between it and the wake-up; cancelled before, the operation is abandoned.
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
