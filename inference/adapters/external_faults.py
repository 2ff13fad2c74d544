"""Faults of an external engine: empty outputs, sequences without progress.

A stuck sequence is distinguished from a stuck engine by how many are silent while others progress.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from inference.adapters.external_request import Choice
from inference.engine import (
    EngineFinishReason,
)
from inference.errors import EngineError, EngineFailed

# Stuck sequences that keep their place, while others progress, before the engine counts as stuck.
STALLS_MAX = 3
_log = logging.getLogger("weir.inference.adapters")


class EmptyAnswers:
    """Detector of a broken KV cache, by consecutive empty outputs of one engine."""

    def __init__(self, count_max: int) -> None:
        """`count_max` consecutive empty outputs indicate a fault; 0 disables the detection."""
        self._count_max = count_max
        # salts of the current run of empty outputs
        self._salts: deque[str] = deque(maxlen=count_max)

    def show_a_fault(self, choice: Choice, inside: Iterable[Choice]) -> bool:
        """Return whether the end of this choice indicates an engine fault. `inside` yields the
        choices that are still in the engine.

        Empty outputs of one tenant do not count while the engine serves other tenants: a restart
        would end their streams.
        """
        request = choice.request.generation
        if choice.ended is EngineFinishReason.CANCELLED or not self._count_max:
            return False
        if request.output_token_ids or request.stop.stop_token_ids or request.sampling.logit_bias:
            return False  # the request may ask for an empty output
        if choice.token_count > 1 or choice.ended is not EngineFinishReason.STOP:
            self._salts.clear()
            return False
        self._salts.append(request.cache_salt)
        known = {*self._salts}
        serves_others = any(other.request.generation.cache_salt not in known for other in inside)
        return len(self._salts) == self._count_max and (len(known) > 1 or not serves_others)


class WatchedQueue(Protocol):
    """Interface of a request queue for `StallWatch`. `moved_at_s` is the time of the last token."""

    moved_at_s: float

    @property
    def inside(self) -> Iterator[Choice]:
        """Iterate over the choices that are in the engine."""
        ...

    def fail(self, choice: Choice, why: EngineError) -> None:
        """End the request of a choice with an error."""
        ...


class StallWatch:
    """Detector of sequences without new tokens. The timeouts, in seconds, apply to the first token
    and to the time between two tokens. An answer that comes whole has the time for its first token
    and for as many others as it may have.

    `abort_frees` tells whether aborting a sequence certainly frees its place in the engine.
    """

    def __init__(
        self,
        queue: WatchedQueue,
        first_token_timeout_s: float,
        inter_token_timeout_s: float,
        *,
        abort_frees: bool = False,
    ) -> None:
        self._queue = queue
        self._first_token_timeout_s = first_token_timeout_s
        self._inter_token_timeout_s = inter_token_timeout_s
        self._abort_frees = abort_frees
        self._stall_count = 0

    def poll(self) -> str | None:
        """Fail the sequences that are stuck. Return the reason if the engine itself is stuck."""
        now_s = time.monotonic()
        stuck, shortest_s = [], self._first_token_timeout_s
        for choice in self._queue.inside:
            first = choice.first_token_at_s is None
            limit_s = self._first_token_timeout_s if first else self._inter_token_timeout_s
            if first and choice.is_whole:
                limit_s += choice.token_count_max * self._inter_token_timeout_s
            if choice.aborted or choice.stalled:
                continue  # limited by abort_drain_s, or already counted
            if now_s - choice.silent_since_s > limit_s:
                stuck.append(choice)
                shortest_s = min(shortest_s, limit_s)
        if not stuck:
            return None
        silent = f"{len(stuck)} sequences have been silent for too long"
        if now_s - self._queue.moved_at_s >= shortest_s / 2:
            return silent
        for choice in stuck:
            choice.stalled = True
            _log.error("sequence %d is stuck while others progress", choice.number)
            self._queue.fail(
                choice, EngineFailed("the engine has stopped generating this sequence")
            )
            self._stall_count += not (choice.aborted and self._abort_frees)
        return silent if self._stall_count >= STALLS_MAX else None
