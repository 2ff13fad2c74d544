"""Until when this process may act under its holds, by a clock of its own.

PostgreSQL expires holds by PostgreSQL's clock. A process that was stopped, or cut off from the database, cannot ask it in time, so
each hold has a deadline here too, counted from before the statement that set its expiry was sent: it always passes first. Once
passed it stays passed, whatever a later renewal says: who has slept that long does not know what has been given to others.
"""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections.abc import Callable, Iterable

DRIFT = 0.01  # of the expiry: far more than two clocks can come apart by themselves in so short a time

# It goes on while the machine sleeps, and nobody can set it. macOS's monotonic clock does so by itself.
BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


boot_time_s = functools.partial(time.clock_gettime, BOOT_CLOCK)  # seconds on that clock


class LeaseClock:
    """Deadlines of the holds of one process."""

    def __init__(self, expiry_s: float, clock: Callable[[], float] = boot_time_s) -> None:
        self.now = clock
        self._span_s = expiry_s * (1 - DRIFT)
        # By the number of the id: UUIDs hash in Python, at ten times the cost, and each token that is delivered asks.
        self.deadlines: dict[int, tuple[uuid.UUID, float]] = {}
        self._first_deadline = math.inf  # none of them is earlier

    @property
    def hold_ids(self) -> Iterable[uuid.UUID]:
        """Holds that have begun and have not ended, lapsed ones among them."""
        return [hold_id for hold_id, _ in self.deadlines.values()]

    def __len__(self) -> int:
        return len(self.deadlines)

    def begin(self, hold_ids: Iterable[uuid.UUID], sent_at: float) -> None:
        """The holds were taken by a statement sent at that time: they are ours now, whatever was before."""
        deadline = sent_at + self._span_s
        self._first_deadline = min(self._first_deadline, deadline)
        for hold_id in hold_ids:
            self.deadlines[hold_id.int] = hold_id, deadline

    def extend(self, hold_id: uuid.UUID, sent_at: float) -> None:
        """The same for an extension, unless the hold has ended here before."""
        if hold_id.int in self.deadlines:
            self.begin((hold_id,), sent_at)

    def renew(self, hold_ids: Iterable[uuid.UUID], sent_at: float) -> None:
        """The expiry of these holds was moved, by a statement sent at that time."""
        deadlines = self.deadlines
        self.begin([each for each in hold_ids if each.int in deadlines and deadlines[each.int][1] > sent_at], sent_at)

    def end(self, hold_ids: Iterable[uuid.UUID]) -> None:
        """The holds have ended."""
        for hold_id in hold_ids:
            self.deadlines.pop(hold_id.int, None)

    def may_have_lapsed(self) -> bool:
        """Whether any hold may have lapsed. One look at the clock for all of them, but for some in a minute."""
        now = self.now()
        if now >= self._first_deadline:  # as it was before the last renewal, perhaps
            self._first_deadline = min((deadline for _, deadline in self.deadlines.values()), default=math.inf)
        return now >= self._first_deadline

    def left_s(self, hold_id: uuid.UUID) -> float:
        """For how long this process may still act under the hold; 0 for one that has lapsed or ended."""
        found = self.deadlines.get(hold_id.int)
        return 0.0 if found is None else max(found[1] - self.now(), 0.0)
