"""What one step computes, as the scheduler tells it to whoever computes. No decisions here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.core.sequence import Sequence


class Chunk(NamedTuple):
    """The next `token_count` uncomputed tokens of a sequence, to be computed in this step.

    completes: nothing is uncomputed afterwards, so that the next token is wanted. copied: a KV block and the one that its content
    goes to before anything is computed: beams share the first and write their own.
    """

    sequence: Sequence
    token_count: int
    completes: bool
    copied: tuple[int, int] | None = None


@dataclass(slots=True)
class StepPlan:
    """What a step computes.

    token_count: rows of the step's batch, at most token_count_max. entered: sequences that left the queue for the first time.
    """

    token_count_max: int = sys.maxsize
    chunks: list[Chunk] = field(default_factory=list)
    entered: list[Sequence] = field(default_factory=list)
    token_count: int = 0

    def add(self, sequence: Sequence, token_count: int, copied: tuple[int, int] | None = None) -> None:
        """Compute so many more tokens of a sequence. copied: see `Chunk`."""
        completes = sequence.computed_token_count + token_count == len(sequence.token_ids)
        self.chunks.append(Chunk(sequence, token_count, completes, copied))
        self.token_count += token_count

    def drop(self, sequence: Sequence) -> None:
        """Compute nothing of a sequence after all."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.token_count = sum(chunk.token_count for chunk in self.chunks)
