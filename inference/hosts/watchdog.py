"""Notices when something that should be heard from is silent for too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Watchdog:
    """Looks a few times per timeout and calls back after each silence that is longer. Belongs to one event loop."""

    def __init__(self, timeout_s: float, on_silence: Callable[[float], None]) -> None:
        """on_silence: called with the silence in seconds; it decides whether that is a fault."""
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._heard_at_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """A sign of life."""
        self._heard_at_s = asyncio.get_running_loop().time()

    def arm(self) -> None:
        """Start watching; counts as a sign of life."""
        self.heard()
        self._schedule()

    def disarm(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / 4, self._look)

    def _look(self) -> None:
        silence_s = asyncio.get_running_loop().time() - self._heard_at_s
        if silence_s > self._timeout_s:
            self._on_silence(silence_s)
        self._schedule()
