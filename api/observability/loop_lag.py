"""How late the event loop of this process is: what each of its frames and tokens waits for, whoever is to blame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from api.observability.histogram import Histogram

INTERVAL_S = 0.05  # between two looks: some 20 µs of CPU each
LAG_BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)


class LoopLag:
    """Measured by a timer, and by how much later than asked it comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self.lags = Histogram(LAG_BOUNDS_MS)
        self._clock = clock

    async def measure(self, late: Callable[[float], None] = lambda _: None, interval_s: float = INTERVAL_S) -> None:
        """Until cancelled. late: told of each lag, in seconds."""
        while True:
            due_at = self._clock() + interval_s
            await asyncio.sleep(interval_s)
            lag_s = max(self._clock() - due_at, 0.0)
            self.lags.observe(lag_s * 1000)
            late(lag_s)
