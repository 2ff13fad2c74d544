"""Tells a sequence that is stuck from an engine that is: by who is silent for too long while who goes on."""

from __future__ import annotations

import logging
import time

from inference.errors import EngineFailed
from inference.outside.core import OutsideCore

STALLS_MAX = 3  # single sequences that stuck while others went on: after so many it is the engine

_log = logging.getLogger("weir.inference.outside")


class StallWatch:
    """Looks at the silence of a core's sequences. The limits are in seconds: until the first token, and from one to the next."""

    def __init__(self, core: OutsideCore, first_token_timeout_s: float, inter_token_timeout_s: float) -> None:
        self._core = core
        self._first_token_timeout_s = first_token_timeout_s
        self._inter_token_timeout_s = inter_token_timeout_s
        self._stall_count = 0

    def look(self) -> str | None:
        """Fails the sequences that alone are stuck. Returns why the engine cannot go on, if it is the engine."""
        now_s = time.monotonic()
        stuck, shortest_s = [], self._first_token_timeout_s
        for choice in self._core.inside:
            first = choice.first_token_at_s is None
            limit_s = self._first_token_timeout_s if first else self._inter_token_timeout_s
            if choice.aborted or choice.stalled:
                continue  # it is waited for by another clock, or was counted and could not be ended
            if now_s - choice.silent_since_s > limit_s:
                stuck.append(choice)
                shortest_s = min(shortest_s, limit_s)
        if not stuck:
            return None
        self._stall_count += len(stuck)
        moving = now_s - self._core.moved_at_s < shortest_s / 2
        if not moving or self._stall_count >= STALLS_MAX:
            return f"{len(stuck)} sequences have been silent for too long"
        for choice in stuck:
            choice.stalled = True
            _log.error("sequence %d is stuck while others go on", choice.number)
            self._core.fail(choice, EngineFailed("the engine has stopped generating this sequence"))
        return None
