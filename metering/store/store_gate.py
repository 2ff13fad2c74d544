"""Whether PostgreSQL is known to be away, and who may try it next. One per process, shared by everything that connects.

While the database answers, nobody notices this. Once it does not, one attempt at a time is let through, after growing pauses with a
random part; everybody else is told `StoreAway` at once. So an outage costs a process a few attempts per second however many clients
come, and processes that lost the database together do not come back together.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from metering.errors import StoreAway

BACKOFF_LEAST_S = 0.05  # a database that is restarted is missed for no longer than that
BACKOFF_MOST_S = 2.0  # how late, and half as much again, the end of a long outage is noticed
CONNECT_TIMEOUT_S = 5  # beyond it the attempt counts as failed; a local network answers within milliseconds


class StoreGate:
    """Not thread-safe: one event loop asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random) -> None:
        """clock: in seconds. jitter: a random number from 0 to 1."""
        self._clock = clock
        self._jitter = jitter
        self._away_since: float | None = None
        self._failure_count = 0
        self._next_attempt_at = -math.inf
        self._attempting = False

    @property
    def away_s(self) -> float | None:
        """For how long the database has not answered; None while it does. Starts with the first failure, not with the outage."""
        return None if self._away_since is None else self._clock() - self._away_since

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt is let through; at least a moment."""
        return max(self._next_attempt_at - self._clock(), BACKOFF_LEAST_S)

    def check(self) -> None:
        """Raises: StoreAway while the database is away and no attempt is due."""
        if self._away_since is not None and (self._attempting or self._clock() < self._next_attempt_at):
            raise StoreAway("the database does not answer", retry_after_s=max(self.pause_s, 1.0))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Connect inside the block, whose error counts as a failure. Raises: StoreAway without trying, as `check` does."""
        self.check()
        if self._away_since is None:  # as many at once as there are pools and places in them
            try:
                yield
            except Exception:
                self.failed()
                raise
            return
        self._attempting = True
        try:
            yield
        except BaseException:
            self.failed()
            raise
        finally:
            self._attempting = False

    def answered(self) -> None:
        """The database has answered something."""
        self._away_since = None
        self._failure_count = 0

    def failed(self) -> None:
        """An attempt to connect came to nothing, or the database went silent."""
        if self._away_since is None:
            self._away_since = self._clock()
        pause_s = min(BACKOFF_LEAST_S * 2**self._failure_count, BACKOFF_MOST_S) * (0.5 + self._jitter())
        self._failure_count = min(self._failure_count + 1, 32)
        self._next_attempt_at = self._clock() + pause_s
