"""Index of the prefixes that an engine caches, built from its KV cache events.

Block hashes are the engine's own, so blocks are identified by their position in its tree. Events
may have no salts: where caches are separated by salt, combine the index with the prefixes sent
under a salt to predict cache hits.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.workers.protocol import Message

PARENTS_MAX = 64  # blocks of equal tokens to follow, one per tenant; a lookup then takes 2 ms


class KvCacheChange(Message, tag="kv_cache", frozen=True):
    """Changes to the KV cache, to apply in order: `reset`, then `stored` as (parent, block,
    tokens), then `removed`.

    `reset` means that events were lost, so the previous state is discarded. A parent of 0 is the
    root.
    """

    reset: bool
    stored: list[tuple[int, int, list[int]]]
    removed: list[int]


class KvEventIndex:
    """Tree of the blocks that an engine holds, bounded by its number of blocks."""

    def __init__(self) -> None:
        # Blocks by parent and tokens: several if the engine separates tenants, since events carry
        # no salt.
        self._children: dict[tuple[int, tuple[int, ...]], dict[int, None]] = {}
        self._positions: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._block_tokens = 0

    def __len__(self) -> int:
        return len(self._positions)

    def apply(self, change: KvCacheChange) -> None:
        if change.reset:
            self.clear()
        for parent, block, tokens in change.stored:
            position = (parent, tuple(tokens))
            self._block_tokens = max(self._block_tokens, len(tokens))
            self._remove(block)
            self._positions[block] = position
            self._children.setdefault(position, {})[block] = None
        for block in change.removed:
            self._remove(block)

    def snapshot(self) -> list[KvCacheChange]:
        """Build the change that makes an empty index equal to this one; none if it is empty."""
        stored = [
            (parent, key, list(tokens)) for key, (parent, tokens) in [*self._positions.items()]
        ]
        return [KvCacheChange(True, stored, [])] if stored else []

    def clear(self) -> None:
        self._children.clear()
        self._positions.clear()

    def matched_token_count(self, token_ids: Sequence[int], root: int = 0) -> int:
        """Count the leading tokens that are cached in whole blocks; never the whole prompt.

        `root` is the parent of the first blocks under a salt. Blocks whose events carry no salt
        count too.
        """
        count, parents = 0, [0, root] if root else [0]
        while self._block_tokens and count + self._block_tokens < len(token_ids):
            tokens = tuple(token_ids[count : count + self._block_tokens])
            parents = [
                block for parent in parents for block in self._children.get((parent, tokens), ())
            ][:PARENTS_MAX]
            if not parents:
                break
            count += self._block_tokens
        return count

    def _remove(self, block: int) -> None:
        position = self._positions.pop(block, None)
        if position is not None:
            del self._children[position][block]
            if not self._children[position]:
                del self._children[position]
