"""Demand of one api process for a launched replica, and the state that it has read.

An engine wants its replica while it serves. The scaler of all processes decides what happens; this
process only follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

WAITING = "waiting until there is room for its server"


@dataclass(frozen=True, slots=True)
class Standing:
    """Known state of a replica.

    `address` is empty unless its server takes requests. `failure` says why no start is tried now.
    `loading_since_s` is on the monotonic clock; None unless the server starts. `load_time_s` is the
    duration of the last start, 0 if unknown.
    """

    address: str = ""
    reason: str = WAITING
    failure: str = ""
    loading_since_s: float | None = None
    load_time_s: float = 0.0


class LaunchedReplica:
    """Replica `number` of a model or version, as seen by this process."""

    def __init__(
        self, served: str, number: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.served = served
        self.number = number
        self.wanted_since_s: float | None = None
        self.demand_changed: Callable[[], None] = lambda: None  # set by who writes demands
        self._clock = clock
        self._standing = Standing()
        self._changed = asyncio.Event()

    @property
    def standing(self) -> Standing:
        return self._standing

    def want(self) -> None:
        """Ask for the server, until `leave`."""
        if self.wanted_since_s is None:
            self.wanted_since_s = self._clock()
            self.demand_changed()

    def leave(self) -> None:
        """Do without the server."""
        if self.wanted_since_s is not None:
            self.wanted_since_s = None
            self.demand_changed()

    def follow(self, standing: Standing) -> None:
        """Record what is known now."""
        if standing != self._standing:
            self._standing = standing
            self.wake()

    def wake(self) -> None:
        """End all waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changes(self, timeout_s: float) -> None:
        """Wait for a change, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
