"""Queue of work for a child process that computes one batch at a time.

The parent's half of dynamic batching: while the child computes one batch, the next one is collected
here, so abandoned work is never sent. Independent of processes; used on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Piece(Generic[Payload, Result]):
    """Unit of work whose caller awaits `result`. `waits`: it is queued and not abandoned."""

    rank: float
    number: int
    size: int
    payload: Payload
    result: asyncio.Future[Result]
    waits: bool = True

    def __lt__(self, other: Piece[Payload, Result]) -> bool:
        return (self.rank, self.number) < (other.rank, other.number)


class BatchQueue(Generic[Payload, Result]):
    """Queue of pieces of work, ordered by rank, then by arrival."""

    def __init__(
        self,
        batch_size_max: int,
        on_taken: Callable[[Piece[Payload, Result]], None] = lambda piece: None,
    ) -> None:
        """Create an empty queue.

        `batch_size_max` limits batches of several pieces, in the unit of their sizes. `on_taken` is
        called with each piece that enters a batch.
        """
        self._batch_size_max = batch_size_max
        self._on_taken = on_taken
        self._waiting: list[Piece[Payload, Result]] = []  # a heap; may contain dropped pieces
        self._under_way: list[Piece[Payload, Result]] = []
        self._number = 0
        self.waiting_count = 0
        self.waiting_size = 0
        self.waiting_count_peak = 0
        self.batch_count = 0  # number of the current or last batch
        self.done_count = 0

    @property
    def under_way_count(self) -> int:
        """Number of pieces in the current batch; 0 if there is none."""
        return len(self._under_way)

    def put(
        self, payloads: Iterable[tuple[Payload, int]], rank: float = 0.0
    ) -> list[Piece[Payload, Result]]:
        """Queue payloads, each with its size; return their pieces in the same order."""
        loop = asyncio.get_running_loop()
        added: list[Piece[Payload, Result]] = []
        for payload, size in payloads:
            self._number += 1
            piece: Piece[Payload, Result] = Piece(
                rank, self._number, size, payload, loop.create_future()
            )
            heapq.heappush(self._waiting, piece)
            added.append(piece)
        self.waiting_count += len(added)
        self.waiting_size += sum(piece.size for piece in added)
        self.waiting_count_peak = max(self.waiting_count_peak, self.waiting_count)
        return added

    def drop(self, pieces: Sequence[Piece[Payload, Result]]) -> None:
        """Abandon pieces whose caller stopped waiting; those that have ended are ignored."""
        for piece in pieces:
            piece.result.cancel()
            self._leave(piece)
        if len(self._waiting) > 2 * self.waiting_count:
            self._waiting = [piece for piece in self._waiting if piece.waits]
            heapq.heapify(self._waiting)

    def take_batch(self) -> list[Payload]:
        """Take the payloads of the next batch; empty while a batch is being computed."""
        if self._under_way:
            return []
        size = 0
        while (piece := self._first()) is not None and (
            not self._under_way or size + piece.size <= self._batch_size_max
        ):
            heapq.heappop(self._waiting)
            self._leave(piece)
            self._under_way.append(piece)
            size += piece.size
        if self._under_way:
            self.batch_count += 1
        for piece in self._under_way:
            self._on_taken(piece)
        return [piece.payload for piece in self._under_way]

    def answer(self, results: Sequence[Result]) -> None:
        """Resolve the pieces of the current batch with their results, in order."""
        done, self._under_way = self._under_way, []
        self.done_count += len(done)
        for piece, result in zip(done, results, strict=True):
            if not piece.result.done():
                piece.result.set_result(result)

    def fail_batch(self, error: Callable[[], Exception]) -> None:
        """Fail the pieces of the current batch, each with a new exception from `error`."""
        lost, self._under_way = self._under_way, []
        self._fail(lost, error)

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Fail all pieces, in the queue and in the current batch."""
        self.fail_batch(error)
        lost, self._waiting = self._waiting, []
        self._fail(lost, error)

    def _fail(self, lost: Sequence[Piece[Payload, Result]], error: Callable[[], Exception]) -> None:
        for piece in lost:
            self._leave(piece)
            if not piece.result.done():
                piece.result.set_exception(error())

    def _first(self) -> Piece[Payload, Result] | None:
        """Find the next live piece, dropping pieces whose callers were cancelled."""
        while self._waiting and not (self._waiting[0].waits and not self._waiting[0].result.done()):
            self._leave(heapq.heappop(self._waiting))
        return self._waiting[0] if self._waiting else None

    def _leave(self, piece: Piece[Payload, Result]) -> None:
        if piece.waits:
            piece.waits = False
            self.waiting_count -= 1
            self.waiting_size -= piece.size
