"""Exponential backoff: how long to wait before something that failed is tried again."""

from __future__ import annotations


def backoff_s(failure_count: int, shortest_s: float, longest_s: float) -> float:
    """Return the seconds to wait after so many failures in a row: `shortest_s`, doubled by each further one up to `longest_s`."""
    return min(shortest_s * 2.0 ** min(max(failure_count - 1, 0), 50), longest_s)


class Backoff:
    """Waits of one loop that tries again and again."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._failure_count = 0

    def next_s(self) -> float:
        """Count a failure, and return the seconds to wait after it."""
        self._failure_count += 1
        return backoff_s(self._failure_count, self._shortest_s, self._longest_s)

    def reset(self) -> None:
        """Forget the failures: it works again."""
        self._failure_count = 0
