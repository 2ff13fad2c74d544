"""Decision on how a request ends, and its stopwatch; shared by generation and embedding.

Every early end of a request calls `EndDecision.stop`: cancellation, the deadline, a limit, the
safety checks, a client that does not read, an administrator, a lapsed hold, or shutdown. The first
call decides; the rest of the code reads `end`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import truediv
from types import TracebackType

from api.core.errors import CancelledEarly, DeadlineBeforeStart
from api.observability.spans import STAGES
from inference.engine import EngineTimings
from inference.errors import EngineFailed
from metering.core.models import Outcome

UNDELIVERED_OUTCOMES = frozenset({Outcome.CANCELLED, Outcome.DEADLINE, Outcome.SLOW_CONSUMER})

NAMES = tuple(f"{stage}_ms" for stage in STAGES)  # names of `weir.v1.Timings`
SETTLE_MS = NAMES[-1]
NO_TIMES = (0,) * (len(STAGES) - 1)
THOUSANDS = (1000,) * len(STAGES)


@dataclass(slots=True)
class End:
    """Reason why a request was stopped.

    `error` is sent to the client instead of a finish reason; delivered output is settled anyway.
    `detail` is sent with the finish reason and names the limit that ended the request.
    """

    outcome: Outcome
    error: Exception | None = None
    detail: str = ""


class Stopped(Exception):
    """Raised inside a request that was stopped without an error while it waited for an engine."""


class EndDecision:
    """Decision on how one request ends; the first stop decides.

    `end` is why it was stopped; None if it is running or ended by itself. If `discards`, output
    that is waiting is not delivered.
    """

    __slots__ = ("_is_closed", "_on_stop", "_task", "discards", "end", "is_stopped")

    def __init__(self, on_stop: Callable[[End], None] = lambda _: None) -> None:
        """`on_stop` is called once, when the request is stopped. It must not block."""
        self.end: End | None = None
        self.is_stopped = False
        self.discards = False
        self._is_closed = False
        self._on_stop = on_stop
        self._task: asyncio.Task[object] | None = None  # set inside an `Interruptible`

    def stop(self, outcome: Outcome, error: Exception | None = None, detail: str = "") -> None:
        """Stop the request as soon as possible, unless it is ending already. Never blocks."""
        if self.is_stopped or self._is_closed:
            return
        self.is_stopped = True
        self.end = End(outcome, error, detail)
        self.discards = self.discards or outcome in UNDELIVERED_OUTCOMES
        self._on_stop(self.end)
        if self._task is not None:
            self._task.cancel()

    def close(self, result: Outcome | Exception) -> tuple[Outcome | None, Outcome | Exception]:
        """Refuse further stops, drop the reference to the request, and decide how the request ends.

        `result` is the engine's outcome, an error, or `Stopped`. Returns the outcome to store, or
        None if the error determines it, and the end of the request: that outcome or an error. A
        failure takes precedence over a stop, and a stop over the engine's outcome.
        """
        self._is_closed, self._on_stop, end = True, _ignore, self.end
        if isinstance(result, Exception) and not isinstance(result, Stopped):
            return None, result
        if end is not None:
            # A stop with an error keeps its outcome, unless it is a failure.
            is_failure = end.error is not None and end.outcome is Outcome.FAILED
            return None if is_failure else end.outcome, end.error or end.outcome
        if not isinstance(result, Outcome) or result is Outcome.CANCELLED:
            return None, EngineFailed("the engine was closed while the request ran")
        return result, result


def _ignore(end: End) -> None:
    """Ignore a stop after the end of the request."""


def error_before_hold(end: End) -> Exception:
    """Return the error for a request that was stopped before it had a hold."""
    if end.error is not None:
        return end.error
    if end.outcome is Outcome.DEADLINE:
        return DeadlineBeforeStart(
            "The deadline passed before your request was admitted. Allow more time."
        )
    return CancelledEarly(
        "You cancelled the request before it was admitted. Nothing is billed; send it again if you"
        " need it."
    )


class Interruptible:
    """Context manager whose block a stop interrupts, by raising `error_of(end)`.

    If the request is stopped already, the block is not entered. Cancellation is confined to the
    block, because a task that is cancelled before its first step never runs, and would never end
    its request. Any other cancellation comes from shutdown.
    """

    __slots__ = ("_decision", "_error_of", "_task")

    def __init__(self, decision: EndDecision, error_of: Callable[[End], Exception]) -> None:
        self._decision = decision
        self._error_of = error_of
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        if self._decision.end is not None:
            raise self._error_of(self._decision.end)
        self._task = self._decision._task = asyncio.current_task()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._decision._task = None
        if not isinstance(error, asyncio.CancelledError):
            return
        end = self._decision.end
        if end is not None and self._task is not None:
            self._task.uncancel()
            raise self._error_of(end) from None


# Indices of `STAGES`.
AUTH, TOKENIZE, ADMISSION, COLD_START, QUEUE, PREFILL, DECODE, CLIENT_STALL, SETTLE = range(
    len(STAGES)
)


class Stopwatch:
    """Stopwatch for the stages of one request, which follow each other and add up to the total.

    Of the client's stall, only the part after the last token counts in the total. Whole
    microseconds are counted, which add up exactly.
    """

    __slots__ = ("_first_token_us", "_last_us", "_received_us", "_stages_us")

    def __init__(self, received_at: float, auth_ms: float) -> None:
        auth_us = int(auth_ms * 1000)
        self._received_us = int(received_at * 1e6)
        self._last_us = self._received_us + auth_us
        self._first_token_us = 0  # 0 before the first token
        self._stages_us = [auth_us, *NO_TIMES]

    def lap(self, stage: int) -> None:
        """Record that a stage ends now; the next one begins. Repeated stages add up."""
        now_us = time.monotonic_ns() // 1000
        self._stages_us[stage] += now_us - self._last_us
        self._last_us = now_us

    def first_token(self) -> None:
        """Record the first token from the engine. Later calls have no effect."""
        if not self._first_token_us:
            self._first_token_us = time.monotonic_ns() // 1000

    def forget_first_token(self) -> None:
        """Record that the time of the first token is unknown: the tokens came together."""
        self._first_token_us = 0

    def tokens_per_second(self, token_count: int) -> float:
        """Return the rate of this many tokens since the first one; 0 before the second."""
        elapsed_s = time.monotonic() - self._first_token_us / 1e6 if self._first_token_us else 0.0
        return (token_count - 1) / elapsed_s if token_count > 1 and elapsed_s > 0 else 0.0

    def engine_finished(self, timings: EngineTimings) -> None:
        """Record the end of engine work; split its time into queue, prefill and decode.

        The engine reports its queue time. The rest is measured here, so that it includes the
        transport to the engine and back.
        """
        now_us = time.monotonic_ns() // 1000
        first_token_us = self._first_token_us or now_us
        until_first_us = first_token_us - self._last_us
        queue_us = min(round(timings.queue_ms * 1000), until_first_us)
        stages_us = self._stages_us
        stages_us[QUEUE] += queue_us
        stages_us[PREFILL] += until_first_us - queue_us
        stages_us[DECODE] += now_us - first_token_us
        self._last_us = now_us

    def forwarded(self, stalled_s: float, later_s: float) -> None:
        """Record that the client has taken the output, or never will.

        Tokens waited for the client for `stalled_s` in total, and for `later_s` of that since the
        last stage; this part is not counted in the next stage.
        """
        if stalled_s:
            self._stages_us[CLIENT_STALL] = round(stalled_s * 1e6)
            now_us = time.monotonic_ns() // 1000
            self._last_us = min(self._last_us + round(later_s * 1e6), now_us)

    def timings(self) -> dict[str, float]:
        """Return the stages so far in ms, as in `weir.v1.Timings`, with TTFT and total."""
        result = dict(zip(NAMES, map(truediv, self._stages_us, THOUSANDS), strict=True))
        if self._first_token_us:
            result["ttft_ms"] = (self._first_token_us - self._received_us) / 1000
        result["total_ms"] = (time.monotonic_ns() // 1000 - self._received_us) / 1000
        return result

    def settled(self, before: Mapping[str, float]) -> dict[str, float]:
        """Record that the settlement ends now; return the timings `before` it, with it added."""
        now_us = time.monotonic_ns() // 1000
        settle_us, self._last_us = now_us - self._last_us, now_us
        total_us = now_us - self._received_us
        return {**before, SETTLE_MS: settle_us / 1000, "total_ms": total_us / 1000}
