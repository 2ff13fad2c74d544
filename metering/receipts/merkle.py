"""Merkle trees over the hashes of receipts: one hash represents many, and a short path proves one.

The leaves are the hashes themselves. Neighbors are hashed together level by level; the last one of
an odd level moves up unchanged. The input of a node's hash begins with a byte 1, that of a
receipt's with its magic, so neither can be passed off as the other. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

NODE = b"\1"
EMPTY_ROOT = sha256(b"").digest()  # root of an empty tree


# Of a path to the root: whether the neighbor is on the left, and its hash.
Step = tuple[bool, bytes]


def node(left: bytes, right: bytes) -> bytes:
    """Hash two children to their parent node."""
    return sha256(NODE + left + right).digest()


class Tree:
    """Merkle tree over the hashes of a batch, with all levels in memory."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        level = list(hashes)
        self._levels = [level]
        while len(level) > 1:
            pairs = [
                sha256(NODE + left + right).digest()
                for left, right in zip(level[::2], level[1::2], strict=False)
            ]
            level = pairs + level[len(pairs) * 2 :]
            self._levels.append(level)

    @property
    def root(self) -> bytes:
        """Hash that commits to all leaves."""
        return self._levels[-1][0] if self._levels[0] else EMPTY_ROOT

    def path(self, index: int) -> tuple[Step, ...]:
        """Compute the path from a leaf to the root; empty for a single leaf."""
        steps: list[Step] = []
        for level in self._levels[:-1]:
            neighbour = index ^ 1
            if neighbour < len(level):
                steps.append((neighbour < index, level[neighbour]))
            index //= 2
        return tuple(steps)


class RunningRoot:
    """Merkle root of a stream of hashes, such as a month's; keeps about thirty in memory."""

    def __init__(self) -> None:
        self.count = 0
        # Roots of complete subtrees, left to right; sizes are the binary digits of `count`.
        self._full: list[bytes] = []

    def push(self, leaf: bytes) -> None:
        """Add the next leaf."""
        at, count, full = leaf, self.count, self._full
        while count & 1:  # merge with the previous subtree of the same size
            at = sha256(NODE + full.pop() + at).digest()
            count >>= 1
        full.append(at)
        self.count += 1

    @property
    def root(self) -> bytes:
        """Root over all leaves so far."""
        if not self._full:
            return EMPTY_ROOT
        *others, at = self._full
        for left in reversed(others):
            at = node(left, at)
        return at
