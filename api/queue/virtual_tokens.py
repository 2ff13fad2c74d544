"""Fair order between tenants by virtual token counters: the tenant that was served least is next.

Pure data and arithmetic, without clock, tasks or limits. Each service tier has its own `Line` and
counters.

The counter of a tenant is its weighted service. The tenant is charged for input when the engine
starts on a request, and for output as it is generated. The rank is the counter plus the expected
remaining cost of the tenant's requests in the engine; its next request starts at this rank.

Requests are ordered by rank, both here and inside the engine, which receives the rank of each
request. A tenant with little work in the engine comes first, even before dispatched requests of
others that have not started.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: virtual token counters
with weights, charged in advance as in the variant with predicted lengths. Start-time fair queueing
(Goyal et al., SIGCOMM 1996) is the source of a start that includes the work under way. Between any
two tenants that both wait throughout, the service (input and output tokens by their costs, divided
by the tenant's weight) differs by at most twice max(input cost x longest input, output cost x most
tokens that one tenant has in the engine at once).

A tenant that returns from idling starts at the level: the lowest counter of tenants that wait, here
or in the engine, where running requests count half. Idle tenants accumulate no credit, but a
returning one finds the places of the engine taken by others. Half of what their requests have
received so far is what it would have there, had it shared the places with them. So its first
requests precede some of the running ones, and the engine lets it have its share of places at once.

Lines of several processes before the same engines exchange reports (`Line.report`, `Line.absorb`).
A process charges a tenant of its own for service elsewhere; the counter of a tenant without
requests of its own is the highest reported one, which includes all service. Service that two others
report must not count twice, so a charged counter is only kept near the highest one. Until others
report, each is presumed to dispatch a tenant's requests as this one does, or all would give out the
same ranks. Lines that meet for the first time, or again, have counted from different beginnings:
the lower one rises by the difference of their heights.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

INPUT_TOKEN_COST = 1.0  # units of service
OUTPUT_TOKEN_COST = 2.0  # units: decode serves one token per step, prefill many; ratio of the paper
RUNNING_SHARE = 0.5  # of the service of running requests, in a level: see above
OUTPUT_MEMORY = 16  # requests in the mean output, which adapts to a change within some dozens
# Expected output until a request has ended: that of the reference workload.
OUTPUT_TOKENS_UNKNOWN = 150.0


class Queued(Protocol):
    """Entry of a line. `number` is unique and grows with each arrival."""

    @property
    def number(self) -> int: ...
    @property
    def input_token_count(self) -> int: ...
    @property
    def output_token_count_max(self) -> int: ...


Item = TypeVar("Item", bound=Queued)


class TenantReport(msgspec.Struct, array_like=True, frozen=True):
    """State of a tenant in the line of one process.

    `served` is the weighted service there since the tenant last began to have requests there;
    `period` numbers these times.
    """

    tenant: bytes
    weight: float
    counter: float
    period: int
    served: float
    owed_units: float
    dispatched_count: int
    waiting_count: int
    input_token_count: int
    output_token_count_max: int
    underway_units: float = 0.0

    @property
    def is_queued(self) -> bool:
        """True if requests of the tenant wait there, or in the engine."""
        return bool(self.waiting_count or self.dispatched_count)


class LineReport(msgspec.Struct, array_like=True, frozen=True):
    """State of the line of one process: its height and level, and its tenants with requests or new
    service.

    `next_rank` is that of the request which is next there; None if nothing waits.
    """

    height: float = 0.0
    next_rank: float | None = None
    tenants: tuple[TenantReport, ...] = ()
    level: float = 0.0


Priority = tuple[float, int]


@dataclass(slots=True, eq=False)
class Tenant(Generic[Item]):
    """Tenant of a line, with its waiting and running requests.

    `counter` is its weighted service so far. `dispatched` are requests that the engine has not
    started on. `owed` has the expected remaining cost of each dispatched or running request,
    `ranks` the rank of each, ascending. `output_tokens_mean` is the mean of ended requests; None
    before the first. `underway` has what each running request has received, in units, if it began
    after the tenant last returned from idling. `listed_level` and `listed_priority` are its valid
    entries in the heaps of `Line.level` and `Line.next_tenant`. `elsewhere` has the last reports of
    other processes in which the tenant has requests, `owed_elsewhere` and `underway_elsewhere` sums
    of them, and `presumed` what each of these is presumed to have dispatched since then. `served`
    and `period` are those of `TenantReport`. `slack` is how much lower than elsewhere the counter
    may be, because service is on its way.
    """

    id: uuid.UUID
    weight: float
    counter: float = 0.0
    # In order of arrival; a dict, so that any request can be removed in constant time.
    waiting: dict[Item, None] = field(default_factory=dict)
    waiting_input_tokens: int = 0
    waiting_output_tokens_max: int = 0
    dispatched: set[Item] = field(default_factory=set)
    owed: dict[Item, float] = field(default_factory=dict)
    owed_units: float = 0.0
    underway: dict[Item, float] = field(default_factory=dict)
    underway_units: float = 0.0
    ranks: dict[Item, float] = field(default_factory=dict)
    output_tokens_mean: float | None = None
    listed_level: float | None = None
    listed_priority: Priority | None = None
    elsewhere: dict[uuid.UUID, TenantReport] = field(default_factory=dict)
    owed_elsewhere: float = 0.0
    underway_elsewhere: float = 0.0
    presumed: dict[uuid.UUID, float] = field(default_factory=dict)
    presumed_units: float = 0.0
    served: float = 0.0
    period: int = 0
    slack: float = 0.0

    @property
    def first(self) -> Item:
        """Request that has waited longest."""
        return next(iter(self.waiting))

    @property
    def is_queued(self) -> bool:
        """True if requests wait in a process, or in the engine."""
        return bool(
            self.waiting
            or self.dispatched
            or (self.elsewhere and any(each.is_queued for each in self.elsewhere.values()))
        )

    def backlog(self) -> tuple[int, int, int]:
        """Count the waiting requests of all processes, their input and their maximal output."""
        totals = len(self.waiting), self.waiting_input_tokens, self.waiting_output_tokens_max
        for each in self.elsewhere.values():
            totals = (
                totals[0] + each.waiting_count,
                totals[1] + each.input_token_count,
                totals[2] + each.output_token_count_max,
            )
        return totals

    @property
    def level(self) -> float:
        """Counter in which running requests count half."""
        units = self.underway_units + self.underway_elsewhere
        return self.counter - RUNNING_SHARE * units / self.weight

    @property
    def rank(self) -> float:
        """Rank of the next request; never before the tenant's requests in the engine."""
        owed_units = self.owed_units + self.owed_elsewhere + self.presumed_units
        own = self.counter + owed_units / self.weight
        if self.ranks and (last := next(reversed(self.ranks.values()))) > own:
            return last
        return own

    @property
    def priority(self) -> Priority:
        """Sort key of the tenant: lowest rank, then longest wait."""
        return self.rank, next(iter(self.waiting)).number if self.waiting else 0

    def lift(self, level: float) -> None:
        """Start at the level after idling, if the counter is below."""
        if self.counter < level:
            self.counter = level
            self.underway.clear()
            self.underway_units = 0.0

    def presume(self, units: float) -> None:
        """Presume that processes in which requests wait dispatch one when this one does, until they
        report again. Otherwise all of them would give out the same ranks.
        """
        for process_id, each in self.elsewhere.items():
            before = self.presumed.get(process_id, 0.0)
            count = each.waiting_count + each.dispatched_count
            more = min(units, count * units - before)
            if more > 0:
                self.presumed[process_id] = before + more
                self.presumed_units += more


class Line(Generic[Item]):
    """Tenants of one tier, with their waiting requests."""

    def __init__(self) -> None:
        # Keys: tenant ids as integers, because UUIDs are hashed in Python.
        self._tenants: dict[int, Tenant[Item]] = {}
        # Min-heap of priorities of waiting tenants, with lazy updates: they mostly grow, and
        # entries that are too low are corrected when they surface. One that shrinks gets another
        # entry; `Tenant.listed_priority` is the valid one.
        self._priorities: list[tuple[Priority, int, Tenant[Item]]] = []
        # Min-heap of levels of tenants with requests here or in the engine, with lazy updates:
        # entries may be too low, or of tenants without requests. One whose level falls gets another
        # entry; `Tenant.listed_level` is the valid one.
        self._queued: list[tuple[float, int, Tenant[Item]]] = []
        # Number of entries so far in both heaps; breaks ties, so that tenants are never compared.
        self._listed_count = 0
        self.waiting_count = 0
        self.output_tokens_mean: float | None = None  # of all tenants; None before the first
        self._last: Tenant[Item] | None = None  # served or left last
        self._swept_at = 1000  # number of known tenants at which idle ones are removed
        # Absorbed service of the present period of each tenant, by process
        self._seen: dict[uuid.UUID, dict[int, tuple[int, float]]] = {}
        self._waiting_elsewhere: set[uuid.UUID] = set()  # processes in which requests wait
        self._floor = 0.0  # level of a line that others have left behind while it had no tenants
        self._period_count = 0

    def reweigh(self, weights: Mapping[int, float]) -> None:
        """Set the weights of the known tenants, by id as an integer; others weigh 1.

        Service before the change keeps its weight.
        """
        for number, tenant in self._tenants.items():
            tenant.weight = weights.get(number, 1.0)
        self._settle(self._tenants.values())

    def waiting_tenants(self) -> Iterator[Tenant[Item]]:
        """Iterate over the tenants that have requests waiting here."""
        return (tenant for tenant in self._tenants.values() if tenant.waiting)

    def backlogged_tenants(self) -> Iterator[Tenant[Item]]:
        """Iterate over the tenants that have requests waiting in any process."""
        return (
            tenant
            for tenant in self._tenants.values()
            if tenant.waiting or (tenant.elsewhere and tenant.backlog()[0])
        )

    @property
    def waits_elsewhere(self) -> bool:
        """True if requests wait in other processes."""
        return bool(self._waiting_elsewhere)

    def find(self, tenant_id: uuid.UUID) -> Tenant[Item] | None:
        """Return a tenant; None if it is unknown and would start at the common level."""
        return self._tenants.get(tenant_id.int)

    def start(self, tenant_id: uuid.UUID) -> float:
        """Return the rank that a request of the tenant would get now."""
        tenant = self._tenants.get(tenant_id.int)
        if tenant is None:
            return self.level()
        return tenant.rank if tenant.is_queued else max(tenant.rank, self.level())

    def arrive(self, tenant_id: uuid.UUID, weight: float) -> tuple[Tenant[Item], float]:
        """Register the arrival of a request; return its tenant and its rank.

        `weight` must be above 0 and replaces the tenant's earlier weight.
        """
        tenant = self._tenants.get(tenant_id.int)
        if tenant is None:
            tenant = self._add(tenant_id, weight)
        if not (tenant.waiting or tenant.dispatched or (tenant.elsewhere and tenant.is_queued)):
            tenant.lift(self.level())
        tenant.weight = weight
        self._note_level(tenant)
        # As `Tenant.rank`
        owed_units = tenant.owed_units + tenant.owed_elsewhere + tenant.presumed_units
        rank = tenant.counter + owed_units / weight
        return tenant, max(rank, next(reversed(tenant.ranks.values()))) if tenant.ranks else rank

    def _add(self, tenant_id: uuid.UUID, weight: float) -> Tenant[Item]:
        self._forget_idle()
        self._period_count += 1
        tenant = Tenant[Item](tenant_id, weight, period=self._period_count)
        self._tenants[tenant_id.int] = tenant
        return tenant

    def join(self, item: Item, tenant_id: uuid.UUID, weight: float) -> Tenant[Item]:
        """Append a request to the waiting ones of its tenant. `weight` is as in `arrive`."""
        tenant, _ = self.arrive(tenant_id, weight)
        tenant.waiting[item] = None
        tenant.waiting_input_tokens += item.input_token_count
        tenant.waiting_output_tokens_max += item.output_token_count_max
        self.waiting_count += 1
        self._note_priority(tenant)
        return tenant

    def leave(self, item: Item, tenant: Tenant[Item]) -> None:
        """Remove a waiting request without charging its tenant."""
        del tenant.waiting[item]
        tenant.waiting_input_tokens -= item.input_token_count
        tenant.waiting_output_tokens_max -= item.output_token_count_max
        self.waiting_count -= 1
        self._last = tenant

    def next_tenant(self) -> Tenant[Item] | None:
        """Return the tenant with the lowest rank, then longest wait; None if nothing waits."""
        priorities = self._priorities
        while priorities:
            priority, number, tenant = priorities[0]
            if tenant.listed_priority != priority:
                heapq.heappop(priorities)  # another entry replaced it
            elif not tenant.waiting:
                heapq.heappop(priorities)
                tenant.listed_priority = None
            elif (present := tenant.priority) != priority:
                tenant.listed_priority = present
                heapq.heapreplace(priorities, (present, number, tenant))
            else:
                return tenant
        return None

    def _note_priority(self, tenant: Tenant[Item]) -> None:
        """Record that a tenant is waiting, or that it may have moved forward."""
        priority = tenant.priority
        if tenant.listed_priority is None or priority < tenant.listed_priority:
            tenant.listed_priority = priority
            self._listed_count += 1
            heapq.heappush(self._priorities, (priority, self._listed_count, tenant))

    def take(self, tenant: Tenant[Item], output_token_count: float) -> Item:
        """Dispatch the first waiting request of a tenant, expecting `output_token_count`.

        Call `begun` at most once afterwards, and then `ended` once.
        """
        item, rank = tenant.first, tenant.rank
        self.leave(item, tenant)
        self.pass_by(item, tenant, rank, output_token_count)
        return item

    def pass_by(
        self, item: Item, tenant: Tenant[Item], rank: float, output_token_count: float
    ) -> None:
        """Record the dispatch of a request that does not wait.

        `rank` is the tenant's rank on its arrival.
        """
        self._last = tenant
        tenant.ranks[item] = rank
        tenant.dispatched.add(item)
        tenant.owed[item] = units = (
            INPUT_TOKEN_COST * item.input_token_count + OUTPUT_TOKEN_COST * output_token_count
        )
        tenant.owed_units += units
        if tenant.elsewhere:
            tenant.presume(units)

    def begun(self, item: Item, tenant: Tenant[Item]) -> None:
        """Record that the engine has started on a request: charge its tenant for the input."""
        tenant.dispatched.remove(item)
        self._last = tenant
        units = INPUT_TOKEN_COST * item.input_token_count
        weighted = units / tenant.weight
        tenant.counter += weighted
        tenant.served += weighted
        tenant.owed[item] -= units
        tenant.owed_units -= units
        tenant.underway[item] = units
        tenant.underway_units += units

    def charge(self, item: Item, tenant: Tenant[Item], units: float) -> None:
        """Charge a tenant for a request that the engine has started, in service units."""
        weighted = units / tenant.weight
        tenant.counter += weighted
        tenant.served += weighted
        expected = min(units, tenant.owed[item])
        tenant.owed[item] -= expected
        tenant.owed_units -= expected
        if item in tenant.underway:
            tenant.underway[item] += units
            tenant.underway_units += units

    def ended(self, item: Item, tenant: Tenant[Item]) -> None:
        """Record the end of a dispatched request, and drop its remaining expected cost."""
        tenant.dispatched.discard(item)
        del tenant.ranks[item]
        tenant.owed_units -= tenant.owed.pop(item)
        tenant.underway_units -= tenant.underway.pop(item, 0.0)
        if not tenant.owed:
            # Sums of fractions may be off by some bits.
            tenant.owed_units = tenant.underway_units = 0.0
        if tenant.waiting:
            self._note_priority(tenant)

    def note_output(self, tenant: Tenant[Item], token_count: int) -> None:
        """Record how many tokens a request of the tenant had generated when it ended."""
        for each in (self, tenant):
            mean, count = each.output_tokens_mean, float(token_count)
            each.output_tokens_mean = (
                count if mean is None else mean + (count - mean) / OUTPUT_MEMORY
            )

    def expected_output_tokens(self, tenant: Tenant[Item], token_count_max: int) -> float:
        """Estimate the output of a request: the mean of its tenant or, if unknown, of all."""
        mean = tenant.output_tokens_mean
        if mean is None:
            mean = (
                OUTPUT_TOKENS_UNKNOWN
                if self.output_tokens_mean is None
                else self.output_tokens_mean
            )
        return min(float(token_count_max), mean)

    def level(self) -> float:
        """Return the counter at which a returning tenant starts: the lowest level of tenants that
        wait, in any process or in the engine; without any, that of the tenant served last.
        """
        queued = self._queued
        while queued:
            level, number, tenant = queued[0]
            if tenant.listed_level != level:
                heapq.heappop(queued)  # another entry replaced it
            elif not (
                tenant.waiting or tenant.dispatched or (tenant.elsewhere and tenant.is_queued)
            ):
                heapq.heappop(queued)
                tenant.listed_level = None
            elif (present := tenant.level) != level:
                tenant.listed_level = present
                heapq.heapreplace(queued, (present, number, tenant))
            else:
                return level
        return self._floor if self._last is None else max(self._floor, self._last.level)

    def _note_level(self, tenant: Tenant[Item]) -> None:
        """Record that a tenant has requests, or that its level may have fallen."""
        level = tenant.level
        if tenant.listed_level is None or level < tenant.listed_level:
            tenant.listed_level = level
            self._listed_count += 1
            heapq.heappush(self._queued, (level, self._listed_count, tenant))

    def height(self) -> float | None:
        """Return the highest counter of tenants with requests in the engine, or in other processes;
        None without any. Takes linear time. A tenant with requests now and then changes the level,
        and hardly the height, so lines of several processes are compared by their heights.
        """
        counters = [
            tenant.counter for tenant in self._tenants.values() if tenant.owed or tenant.elsewhere
        ]
        return max(counters, default=None)

    def report(self) -> LineReport:
        """Describe the line for other processes, and begin new periods of idle tenants."""
        tenants = []
        for tenant in self._tenants.values():
            is_active = bool(tenant.waiting or tenant.owed)
            if not (is_active or tenant.served):
                continue
            tenants.append(
                TenantReport(
                    tenant.id.bytes,
                    tenant.weight,
                    tenant.counter,
                    tenant.period,
                    tenant.served,
                    tenant.owed_units,
                    len(tenant.dispatched),
                    len(tenant.waiting),
                    tenant.waiting_input_tokens,
                    tenant.waiting_output_tokens_max,
                    tenant.underway_units,
                )
            )
            if not is_active:
                self._period_count += 1
                tenant.period, tenant.served = self._period_count, 0.0
        first = self.next_tenant()
        height, level = self.height(), self.level()
        return LineReport(
            level if height is None else height,
            None if first is None else first.rank,
            tuple(tenants),
            level,
        )

    def absorb(self, process_id: uuid.UUID, report: LineReport, *, is_new: bool) -> float:
        """Take over the report of another process; return the new service there, in units.

        `is_new` says that the process was unknown, or silent for too long. Its service since its
        last report is then not charged: its tenants would wait until others have caught up. If its
        line is higher, this one rises and takes over its counters; otherwise it does so there.
        """
        is_behind = False
        if is_new:
            height = self.height()
            # Before its first request to the engine, a line has nothing but its level.
            gap = report.level - self.level() if height is None else report.height - height
            is_behind = gap < 0
            if gap > 0:
                self.rise(gap)
        if not is_behind:
            self._floor = max(self._floor, report.level)
        seen, units = self._seen.get(process_id, {}), 0.0
        if report.next_rank is None:
            self._waiting_elsewhere.discard(process_id)
        else:
            self._waiting_elsewhere.add(process_id)
        self._seen[process_id] = now_seen = {}
        before = self._drop(process_id)
        for each in report.tenants:
            tenant_id = uuid.UUID(bytes=each.tenant)
            found = self._tenants.get(tenant_id.int)
            tenant = self._add(tenant_id, each.weight) if found is None else found
            period, served = seen.get(tenant_id.int, (0, 0.0))
            now_seen[tenant_id.int] = each.period, each.served
            weighted = each.served - served if each.period == period else each.served
            if not is_new:
                units += weighted * each.weight
            if is_behind:
                if not tenant.is_queued:
                    tenant.lift(self.level())
            elif is_new or not (tenant.waiting or tenant.owed):
                tenant.counter = max(tenant.counter, each.counter)
            else:
                tenant.counter += weighted
                # Service in the last two reports of each process: some may not have arrived here.
                tenant.slack += weighted - tenant.slack / (2 * len(self._seen))
                tenant.counter = max(tenant.counter, each.counter - tenant.slack)
            if each.waiting_count or each.dispatched_count or each.owed_units:
                tenant.elsewhere[process_id] = each
            before.append(tenant)
        self._settle(before)
        return units

    def rise(self, units: float) -> None:
        """Raise the level, and the counters of all tenants with it, or lower them again."""
        for tenant in self._tenants.values():
            tenant.counter += units
        self._settle(self._tenants.values())
        self._floor += units

    def forget(self, process_id: uuid.UUID) -> None:
        """Drop the requests of a process that has ended or is silent; its service stays charged."""
        self._seen.pop(process_id, None)
        self._waiting_elsewhere.discard(process_id)
        self._settle(self._drop(process_id))

    def _drop(self, process_id: uuid.UUID) -> list[Tenant[Item]]:
        """Drop the requests in a process; return their tenants."""
        dropped = [each for each in self._tenants.values() if process_id in each.elsewhere]
        for tenant in dropped:
            del tenant.elsewhere[process_id]
            tenant.presumed_units -= tenant.presumed.pop(process_id, 0.0)
            if not tenant.presumed:
                tenant.presumed_units = 0.0
        return dropped

    def _settle(self, tenants: Iterable[Tenant[Item]]) -> None:
        """Order tenants again whose counter, weight or requests elsewhere have changed."""
        for tenant in tenants:
            elsewhere = tenant.elsewhere.values()
            tenant.owed_elsewhere = sum([each.owed_units for each in elsewhere])
            tenant.underway_elsewhere = sum([each.underway_units for each in elsewhere])
            if tenant.waiting:
                self._note_priority(tenant)
            if tenant.is_queued:
                self._note_level(tenant)

    def _forget_idle(self) -> None:
        """Remove idle tenants that would start at the common level anyway, to bound memory."""
        if len(self._tenants) < self._swept_at:
            return
        level = self.level()
        kept = {
            tenant.id.int: tenant
            for tenant in self._tenants.values()
            if tenant.waiting
            or tenant.owed
            or tenant.elsewhere
            or tenant.counter > level
            or tenant is self._last
        }
        self._tenants = kept
        self._swept_at = max(1000, 2 * len(kept))
