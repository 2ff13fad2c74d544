"""How much one `Embed` call may ask for, and in which parts it is embedded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from inference.engine import ModelInfo

INPUT_COUNT_MAX = 2048  # texts in one call: what others offer; more gain nothing, a batch is smaller
ANSWER_BYTES_MAX = 4 * 2**20 - 2**16  # what gRPC clients take unless told otherwise, less what stands beside the vectors
EMBEDDING_BYTES = 24  # of a message beside its vector
PART_TOKENS = 16_384  # tokens that have their turn together: seconds of work on a laptop, for which others may have to wait

Text = TypeVar("Text", bound=Sequence[int])


def input_count_max(model: ModelInfo) -> int:
    """Most texts of one call: so many that their vectors fit a message of the size that clients take. 0 if the model generates."""
    if not model.embedding_dimension:
        return 0
    return min(INPUT_COUNT_MAX, ANSWER_BYTES_MAX // (4 * model.embedding_dimension + EMBEDDING_BYTES))


def parts_of(texts: Sequence[Text], token_count_max: int = PART_TOKENS) -> list[tuple[Text, ...]]:
    """Texts in order, divided so that no part has more tokens, but for one of a single text."""
    parts: list[list[Text]] = []
    room = 0
    for text in texts:
        if not parts or len(text) > room:
            parts.append([])
            room = token_count_max
        parts[-1].append(text)
        room -= len(text)
    return [tuple(part) for part in parts]
