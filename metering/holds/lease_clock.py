"""Local deadlines of the holds of this process.

PostgreSQL expires holds by its own clock. A process that was suspended, or cut off from the
database, cannot ask it in time, so each hold has a local deadline too. It is counted from before
the statement that set the expiry was sent, so it always passes first. A passed deadline stays
passed whatever a later renewal returns: the hold's room may already have gone to other requests.
"""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections.abc import Callable, Iterable

DRIFT = 0.01  # share of the expiry: far above the drift between two clocks within a minute

# Counts time in suspend and cannot be set. The monotonic clock of macOS does so too.
BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


boot_time_s = functools.partial(time.clock_gettime, BOOT_CLOCK)  # seconds on that clock


class LeaseClock:
    """Deadlines of this process's holds: a hold not renewed by then has lapsed."""

    def __init__(self, expiry_s: float, clock: Callable[[], float] = boot_time_s) -> None:
        self.now = clock
        self._span_s = expiry_s * (1 - DRIFT)
        # By integer id: UUIDs hash in Python at ten times the cost, once per delivered token.
        self.deadlines: dict[int, tuple[uuid.UUID, float]] = {}
        self._first_deadline = math.inf  # a lower bound of all deadlines

    @property
    def hold_ids(self) -> Iterable[uuid.UUID]:
        """Holds that have begun and not ended, including lapsed ones."""
        return [hold_id for hold_id, _ in self.deadlines.values()]

    def __len__(self) -> int:
        return len(self.deadlines)

    def begin(self, hold_ids: Iterable[uuid.UUID], sent_at: float) -> None:
        """Set the deadlines of holds taken by a statement sent at `sent_at` (clock seconds)."""
        deadline = sent_at + self._span_s
        self._first_deadline = min(self._first_deadline, deadline)
        for hold_id in hold_ids:
            self.deadlines[hold_id.int] = hold_id, deadline

    def extend(self, hold_id: uuid.UUID, sent_at: float) -> None:
        """Postpone the deadline of an extended hold, unless it has ended in this process."""
        if hold_id.int in self.deadlines:
            self.begin((hold_id,), sent_at)

    def renew(self, hold_ids: Iterable[uuid.UUID], sent_at: float) -> None:
        """Postpone the deadlines of renewed holds, except those that had passed at `sent_at`."""
        deadlines = self.deadlines
        self.begin(
            [
                each
                for each in hold_ids
                if each.int in deadlines and deadlines[each.int][1] > sent_at
            ],
            sent_at,
        )

    def end(self, hold_ids: Iterable[uuid.UUID]) -> None:
        """Remove the deadlines of ended holds."""
        for hold_id in hold_ids:
            self.deadlines.pop(hold_id.int, None)

    def may_have_lapsed(self) -> bool:
        """Return True if any hold may have lapsed. Usually costs one reading of the clock."""
        now = self.now()
        if now >= self._first_deadline:  # may be outdated by a renewal
            self._first_deadline = min(
                (deadline for _, deadline in self.deadlines.values()), default=math.inf
            )
        return now >= self._first_deadline

    def left_s(self, hold_id: uuid.UUID) -> float:
        """Compute the seconds until the hold's deadline; 0 if it has lapsed or ended."""
        entry = self.deadlines.get(hold_id.int)
        return 0.0 if entry is None else max(entry[1] - self.now(), 0.0)
