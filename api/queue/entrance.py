"""Who may join the queue before an engine: bounds, deadlines, and refusals that say truly when to come back."""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from api.core.errors import QueueFull, StartsTooLate
from api.queue.fair_queue import Lookahead
from api.queue.places import ALL_TENANTS, Arrival, Place, QueueLimits, ServiceTier
from api.queue.virtual_tokens import Line
from api.queue.waits import Waits

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
