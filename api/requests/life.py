"""Where a request stands and how it ends: the state machine that generation and embedding share.

Whatever can end a request before it has all its output calls `Life.stop`: its client, its deadline, a limit, the safety stage, a
client that does not read, an administrator, a hold that lapsed, this process going down. The first call decides; everybody else
reads `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from types import TracebackType

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
        self._task: asyncio.Task[object] | None = None  # inside a block of `interruptible`

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

    def interruptible(self, error_of: Callable[[End], Exception]) -> Interruptible:
        """Let `stop` cut the task short inside this block, which then raises what `error_of` makes of the end.

        Raises the same at once if the request was stopped before.
        """
        return Interruptible(self, error_of)

    def over(self) -> None:
        """The request has ended: from now on this refers to nothing of it."""
        self.become(State.ENDED)
        self._on_stop = None


class Interruptible:
    """A block of `Life.interruptible`.

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
