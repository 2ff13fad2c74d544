"""Simulation in virtual time: the real queue, a modelled engine, and tenants with scripted
requests.

The engine is the product's own scheduler with a clock instead of the model. Requests that arrive
during a step take part in the next one.
"""

from __future__ import annotations

import heapq
import itertools
import random
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from api.core.errors import QueueFull, StartsTooLate
from api.core.settings import QueueSettings
from api.queue.exchange import INTERVAL_S, SILENT_S, Exchange
from api.queue.fair_queue import FairQueue, QueueEntry, ServiceTier
from api.queue.queue_admission import Arrival
from inference.core.kv_cache import BlockPool
from inference.core.scheduler import Scheduler, StepPlan
from inference.core.sequence import Sequence
from inference.engine import EngineStatistics
from inference.limits import EngineLimits
from metering.control.queue_reports import QueueReportRow
from tests.inference.running import make_request
from tests.inference.scheduler_model import NoText


def tenant_id(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, name)


@dataclass(slots=True, eq=False)
class Request:
    """Request with its result. Times in virtual seconds."""

    tenant: str
    input_tokens: int
    output_tokens: int
    sent_at: float
    output_tokens_max: int = 0
    tier: ServiceTier = ServiceTier.INTERACTIVE
    weight: float = 1.0
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    timeout_s: float | None = None
    process: int = 0  # that it is sent to
    entry: QueueEntry | None = None
    joined_at: float | None = None
    dispatched_at: float | None = None
    begun_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    sequence: Sequence | None = None
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
    """Engine whose steps take step_s plus token_s per token, with KV blocks of 16 tokens."""

    running_max: int = 32
    kv_block_count: int = 20_000
    step_tokens_max: int = 512
    step_s: float = 0.004
    token_s: float = 0.0001


POOL = "pool"


@dataclass(slots=True, eq=False)
class Process:
    """Api process: its queue, its exchange, and its row, which the others read.

    `is_cut_off` says that its exchanges fail, `is_paused` that it does nothing.
    """

    id: uuid.UUID
    queue: FairQueue
    exchange: Exchange
    written_at: float = -1e9
    report: bytes = b""
    is_cut_off: bool = False
    is_paused: bool = False


class World:
    """Time, the queues of some processes, the engine, and scheduled events."""

    def __init__(
        self,
        limits: QueueSettings | None = None,
        engine: EngineModel | None = None,
        *,
        has_window: bool = True,
        process_count: int = 1,
        exchanges: bool = True,
        counts_steps: bool = True,
    ) -> None:
        """has_window: without it the engine gets all requests at once, as without a queue.

        Without `exchanges`, each process knows its own requests only. Without `counts_steps`, they
        do not learn how many steps the engine has made.
        """
        self.now = 0.0
        self.engine = engine or EngineModel()
        self.counts_steps = counts_steps
        self.step_count = 0
        self.limits = limits or QueueSettings()
        self.processes: list[Process] = []
        self.service: dict[str, float] = defaultdict(float)  # charged units by tenant
        self.on_event: Callable[[], None] = lambda: None
        self.with_engine: set[Request] = set()
        self._live: set[Request] = set()  # entered, and not ended
        self._killed: set[Sequence] = set()  # to be removed before the next step
        self.ended: list[Request] = []
        self.output_tokens = 0
        waiting_max = 256 if has_window else 1 << 20
        engine = self.engine
        bounds = EngineLimits(
            1 << 20, engine.step_tokens_max, None, engine.running_max, waiting_max
        )
        self.scheduler = Scheduler(BlockPool(self.engine.kv_block_count), bounds)
        self._inbox: list[Request] = []
        self._sequence_numbers = itertools.count(1)
        self._by_sequence: dict[Sequence, Request] = {}
        self._on_end: dict[Request, Callable[[Request], None]] = {}
        self._stepping = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        for index in range(process_count):
            self.processes.append(self._process())
            if exchanges and process_count > 1:
                # As processes start at different times, so their exchanges alternate.
                self.at(INTERVAL_S * (index + 1) / process_count, partial(self._tick, index))
        if not has_window:
            vars(self.queue.window).update(has_room=lambda rank: True)  # replaces its method

    def _process(self) -> Process:
        queue = FairQueue(self.limits, self._statistics, lambda: self.now)
        process_id = uuid.uuid4()
        exchange = Exchange({POOL: queue}, process_id, lambda: self.now)
        return Process(process_id, queue, exchange)

    @property
    def queue(self) -> FairQueue:
        """Queue of the first process."""
        return self.processes[0].queue

    def _tick(self, index: int) -> None:
        """Let a process exchange reports, as the task of `QueueExchange` does."""
        process = self.processes[index]
        if process.is_cut_off:
            process.exchange.cut_off()
        elif not process.is_paused:
            process.report, process.written_at = process.exchange.report(), self.now
            rows = [
                QueueReportRow(each.id, each.report, each.written_at, self.now - each.written_at)
                for each in self.processes
                if each is not process and self.now - each.written_at <= SILENT_S
            ]
            for _ in process.exchange.take(rows):
                pass
        self.at(self.now + INTERVAL_S, lambda: self._tick(index))

    def kill(self, index: int) -> list[Request]:
        """Replace a process by a new one; return its requests, which end without an answer."""
        process = self.processes[index]
        lost = [each for each in self._live if each.process == index]
        for request in lost:
            self._live.discard(request)
            self.with_engine.discard(request)
            request.ended_at = self.now
            if request in self._inbox:
                self._inbox.remove(request)
            elif request.sequence in self._by_sequence:
                self._killed.add(request.sequence)
        self.processes[index] = self._process()
        del process
        return lost

    def _statistics(self) -> EngineStatistics:
        return EngineStatistics(
            step_count=self.step_count if self.counts_steps else 0,
            running_sequence_count_max=self.engine.running_max,
        )

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedule a call."""
        heapq.heappush(self._agenda, (when, next(self._numbers), act))

    def run(self, until: float) -> None:
        """Advance the time."""
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        self.now = until

    def end_of(self, request: Request) -> Callable[[Request], None] | None:
        """Return what its client does at the end of a request, and forget it."""
        return self._on_end.pop(request, None)

    def send(self, request: Request, on_end: Callable[[Request], None] | None = None) -> bool:
        """Enter the queue; return whether it admitted the request, which records a refusal."""
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
            entry = self.processes[request.process].queue.enter(arrival)
        except (QueueFull, StartsTooLate) as refusal:
            request.refusals.append(refusal)
            return False
        request.entry, request.joined_at = entry, self.now
        self._live.add(request)
        if on_end is not None:
            self._on_end[request] = on_end
        if entry.join(lambda: self._take(request)):
            self._take(request)
        self.on_event()
        return True

    def send_stubbornly(
        self, request: Request, on_end: Callable[[Request], None] | None = None
    ) -> None:
        """Retry each time after exactly the announced time."""
        if not self.send(request, on_end):
            retry_at = self.now + request.refusals[-1].retry_after_s
            self.at(retry_at, lambda: self.send_stubbornly(request, on_end))

    def keep_busy(
        self,
        tenant: str,
        agent_count: int,
        make: Callable[[], Request],
        until: float,
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Run agents of a tenant; each sends its next request `pause_s` after the end of the
        previous one.
        """

        def send() -> None:
            if self.now < until:
                request = make()
                request.sent_at = self.now
                self.send_stubbornly(request, again)

        def again(_: Request | None = None) -> None:
            self.at(self.now + pause_s(), send)

        for _ in range(agent_count):
            again()

    def _take(self, request: Request) -> None:
        if request not in self._live:
            return  # its process was killed
        assert request.entry is not None
        request.dispatched_at = self.now
        number = next(self._sequence_numbers)
        # Nothing is shared: each prompt begins with another token.
        tokens = range(number, number + request.input_tokens)
        made = make_request(tokens, request.output_tokens, rank=request.entry.rank)
        request.sequence = Sequence(number, made, 0, frozenset(), NoText({}, frozenset()))
        self._by_sequence[request.sequence] = request
        self._inbox.append(request)
        self.with_engine.add(request)
        if not self._stepping:
            self._stepping = True
            self.at(self.now, self._step)

    def _step(self) -> None:
        """Run the next step, up to its report."""
        for sequence in self._killed:
            if self._by_sequence.pop(sequence, None) is not None:
                self.scheduler.remove(sequence)
        self._killed.clear()
        for request in self._inbox:
            assert request.sequence is not None
            self.scheduler.add(request.sequence)
        self._inbox.clear()
        if not self._by_sequence:
            self._stepping = False
            return
        plan = self.scheduler.schedule()
        duration = self.engine.step_s + self.engine.token_s * plan.token_count
        # The worker begins its next step before the report of this one has been read.
        self.at(self.now + duration, lambda: self._report(plan))

    def _report(self, plan: StepPlan) -> None:
        self.step_count += 1
        finishing = [chunk.sequence for chunk in plan.chunks if chunk.completes]
        self.scheduler.commit(plan)
        done = [
            sequence
            for sequence in finishing
            if sequence.append(0, self.now).finish_reason is not None
        ]
        for sequence in done:
            self.scheduler.remove(sequence)
        requests = [self._by_sequence[sequence] for sequence in finishing]
        ended = [self._by_sequence.pop(sequence) for sequence in done]
        self.at(self.now, self._step)
        for sequence in plan.entered:
            request = self._by_sequence.get(sequence) or next(
                each for each in ended if each.sequence is sequence
            )
            assert request.entry is not None
            if request.sequence in self._killed:
                continue
            request.begun_at = self.now
            self.service[request.tenant] += request.input_tokens
            request.entry.begun()
        for request in requests:
            self._produce(request)
        for request in ended:
            self._end(request)

    def _produce(self, request: Request) -> None:
        assert request.entry is not None
        if request.sequence in self._killed:
            return
        self.output_tokens += 1
        self.service[request.tenant] += 2.0
        request.entry.generated(1)
        if request.first_token_at is None:
            request.first_token_at = self.now
        self.on_event()

    def _end(self, request: Request) -> None:
        assert request.entry is not None
        if request.sequence in self._killed:
            return
        self._live.discard(request)
        request.ended_at = self.now
        self.with_engine.discard(request)
        request.entry.leave()
        self.ended.append(request)
        self.on_event()
        if (on_end := self._on_end.pop(request, None)) is not None:
            on_end(request)


def percentile(values: list[float], percent: float) -> float:
    """Return the percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def agent(
    tenant: str, rng: random.Random, *, input_tokens: int = 1000, output_tokens: int = 150
) -> Callable[[], Request]:
    """Return a maker of requests of one shape, with lengths that vary by a fifth."""

    def make() -> Request:
        spread = rng.uniform(0.8, 1.2)
        return Request(
            tenant, int(input_tokens * spread), int(output_tokens * rng.uniform(0.8, 1.2)), 0.0
        )

    return make
