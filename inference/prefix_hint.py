"""Guesses what an engine's prefix cache would serve, from what was sent to it. No torch.

A hint for routing and quotes: eviction in the engine is not seen here. Bills use the engine's own exact count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from inference.kv_cache import KV_BLOCK_TOKENS, block_keys, matchable_block_count


class PrefixHint:
    """The block hashes of recent sequences, least recently used first, at most as many as the engine has blocks."""

    def __init__(self, block_count_max: int) -> None:
        self._block_count_max = block_count_max
        self._recent: OrderedDict[int, None] = OrderedDict()

    def note(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """The engine has computed these tokens."""
        # The tail first, as the engine frees it: a shared head is then the last to be forgotten.
        for key in reversed(block_keys(token_ids, cache_salt, len(token_ids) // KV_BLOCK_TOKENS)):
            self._recent[key.key] = None
            self._recent.move_to_end(key.key)
        while len(self._recent) > self._block_count_max:
            self._recent.popitem(last=False)

    def predict(self, prompt_token_ids: Sequence[int], cache_salt: str) -> int:
        """Leading prompt tokens that were computed before under this salt; whole blocks, never the whole prompt."""
        count = 0
        for key in block_keys(prompt_token_ids, cache_salt, matchable_block_count(len(prompt_token_ids))):
            if key.key not in self._recent:
                break
            count += KV_BLOCK_TOKENS
        return count

    def clear(self) -> None:
        """The engine has lost its cache."""
        self._recent.clear()
