"""What a queue hands out: places, and the values that tell of them. The queue itself is in `fair_queue.py`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Protocol, Self

from api.queue.virtual_tokens import Tenant
from metering.core.models import ServiceTier as ServiceTier

ALL_TENANTS = uuid.UUID(int=0)  # in whose line everybody stands where fairness is off


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of one engine's queue; see `Settings` for their reasons. fair: tenants take turns; else arrival is the order."""

    request_count_max: int = 2000
    tenant_request_count_max: int = 1000
    batch_wait_s_max: float = 30.0
    fair: bool = True


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the queue has to know of a request. deadline: by the queue's clock; compiles: it has a response format."""

    request_id: uuid.UUID
    tenant_id: uuid.UUID
    input_token_count: int
    output_token_count_max: int
    tier: ServiceTier = ServiceTier.INTERACTIVE
    weight: float = 1.0
    sequence_count: int = 1
    compiles: bool = False
    deadline: float | None = None

    @property
    def key(self) -> tuple[uuid.UUID, uuid.UUID]:
        """Tenant and request: ids of requests are minted by clients, so two tenants may use the same one."""
        return self.tenant_id, self.request_id


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request that waits may expect. position: requests ahead of it; wait_s: None if nothing was observed yet."""

    place: Place
    position: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counts of requests, but for the engine's, which are in sequences. peak: the most that ever waited.

    longest_wait_s: what the last of those that wait may expect; None where nothing waits, or nothing was observed yet.
    """

    waiting_count: int
    waiting_count_peak: int
    promise_count: int
    refused_count: int
    engine_pending_count: int
    engine_window: int
    longest_wait_s: float | None = None


class State(Enum):
    """Where a place stands in its life; each follows from the one before, and GONE from any."""

    ENTERED = auto()  # its hold is being taken, or its engine started
    WAITING = auto()
    HANDED = auto()  # the engine has it, and has not begun
    RUNNING = auto()
    GONE = auto()


class Queue(Protocol):
    """What a place tells its queue."""

    def join(self, place: Place) -> None:
        """Begin to wait for the turn."""
        ...

    def begun(self, place: Place) -> None:
        """The engine has let a request enter."""
        ...

    def generated(self, place: Place, token_count: int) -> None:
        """The engine has generated so many more tokens for it."""
        ...

    def leave(self, place: Place) -> None:
        """The place is given back."""
        ...


class Place:
    """One request's place, as a context manager: leaving gives it back, wherever it stands. Made by `FairQueue.enter`."""

    def __init__(self, queue: Queue, arrival: Arrival, number: int) -> None:
        self.arrival = arrival
        self.number = number
        self.state = State.ENTERED
        self.tenant: Tenant[Place] | None = None  # from `join` on
        self.generated_token_count = 0
        self.handed_at_step = 0
        self.rank = 0.0  # for the engine, from its turn on
        self.on_turn: Callable[[], None] = lambda: None
        self._queue = queue

    @property
    def input_token_count(self) -> int:
        """Tokens of the prompt."""
        return self.arrival.input_token_count

    @property
    def output_token_count_max(self) -> int:
        """Most tokens that it may generate."""
        return self.arrival.output_token_count_max

    async def turn(self) -> None:
        """Wait until the engine is to have the request. Cancelled, it still has to be left."""
        self._queue.join(self)
        if self.state is State.WAITING:
            handed = asyncio.Event()
            self.on_turn = handed.set
            await handed.wait()

    def begun(self) -> None:
        """The engine has let it enter."""
        self._queue.begun(self)

    def generated(self, token_count: int) -> None:
        """The engine has generated so many more tokens for it."""
        self._queue.generated(self, token_count)

    def leave(self) -> None:
        """Give it back; once is enough."""
        self._queue.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()
