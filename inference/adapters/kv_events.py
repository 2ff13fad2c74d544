"""Which prefixes an engine says that it holds: its KV cache events, kept as an index over token ids.

The engine's hashes are its own, so blocks are told apart by their place in its tree. The index says what is there for anybody;
where caches are kept apart by salt, it is only together with what was sent under a salt a guess of what a request will find.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.workers.protocol import Message

PARENTS_MAX = 64  # blocks of the same tokens that are followed: so many tenants with one prompt; looking takes 2 ms then


class KvCacheChange(Message, tag="kv_cache", frozen=True):
    """Blocks that came and went, in order: first all of `reset`, then `stored` as (parent, block, tokens), then `removed`.

    reset: events were lost, so nothing that was known before holds. A parent of 0 is the root.
    """

    reset: bool
    stored: list[tuple[int, int, list[int]]]
    removed: list[int]


class KvEventIndex:
    """The blocks that an engine holds, as a tree. Bounded by the engine's own blocks, of which it tells."""

    def __init__(self) -> None:
        # Blocks by their parent and their tokens: several where an engine keeps tenants apart, since their salts are not told.
        self._children: dict[tuple[int, tuple[int, ...]], dict[int, None]] = {}
        self._places: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._block_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, change: KvCacheChange) -> None:
        if change.reset:
            self.clear()
        for parent, block, tokens in change.stored:
            place = (parent, tuple(tokens))
            self._block_tokens = max(self._block_tokens, len(tokens))
            self._remove(block)
            self._places[block] = place
            self._children.setdefault(place, {})[block] = None
        for block in change.removed:
            self._remove(block)

    def clear(self) -> None:
        self._children.clear()
        self._places.clear()

    def matched_token_count(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that are held in whole blocks for anybody, never all of them."""
        count, parents = 0, [0]
        while self._block_tokens and count + self._block_tokens < len(token_ids):
            tokens = tuple(token_ids[count : count + self._block_tokens])
            parents = [block for parent in parents for block in self._children.get((parent, tokens), ())][:PARENTS_MAX]
            if not parents:
                break
            count += self._block_tokens
        return count

    def _remove(self, block: int) -> None:
        place = self._places.pop(block, None)
        if place is not None:
            del self._children[place][block]
            if not self._children[place]:
                del self._children[place]
