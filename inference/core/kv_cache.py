"""KV block pool and prefix cache: bookkeeping only, the tensors are in the model runner.

A block is `KV_BLOCK_TOKENS` consecutive positions of one sequence. Each block is in exactly one of
three states:

    free    no content                        in `_free`
    cached  content, without readers          in `_evictable`, least recently used first
    held    in at least one sequence's table  reference count above 0

    free + cached + held = total, and the reference counts add up to the entries of all tables:
    `check_conservation`.

A full block whose KV is computed may be registered: later prompts that begin with the same tokens
under the same salt find it by a chained hash. A hit must also have the same tokens and the same
predecessor block, so that a hash collision cannot serve another prompt's KV. No torch here: the
parent process uses the hashes for predictions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inference.errors import InvariantViolated
from inference.kv_blocks import KV_BLOCK_TOKENS, salt_hash

# Hash of a block: of its parent's hash, and of its tokens.
BlockHash = Callable[[tuple[int, tuple[int, ...]]], int]


def matchable_block_count(prompt_token_count: int) -> int:
    """Count the leading blocks that a prefix hit can have; the last token is never part of one."""
    return max(prompt_token_count - 1, 0) // KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Lookup key of a full block: the chained hash, and the tokens to verify a hit."""

    key: int
    token_ids: tuple[int, ...]


def block_keys(
    token_ids: Sequence[int], cache_salt: str, block_count: int, hash_block: BlockHash = hash
) -> list[BlockKey]:
    """Compute the keys of the first `block_count` full blocks of a sequence."""
    keys: list[BlockKey] = []
    chained = salt_hash(cache_salt)
    for start in range(0, block_count * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS):
        tokens = tuple(token_ids[start : start + KV_BLOCK_TOKENS])
        chained = hash_block((chained, tokens))
        keys.append(BlockKey(chained, tokens))
    return keys


@dataclass(slots=True, eq=False)
class CachedBlock:
    """Content of a registered block. `parent` is compared by identity, so chains match exactly."""

    key: int
    token_ids: tuple[int, ...]
    parent: CachedBlock | None
    cache_salt: str
    block_id: int


class BlockPool:
    """All KV blocks of one engine. Not thread-safe: only the step loop uses it."""

    def __init__(self, block_count: int, hash_block: BlockHash = hash) -> None:
        """Create a pool of at least 1 block. Tests replace `hash_block` to force collisions."""
        self._reference_counts = np.zeros(block_count, dtype=np.int32)
        # Popped from the end: low ids first.
        self._free: list[int] = list(range(block_count - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._contents: list[CachedBlock | None] = [None] * block_count
        self._index: dict[int, CachedBlock] = {}
        self.hash_block = hash_block
        self.block_count_total = block_count

    @property
    def block_count_free(self) -> int:
        return len(self._free)

    @property
    def block_count_cached(self) -> int:
        """Number of blocks with content but no readers; the least recently used goes first."""
        return len(self._evictable)

    @property
    def block_count_held(self) -> int:
        """Number of blocks in the tables of sequences, counted anew."""
        return int(np.count_nonzero(self._reference_counts > 0))

    @property
    def block_count_available(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + len(self._evictable)

    def match(self, keys: Sequence[BlockKey], cache_salt: str) -> list[CachedBlock]:
        """Find the longest cached run of leading blocks; it is valid until the pool changes."""
        blocks: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for key in keys:
            parent = self._find(key, parent, cache_salt)
            if parent is None:
                break
            blocks.append(parent)
        return blocks

    def evictable_count(self, matched: Sequence[CachedBlock]) -> int:
        """Count the matched blocks that would no longer be available once they are held."""
        return sum(block.block_id in self._evictable for block in matched)

    def hold(self, matched: Sequence[CachedBlock]) -> list[int]:
        """Add a reader to each matched block; return their ids, with which a table begins."""
        for block in matched:
            if self._reference_counts[block.block_id] == 0:
                del self._evictable[block.block_id]
            self._reference_counts[block.block_id] += 1
        return [block.block_id for block in matched]

    def is_shared(self, block_id: int) -> bool:
        """Return whether several sequences read a block, so that one of them does not free it."""
        return bool(self._reference_counts[block_id] > 1)

    def allocate(self, block_count: int) -> list[int]:
        """Allocate blocks with one reader each, evicting cached blocks if necessary.

        Raises InvariantViolated if there are not enough; callers check `block_count_available`
        first.
        """
        if block_count > len(self._free) + len(self._evictable):
            raise InvariantViolated(
                f"{block_count} KV blocks requested, {self.block_count_available} available"
            )
        block_ids = []
        for _ in range(block_count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _unused = self._evictable.popitem(last=False)
                self._forget(block_id)
            self._reference_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one reader from each block of a table, the last block first.

        The tail is therefore evicted before the head, so a shared head outlives its tails.
        Raises: InvariantViolated.
        """
        for block_id in reversed(block_ids):
            count = int(self._reference_counts[block_id]) - 1
            if count < 0:
                raise InvariantViolated(f"KV block {block_id} was released more often than held")
            self._reference_counts[block_id] = count
            if count > 0:
                continue
            if self._contents[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def register(
        self, block_id: int, token_ids: tuple[int, ...], cache_salt: str, parent: CachedBlock | None
    ) -> CachedBlock | None:
        """Register a held block whose KV is computed, so that later prompts find it. `parent` is
        the result for the previous block.

        Returns the parent for the next block. If another block already has this content, that one
        is the parent and this block stays private. Returns None if the block cannot be indexed; the
        caller then stops registering.
        """
        if parent is not None and self._index.get(parent.key) is not parent:
            return None
        before = parent.key if parent else salt_hash(cache_salt)
        key = BlockKey(self.hash_block((before, token_ids)), token_ids)
        found = self._find(key, parent, cache_salt)
        if found is not None:
            return found
        occupant = self._index.get(key.key)
        if occupant is not None and not self._drop_orphan(occupant):
            return None
        assert self._contents[block_id] is None, "a block with content is registered once"
        content = CachedBlock(key.key, token_ids, parent, cache_salt, block_id)
        self._index[key.key] = content
        self._contents[block_id] = content
        return content

    def check_conservation(self, table_entry_count: int) -> None:
        """Raise InvariantViolated unless every block is in one state and every reader is known.

        `table_entry_count` is the total length of all sequences' tables. The check takes about 30
        µs for 10,000 blocks.
        """
        free, cached = len(self._free), len(self._evictable)
        held = int(np.count_nonzero(self._reference_counts))
        readers = int(self._reference_counts.sum())
        if free + cached + held != self.block_count_total:
            raise InvariantViolated(
                f"KV blocks: {free} free + {cached} cached + {held} held is not"
                f" {self.block_count_total}"
            )
        if readers != table_entry_count:
            raise InvariantViolated(
                f"KV blocks have {readers} readers, but tables have {table_entry_count} entries"
            )

    def _find(
        self, key: BlockKey, parent: CachedBlock | None, cache_salt: str
    ) -> CachedBlock | None:
        content = self._index.get(key.key)
        if content is None or content.parent is not parent:
            return None
        is_equal = content.token_ids == key.token_ids and content.cache_salt == cache_salt
        return content if is_equal else None

    def _drop_orphan(self, content: CachedBlock) -> bool:
        """Drop content that is unreachable as its parent was evicted; return whether it was."""
        if content.parent is None or self._index.get(content.parent.key) is content.parent:
            return False
        self._forget(content.block_id)
        if content.block_id in self._evictable:
            del self._evictable[content.block_id]
            self._free.append(content.block_id)
        return True

    def _forget(self, block_id: int) -> None:
        content = self._contents[block_id]
        assert content is not None, "an evictable block has content"
        del self._index[content.key]
        self._contents[block_id] = None
