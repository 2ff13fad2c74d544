"""How much one `Embed` call may ask for, and in which parts it is embedded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

PART_TOKENS = 16_384  # tokens that have their turn together: seconds of work on a laptop, for which others may have to wait

Text = TypeVar("Text", bound=Sequence[int])


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
