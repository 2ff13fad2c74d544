"""The queue before one engine: bounded, fair between tenants, honest about its waits.

Each request has a `Place` from before its hold until it ends. Its turn comes in the order of `virtual_tokens.Line` within its
service tier, and within the engine in the order of the ranks that it gets here; `Lookahead` says how many the engine is given at
once; `Entrance` refuses at once what would find no place or start too late. One event loop uses it, and nothing here awaits.
"""

from __future__ import annotations

import bisect
import heapq
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.core.errors import QueueFull, StartsTooLate
from api.queue.places import ALL_TENANTS, Arrival, Outlook, Place, QueueLimits, QueueStatistics, ServiceTier, State
from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Line, Tenant
from api.queue.waits import Waits
from inference.engine import EngineStatistics

BATCH_RANK = 1e15  # units of service that no interactive tenant reaches, at a million per second not in thirty years


class FairQueue:
    """All places before one engine."""

    def __init__(
        self, limits: QueueLimits, engine: Callable[[], EngineStatistics], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """engine: what it told last."""
        self._limits = limits
        self._engine = engine
        self._clock = clock
        self._interactive, self._batch = Tier(), Tier()
        self._tiers = {ServiceTier.INTERACTIVE: self._interactive, ServiceTier.BATCH: self._batch}
        self._lookahead = Lookahead()
        self._entrance = Entrance(limits, self._tiers, self._lookahead)
        self._handed: dict[Place, None] = {}  # with the engine, which has not begun with them, the first given first
        self._number = 0
        self._batch_moved_at = -math.inf  # when the batch tier was last given something, or began to wait

    def enter(self, arrival: Arrival, engine_wait_s: float = 0.0) -> Place:
        """Take a place. engine_wait_s: until the engine takes anything at all.

        Raises: QueueFull if there is none for this tenant, StartsTooLate if its turn would come after its deadline.
        """
        self._entrance.let_in(arrival, engine_wait_s, self._clock())
        self._number += 1
        return Place(self, arrival, self._number)

    def wait_s(self, arrival: Arrival) -> float | None:
        """How long a request would wait that came now; None before anything was observed."""
        return self._entrance.wait_s(arrival)

    def join(self, place: Place) -> None:
        """Begin to wait for the turn."""
        assert place.state is State.ENTERED, "a place waits once"
        place.state = State.WAITING
        arrival, tier = place.arrival, self._tiers[place.arrival.tier]
        if arrival.tier is ServiceTier.BATCH and not tier.line:
            self._batch_moved_at = self._clock()
        tenant_id, weight = (arrival.tenant_id, arrival.weight) if self._limits.fair else (ALL_TENANTS, 1.0)
        place.tenant = tier.line.join(place, tenant_id, weight)
        self._hand_over()

    def begun(self, place: Place) -> None:
        """The engine has let a request enter."""
        if place.state is not State.HANDED:
            return
        assert place.tenant is not None, "only what was handed over begins"
        place.state = State.RUNNING
        self._tiers[place.arrival.tier].line.begun(place, place.tenant)
        steps = self._engine().step_count - place.handed_at_step
        behind = self._is_waited()
        overtakes = next(iter(self._handed)).rank > place.rank
        if not (place.arrival.compiles or overtakes):  # else it was its grammar that it waited for, or nothing
            self._lookahead.entered(steps, behind=behind)
        self._take_back(place)
        self._hand_over()

    def generated(self, place: Place, token_count: int) -> None:
        """Charge for output, and note what was served."""
        assert place.tenant is not None, "only what was handed over generates"
        tier = self._tiers[place.arrival.tier]
        units = OUTPUT_TOKEN_COST * token_count
        if not place.generated_token_count:
            units += INPUT_TOKEN_COST * place.input_token_count
        place.generated_token_count += token_count
        tier.line.generated(place, place.tenant, token_count)
        tier.waits.rate.served(units, self._clock())

    def leave(self, place: Place) -> None:
        """Give a place back."""
        state, arrival = place.state, place.arrival
        place.state = State.GONE
        tier = self._tiers[arrival.tier]
        match state:
            case State.ENTERED:
                self._entrance.passed(arrival)
            case State.WAITING:
                assert place.tenant is not None
                tier.line.leave(place, place.tenant)
                self._entrance.passed(arrival)
            case State.HANDED | State.RUNNING:
                assert place.tenant is not None
                tier.line.ended(place, place.tenant)
                if state is State.HANDED:
                    self._take_back(place)
                else:
                    tier.waits.ended(place.tenant, place.generated_token_count)
            case State.GONE:
                return
        self._hand_over()

    def outlook(self) -> list[Outlook]:
        """What everybody who waits may expect, the next first. Takes time in proportion to how many they are."""
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
                found.append(Outlook(place, self._lookahead.pending_count + len(found), tier.waits.seconds(units)))
                units += cost
        return found

    def statistics(self) -> QueueStatistics:
        """Never blocks; takes time in proportion to how many wait."""
        entrance = self._entrance
        return QueueStatistics(
            waiting_count=entrance.waiting_count,
            waiting_count_peak=entrance.waiting_count_peak,
            promise_count=entrance.promise_count,
            refused_count=entrance.refused_count,
            engine_pending_count=self._lookahead.pending_count,
            engine_window=int(self._lookahead.window),
            longest_wait_s=max((each.wait_s for each in self.outlook() if each.wait_s is not None), default=None),
        )

    def _hand_over(self) -> None:
        """Give the engine what it has room for."""
        now, engine = self._clock(), self._engine()
        self._lookahead.spread(engine.replica_count)
        while self._is_waited() and (turn := self._next_turn(now)) is not None:
            tier, tenant, rank = turn
            if not self._lookahead.has_room(rank):
                break
            if tier is self._batch:
                self._batch_moved_at = now
            place = tier.line.take(tenant, tier.waits.output_tokens(tenant, tenant.first.output_token_count_max))
            place.rank = rank
            self._entrance.passed(place.arrival)
            self._handed[place] = None
            self._lookahead.given(rank, place.arrival.sequence_count, compiles=place.arrival.compiles)
            place.handed_at_step = engine.step_count
            place.state = State.HANDED
            place.on_turn()
        for tier in (self._interactive, self._batch):
            tier.waits.rate.watch(now, waiting=bool(tier.line))

    def _is_waited(self) -> bool:
        """Whether anybody waits for a turn."""
        return bool(self._interactive.line or self._batch.line)

    def _take_back(self, place: Place) -> None:
        """The engine has begun with a request, or never will."""
        del self._handed[place]
        self._lookahead.gone(place.rank, place.arrival.sequence_count, compiles=place.arrival.compiles)

    def _next_turn(self, now: float) -> tuple[Tier, Tenant[Place], float] | None:
        """Whose turn it is, and with which rank.

        Interactive first, unless the batch tier has waited for so long that the next turn is its own: then it is ranked as if it
        were interactive and came back from idling. Otherwise batch comes after everything interactive in the engine, too.
        """
        interactive, batch = self._interactive.line, self._batch.line
        is_overdue = now - self._batch_moved_at >= self._limits.batch_wait_s_max
        if batch and (is_overdue or not interactive):
            tenant = batch.next_tenant()
            assert tenant is not None, "something of the tier waits"
            rank = interactive.level() if interactive else BATCH_RANK + tenant.rank
            return self._batch, tenant, rank if self._limits.fair else 0.0
        tenant = interactive.next_tenant()
        if tenant is None:
            return None
        return self._interactive, tenant, tenant.rank if self._limits.fair else 0.0


WINDOW_FIRST = 8.0  # sequences: a burst that meets an idle engine fills its first batch within a few steps
WINDOW_MIN = 1.0
WINDOW_MAX = 160.0  # sequences: with those below it, and those that overtake, it stays under what engines queue (256)
PENDING_MAX = 224  # sequences in all; one request more, of up to 16 choices, still stays under it
COMPILING_MAX = 32  # sequences with a response format that do not count, since it is their grammar that they wait for
# Steps: the one under way when a sequence is handed over cannot see it, the one after it is the first that does.
STEPS_AT_ONCE = 2
STEPS_LONG = 3  # one step of waiting is the aim
SHRINK = 0.5  # sequences per late one: slower than it grows, since an empty batch costs more than a less fair order


class Lookahead:
    """The window of one engine, or of several behind one queue. Counts are in sequences; a request with several choices is several.

    Several engines have as many times the room; one that is full passes on what it is given.
    """

    def __init__(self) -> None:
        self.window = WINDOW_FIRST
        self._engine_count = 1
        self._ranks: list[float] = []  # of those that wait for nothing but room, the lowest first
        self._compiling_count = 0

    @property
    def pending_count(self) -> int:
        """Sequences that the engine was given and has not let enter yet."""
        return len(self._ranks) + self._compiling_count

    def spread(self, engine_count: int) -> None:
        """So many engines take from the queue now, at least 1. Each one that comes begins as the first did."""
        if engine_count != self._engine_count:
            added = WINDOW_FIRST * (engine_count - self._engine_count)
            self._engine_count = engine_count
            self.window = min(max(self.window + added, WINDOW_MIN * engine_count), WINDOW_MAX * engine_count)

    def count_before(self, rank: float) -> int:
        """Those of them that come before a request which would be given now."""
        return bisect.bisect_right(self._ranks, rank) + max(0, self._compiling_count - COMPILING_MAX * self._engine_count)

    def has_room(self, rank: float) -> bool:
        """Whether the engine may be given one more request, of this rank."""
        return self.count_before(rank) < int(self.window) and self.pending_count < PENDING_MAX * self._engine_count

    def given(self, rank: float, sequence_count: int, *, compiles: bool) -> None:
        """The engine has a request more. compiles: it has a response format."""
        if compiles:
            self._compiling_count += sequence_count
        else:
            at = bisect.bisect_right(self._ranks, rank)
            self._ranks[at:at] = [rank] * sequence_count

    def gone(self, rank: float, sequence_count: int, *, compiles: bool) -> None:
        """A request that was given has entered or ended."""
        if compiles:
            self._compiling_count -= sequence_count
        else:
            at = bisect.bisect_left(self._ranks, rank)
            assert self._ranks[at : at + sequence_count] == [rank] * sequence_count, "what is gone was given"
            del self._ranks[at : at + sequence_count]

    def entered(self, step_count: int, *, behind: bool) -> None:
        """A request that overtook nobody has entered so many steps after it was given. behind: others wait that would follow it."""
        if step_count < 0:
            return  # the engine was started anew in between
        if step_count <= STEPS_AT_ONCE:
            if behind and self.pending_count >= int(self.window):
                self.window = min(self.window + 1, WINDOW_MAX * self._engine_count)
        elif step_count > STEPS_LONG:
            self.window = max(self.window - SHRINK, WINDOW_MIN * self._engine_count)


NEWCOMERS_SHARE = 0.8  # of all places: the others are for those who were promised one, since rates are not steady
# Of the time that is left: what the expected wait may take, since one request in ten waits a fifth longer than expected.
PROMISED_WAIT_SHARE, NEWCOMERS_WAIT_SHARE = 0.9, 0.6
HINT_MARGIN = 1.2  # a wait is told a fifth longer than computed: too early means to be refused again
HINT_S_MIN = 0.05  # seconds: below it a client would spin
HINT_S_UNKNOWN = 1.0  # seconds: before anything was served there is nothing to compute from
PROMISES_PER_PLACE = 10  # beyond so many the time told is an estimate, and nothing is kept
GRACE_S_MIN = 2.0  # seconds for which a place is kept at least: the jitter of clients and the way of the message


class Tier:
    """One service tier: its line and its waits."""

    def __init__(self) -> None:
        self.line: Line[Place] = Line()
        self.waits = Waits()


class Entrance:
    """Counts who has a place and was not handed over yet, and lets in or refuses."""

    def __init__(self, limits: QueueLimits, tiers: Mapping[ServiceTier, Tier], lookahead: Lookahead) -> None:
        self.waiting_count = 0
        self.waiting_count_peak = 0
        self.refused_count = 0
        self._limits = limits
        self._tiers = tiers
        self._lookahead = lookahead
        self._by_tenant: Counter[uuid.UUID] = Counter()  # of those that wait
        self._promises = Promises(PROMISES_PER_PLACE * limits.request_count_max)

    @property
    def promise_count(self) -> int:
        """Refused requests for which a place is kept."""
        return len(self._promises)

    def let_in(self, arrival: Arrival, engine_wait_s: float, now: float) -> None:
        """Count a request in, or raise: QueueFull, StartsTooLate. `passed` follows once."""
        self._promises.forget_expired(now)
        keeps_promise = self._promises.is_due(arrival.key, now)
        refusal: Exception | None = self._room_fault(arrival, now, keeps_promise=keeps_promise)
        if refusal is None and arrival.deadline is not None:
            refusal = self._deadline_fault(arrival, arrival.deadline - now, engine_wait_s, now, keeps_promise=keeps_promise)
        if refusal is not None:
            self.refused_count += 1
            raise refusal
        self._promises.drop(arrival.key)
        self.waiting_count += 1
        self.waiting_count_peak = max(self.waiting_count_peak, self.waiting_count)
        self._by_tenant[arrival.tenant_id] += 1

    def passed(self, arrival: Arrival) -> None:
        """A request waits no more: it was handed over, or has gone."""
        self.waiting_count -= 1
        self._by_tenant[arrival.tenant_id] -= 1
        if not self._by_tenant[arrival.tenant_id]:
            del self._by_tenant[arrival.tenant_id]

    def wait_s(self, arrival: Arrival, *, keeps_promise: bool = False) -> float | None:
        """How long a request would wait that came now; None before anything was observed. keeps_promise: others wait for it."""
        tier = self._tiers[arrival.tier]
        rank = tier.line.start(self._line_id(arrival))
        if self._lookahead.has_room(rank) and not tier.line:
            return 0.0
        tenant = tier.line.find(self._line_id(arrival))
        own = tier.waits.backlog(tenant) if tenant is not None else 0.0
        if not keeps_promise:
            own += self._promises.cost(arrival.tenant_id)
        before = self._units_before(arrival, own)
        return tier.waits.seconds(before + self._cost(arrival) * self._lookahead.count_before(rank))

    def _room_fault(self, arrival: Arrival, now: float, *, keeps_promise: bool) -> QueueFull | None:
        """Why there is no place: within the bounds, behind all promises, and no tenant has more places than it leaves free."""
        limits, own = self._limits, self._by_tenant[arrival.tenant_id]
        share = 1.0 if keeps_promise else NEWCOMERS_SHARE
        free = int(limits.request_count_max * share) - self.waiting_count
        own_max = int(limits.tenant_request_count_max * share)
        if keeps_promise:
            over = max(1 - free, own + 1 - own_max)
        else:
            known = self._promises.find(arrival.key) is not None  # it came too early: it is not behind itself
            own += self._promises.count(arrival.tenant_id) - known
            free -= len(self._promises) - known
            over_share = (own + 2 - free) // 2  # each place that the tenant gives back is one less and leaves one more
            over = max(own + 1 - own_max, over_share)
            if over > 0 and self._is_half_empty(arrival):
                return None
        if over <= 0:
            return None
        waits = self._tiers[arrival.tier].waits
        ahead = self._units_before(arrival, over * self._usual_cost(arrival))
        units = max(ahead, (1 - free) * self._cost(arrival))
        hint_s = self._promise(arrival, waits.seconds(units), now, again=keeps_promise)
        return QueueFull(own, self.waiting_count, hint_s)

    def _is_half_empty(self, arrival: Arrival) -> bool:
        """Whether half of what this tenant could have is free: then those who were promised places do not come back for them."""
        own_max = min(self._limits.tenant_request_count_max, self._limits.request_count_max // 2)
        return self.waiting_count < self._limits.request_count_max // 2 and self._by_tenant[arrival.tenant_id] < own_max // 2

    def _deadline_fault(
        self, arrival: Arrival, left_s: float, engine_wait_s: float, now: float, *, keeps_promise: bool
    ) -> StartsTooLate | None:
        wait_s = self.wait_s(arrival, keeps_promise=keeps_promise)
        if wait_s is None:
            return None
        wait_s += engine_wait_s
        sure_s = left_s * (PROMISED_WAIT_SHARE if keeps_promise else NEWCOMERS_WAIT_SHARE)
        if wait_s <= sure_s:
            return None
        return StartsTooLate(wait_s, left_s, self._promise(arrival, wait_s - sure_s, now, again=keeps_promise))

    def _promise(self, arrival: Arrival, wait_s: float | None, now: float, *, again: bool) -> float:
        """The time after which a refused request will be let in. again: it came when it was told, and there was no place."""
        if again:
            self._promises.drop(arrival.key)
        standing = self._promises.find(arrival.key)
        if standing is not None:  # it came too early, and what it was told still holds
            return max(standing.ready_at - now, HINT_S_MIN)
        hint_s = HINT_S_UNKNOWN if wait_s is None else max(wait_s * HINT_MARGIN, HINT_S_MIN)
        self._promises.make(Promise(arrival.key, self._cost(arrival), now + hint_s, now + hint_s + max(GRACE_S_MIN, hint_s / 2)))
        return hint_s

    def _line_id(self, arrival: Arrival) -> uuid.UUID:
        return arrival.tenant_id if self._limits.fair else ALL_TENANTS

    def _units_before(self, arrival: Arrival, own_units: float) -> float:
        """What is served before the tenant has been served so much more."""
        tier = self._tiers[arrival.tier]
        weight = arrival.weight if self._limits.fair else 1.0
        return tier.waits.units_before(tier.line, self._line_id(arrival), weight, own_units, self._promises.cost)

    def _usual_cost(self, arrival: Arrival) -> float:
        """What a request of this tenant costs on average, of those that wait; else what this one costs."""
        tier = self._tiers[arrival.tier]
        tenant = tier.line.find(self._line_id(arrival))
        if tenant is None or not tenant.waiting:
            return self._cost(arrival)
        return tier.waits.backlog(tenant) / len(tenant.waiting)

    def _cost(self, arrival: Arrival) -> float:
        return self._tiers[arrival.tier].waits.cost(arrival.input_token_count, arrival.output_token_count_max)


EARLY_S = 0.001  # seconds by which a timer may fire too soon

Key = tuple[uuid.UUID, uuid.UUID]  # tenant and request


@dataclass(frozen=True, slots=True)
class Promise:
    """One of them. Times in monotonic seconds; cost in units of service."""

    key: Key
    cost: float
    ready_at: float
    expires_at: float


class Promises:
    """All that stand."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._standing: dict[Key, Promise] = {}
        self._counts: Counter[uuid.UUID] = Counter()
        self._costs: dict[uuid.UUID, float] = {}
        self._expiries: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._standing)

    def count(self, tenant_id: uuid.UUID) -> int:
        """Promises to one tenant."""
        return self._counts[tenant_id]

    def cost(self, tenant_id: uuid.UUID) -> float:
        """What those to one tenant will cost, in units of service."""
        return self._costs.get(tenant_id, 0.0)

    def find(self, key: Key) -> Promise | None:
        """The promise to a request, if it has one."""
        return self._standing.get(key)

    def make(self, promise: Promise) -> None:
        """Keep a place. Beyond the bound the time told stays an estimate."""
        if len(self._standing) >= self._count_max or promise.key in self._standing:
            return
        tenant_id = promise.key[0]
        self._standing[promise.key] = promise
        self._counts[tenant_id] += 1
        self._costs[tenant_id] = self.cost(tenant_id) + promise.cost
        heapq.heappush(self._expiries, (promise.expires_at, promise.key))

    def is_due(self, key: Key, now: float) -> bool:
        """Whether this request has a promise, and has waited as long as it was told."""
        promise = self._standing.get(key)
        return promise is not None and now >= promise.ready_at - EARLY_S

    def drop(self, key: Key) -> None:
        """The place was taken, or is no longer needed."""
        promise = self._standing.pop(key, None)
        if promise is None:
            return
        tenant_id = key[0]
        self._counts[tenant_id] -= 1
        self._costs[tenant_id] -= promise.cost
        if not self._counts[tenant_id]:
            del self._counts[tenant_id], self._costs[tenant_id]

    def forget_expired(self, now: float) -> None:
        """Give up on those who did not come back."""
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            promise = self._standing.get(key)
            if promise is not None and promise.expires_at <= now:
                self.drop(key)
