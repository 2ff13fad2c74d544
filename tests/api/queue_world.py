"""A world in virtual time: the real queue before a modelled engine, and tenants that send requests by a plan. Nothing sleeps.

The engine is modelled step by step as ours works: in order of arrival, at most so many sequences at once, decoding first, the rest
of a step's tokens for prompts. What is handed over while a step runs is seen by the step after it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from api.errors import QueueFull, StartsTooLate
from api.fair_queue import FairQueue
from api.places import Arrival, Place, QueueLimits, ServiceTier
from inference.engine import EngineStatistics


def tenant_id(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, name)


@dataclass(slots=True, eq=False)
class Request:
    """One request and what became of it. Times in virtual seconds."""

    tenant: str
    input_tokens: int
    output_tokens: int
    sent_at: float
    output_tokens_max: int = 0
    tier: ServiceTier = ServiceTier.INTERACTIVE
    weight: float = 1.0
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    timeout_s: float | None = None
    place: Place | None = None
    joined_at: float | None = None
    handed_at: float | None = None
    begun_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    uncomputed: int = 0
    generated: int = 0
    refusals: list[QueueFull | StartsTooLate] = field(default_factory=list)

    @property
    def wait_s(self) -> float:
        assert self.begun_at is not None
        return self.begun_at - self.sent_at

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.sent_at


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What the engine can do. A step takes step_s and token_s for each of its tokens."""

    running_max: int = 32
    step_tokens_max: int = 512
    step_s: float = 0.004
    token_s: float = 0.0001


class World:
    """Time, the queue, the engine, and what happens next."""

    def __init__(self, limits: QueueLimits | None = None, engine: EngineModel | None = None, *, lookahead: bool = True) -> None:
        """lookahead: else the engine is given everything at once, as if there were no queue before it."""
        self.now = 0.0
        self.engine = engine or EngineModel()
        self.step_count = 0
        self.queue = FairQueue(limits or QueueLimits(), self._statistics, lambda: self.now)
        if not lookahead:
            self.queue._lookahead.window = 1e9
        self.service: dict[str, float] = defaultdict(float)  # units by tenant, as they are charged
        self.on_event: Callable[[], None] = lambda: None
        self.with_engine: set[Request] = set()
        self.ended: list[Request] = []
        self.output_tokens = 0
        self._inbox: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._on_end: dict[Request, Callable[[Request], None]] = {}
        self._stepping = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def _statistics(self) -> EngineStatistics:
        return EngineStatistics(step_count=self.step_count, running_sequence_count_max=self.engine.running_max)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._agenda, (when, next(self._numbers), act))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        self.now = until

    def send(self, request: Request, on_end: Callable[[Request], None] | None = None) -> bool:
        """Ask for a place and join; whether there was one. A refusal is noted in the request."""
        arrival = Arrival(
            request.id,
            tenant_id(request.tenant),
            request.input_tokens,
            request.output_tokens_max or request.output_tokens,
            tier=request.tier,
            weight=request.weight,
            deadline=None if request.timeout_s is None else self.now + request.timeout_s,
        )
        try:
            place = self.queue.enter(arrival)
        except (QueueFull, StartsTooLate) as refusal:
            request.refusals.append(refusal)
            return False
        request.place, request.joined_at = place, self.now
        place.on_turn = lambda: self._take(request, on_end)
        self.queue.join(place)
        self.on_event()
        return True

    def send_stubbornly(self, request: Request, on_end: Callable[[Request], None] | None = None) -> None:
        """Come back each time after exactly the time that was told."""
        if not self.send(request, on_end):
            self.at(self.now + request.refusals[-1].retry_after_s, lambda: self.send_stubbornly(request, on_end))

    def keep_busy(self, tenant: str, agent_count: int, make: Callable[[], Request], until: float) -> None:
        """So many agents of a tenant, each of which sends its next request when the one before has ended."""

        def again(_: Request | None = None) -> None:
            if self.now < until:
                request = make()
                request.sent_at = self.now
                self.send_stubbornly(request, again)

        for _ in range(agent_count):
            self.at(self.now, again)

    def _take(self, request: Request, on_end: Callable[[Request], None] | None) -> None:
        request.handed_at = self.now
        request.uncomputed = request.input_tokens
        self.service[request.tenant] += request.input_tokens
        self._inbox.append(request)
        self.with_engine.add(request)
        if on_end is not None:
            self._on_end[request] = on_end
        if not self._stepping:
            self._stepping = True
            self.at(self.now, self._step)

    def _step(self) -> None:
        """The next step, up to its report."""
        self._waiting += self._inbox
        self._inbox.clear()
        if not self._waiting and not self._running:
            self._stepping = False
            return
        budget = self.engine.step_tokens_max
        entered: list[Request] = []
        chunks: list[tuple[Request, int]] = []
        for request in sorted(self._running, key=lambda each: each.uncomputed > 1):  # a stable sort: decoding first
            budget -= self._chunk(request, budget, chunks)
        while self._waiting and len(self._running) < self.engine.running_max and budget > 0:
            request = self._waiting.popleft()
            self._running.append(request)
            entered.append(request)
            budget -= self._chunk(request, budget, chunks)
        token_count = self.engine.step_tokens_max - budget
        duration = self.engine.step_s + self.engine.token_s * token_count
        # The host begins its next step before the report of this one has been read.
        self.at(self.now + duration, lambda: self._report(entered, chunks))

    def _chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]]) -> int:
        count = min(max(request.uncomputed, 1), budget)
        if count > 0:
            chunks.append((request, count))
        return max(count, 0)

    def _report(self, entered: list[Request], chunks: list[tuple[Request, int]]) -> None:
        self.step_count += 1
        done, produced = [], []
        for request, count in chunks:
            request.uncomputed -= count
            if request.uncomputed <= 0:
                request.uncomputed = 1
                produced.append(request)
                if request.generated + 1 == request.output_tokens:
                    done.append(request)
                    self._running.remove(request)
        self.at(self.now, self._step)
        for request in entered:
            assert request.place is not None
            request.begun_at = self.now
            request.place.begun()
        for request in produced:
            self._produce(request)
        for request in done:
            self._end(request)

    def _produce(self, request: Request) -> None:
        assert request.place is not None
        request.generated += 1
        self.output_tokens += 1
        self.service[request.tenant] += 2.0
        request.place.generated(1)
        if request.first_token_at is None:
            request.first_token_at = self.now
        self.on_event()

    def _end(self, request: Request) -> None:
        assert request.place is not None
        request.ended_at = self.now
        self.with_engine.discard(request)
        request.place.leave()
        self.ended.append(request)
        self.on_event()
        if (on_end := self._on_end.pop(request, None)) is not None:
            on_end(request)


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def agent(tenant: str, rng: random.Random, *, input_tokens: int = 1000, output_tokens: int = 150) -> Callable[[], Request]:
    """Requests of one shape, with lengths that vary by a fifth."""

    def make() -> Request:
        spread = rng.uniform(0.8, 1.2)
        return Request(tenant, int(input_tokens * spread), int(output_tokens * rng.uniform(0.8, 1.2)), 0.0)

    return make
