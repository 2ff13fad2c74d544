"""Exponential backoff between retries."""

from __future__ import annotations


def backoff_s(failure_count: int, shortest_s: float, longest_s: float) -> float:
    """Compute a delay in seconds: `shortest_s`, doubled by each failure up to `longest_s`."""
    return min(shortest_s * 2.0 ** min(max(failure_count - 1, 0), 50), longest_s)


class Backoff:
    """Exponential backoff of one retry loop: counts its consecutive failures."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._failure_count = 0

    def next_s(self) -> float:
        """Count a failure; compute the delay in seconds before the next attempt."""
        self._failure_count += 1
        return backoff_s(self._failure_count, self._shortest_s, self._longest_s)

    def reset(self) -> None:
        """Reset the delay after a success."""
        self._failure_count = 0
