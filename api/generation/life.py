"""Where a request stands and how it ends: the state machine that generation and embedding share.

Whatever can end a request before it has all its output calls `Life.stop`: its client, its deadline, a limit, the safety stage, a
client that does not read, an administrator, a hold that lapsed, this process going down. The first call decides; everybody else
reads `end`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from types import TracebackType

from api.observability.observer import STAGES
from inference.engine import EngineTimings
from metering.core.models import Outcome

UNDELIVERED_OUTCOMES = frozenset({Outcome.CANCELLED, Outcome.DEADLINE, Outcome.SLOW_CONSUMER})


class State(IntEnum):
    """Where a request stands. Whoever waits goes between `LOADING` and `QUEUED`; an embedding queues for each of its parts."""

    RECEIVED = auto()
    PREPARING = auto()
    ADMITTED = auto()
    LOADING = auto()  # it waits for an engine that is being started
    QUEUED = auto()  # it waits for its turn
    RUNNING = auto()
    SETTLING = auto()
    ENDED = auto()

    @property
    def phase(self) -> str:
        """The word for it in the live view and in metrics."""
        return PHASES[self]


WAITING = frozenset({State.LOADING, State.QUEUED})
PHASES = {
    State.RECEIVED: "preparing",
    State.PREPARING: "preparing",
    State.ADMITTED: "queued",
    State.LOADING: "loading",
    State.QUEUED: "queued",
    State.RUNNING: "streaming",
    State.SETTLING: "ending",
    State.ENDED: "ending",
}
NEXT: dict[State, frozenset[State]] = {
    State.RECEIVED: frozenset({State.PREPARING, State.ENDED}),
    State.PREPARING: frozenset({State.ADMITTED, State.ENDED}),
    State.ADMITTED: frozenset({*WAITING, State.SETTLING, State.ENDED}),
    State.LOADING: frozenset({*WAITING, State.RUNNING, State.SETTLING, State.ENDED}),
    State.QUEUED: frozenset({*WAITING, State.RUNNING, State.SETTLING, State.ENDED}),
    State.RUNNING: frozenset({*WAITING, State.RUNNING, State.SETTLING, State.ENDED}),
    State.SETTLING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(slots=True)
class End:
    """Why a request was stopped. error: what its client is told instead of a finish reason; what was delivered is still settled."""

    outcome: Outcome
    error: Exception | None = None


class Life:
    """The state of one request, and the decision how it ends.

    end: why it was stopped; None while it was not, and for a request that ends by itself. discards: output that waits for its
    client is not delivered.
    """

    __slots__ = ("_on_stop", "_task", "discards", "end", "state")

    def __init__(self, on_stop: Callable[[End], None] | None = None) -> None:
        """on_stop: called once, when it is stopped; must not block."""
        self.state = State.RECEIVED
        self.end: End | None = None
        self.discards = False
        self._on_stop = on_stop
        self._task: asyncio.Task[object] | None = None  # inside an `Interruptible`

    def become(self, state: State) -> None:
        """Go on to a state."""
        assert state in NEXT[self.state], f"a request does not go from {self.state.name} to {state.name}"
        self.state = state

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """End the request as soon as possible, for this reason, unless it ends already. Never blocks."""
        if self.end is not None or self.state >= State.SETTLING:
            return
        self.end = End(outcome, error)
        self.discards = self.discards or outcome in UNDELIVERED_OUTCOMES
        if self._on_stop is not None:
            self._on_stop(self.end)
        if self._task is not None:
            self._task.cancel()

    def over(self) -> None:
        """The request has ended: from now on this refers to nothing of it."""
        assert self.state is not State.ENDED, "a request ends once"
        self.state = State.ENDED
        self._on_stop = None


class Interruptible:
    """A block that `Life.stop` cuts short: it then raises what `error_of` makes of the end, and at once if that was decided before.

    Only inside it: a task that is cancelled before its first step never runs at all, and so would never end its request. Any other
    cancellation is the process ending.
    """

    __slots__ = ("_error_of", "_life", "_task")

    def __init__(self, life: Life, error_of: Callable[[End], Exception]) -> None:
        self._life = life
        self._error_of = error_of
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        if self._life.end is not None:
            raise self._error_of(self._life.end)
        self._task = self._life._task = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._life._task = None
        if not isinstance(error, asyncio.CancelledError):
            return
        end = self._life.end
        if end is not None and self._task is not None:
            self._task.uncancel()
            raise self._error_of(end) from None


NAMES = {stage: f"{stage}_ms" for stage in STAGES}  # as in `weir.v1.Timings`
NO_TIMINGS = dict.fromkeys(NAMES.values(), 0.0)


class Stopwatch:
    """Laps of one request. The stages follow each other, so that together they are the total."""

    def __init__(self, received_at: float, auth_ms: float) -> None:
        self._received_at = received_at
        self._last = received_at + auth_ms / 1000
        self._first_token_at: float | None = None
        self._stages_ms = NO_TIMINGS | {"auth_ms": auth_ms}

    def lap(self, stage: str) -> None:
        """A stage ends now; it began when the one before it ended. One that comes several times has all of them together."""
        now = time.monotonic()
        self._stages_ms[NAMES[stage]] += (now - self._last) * 1000
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
        stages_ms = self._stages_ms
        stages_ms["queue_ms"] += queue_ms
        stages_ms["prefill_ms"] += until_first_ms - queue_ms
        stages_ms["decode_ms"] += (now - first_token_at) * 1000
        self._last = now

    def timings(self) -> dict[str, float]:
        """All stages so far as `<stage>_ms`, with `ttft_ms` and `total_ms`; names as in `weir.v1.Timings`."""
        result = {name: round(time_ms, 3) for name, time_ms in self._stages_ms.items()}
        if self._first_token_at is not None:
            result["ttft_ms"] = round((self._first_token_at - self._received_at) * 1000, 3)
        result["total_ms"] = round((time.monotonic() - self._received_at) * 1000, 3)
        return result
