"""Which prefixes one replica has probably cached: an index of what was sent to it, corrected by what its engine tells.

A hint for placing, never for bills. Blocks are told apart by their chained hash, which begins with the cache salt; the least
recently used are forgotten first, as engines do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from inference.core.kv_cache import KV_BLOCK_TOKENS
from inference.prefix_hint import chained_hashes

BLOCK_COUNT_MAX = 65_536  # blocks: of an engine that does not tell how many it has; a million tokens, some 10 MB here
ENGINE_BLOCK_TOKENS_MAX = 128  # tokens: engines count in blocks of up to so many, and so may tell that much less than is there

Keys = tuple[int, ...]


def prefix_keys(token_ids: Sequence[int], cache_salt: str) -> Keys:
    """Of the full blocks of a prompt that a cache could serve: never its last token."""
    return tuple(chained_hashes(token_ids, cache_salt, max(len(token_ids) - 1, 0) // KV_BLOCK_TOKENS, KV_BLOCK_TOKENS))


class Found(NamedTuple):
    """The leading blocks of a prompt that were sent before. computed: when each was last used, for those known to be computed."""

    block_count: int
    computed: tuple[int, ...]

    @property
    def token_count(self) -> int:
        """In tokens."""
        return self.block_count * KV_BLOCK_TOKENS


class SentPrefixes:
    """The blocks of one replica. Uses are numbered in order."""

    def __init__(self, block_count_max: int = BLOCK_COUNT_MAX) -> None:
        self.block_count_max = block_count_max
        self._uses: OrderedDict[int, int] = OrderedDict()  # the least recently used first
        self._computed: set[int] = set()
        self._use = 0

    def __len__(self) -> int:
        return len(self._uses)

    def find(self, keys: Keys) -> Found:
        """The longest known beginning. Looks only."""
        count = 0
        computed: list[int] = []
        for key in keys:
            if (use := self._uses.get(key)) is None:
                break
            if count == len(computed) and key in self._computed:
                computed.append(use)
            count += 1
        return Found(count, tuple(computed))

    def sent(self, keys: Keys) -> None:
        """A prompt is on its way; it counts at once, so that those who share it follow it."""
        self._touch(keys)
        while len(self._uses) > self.block_count_max:
            key, _ = self._uses.popitem(last=False)
            self._computed.discard(key)

    def computed(self, keys: Keys) -> None:
        """The engine has computed these blocks, as far as they are still known."""
        self._computed.update(key for key in keys if key in self._uses)

    def found_missing(self, found: Found, token_count: int) -> bool:
        """The engine has served so many tokens of what was found: what it lacked, and all that was used less recently, is gone.

        found: as it was when the prompt was sent. Only blocks that had been computed show anything: others may not be there yet.
        Returns whether anything was missing.
        """
        missing = found.computed[(token_count + ENGINE_BLOCK_TOKENS_MAX) // KV_BLOCK_TOKENS :]
        last_gone = max(missing, default=0)
        while self._uses and self._uses[key := next(iter(self._uses))] <= last_gone:
            del self._uses[key]
            self._computed.discard(key)
        return bool(missing)

    def clear(self) -> None:
        """The engine has lost its cache."""
        self._uses.clear()
        self._computed.clear()

    def _touch(self, keys: Keys) -> None:
        # The tail first, as engines free it: a shared head is then the last to be forgotten.
        for key in reversed(keys):
            self._use += 1
            self._uses[key] = self._use
            self._uses.move_to_end(key)
