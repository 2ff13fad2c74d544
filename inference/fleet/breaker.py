"""A circuit breaker: whom to ask no more, and when to try again with one request. Pure data; the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """CLOSED lets everybody through, OPEN nobody, HALF_OPEN one at a time until that one tells."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """failure_count_max: failures in a row that open it. pause_s_min: its first time open; doubled by each probe that fails."""

    failure_count_max: int = 3
    pause_s_min: float = 2.0
    pause_s_max: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that mean nothing."""
        if self.failure_count_max < 1 or not 0 < self.pause_s_min <= self.pause_s_max:
            raise ValueError("failure_count_max must be at least 1, and pause_s_min above 0 and at most pause_s_max")


class CircuitBreaker:
    """Of one replica. Times are seconds of one monotonic clock.

    A process that dies fails all of its sequences at once, and that is one failure: a sequence that began before the last failure
    says nothing new by failing too.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._failure_count = 0
        self._failed_at_s: float | None = None
        self._open_until_s: float | None = None  # None: closed
        self._pause_s = limits.pause_s_min
        self._probing = False

    def state(self, now_s: float) -> BreakerState:
        """As it is now."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def admits(self, now_s: float) -> bool:
        """Whether a sequence may be begun now."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def wait_s(self, now_s: float) -> float:
        """Until it may admit one; 0 if it is not open."""
        return 0.0 if self._open_until_s is None else max(self._open_until_s - now_s, 0.0)

    def begun(self, now_s: float) -> bool:
        """A sequence begins; whether it is the probe."""
        assert self.admits(now_s), "whoever begins has asked"
        self._probing = self.state(now_s) is BreakerState.HALF_OPEN
        return self._probing

    def succeeded(self) -> None:
        """A sequence that began after the last failure has had a token."""
        self._failure_count = 0
        self._pause_s = self._limits.pause_s_min
        self._open_until_s = None
        self._probing = False

    def failed(self, began_at_s: float, now_s: float) -> None:
        """A sequence that began then was lost."""
        if self._failed_at_s is not None and began_at_s <= self._failed_at_s:
            return
        self._failed_at_s = now_s
        self._failure_count += 1
        if self._probing or self._failure_count >= self._limits.failure_count_max:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(self._pause_s * 2, self._limits.pause_s_max)
        self._probing = False

    def told_nothing(self) -> None:
        """The probe ended without showing anything: it was cancelled, or found no place."""
        self._probing = False

    def is_news(self, began_at_s: float) -> bool:
        """Whether a sequence that began then says anything about the time since the last failure."""
        return self._failed_at_s is None or began_at_s > self._failed_at_s
