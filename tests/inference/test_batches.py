"""Queue of batches for a child: order, bounds, counts, and an end for every item."""

from __future__ import annotations

import asyncio
import random
from typing import TypeAlias

import pytest

from inference.workers.batches import BatchQueue, Piece

BATCH_SIZE_MAX = 10
ACTS = 400

Queue: TypeAlias = "BatchQueue[int, int]"
Pieces: TypeAlias = "list[Piece[int, int]]"


class Lost(Exception):
    """Error of items without a result."""


class Model:
    """Expected content of a queue, recomputed from all items ever added."""

    def __init__(self) -> None:
        self.waiting: Pieces = []
        self.under_way: Pieces = []

    def next_batch(self) -> Pieces:
        """Return items by rank and arrival, as many as fit, and at least one."""
        batch: Pieces = []
        for piece in sorted(self.waiting, key=lambda piece: (piece.rank, piece.number)):
            if batch and sum(each.size for each in batch) + piece.size > BATCH_SIZE_MAX:
                break
            batch.append(piece)
        return batch


def check(queue: Queue, model: Model) -> None:
    """Check that the counts are those of the model."""
    assert queue.waiting_count == len(model.waiting)
    assert queue.waiting_size == sum(piece.size for piece in model.waiting)
    assert queue.under_way_count == len(model.under_way)


@pytest.mark.parametrize("seed", range(8))
async def test_any_sequence_of_acts_ends_as_predicted(seed: int) -> None:
    chance = random.Random(seed)
    taken: Pieces = []
    queue: Queue = BatchQueue(BATCH_SIZE_MAX, taken.append)
    model = Model()
    for number in range(ACTS):
        match chance.choice(
            ("put", "put", "drop", "cancel", "take", "take", "answer", "fail batch", "fail all")
        ):
            case "put":
                sizes = [(number, chance.randint(1, 14)) for _ in range(chance.randint(1, 4))]
                model.waiting += queue.put(sizes, rank=float(chance.randint(0, 3)))
            case "drop" if model.waiting:
                gone = chance.sample(model.waiting, chance.randint(1, len(model.waiting)))
                # An item under way is computed in any case.
                queue.drop([*gone, *model.under_way[:1]])
                model.waiting = [piece for piece in model.waiting if piece not in gone]
            case "cancel" if model.waiting:  # its caller was cancelled, and has not dropped it yet
                piece = chance.choice(model.waiting)
                piece.result.cancel()
                queue.drop([piece])
                model.waiting.remove(piece)
            case "take" if not model.under_way:
                expected, before = model.next_batch(), len(taken)
                queue.take_batch()
                assert taken[before:] == expected
                model.under_way = expected
                model.waiting = [piece for piece in model.waiting if piece not in expected]
            case "take":
                assert queue.take_batch() == []
            case "answer":
                queue.answer(range(len(model.under_way)))
                for index, piece in enumerate(model.under_way):
                    assert piece.result.cancelled() or piece.result.result() == index
                model.under_way = []
            case "fail batch":
                queue.fail_batch(Lost)
                assert all(is_lost(piece) for piece in model.under_way)
                model.under_way = []
            case "fail all":
                queue.fail_all(Lost)
                assert all(is_lost(piece) for piece in (*model.under_way, *model.waiting))
                model = Model()
        check(queue, model)
    assert queue.done_count > 0
    assert queue.waiting_count_peak > 0


async def test_one_whose_caller_was_cancelled_is_passed_over_before_it_is_dropped() -> None:
    queue: Queue = BatchQueue(BATCH_SIZE_MAX)
    first, second = queue.put([(1, 9), (2, 9)])

    first.result.cancel()

    assert queue.take_batch() == [2]
    assert queue.waiting_count == 0
    queue.drop([first, second])
    assert (queue.waiting_count, queue.waiting_size) == (0, 0)


async def test_results_must_be_as_many_as_pieces() -> None:
    queue: Queue = BatchQueue(BATCH_SIZE_MAX)
    queue.put([(1, 1), (2, 1)])
    queue.take_batch()

    with pytest.raises(ValueError, match="argument"):
        queue.answer([1])


def is_lost(piece: Piece[int, int]) -> bool:
    """Return whether its caller got an error, or had left before."""
    future: asyncio.Future[int] = piece.result
    return future.cancelled() or isinstance(future.exception(), Lost)
