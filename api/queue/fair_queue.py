"""Queue in front of one engine: bounded, fair between tenants, with wait estimates.

Each request has a `QueueEntry` from before its hold until its end. Within a service tier, requests
are dispatched in the order of `virtual_tokens.Line`, and the engine follows the ranks assigned
here. `DispatchWindow` limits how many requests the engine gets at once. `QueueAdmission` refuses
requests if there is no room or they would start too late. Used by one event loop; nothing here
awaits.

Queues of several processes before the same engines exchange a `QueueReport` some times a second
(`exchange.py`): order, bounds, estimates and the turns of the batch tier are those of all of them.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self

import msgspec

from api.core.settings import QueueSettings
from api.queue.queue_admission import (
    ALL_TENANTS,
    Arrival,
    QueueAdmission,
    TenantEntries,
    WaitingCounts,
)
from api.queue.tier import Tier
from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, LineReport, Tenant
from inference.engine import EngineStatistics
from metering.core.models import ServiceTier as ServiceTier

# Units of service that no interactive tenant reaches in thirty years at a million per second.
BATCH_RANK = 1e15
BATCH = ServiceTier.BATCH
WINDOW_FIRST = 8.0  # sequences: a burst to an idle engine fills its first batch within a few steps
WINDOW_MIN = 2.0  # sequences: a tenant with little load may send two requests at once
# Sequences: together with overtaking ones below the queue limit of engines (256).
WINDOW_MAX = 160.0
# Sequences of all processes in total; one more request of each with all its choices still fits.
PENDING_MAX, CHOICES_MAX = 224, 16
BATCH_GAP_S = 0.5  # between turns of the batch tier in several processes: by then, each knows
# Sequences with a response format that do not count, since they wait for their grammar.
COMPILING_MAX = 32
# Steps: a sequence misses the step under way at its dispatch; the next one can take it.
STEPS_AT_ONCE = 2
STEPS_LONG = 3  # the target is one step of waiting
# Sequences per late one: slower than growth, since an empty batch costs more than unfairness.
SHRINK = 0.5


class QueueReport(msgspec.Struct, array_like=True, frozen=True):
    """State of one process's queue, for the others before the same engines.

    `batch_dispatch_age_s` is the number of seconds since the last turn of the batch tier there;
    None for never.
    """

    interactive: LineReport = LineReport()
    batch: LineReport = LineReport()
    entries: tuple[TenantEntries, ...] = ()
    batch_dispatch_age_s: float | None = None

    @property
    def has_work(self) -> bool:
        """True if requests wait there, or are in the engines."""
        return any(
            each.waiting_count or each.dispatched_count or each.owed_units
            for line in (self.interactive, self.batch)
            for each in line.tenants
        )


@dataclass(frozen=True, slots=True)
class ExpectedWait:
    """Expected wait of a request: `position` requests are ahead of it.

    `wait_s` is in seconds; None if nothing was measured yet.
    """

    entry: QueueEntry
    position: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counts of a queue: of requests, or of sequences for the engine. `peak` is the maximum so far.

    `longest_wait_s` is the expected wait of the last request in the queue; None if the queue is
    empty or nothing was measured yet.
    """

    waiting_count: int
    waiting_count_peak: int
    reservation_count: int
    refused_count: int
    engine_pending_count: int
    engine_window: int
    longest_wait_s: float | None = None


class State(Enum):
    """State of a queue entry. States follow in this order; GONE may follow any."""

    ENTERED = auto()  # its hold is being taken, or its engine is starting
    WAITING = auto()
    DISPATCHED = auto()  # the engine has it, but has not started on it
    RUNNING = auto()
    GONE = auto()


# Members of an enum are looked up by a descriptor, which takes 0.1 µs each time.
ENTERED, WAITING, DISPATCHED, RUNNING, GONE = State


class QueueEntry:
    """Entry of one request in the queue, from `FairQueue.enter`.

    As a context manager, it leaves the queue at the end of the block.
    """

    def __init__(self, queue: FairQueue, arrival: Arrival, number: int) -> None:
        self.arrival = arrival
        self.number = number
        self.input_token_count = arrival.input_token_count
        self.output_token_count_max = arrival.output_token_count_max
        self.state = ENTERED
        self.tier: Tier[QueueEntry] | None = None  # set by `join`
        self.tenant: Tenant[QueueEntry] | None = None
        self.generated_token_count = 0
        # Engine step at the dispatch; None: it did not wait for its turn.
        self.dispatched_at_step: int | None = None
        self.rank = 0.0  # for the engine; set at its turn
        self.on_dispatch: Callable[[], object] | None = None
        self._queue = queue

    @property
    def queue(self) -> FairQueue:
        """Queue that it entered."""
        return self._queue

    @property
    def is_dispatched(self) -> bool:
        """True if the request was dispatched and has not left."""
        return self.state is DISPATCHED or self.state is RUNNING

    def join(self, on_dispatch: Callable[[], object]) -> bool:
        """Start waiting for dispatch.

        Returns True if the request is dispatched at once, because nothing waits and the engine has
        room. Otherwise `on_dispatch` is called later; it must not use the queue.
        """
        assert self.state is ENTERED, "an entry waits once"
        queue, arrival = self._queue, self.arrival
        self.tier = tier = queue.batch if arrival.tier is BATCH else queue.interactive
        line, is_fair = tier.line, queue.is_fair
        tenant_id, weight = (arrival.tenant_id, arrival.weight) if is_fair else (ALL_TENANTS, 1.0)
        if tier is queue.batch and not line.waiting_count:
            queue.batch_waits_since = queue.clock()
        if not (
            queue.interactive.line.waiting_count
            or queue.batch.line.waiting_count
            or (tier is queue.batch and queue.interactive_waits_elsewhere)
        ):
            self.tenant, own_rank = line.arrive(tenant_id, weight)
            rank = (
                0.0 if not is_fair else own_rank + BATCH_RANK if tier is queue.batch else own_rank
            )
            if queue.window.has_room(rank):
                output_tokens = tier.line.expected_output_tokens(
                    self.tenant, self.output_token_count_max
                )
                line.pass_by(self, self.tenant, own_rank, output_tokens)
                self.rank, self.state = rank, DISPATCHED
                queue.stopped_waiting(arrival)
                queue.window.add(self)
                return True
        self.state = WAITING
        self.tenant = line.join(self, tenant_id, weight)
        queue.dispatch_waiting()
        if self.state is not WAITING:
            return True
        self.on_dispatch = on_dispatch
        return False

    async def wait_for_dispatch(self) -> None:
        """Wait until the request is dispatched. If cancelled, the caller must still `leave`."""
        dispatched = asyncio.Event()
        if not self.join(dispatched.set):
            await dispatched.wait()

    def begun(self) -> None:
        """Record that the engine has started on the request."""
        if self.state is not DISPATCHED:
            return
        tier, tenant, queue = self.tier, self.tenant, self._queue
        assert tier is not None, "only a dispatched request starts"
        assert tenant is not None
        self.state = RUNNING
        tier.line.begun(self, tenant)
        is_waited = queue.interactive.line.waiting_count or queue.batch.line.waiting_count
        engine = None
        if self.dispatched_at_step is not None:
            engine = queue.engine_statistics()
            steps = engine.step_count - self.dispatched_at_step
            overtakes = next(iter(queue.window.dispatched)).rank > self.rank
            # Otherwise it waited for its grammar, or not at all.
            if not (self.arrival.compiles or overtakes):
                queue.window.adapt(steps, behind=bool(is_waited))
        queue.window.remove(self)
        if is_waited:
            queue.dispatch_waiting(engine)

    def generated(self, token_count: int) -> None:
        """Charge the tenant for newly generated tokens, and measure the service rate."""
        tier, tenant = self.tier, self.tenant
        assert tier is not None, "only a dispatched request generates"
        assert tenant is not None
        units = OUTPUT_TOKEN_COST * token_count
        if not self.generated_token_count:
            units += INPUT_TOKEN_COST * self.input_token_count
        self.generated_token_count += token_count
        tier.line.charge(self, tenant, OUTPUT_TOKEN_COST * token_count)
        if tier.rate.is_sampled:
            tier.rate.served(units, self._queue.clock())

    def leave(self) -> None:
        """Leave the queue. Repeated calls have no effect."""
        state, tier, tenant, queue = self.state, self.tier, self.tenant, self._queue
        if state is GONE:
            return
        self.state = GONE
        queue.live_count -= 1
        if state is ENTERED or state is WAITING:
            queue.stopped_waiting(self.arrival)
        if tier is not None and tenant is not None:
            if state is WAITING:
                tier.line.leave(self, tenant)
            else:
                tier.line.ended(self, tenant)
            if state is RUNNING:
                tier.line.note_output(tenant, self.generated_token_count)
            elif state is DISPATCHED:
                queue.window.remove(self)
        if (
            state is WAITING
            or queue.interactive.line.waiting_count
            or queue.batch.line.waiting_count
        ):
            queue.dispatch_waiting()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class DispatchWindow:
    """Dispatch window of one engine: a limit on dispatched sequences that have not started.

    With several engines behind one queue, the limit is a multiple; a full engine passes requests
    on.
    """

    def __init__(self) -> None:
        self.size = WINDOW_FIRST
        self.engine_count = 1
        self.process_count = 1
        self.dispatched: dict[QueueEntry, None] = {}  # dispatched, not started; oldest first
        self._ranks: list[float] = []  # ranks of those that wait for room only, lowest first
        self._compiling_count = 0

    @property
    def pending_count(self) -> int:
        """Number of dispatched sequences that the engine has not started on."""
        return len(self._ranks) + self._compiling_count

    def spread(self, engine_count: int, process_count: int) -> None:
        """Set the number of engines, and of processes with requests for them; both at least 1.

        Each new engine adds the initial window.
        """
        added = WINDOW_FIRST * (engine_count - self.engine_count)
        self.engine_count, self.process_count = engine_count, process_count
        self.size = min(max(self.size + added, self.size_min), self.size_max)

    @property
    def size_min(self) -> float:
        """Minimum of the window, for each process: together they have as many times that."""
        return max(WINDOW_MIN * self.engine_count / self.process_count, WINDOW_MIN)

    @property
    def size_max(self) -> float:
        """Maximum of the window, a part of that of all processes together."""
        return max(WINDOW_MAX * self.engine_count / self.process_count, WINDOW_MIN)

    def count_before(self, rank: float) -> int:
        """Count the pending sequences that precede a request of this rank."""
        return bisect.bisect_right(self._ranks, rank) + max(
            0, self._compiling_count - COMPILING_MAX * self.engine_count
        )

    def has_room(self, rank: float) -> bool:
        """Return whether a request of this rank can be dispatched."""
        ranks, compiling_count, engine_count = self._ranks, self._compiling_count, self.engine_count
        before = self.count_before(rank) if compiling_count else bisect.bisect_right(ranks, rank)
        if before >= int(self.size):
            return False
        pending_max = (PENDING_MAX + CHOICES_MAX) // self.process_count - CHOICES_MAX
        return len(ranks) + compiling_count < max(pending_max, 1) * engine_count

    def add(self, entry: QueueEntry) -> None:
        """Record a dispatched request."""
        self.dispatched[entry] = None
        rank, sequence_count = entry.rank, entry.arrival.sequence_count
        if entry.arrival.compiles:
            self._compiling_count += sequence_count
        else:
            at = bisect.bisect_right(self._ranks, rank)
            self._ranks[at:at] = [rank] * sequence_count

    def remove(self, entry: QueueEntry) -> None:
        """Record that the engine has started on a dispatched request, or that it has ended."""
        del self.dispatched[entry]
        rank, sequence_count = entry.rank, entry.arrival.sequence_count
        if entry.arrival.compiles:
            self._compiling_count -= sequence_count
        else:
            at = bisect.bisect_left(self._ranks, rank)
            assert self._ranks[at : at + sequence_count] == [rank] * sequence_count, (
                "a removed request was dispatched"
            )
            del self._ranks[at : at + sequence_count]

    def adapt(self, step_count: int, *, behind: bool) -> None:
        """Adapt the window to the number of engine steps for which a request was pending.

        `behind` says that requests are waiting in the queue.
        """
        if step_count < 0:
            return  # the engine was restarted meanwhile
        if step_count <= STEPS_AT_ONCE:
            if behind and self.pending_count >= int(self.size):
                self.size = min(self.size + 1, self.size_max)
        elif step_count > STEPS_LONG:
            self.size = max(self.size - SHRINK, self.size_min)


class FairQueue:
    """Queue of the requests for one engine."""

    def __init__(
        self,
        settings: QueueSettings,
        engine: Callable[[], EngineStatistics],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine` returns the latest statistics of the engine."""
        self.settings = settings
        self.is_fair = settings.order == "fair"  # tenants take turns; else in order of arrival
        self.engine_statistics = engine
        self.clock = clock
        self.interactive, self.batch = Tier[QueueEntry](), Tier[QueueEntry]()
        self.tiers = {ServiceTier.INTERACTIVE: self.interactive, ServiceTier.BATCH: self.batch}
        self.window = DispatchWindow()
        self.waiting = WaitingCounts()
        self.admission = QueueAdmission(settings, self.tiers, self.window, self.waiting)
        self._half = settings.requests_max // 2
        self._tenant_half = min(settings.requests_per_tenant_max, self._half) // 2
        self._number = 0
        # When the batch tier last got a turn in any process, and when it started to wait here
        self.batch_dispatched_at = self.batch_waits_since = -math.inf
        self.live_count = 0  # requests that have not left
        self.on_live: Callable[[], None] = lambda: None  # called when there was none before
        self.process_id = uuid.UUID(int=0)  # tells this process from those of `reports`
        self.reports: dict[uuid.UUID, QueueReport] = {}  # of other processes
        self.interactive_waits_elsewhere = False

    def enter(self, arrival: Arrival, engine_wait_s: float = 0.0) -> QueueEntry:
        """Add a request.

        `engine_wait_s` is the time until the engine accepts requests. Raises QueueFull if there is
        no room for the tenant, StartsTooLate if the request would start after its deadline.
        """
        waiting, admission, tenant = self.waiting, self.admission, arrival.tenant_id.int
        own = waiting.by_tenant.get(tenant, 0)
        # While half of a tenant's share is free, reservations need not be checked.
        is_half_empty = (
            waiting.total + waiting.elsewhere_total < self._half
            and own + waiting.elsewhere_by_tenant.get(tenant, 0) < self._tenant_half
        )
        if admission.reservations or arrival.deadline is not None or not is_half_empty:
            admission.check(arrival, engine_wait_s, self.clock(), is_half_empty=is_half_empty)
        waiting.total += 1
        if waiting.total > waiting.peak:
            waiting.peak = waiting.total
        waiting.by_tenant[tenant] = own + 1
        self._number += 1
        self.live_count += 1
        if self.live_count == 1:
            self.on_live()
        return QueueEntry(self, arrival, self._number)

    def forgo(self, tenant_id: uuid.UUID, request_id: uuid.UUID) -> None:
        """Free the place reserved for a refused request, which will not come back."""
        self.admission.reservations.returned((tenant_id, request_id))

    def reweigh(self, weights: Mapping[int, float]) -> None:
        """Set the weights of tenants, by id as an integer; others weigh 1."""
        if self.is_fair:
            for tier in self.tiers.values():
                tier.line.reweigh(weights)

    def report(self) -> QueueReport:
        """Describe the queue for other processes before the same engines."""
        dispatched_at = self.batch_dispatched_at
        return QueueReport(
            self.interactive.line.report(),
            self.batch.line.report(),
            self.admission.entries(),
            None if dispatched_at == -math.inf else self.clock() - dispatched_at,
        )

    def absorb(
        self, process_id: uuid.UUID, report: QueueReport, age_s: float, *, is_new: bool
    ) -> None:
        """Take over the report of another process, written `age_s` seconds ago.

        `is_new` is explained at `Line.absorb`. Call `exchanged` after all reports.
        """
        now = self.clock()
        for tier, line in ((self.interactive, report.interactive), (self.batch, report.batch)):
            units = tier.line.absorb(process_id, line, is_new=is_new)
            if units and tier.rate.is_sampled:
                tier.rate.served(units, now)
        if report.batch_dispatch_age_s is not None:
            self.batch_dispatched_at = max(
                self.batch_dispatched_at, now - report.batch_dispatch_age_s - age_s
            )
        self.reports[process_id] = report

    def forget(self, process_id: uuid.UUID) -> None:
        """Drop the requests of a process that has ended or is silent, before `exchanged`."""
        if self.reports.pop(process_id, None) is not None:
            for tier in self.tiers.values():
                tier.line.forget(process_id)

    def exchanged(self) -> None:
        """Apply the absorbed reports: bounds, windows, and requests whose turn has come."""
        reports = self.reports.values()
        self.waiting.note_elsewhere(each for report in reports for each in report.entries)
        self.interactive_waits_elsewhere = any(
            report.interactive.next_rank is not None for report in reports
        )
        process_count = 1 + sum(report.has_work for report in reports)
        if process_count != self.window.process_count:
            self.window.spread(self.window.engine_count, process_count)
        self.dispatch_waiting()

    def _batch_is_due(self, now: float) -> bool:
        """Return whether the batch tier gets the next turn although interactive requests wait.

        It may be due in several processes: the one with the lowest rank is first.
        """
        waited_s = now - max(self.batch_dispatched_at, self.batch_waits_since)
        if waited_s < self.settings.batch_wait_max_s or not self.reports:
            return waited_s >= self.settings.batch_wait_max_s
        tenant = self.batch.line.next_tenant()
        assert tenant is not None, "the tier has a waiting request"
        own = tenant.rank, self.process_id
        before = [
            process_id
            for process_id, report in self.reports.items()
            if (rank := report.batch.next_rank) is not None and (rank, process_id) < own
        ]
        return waited_s >= self.settings.batch_wait_max_s + BATCH_GAP_S * len(before)

    def stopped_waiting(self, arrival: Arrival) -> None:
        """Record that a request has stopped waiting: it was dispatched or has left."""
        waiting, tenant = self.waiting, arrival.tenant_id.int
        waiting.total -= 1
        waiting.by_tenant[tenant] -= 1
        if not waiting.by_tenant[tenant]:
            del waiting.by_tenant[tenant]

    def wait_s(self, arrival: Arrival) -> float | None:
        """Estimate the wait of a request that arrives now, in seconds; None without data."""
        return self.admission.wait_s(arrival)

    def expected_waits(self) -> list[ExpectedWait]:
        """Estimate the waits of all waiting requests, next one first. Takes linear time."""
        found: list[ExpectedWait] = []
        for tier in self.tiers.values():
            units, ordered = 0.0, []
            for tenant in tier.line.waiting_tenants():
                level = tenant.rank
                for entry in tenant.waiting:
                    cost = tier.cost(entry.input_token_count, entry.output_token_count_max)
                    ordered.append((level, entry.number, entry, cost))
                    level += cost / tenant.weight
            for _, _, entry, cost in sorted(ordered, key=lambda each: each[:2]):
                found.append(
                    ExpectedWait(entry, self.window.pending_count + len(found), tier.seconds(units))
                )
                units += cost
        return found

    def statistics(self) -> QueueStatistics:
        """Collect statistics. Takes time linear in the number of waiting requests."""
        return QueueStatistics(
            waiting_count=self.waiting.total,
            waiting_count_peak=self.waiting.peak,
            reservation_count=len(self.admission.reservations),
            refused_count=self.admission.refused_count,
            engine_pending_count=self.window.pending_count,
            engine_window=int(self.window.size),
            longest_wait_s=max(
                (each.wait_s for each in self.expected_waits() if each.wait_s is not None),
                default=None,
            ),
        )

    def dispatch_waiting(self, engine: EngineStatistics | None = None) -> None:
        """Dispatch as many requests as the engine has room for.

        Interactive requests come first, unless the batch tier has waited so long that it gets the
        next turn; then it is ranked like an interactive tenant that returns from idling. Otherwise
        batch ranks after all interactive requests, in the engine as well. `engine` has its latest
        statistics.
        """
        now, engine, window = self.clock(), engine or self.engine_statistics(), self.window
        interactive, batch = self.interactive.line, self.batch.line
        if engine.replica_count != window.engine_count:
            window.spread(engine.replica_count, window.process_count)
        while interactive.waiting_count or batch.waiting_count:
            interactive_waits = interactive.waiting_count or self.interactive_waits_elsewhere
            if batch.waiting_count and (not interactive_waits or self._batch_is_due(now)):
                tier = self.batch
            elif interactive.waiting_count:
                tier = self.interactive
            else:
                break
            tenant = tier.line.next_tenant()
            assert tenant is not None, "the tier has a waiting request"
            assert tenant.listed_priority is not None, "the next tenant is listed with its rank"
            tenant_rank, _ = tenant.listed_priority
            if not self.is_fair:
                rank = 0.0
            elif tier is self.interactive:
                rank = tenant_rank
            elif interactive_waits:
                rank = interactive.level()
            else:
                rank = BATCH_RANK + tenant_rank
            if not window.has_room(rank):
                break
            if tier is self.batch:
                self.batch_dispatched_at = now
            entry = tier.line.take(
                tenant,
                tier.line.expected_output_tokens(tenant, tenant.first.output_token_count_max),
            )
            entry.rank, entry.dispatched_at_step, entry.state = (
                rank,
                engine.step_count,
                DISPATCHED,
            )
            self.stopped_waiting(entry.arrival)
            window.add(entry)
            if entry.on_dispatch is not None:
                entry.on_dispatch()
        for tier in (self.interactive, self.batch):
            waits_elsewhere = self.reports and tier.line.waits_elsewhere
            if tier.rate.is_sampled != bool(tier.line.waiting_count or waits_elsewhere):
                tier.rate.watch(now, waiting=not tier.rate.is_sampled)
