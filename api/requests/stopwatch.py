"""Where the time of one request goes: consecutive stages on one monotonic clock, in ms."""

from __future__ import annotations

import time

from api.observability.counts import STAGES
from inference.engine import EngineTimings

NAMES = {stage: f"{stage}_ms" for stage in STAGES}  # as in `weir.v1.Timings`
NO_TIMINGS = dict.fromkeys(NAMES.values(), 0.0)


class Stopwatch:
    """Laps of one request. The stages follow each other, so that together they are the total."""

    def __init__(self, received_at: float, auth_ms: float) -> None:
        self._received_at = received_at
        self._last = received_at + auth_ms / 1000
        self._first_token_at: float | None = None
        self._stages_ms = NO_TIMINGS | {"auth_ms": round(auth_ms, 3)}

    def lap(self, stage: str) -> None:
        """A stage ends now; it began when the one before it ended. One that comes several times has all of them together."""
        now = time.monotonic()
        self._add(stage, (now - self._last) * 1000)
        self._last = now

    def first_token(self) -> None:
        """A token arrived from the engine; only the first one counts."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()

    @property
    def since_first_token_s(self) -> float:
        """Time since the first token; 0 before it."""
        return 0.0 if self._first_token_at is None else time.monotonic() - self._first_token_at

    def engine_finished(self, timings: EngineTimings) -> None:
        """The engine is done: split the time since submission into queue, prefill and decode.

        The engine knows how long the request waited for its place, after it had waited for its turn; the rest is measured here, so
        that the way to the engine and back is counted too.
        """
        now = time.monotonic()
        first_token_at = now if self._first_token_at is None else self._first_token_at
        until_first_ms = (first_token_at - self._last) * 1000
        queue_ms = min(timings.queue_ms, until_first_ms)
        self._add("queue", queue_ms)
        self._add("prefill", until_first_ms - queue_ms)
        self._add("decode", (now - first_token_at) * 1000)
        self._last = now

    def timings(self) -> dict[str, float]:
        """All stages so far as `<stage>_ms`, with `ttft_ms` and `total_ms`; names as in `weir.v1.Timings`."""
        result = self._stages_ms.copy()
        if self._first_token_at is not None:
            result["ttft_ms"] = round((self._first_token_at - self._received_at) * 1000, 3)
        result["total_ms"] = round((time.monotonic() - self._received_at) * 1000, 3)
        return result

    def _add(self, stage: str, time_ms: float) -> None:
        name = NAMES[stage]
        self._stages_ms[name] = round(self._stages_ms[name] + time_ms, 3)
