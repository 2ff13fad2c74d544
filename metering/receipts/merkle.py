"""Merkle trees over the hashes of receipts: one hash stands for many, and a short path proves one.

The leaves are the hashes themselves. Neighbours are hashed together level by level; the last of an odd level goes up as it is.
What is hashed for a node begins with a byte 1, what is hashed for a receipt with its magic: nobody can show one as the other. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

NODE = b"\1"
EMPTY_ROOT = sha256(b"").digest()  # of no hashes at all


Step = tuple[bool, bytes]  # from a leaf to the root: whether the neighbour stands on the left, and its hash


def node(left: bytes, right: bytes) -> bytes:
    """The hash above two others."""
    return sha256(NODE + left + right).digest()


class Tree:
    """All levels of a tree in memory: for as many hashes as a batch has."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        level = list(hashes)
        self._levels = [level]
        while len(level) > 1:
            pairs = [sha256(NODE + left + right).digest() for left, right in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(pairs) * 2 :]
            self._levels.append(level)

    @property
    def root(self) -> bytes:
        """The one hash that stands for all."""
        return self._levels[-1][0] if self._levels[0] else EMPTY_ROOT

    def path(self, index: int) -> tuple[Step, ...]:
        """The way of one leaf to the root; empty if it is the only one."""
        steps: list[Step] = []
        for level in self._levels[:-1]:
            neighbour = index ^ 1
            if neighbour < len(level):
                steps.append((neighbour < index, level[neighbour]))
            index //= 2
        return tuple(steps)


class RunningRoot:
    """The root of hashes that come one after the other: for as many as a month has, in memory for some thirty."""

    def __init__(self) -> None:
        self.count = 0
        self._full: list[bytes] = []  # roots of complete subtrees from left to right; their sizes are the binary digits of `count`

    def push(self, leaf: bytes) -> None:
        """Take the next hash."""
        at, count, full = leaf, self.count, self._full
        while count & 1:  # a subtree of the same size stands before it
            at = sha256(NODE + full.pop() + at).digest()
            count >>= 1
        full.append(at)
        self.count += 1

    @property
    def root(self) -> bytes:
        """Of all so far."""
        if not self._full:
            return EMPTY_ROOT
        *others, at = self._full
        for left in reversed(others):
            at = node(left, at)
        return at
