"""A histogram with fixed buckets, filled by the event loop at the price of an addition, and read by it when somebody scrapes.

The client library's own takes a lock for each observation, which takes eight times as long; nothing here needs one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by the first bound that they do not exceed, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending; one more bucket takes what exceeds them all."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """The same value so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def copy(self) -> Histogram:
        """As it is now."""
        made = Histogram(self.bounds)
        made.counts, made.sum = self.counts[:], self.sum
        return made

    @property
    def count(self) -> int:
        """Of all values."""
        return sum(self.counts)

    def buckets(self, unit: float = 1.0) -> list[tuple[str, float]]:
        """Bounds, in so many of their units, and how many values do not exceed each: as the exposition format wants them."""
        found, below = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            found.append((f"{bound * unit:g}", float(below)))
        found.append(("+Inf", float(below + self.counts[-1])))
        return found
