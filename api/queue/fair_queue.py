"""Queue before one engine: bounded, fair between tenants, with wait estimates.

Each request has a `Place` from before its hold until its end. Turns follow the order of
`virtual_tokens.Line` within a service tier, and the engine follows the ranks assigned here.
`DispatchWindow` limits how many requests the engine gets at once; `QueueAdmission` refuses requests
for which there is no room or that would start too late. Used by one event loop; nothing here
awaits.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self

import msgspec

from api.core.errors import QueueFull, StartsTooLate
from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Item, Line, Tenant
from inference.engine import EngineStatistics
from metering.core.models import ServiceTier as ServiceTier

ALL_TENANTS = uuid.UUID(int=0)  # shared line of all tenants if fairness is off

OUTPUT_MEMORY = 16  # requests in the mean output, which adapts to a change within some dozens
# Expected output until a request has ended: that of the reference workload.
OUTPUT_TOKENS_UNKNOWN = 150.0
SAMPLE_S = 0.25  # seconds: several steps of a slow engine
MEMORY_S = 5.0  # seconds after which a sample weighs a third: follows the load without flickering
# Units of service that no interactive tenant reaches in thirty years at a million per second.
BATCH_RANK = 1e15
WINDOW_FIRST = 8.0  # sequences: a burst to an idle engine fills its first batch within a few steps
WINDOW_MIN = 1.0
# Sequences: together with overtaking ones below the queue limit of engines (256).
WINDOW_MAX = 160.0
PENDING_MAX = 224  # sequences in total; one more request of up to 16 choices still fits
# Sequences with a response format that do not count, since they wait for their grammar.
COMPILING_MAX = 32
# Steps: a sequence misses the step under way at its dispatch; the next one can take it.
STEPS_AT_ONCE = 2
STEPS_LONG = 3  # the target is one step of waiting
# Sequences per late one: slower than growth, since an empty batch costs more than unfairness.
SHRINK = 0.5
# Share of places for new requests; the rest is for reservations, since rates vary.
NEWCOMERS_SHARE = 0.8
# Retry-after is a fifth longer than computed, since an early retry is refused again.
RETRY_MARGIN = 1.2
RETRY_S_MIN = 0.05  # seconds: with a shorter retry-after a client would spin
RETRY_S_UNKNOWN = 1.0  # seconds: before any service was observed
RESERVATIONS_PER_PLACE = 10  # beyond this many, a retry-after is an estimate without a reservation
# Seconds for which a reservation is kept at least, for client jitter and network delay.
GRACE_S_MIN = 2.0
EARLY_S = 0.001  # seconds that a timer may fire early


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of one engine's queue; see `Settings` for reasons.

    fair: tenants take turns; else in order of arrival.
    """

    request_count_max: int = 2000
    tenant_request_count_max: int = 1000
    batch_wait_s_max: float = 30.0
    fair: bool = True


class Arrival(msgspec.Struct, frozen=True):
    """A request as seen by the queue.

    deadline: on the queue's clock; compiles: it has a response format.
    """

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
        """Tenant and request; clients choose request ids, so two tenants may use the same one."""
        return self.tenant_id, self.request_id


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected wait of a request.

    position: requests ahead of it; wait_s: None before any observation.
    """

    place: Place
    position: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Request counts; those of the engine are in sequences. peak: the maximum so far.

    longest_wait_s: expected wait of the last waiting request; None if none waits or nothing was
    observed.
    """

    waiting_count: int
    waiting_count_peak: int
    reservation_count: int
    refused_count: int
    engine_pending_count: int
    engine_window: int
    longest_wait_s: float | None = None


class State(Enum):
    """State of a place, in this order; GONE may follow any."""

    ENTERED = auto()  # its hold is being taken, or its engine is starting
    WAITING = auto()
    HANDED = auto()  # the engine has it, but has not started on it
    RUNNING = auto()
    GONE = auto()


class Place:
    """Queue entry of one request, as a context manager that gives it back.

    Created by `FairQueue.enter`.
    """

    def __init__(self, queue: FairQueue, arrival: Arrival, number: int) -> None:
        self.arrival = arrival
        self.number = number
        self.input_token_count = arrival.input_token_count
        self.output_token_count_max = arrival.output_token_count_max
        self.state = State.ENTERED
        self.tier: Tier | None = None  # set by `join`
        self.tenant: Tenant[Place] | None = None
        self.generated_token_count = 0
        # Engine step at the dispatch; None: it did not wait for its turn.
        self.handed_at_step: int | None = None
        self.rank = 0.0  # for the engine; set at its turn
        self.on_turn: Callable[[], object] | None = None
        self._queue = queue

    @property
    def has_turn(self) -> bool:
        """True if its turn has come."""
        return self.state in (State.HANDED, State.RUNNING)

    def join(self, on_turn: Callable[[], object]) -> bool:
        """Start waiting for the turn.

        Return whether it came at once, without waiting requests and with engine room. Otherwise
        `on_turn` is called at the turn; it must not use the queue.
        """
        assert self.state is State.ENTERED, "a place waits once"
        queue, arrival = self._queue, self.arrival
        self.tier = tier = queue._batch if arrival.tier is ServiceTier.BATCH else queue._interactive
        line, is_fair = tier.line, queue._limits.fair
        tenant_id, weight = (arrival.tenant_id, arrival.weight) if is_fair else (ALL_TENANTS, 1.0)
        if tier is queue._batch and not line.waiting_count:
            queue._batch_moved_at = queue.clock()
        if not (queue._interactive.line.waiting_count or queue._batch.line.waiting_count):
            self.tenant, own_rank = line.arrive(tenant_id, weight)
            rank = (
                0.0 if not is_fair else own_rank + BATCH_RANK if tier is queue._batch else own_rank
            )
            if queue._dispatch.has_room(rank):
                output_tokens = tier.waits.output_tokens(self.tenant, self.output_token_count_max)
                line.pass_by(self, self.tenant, own_rank, output_tokens)
                self.rank, self.state = rank, State.HANDED
                queue._admission.passed(arrival)
                queue._dispatch.given(self)
                return True
        self.state = State.WAITING
        self.tenant = line.join(self, tenant_id, weight)
        queue._hand_over()
        if self.state is not State.WAITING:
            return True
        self.on_turn = on_turn
        return False

    async def turn(self) -> None:
        """Wait for the turn. If cancelled, the place must still be left."""
        handed = asyncio.Event()
        if not self.join(handed.set):
            await handed.wait()

    def begun(self) -> None:
        """Handle that the engine has started on the request."""
        if self.state is not State.HANDED:
            return
        tier, tenant, queue = self.tier, self.tenant, self._queue
        assert tier is not None, "only a dispatched request starts"
        assert tenant is not None
        self.state = State.RUNNING
        tier.line.begun(self, tenant)
        is_waited = queue._interactive.line.waiting_count or queue._batch.line.waiting_count
        engine = None
        if self.handed_at_step is not None:
            engine = queue._engine()
            steps = engine.step_count - self.handed_at_step
            overtakes = next(iter(queue._dispatch.handed)).rank > self.rank
            # Otherwise it waited for its grammar, or not at all.
            if not (self.arrival.compiles or overtakes):
                queue._dispatch.entered(steps, behind=bool(is_waited))
        queue._dispatch.gone(self)
        if is_waited:
            queue._hand_over(engine)

    def generated(self, token_count: int) -> None:
        """Charge for newly generated tokens, and record the service."""
        tier, tenant = self.tier, self.tenant
        assert tier is not None, "only a dispatched request generates"
        assert tenant is not None
        units = OUTPUT_TOKEN_COST * token_count
        if not self.generated_token_count:
            units += INPUT_TOKEN_COST * self.input_token_count
        self.generated_token_count += token_count
        tier.line.charge(self, tenant, OUTPUT_TOKEN_COST * token_count)
        if tier.waits.rate.is_sampled:
            tier.waits.rate.served(units, self._queue.clock())

    def leave(self) -> None:
        """Give the place back. Repeated calls have no effect."""
        state, tier, tenant, queue = self.state, self.tier, self.tenant, self._queue
        if state is State.GONE:
            return
        self.state = State.GONE
        if state in (State.ENTERED, State.WAITING):
            queue._admission.passed(self.arrival)
        if tier is not None and tenant is not None:
            if state is State.WAITING:
                tier.line.leave(self, tenant)
            else:
                tier.line.ended(self, tenant)
            if state is State.RUNNING:
                tier.waits.ended(tenant, self.generated_token_count)
            elif state is State.HANDED:
                queue._dispatch.gone(self)
        if (
            state is State.WAITING
            or queue._interactive.line.waiting_count
            or queue._batch.line.waiting_count
        ):
            queue._hand_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class Waits:
    """Rate and mean output of one tier, and wait estimates from them."""

    def __init__(self) -> None:
        self.rate = ServiceRate()
        self.output_tokens_mean: float | None = None

    def ended(self, tenant: Tenant[Item], generated_token_count: int) -> None:
        """Record that a served request has ended with this many output tokens."""
        for each in (self, tenant):
            mean, count = each.output_tokens_mean, float(generated_token_count)
            each.output_tokens_mean = (
                count if mean is None else mean + (count - mean) / OUTPUT_MEMORY
            )

    def cost(
        self, input_token_count: int, output_token_count_max: int, request_count: int = 1
    ) -> float:
        """Return the expected cost in service units, with the mean output or a lower maximum."""
        output = float(output_token_count_max)
        if self.output_tokens_mean is not None:
            output = min(output, self.output_tokens_mean * request_count)
        return INPUT_TOKEN_COST * input_token_count + OUTPUT_TOKEN_COST * output

    def output_tokens(self, tenant: Tenant[Item], output_token_count_max: int) -> float:
        """Return the expected output of a request: the mean of its tenant, or else of all."""
        mean = tenant.output_tokens_mean
        if mean is None:
            mean = (
                OUTPUT_TOKENS_UNKNOWN
                if self.output_tokens_mean is None
                else self.output_tokens_mean
            )
        return min(float(output_token_count_max), mean)

    def backlog(self, tenant: Tenant[Item]) -> float:
        """Return the expected cost of all waiting requests of a tenant."""
        return self.cost(
            tenant.waiting_input_tokens, tenant.waiting_output_tokens_max, len(tenant.waiting)
        )

    def seconds(self, units: float) -> float | None:
        """Return the seconds that this much service takes; None before any observation."""
        per_s = self.rate.per_s
        return units / per_s if per_s else None

    def units_before(
        self,
        line: Line[Item],
        tenant_id: uuid.UUID,
        weight: float,
        own_units: float,
        reserved: Callable[[uuid.UUID], float],
    ) -> float:
        """Return the service until the tenant got `own_units` more, included.

        reserved: reserved units by tenant.
        """
        level = line.start(tenant_id) + own_units / weight
        return own_units + sum(
            self._whole_requests(tenant, level, reserved(tenant.id))
            for tenant in line.waiting_tenants()
            if tenant.id != tenant_id and tenant.rank < level
        )

    def _whole_requests(self, tenant: Tenant[Item], level: float, reserved_units: float) -> float:
        """Return the service of a tenant until its rank reaches a level, in whole requests."""
        backlog = self.backlog(tenant)
        each = max(backlog / len(tenant.waiting), 1.0)
        return min(
            backlog + reserved_units, math.ceil((level - tenant.rank) * tenant.weight / each) * each
        )


class ServiceRate:
    """Service units per second while requests wait; at other times it would measure demand."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None before any observation
        self._sampled_from: float | None = None
        self._sampled_units = 0.0
        self.is_sampled = False  # while requests wait

    def watch(self, now: float, *, waiting: bool) -> None:
        """Record whether requests wait. now: monotonic seconds."""
        self.is_sampled = waiting
        if waiting and self._sampled_from is None:
            self._sampled_from, self._sampled_units = now, 0.0
        elif not waiting:
            self._sampled_from = None

    def served(self, units: float, now: float) -> None:
        """Record service at this time."""
        if self._sampled_from is None:
            return
        self._sampled_units += units
        elapsed_s = now - self._sampled_from
        if elapsed_s < SAMPLE_S:
            return
        sample = self._sampled_units / elapsed_s
        if self.per_s is None:
            self.per_s = sample
        else:
            self.per_s += (sample - self.per_s) * -math.expm1(-elapsed_s / MEMORY_S)
        self._sampled_from, self._sampled_units = now, 0.0


class Tier:
    """One service tier: its line and its wait estimates."""

    def __init__(self) -> None:
        self.line: Line[Place] = Line()
        self.waits = Waits()


class FairQueue:
    """All places before one engine."""

    def __init__(
        self,
        limits: QueueLimits,
        engine: Callable[[], EngineStatistics],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine: returns its latest statistics."""
        self._limits = limits
        self._engine = engine
        self.clock = clock
        self._interactive, self._batch = Tier(), Tier()
        self._tiers = {ServiceTier.INTERACTIVE: self._interactive, ServiceTier.BATCH: self._batch}
        self._dispatch = DispatchWindow()
        self._admission = QueueAdmission(limits, self._tiers, self._dispatch)
        self._number = 0
        self._batch_moved_at = -math.inf  # when the batch tier last got a turn, or started to wait

    def enter(self, arrival: Arrival, engine_wait_s: float = 0.0) -> Place:
        """Take a place. engine_wait_s: until the engine accepts requests.

        Raises: QueueFull if the tenant finds no room, StartsTooLate if its turn would come after
        its deadline.
        """
        self._admission.admit(arrival, engine_wait_s, self.clock)
        self._number += 1
        return Place(self, arrival, self._number)

    def wait_s(self, arrival: Arrival) -> float | None:
        """Return the expected wait of a request that arrives now; None before any observation."""
        return self._admission.wait_s(arrival)

    def outlook(self) -> list[Outlook]:
        """Return the expected wait of all waiting requests, next first.

        Takes time linear in their number.
        """
        found: list[Outlook] = []
        for tier in self._tiers.values():
            units, ordered = 0.0, []
            for tenant in tier.line.waiting_tenants():
                level = tenant.rank
                for place in tenant.waiting:
                    cost = tier.waits.cost(place.input_token_count, place.output_token_count_max)
                    ordered.append((level, place.number, place, cost))
                    level += cost / tenant.weight
            for _, _, place, cost in sorted(ordered, key=lambda each: each[:2]):
                found.append(
                    Outlook(
                        place, self._dispatch.pending_count + len(found), tier.waits.seconds(units)
                    )
                )
                units += cost
        return found

    def statistics(self) -> QueueStatistics:
        """Return statistics. Never blocks; takes time linear in the number of waiting requests."""
        entrance = self._admission
        return QueueStatistics(
            waiting_count=entrance.waiting_count,
            waiting_count_peak=entrance.waiting_count_peak,
            reservation_count=entrance.reservation_count,
            refused_count=entrance.refused_count,
            engine_pending_count=self._dispatch.pending_count,
            engine_window=int(self._dispatch.window),
            longest_wait_s=max(
                (each.wait_s for each in self.outlook() if each.wait_s is not None), default=None
            ),
        )

    def _hand_over(self, engine: EngineStatistics | None = None) -> None:
        """Dispatch as many requests as the engine has room for.

        Interactive requests come first, unless the batch tier has waited for so long that it gets
        the next turn: then it is ranked like an interactive tenant that returns from idling.
        Otherwise batch ranks after all interactive requests, in the engine as well. engine: its
        latest statistics.
        """
        now, engine, lookahead = self.clock(), engine or self._engine(), self._dispatch
        interactive, batch = self._interactive.line, self._batch.line
        if engine.replica_count != lookahead.engine_count:
            lookahead.spread(engine.replica_count)
        while interactive.waiting_count or batch.waiting_count:
            is_overdue = now - self._batch_moved_at >= self._limits.batch_wait_s_max
            tier = (
                self._batch
                if batch.waiting_count and (is_overdue or not interactive.waiting_count)
                else self._interactive
            )
            tenant = tier.line.next_tenant()
            assert tenant is not None, "the tier has a waiting request"
            assert tenant.listed_turn is not None, "the next tenant is listed with its rank"
            tenant_rank, _ = tenant.listed_turn
            if not self._limits.fair:
                rank = 0.0
            elif tier is self._interactive:
                rank = tenant_rank
            elif interactive.waiting_count:
                rank = interactive.level()
            else:
                rank = BATCH_RANK + tenant_rank
            if not lookahead.has_room(rank):
                break
            if tier is self._batch:
                self._batch_moved_at = now
            place = tier.line.take(
                tenant, tier.waits.output_tokens(tenant, tenant.first.output_token_count_max)
            )
            place.rank, place.handed_at_step, place.state = rank, engine.step_count, State.HANDED
            self._admission.passed(place.arrival)
            lookahead.given(place)
            if place.on_turn is not None:
                place.on_turn()
        for tier in (self._interactive, self._batch):
            if tier.waits.rate.is_sampled != bool(tier.line.waiting_count):
                tier.waits.rate.watch(now, waiting=not tier.waits.rate.is_sampled)


class DispatchWindow:
    """Dispatch window of one engine, or of several behind one queue. Counts are in sequences.

    Several engines have a multiple of the room; a full one passes requests on.
    """

    def __init__(self) -> None:
        self.window = WINDOW_FIRST
        self.engine_count = 1
        self.handed: dict[Place, None] = {}  # dispatched, not started; oldest first
        self._ranks: list[float] = []  # ranks of those that wait for room only, lowest first
        self._compiling_count = 0

    @property
    def pending_count(self) -> int:
        """Dispatched sequences that the engine has not started on."""
        return len(self._ranks) + self._compiling_count

    def spread(self, engine_count: int) -> None:
        """Set the number of engines, at least 1. A new engine starts with the first window."""
        added = WINDOW_FIRST * (engine_count - self.engine_count)
        self.engine_count = engine_count
        self.window = min(
            max(self.window + added, WINDOW_MIN * engine_count), WINDOW_MAX * engine_count
        )

    def count_before(self, rank: float) -> int:
        """Return the number of dispatched sequences that precede a request of this rank."""
        return bisect.bisect_right(self._ranks, rank) + max(
            0, self._compiling_count - COMPILING_MAX * self.engine_count
        )

    def has_room(self, rank: float) -> bool:
        """Return whether the engine has room for a request of this rank."""
        ranks, compiling_count, engine_count = self._ranks, self._compiling_count, self.engine_count
        before = self.count_before(rank) if compiling_count else bisect.bisect_right(ranks, rank)
        return (
            before < int(self.window) and len(ranks) + compiling_count < PENDING_MAX * engine_count
        )

    def given(self, place: Place) -> None:
        """Record a dispatched request."""
        self.handed[place] = None
        rank, sequence_count = place.rank, place.arrival.sequence_count
        if place.arrival.compiles:
            self._compiling_count += sequence_count
        else:
            at = bisect.bisect_right(self._ranks, rank)
            self._ranks[at:at] = [rank] * sequence_count

    def gone(self, place: Place) -> None:
        """Record that a dispatched request was started or has ended."""
        del self.handed[place]
        rank, sequence_count = place.rank, place.arrival.sequence_count
        if place.arrival.compiles:
            self._compiling_count -= sequence_count
        else:
            at = bisect.bisect_left(self._ranks, rank)
            assert self._ranks[at : at + sequence_count] == [rank] * sequence_count, (
                "a removed request was dispatched"
            )
            del self._ranks[at : at + sequence_count]

    def entered(self, step_count: int, *, behind: bool) -> None:
        """Adapt the window to the steps that a request waited.

        behind: requests of later rank wait.
        """
        if step_count < 0:
            return  # the engine was restarted meanwhile
        if step_count <= STEPS_AT_ONCE:
            if behind and self.pending_count >= int(self.window):
                self.window = min(self.window + 1, WINDOW_MAX * self.engine_count)
        elif step_count > STEPS_LONG:
            self.window = max(self.window - SHRINK, WINDOW_MIN * self.engine_count)


# Fraction of the time left that the expected wait may take: one wait in ten is a fifth longer than
# expected.
RESERVED_WAIT_SHARE, NEWCOMERS_WAIT_SHARE = 0.9, 0.6


class QueueAdmission:
    """Queue admission: counts waiting requests, and admits or refuses new ones."""

    def __init__(
        self, limits: QueueLimits, tiers: Mapping[ServiceTier, Tier], lookahead: DispatchWindow
    ) -> None:
        self.waiting_count = 0
        self.waiting_count_peak = 0
        self.refused_count = 0
        self._limits = limits
        self._half = limits.request_count_max // 2
        self._own_half = min(limits.tenant_request_count_max, self._half) // 2
        self._tiers = tiers
        self._dispatch = lookahead
        # Waiting requests by tenant number, since UUIDs are hashed in Python.
        self._by_tenant: dict[int, int] = {}
        self._reservations = Reservations(RESERVATIONS_PER_PLACE * limits.request_count_max)

    @property
    def reservation_count(self) -> int:
        """Refused requests with a reservation."""
        return len(self._reservations)

    def admit(self, arrival: Arrival, engine_wait_s: float, clock: Callable[[], float]) -> None:
        """Admit a request, or raise QueueFull or StartsTooLate. Call `passed` once afterwards."""
        own = self._by_tenant.get(arrival.tenant_id.int, 0)
        # While half of a tenant's share is free, reservations need not be checked.
        is_half_empty = self.waiting_count < self._half and own < self._own_half
        if self._reservations.by_key or arrival.deadline is not None or not is_half_empty:
            self._check(arrival, engine_wait_s, clock(), is_half_empty=is_half_empty)
        self.waiting_count += 1
        if self.waiting_count > self.waiting_count_peak:
            self.waiting_count_peak = self.waiting_count
        self._by_tenant[arrival.tenant_id.int] = own + 1

    def _check(
        self, arrival: Arrival, engine_wait_s: float, now: float, *, is_half_empty: bool
    ) -> None:
        self._reservations.forget_expired(now)
        is_reserved = self._reservations.is_due(arrival.key, now)
        refusal: Exception | None = self._room_fault(
            arrival, now, is_reserved=is_reserved, is_half_empty=is_half_empty
        )
        if refusal is None and arrival.deadline is not None:
            refusal = self._deadline_fault(
                arrival, arrival.deadline - now, engine_wait_s, now, is_reserved=is_reserved
            )
        if refusal is not None:
            self.refused_count += 1
            raise refusal
        self._reservations.drop(arrival.key)

    def passed(self, arrival: Arrival) -> None:
        """Record that a request stopped waiting: it was dispatched, or is gone."""
        self.waiting_count -= 1
        tenant = arrival.tenant_id.int
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def wait_s(self, arrival: Arrival, *, is_reserved: bool = False) -> float | None:
        """Return the expected wait of a request that arrives now; None if unknown.

        is_reserved: room is reserved for it.
        """
        tier = self._tiers[arrival.tier]
        rank = tier.line.start(self._line_id(arrival))
        if self._dispatch.has_room(rank) and not tier.line.waiting_count:
            return 0.0
        tenant = tier.line.find(self._line_id(arrival))
        own = tier.waits.backlog(tenant) if tenant is not None else 0.0
        if not is_reserved:
            own += self._reservations.cost(arrival.tenant_id)
        before = self._units_before(arrival, own)
        return tier.waits.seconds(before + self._cost(arrival) * self._dispatch.count_before(rank))

    def _room_fault(
        self, arrival: Arrival, now: float, *, is_reserved: bool, is_half_empty: bool
    ) -> QueueFull | None:
        """Return the refusal if there is no room within the limits, after reservations and the
        tenant's share."""
        limits, own = self._limits, self._by_tenant.get(arrival.tenant_id.int, 0)
        share = 1.0 if is_reserved else NEWCOMERS_SHARE
        free = int(limits.request_count_max * share) - self.waiting_count
        own_max = int(limits.tenant_request_count_max * share)
        if is_reserved:
            over = max(1 - free, own + 1 - own_max)
        else:
            # It returned too early: its own reservation does not count.
            known = self._reservations.find(arrival.key) is not None
            own += self._reservations.count(arrival.tenant_id) - known
            free -= len(self._reservations) - known
            # Each place that the tenant gives back is one less and leaves one more free.
            over_share = (own + 2 - free) // 2
            over = max(own + 1 - own_max, over_share)
            if is_half_empty:
                return None
        if over <= 0:
            return None
        waits = self._tiers[arrival.tier].waits
        ahead = self._units_before(arrival, over * self._usual_cost(arrival))
        units = max(ahead, (1 - free) * self._cost(arrival))
        hint_s = self._reserve(arrival, waits.seconds(units), now, again=is_reserved)
        return QueueFull(own, self.waiting_count, hint_s)

    def _deadline_fault(
        self,
        arrival: Arrival,
        left_s: float,
        engine_wait_s: float,
        now: float,
        *,
        is_reserved: bool,
    ) -> StartsTooLate | None:
        wait_s = self.wait_s(arrival, is_reserved=is_reserved)
        if wait_s is None:
            return None
        wait_s += engine_wait_s
        sure_s = left_s * (RESERVED_WAIT_SHARE if is_reserved else NEWCOMERS_WAIT_SHARE)
        if wait_s <= sure_s:
            return None
        return StartsTooLate(
            wait_s, left_s, self._reserve(arrival, wait_s - sure_s, now, again=is_reserved)
        )

    def _reserve(self, arrival: Arrival, wait_s: float | None, now: float, *, again: bool) -> float:
        """Reserve a place for a refused request; return its retry-after.

        again: it returned on time and there was no room.
        """
        if again:
            self._reservations.drop(arrival.key)
        reservation = self._reservations.find(arrival.key)
        if reservation is not None:  # it returned too early; its reservation still holds
            return max(reservation.ready_at - now, RETRY_S_MIN)
        hint_s = RETRY_S_UNKNOWN if wait_s is None else max(wait_s * RETRY_MARGIN, RETRY_S_MIN)
        self._reservations.make(
            Reservation(
                arrival.key,
                self._cost(arrival),
                now + hint_s,
                now + hint_s + max(GRACE_S_MIN, hint_s / 2),
            )
        )
        return hint_s

    def _line_id(self, arrival: Arrival) -> uuid.UUID:
        return arrival.tenant_id if self._limits.fair else ALL_TENANTS

    def _units_before(self, arrival: Arrival, own_units: float) -> float:
        """Return the service before the tenant has been served this much more."""
        tier = self._tiers[arrival.tier]
        weight = arrival.weight if self._limits.fair else 1.0
        return tier.waits.units_before(
            tier.line, self._line_id(arrival), weight, own_units, self._reservations.cost
        )

    def _usual_cost(self, arrival: Arrival) -> float:
        """Return the mean cost of the tenant's waiting requests, or else the cost of this one."""
        tier = self._tiers[arrival.tier]
        tenant = tier.line.find(self._line_id(arrival))
        if tenant is None or not tenant.waiting:
            return self._cost(arrival)
        return tier.waits.backlog(tenant) / len(tenant.waiting)

    def _cost(self, arrival: Arrival) -> float:
        return self._tiers[arrival.tier].waits.cost(
            arrival.input_token_count, arrival.output_token_count_max
        )


Key = tuple[uuid.UUID, uuid.UUID]  # tenant and request


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation. Times in monotonic seconds; cost in service units."""

    key: Key
    cost: float
    ready_at: float
    expires_at: float


class Reservations:
    """All reservations of a queue."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self.by_key: dict[Key, Reservation] = {}
        self._counts: Counter[uuid.UUID] = Counter()
        self._costs: dict[uuid.UUID, float] = {}
        self._expiries: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self.by_key)

    def count(self, tenant_id: uuid.UUID) -> int:
        """Return the number of reservations of one tenant."""
        return self._counts[tenant_id]

    def cost(self, tenant_id: uuid.UUID) -> float:
        """Return the expected cost of one tenant's reservations, in service units."""
        return self._costs.get(tenant_id, 0.0)

    def find(self, key: Key) -> Reservation | None:
        """Return the reservation of a request, if any."""
        return self.by_key.get(key)

    def make(self, reservation: Reservation) -> None:
        """Add a reservation, unless there are too many."""
        if len(self.by_key) >= self._count_max or reservation.key in self.by_key:
            return
        tenant_id = reservation.key[0]
        self.by_key[reservation.key] = reservation
        self._counts[tenant_id] += 1
        self._costs[tenant_id] = self.cost(tenant_id) + reservation.cost
        heapq.heappush(self._expiries, (reservation.expires_at, reservation.key))

    def is_due(self, key: Key, now: float) -> bool:
        """Return whether this request has a reservation and has waited long enough."""
        reservation = self.by_key.get(key)
        return reservation is not None and now >= reservation.ready_at - EARLY_S

    def drop(self, key: Key) -> None:
        """Remove a reservation that was used or is no longer needed."""
        reservation = self.by_key.pop(key, None)
        if reservation is None:
            return
        tenant_id = key[0]
        self._counts[tenant_id] -= 1
        self._costs[tenant_id] -= reservation.cost
        if not self._counts[tenant_id]:
            del self._counts[tenant_id], self._costs[tenant_id]

    def forget_expired(self, now: float) -> None:
        """Remove reservations whose requests did not return."""
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            reservation = self.by_key.get(key)
            if reservation is not None and reservation.expires_at <= now:
                self.drop(key)
