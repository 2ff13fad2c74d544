"""KV blocks as every part of the engine counts and keys them, and a guess of what an engine's prefix cache holds. No torch.

`PrefixHint` is a hint for routing and quotes: eviction in the engine is not seen here. Bills use the engine's own exact count.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

KV_BLOCK_TOKENS = 16  # tokens: small enough that a 200-token prefix shares 96 % of itself, large enough for fast copies


def chain_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Key of a block after a block. Python's own: the same in one process, and a collision costs a miss, never a wrong hit."""
    return hash((parent_hash, token_ids))


@functools.lru_cache(maxsize=4096)  # one per tenant
def salt_hash(cache_salt: str) -> int:
    """Key before the first block. Equal salts give equal keys in every process, whatever PYTHONHASHSEED is."""
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(), digest_size=7).digest(), "big")


def blocks_for(token_count: int) -> int:
    return -(-token_count // KV_BLOCK_TOKENS)


class PrefixHint:
    """The block hashes of recent sequences, least recently used first, at most as many as the engine has blocks."""

    def __init__(self, block_count_max: int, block_tokens: int) -> None:
        """block_tokens: how many tokens the engine caches as one."""
        self._block_count_max = block_count_max
        self._block_tokens = block_tokens
        self._recent: OrderedDict[int, None] = OrderedDict()

    def note(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """The engine has computed these tokens."""
        # The tail first, as the engine frees it: a shared head is then the last to be forgotten.
        for key in reversed(block_hashes(tuple(token_ids), cache_salt, self._block_tokens)):
            self._recent[key] = None
            self._recent.move_to_end(key)
        while len(self._recent) > self._block_count_max:
            self._recent.popitem(last=False)

    def predict(self, prompt_token_ids: Sequence[int], cache_salt: str) -> int:
        """Leading prompt tokens that were computed before under this salt; whole blocks, never the whole prompt."""
        count = 0
        if not self._recent:
            return 0
        for key in block_hashes(tuple(prompt_token_ids), cache_salt, self._block_tokens):
            if key not in self._recent:
                break
            count += self._block_tokens
        return min(count, max(len(prompt_token_ids) - 1, 0) // self._block_tokens * self._block_tokens)

    def clear(self) -> None:
        self._recent.clear()


# A prompt is keyed for its price, for its replica and when it is computed, all within a moment.
@functools.lru_cache(maxsize=64)
def block_hashes(token_ids: tuple[int, ...], cache_salt: str, block_tokens: int) -> tuple[int, ...]:
    """Chained hashes of all full blocks, as in `block_keys`, but without the tokens that would prove a hit."""
    chained, keys = salt_hash(cache_salt), []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        chained = chain_hash(chained, token_ids[end - block_tokens : end])
        keys.append(chained)
    return tuple(keys)
