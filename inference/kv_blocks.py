"""KV block size, types and hashes, and a prediction of an engine's prefix cache. No torch.

`PrefixHint` serves routing and quotes and does not see evictions. Billing uses the engine's exact
count.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

# tokens: a 200-token prefix shares 96 % of itself, and blocks are large enough for fast copies
KV_BLOCK_TOKENS = 16

# Data types of keys and values, and their bits. Those of int8 have a scale for each position and
# head, in bfloat16.
KvType = Literal["float32", "bfloat16", "int8"]
KV_BITS: dict[KvType, int] = {"float32": 32, "bfloat16": 16, "int8": 8}
KV_SCALE_BYTES = 2


@functools.lru_cache(maxsize=4096)  # one per tenant
def salt_hash(cache_salt: str) -> int:
    """Hash a salt, as parent of first blocks; equal in every process despite PYTHONHASHSEED."""
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(), digest_size=7).digest(), "big")


def blocks_for(token_count: int) -> int:
    return -(-token_count // KV_BLOCK_TOKENS)


class PrefixHint:
    """LRU set of the block hashes of recent sequences, limited to the engine's number of blocks."""

    def __init__(self, block_count_max: int, block_tokens: int) -> None:
        """Create an empty set. `block_tokens` is the engine's number of tokens per cache block."""
        self._block_count_max = block_count_max
        self._block_tokens = block_tokens
        self._recent: OrderedDict[int, None] = OrderedDict()

    def note(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """Record a sequence whose tokens the engine has computed; return its unknown blocks."""
        # The tail first, as in the engine's eviction order: a shared head is evicted last.
        keys = block_hashes(tuple(token_ids), cache_salt, self._block_tokens)[::-1]
        added = [key for key in keys if key not in self._recent]
        self.add(keys)
        return added

    def add(self, keys: Iterable[int]) -> None:
        """Record blocks by their hashes, those that are evicted first before others."""
        for key in keys:
            self._recent[key] = None
            self._recent.move_to_end(key)
        while len(self._recent) > self._block_count_max:
            self._recent.popitem(last=False)

    def predict(self, prompt_token_ids: Sequence[int], cache_salt: str) -> int:
        """Count the leading prompt tokens computed under this salt; never the whole prompt."""
        count = 0
        if not self._recent:
            return 0
        for key in block_hashes(tuple(prompt_token_ids), cache_salt, self._block_tokens):
            if key not in self._recent:
                break
            count += self._block_tokens
        return min(
            count, max(len(prompt_token_ids) - 1, 0) // self._block_tokens * self._block_tokens
        )

    def clear(self) -> None:
        self._recent.clear()


# Pricing, routing and submission hash the same prompt within a short time.
@functools.lru_cache(maxsize=64)
def block_hashes(token_ids: tuple[int, ...], cache_salt: str, block_tokens: int) -> tuple[int, ...]:
    """Compute the chained hashes of all full blocks, like `block_keys`, but without the tokens.

    A block's hash is that of its parent's hash and its tokens. A collision only costs a cache miss.
    """
    chained, keys = salt_hash(cache_salt), []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        chained = hash((chained, token_ids[end - block_tokens : end]))
        keys.append(chained)
    return tuple(keys)
