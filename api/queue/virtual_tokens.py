"""Fair order between tenants: a virtual token counter for each, and the next request is that of the one that was served least.

Pure data and arithmetic: no clock, no tasks, no bounds. One `Line` per service tier; a tenant's counter in one says nothing of
another.

    counter   what a tenant was served, by its weight: input when the engine begins with a request, output as it comes
    rank      counter + what the requests that the engine has of it will still cost: where its next request starts

The order is that of the ranks, here and inside the engine, which is told the rank of each request. So whoever has little there
comes first, also before what the engine has of others and has not begun with.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: its virtual token counter, with weights, and charged
in advance as in its variant with predicted lengths; a start that includes what is under way is that of start-time fair queueing
(Goyal et al., SIGCOMM 1996). Between any two tenants that both wait throughout, the service (input and output tokens by their
costs, divided by the tenant's weight) differs by at most twice max(input cost x longest input, output cost x most tokens that one
tenant has with the engine at once). A tenant that comes back from idling starts where the least served of those stands that wait,
here or in the engine, so that nobody saves up credit.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

INPUT_TOKEN_COST = 1.0  # units of service: the measure of all others
OUTPUT_TOKEN_COST = 2.0  # units: a decode step serves one token where a prefill step serves many; the paper's ratio


class Queued(Protocol):
    """What waits in a line."""

    @property
    def number(self) -> int:
        """Grows with each arrival; never used twice."""
        ...

    @property
    def input_token_count(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def output_token_count_max(self) -> int:
        """Most tokens that it may generate."""
        ...


Item = TypeVar("Item", bound=Queued)


Turn = tuple[float, int]


@dataclass(slots=True, eq=False)
class Tenant(Generic[Item]):
    """One tenant's part of a line.

    counter: service so far, in units by weight. handed: taken out, and the engine has not begun with them; owed: units that those
    and the ones that run will still cost, by request. ranks: what those were given, which grows from one to the next.
    output_tokens_mean: of its requests, as far as any have ended. is_listed: in the heap of `Line.level`. listed_turn: in its one
    valid entry in the heap of `Line.next_tenant`.
    """

    id: uuid.UUID
    weight: float
    counter: float = 0.0
    waiting: dict[Item, None] = field(default_factory=dict)  # in order of arrival; a dict, so that any of them can leave at once
    waiting_input_tokens: int = 0
    waiting_output_tokens_max: int = 0
    handed: set[Item] = field(default_factory=set)
    owed: dict[Item, float] = field(default_factory=dict)
    owed_units: float = 0.0
    ranks: dict[Item, float] = field(default_factory=dict)
    output_tokens_mean: float | None = None
    is_listed: bool = False
    listed_turn: Turn | None = None

    @property
    def first(self) -> Item:
        """The one that has waited longest."""
        return next(iter(self.waiting))

    @property
    def rank(self) -> float:
        """Where its next request starts: never before one that the engine has."""
        own = self.counter + self.owed_units / self.weight
        return max(own, next(reversed(self.ranks.values()))) if self.ranks else own

    @property
    def turn(self) -> Turn:
        """The least one is next: the least rank, and of equal ones the longest wait."""
        return self.rank, next(iter(self.waiting)).number if self.waiting else 0


class Line(Generic[Item]):
    """Tenants of one tier, and what of theirs waits."""

    def __init__(self) -> None:
        self._tenants: dict[int, Tenant[Item]] = {}  # by the numbers of their ids: UUIDs hash in Python
        # Turns of tenants of whom something waits. A turn mostly grows, and an entry that is too low comes up early: then it is put
        # right. For a turn that shrinks `_note_turn` adds another entry; `Tenant.listed_turn` tells which one is valid.
        self._turns: list[tuple[Turn, int, Tenant[Item]]] = []
        # Counters of tenants of whom something waits, here or in the engine. Until it is looked at an entry may be too low, or of a
        # tenant of whom nothing waits any more.
        self._queued: list[tuple[float, int, Tenant[Item]]] = []
        self._listed_count = 0  # since the start, in both heaps: breaks ties, so that tenants are never compared
        self.waiting_count = 0
        self._last: Tenant[Item] | None = None  # the one that was the last to wait for anything
        self._swept_at = 1000  # tenants known before the idle ones among them are looked for

    def waiting_tenants(self) -> Iterator[Tenant[Item]]:
        """Those of whom something waits."""
        return (tenant for tenant in self._tenants.values() if tenant.waiting)

    def find(self, tenant_id: uuid.UUID) -> Tenant[Item] | None:
        """What is known of a tenant; None for one that would start where the others stand."""
        return self._tenants.get(tenant_id.int)

    def start(self, tenant_id: uuid.UUID) -> float:
        """The rank that a tenant's request would have if it were next now."""
        tenant = self._tenants.get(tenant_id.int)
        if tenant is None:
            return self.level()
        return tenant.rank if tenant.waiting or tenant.handed else max(tenant.rank, self.level())

    def arrive(self, tenant_id: uuid.UUID, weight: float) -> tuple[Tenant[Item], float]:
        """Return the tenant of a request that comes now, and its rank.

        weight: more than 0; the latest one given holds from now on.
        """
        tenant = self._tenants.get(tenant_id.int)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[tenant_id.int] = Tenant(tenant_id, weight)
        if not (tenant.waiting or tenant.handed):
            tenant.counter = max(tenant.counter, self.level())
        tenant.weight = weight
        if not tenant.is_listed:
            tenant.is_listed = True
            self._listed_count += 1
            heapq.heappush(self._queued, (tenant.counter, self._listed_count, tenant))
        rank = tenant.counter + tenant.owed_units / weight  # as `Tenant.rank`
        return tenant, max(rank, next(reversed(tenant.ranks.values()))) if tenant.ranks else rank

    def join(self, item: Item, tenant_id: uuid.UUID, weight: float) -> Tenant[Item]:
        """Put a request at the end of its tenant's own line. weight: as of `arrive`."""
        tenant, _ = self.arrive(tenant_id, weight)
        tenant.waiting[item] = None
        tenant.waiting_input_tokens += item.input_token_count
        tenant.waiting_output_tokens_max += item.output_token_count_max
        self.waiting_count += 1
        self._note_turn(tenant)
        return tenant

    def leave(self, item: Item, tenant: Tenant[Item]) -> None:
        """Forget a request that waits no more, without any charge."""
        del tenant.waiting[item]
        tenant.waiting_input_tokens -= item.input_token_count
        tenant.waiting_output_tokens_max -= item.output_token_count_max
        self.waiting_count -= 1
        self._last = tenant

    def next_tenant(self) -> Tenant[Item] | None:
        """Whose first request is the next: the least rank, and of equal ones the longest wait. None if nothing waits."""
        turns = self._turns
        while turns:
            turn, number, tenant = turns[0]
            if tenant.listed_turn != turn:
                heapq.heappop(turns)  # another entry took its place
            elif not tenant.waiting:
                heapq.heappop(turns)
                tenant.listed_turn = None
            elif (present := tenant.turn) != turn:
                tenant.listed_turn = present
                heapq.heapreplace(turns, (present, number, tenant))
            else:
                return tenant
        return None

    def _note_turn(self, tenant: Tenant[Item]) -> None:
        """Something of a tenant waits from now on, or its turn may have come closer."""
        turn = tenant.turn
        if tenant.listed_turn is None or turn < tenant.listed_turn:
            tenant.listed_turn = turn
            self._listed_count += 1
            heapq.heappush(self._turns, (turn, self._listed_count, tenant))

    def take(self, tenant: Tenant[Item], output_token_count: float) -> Item:
        """Take out what waits first of a tenant, mostly the next one. `begun` may follow once, and `ended` does.

        output_token_count: what it will probably generate.
        """
        item, rank = tenant.first, tenant.rank
        self.leave(item, tenant)
        self.pass_by(item, tenant, rank, output_token_count)
        return item

    def pass_by(self, item: Item, tenant: Tenant[Item], rank: float, output_token_count: float) -> None:
        """The same for a request that did not wait. rank: of its tenant, who has just arrived."""
        self._last = tenant
        tenant.ranks[item] = rank
        tenant.handed.add(item)
        tenant.owed[item] = units = INPUT_TOKEN_COST * item.input_token_count + OUTPUT_TOKEN_COST * output_token_count
        tenant.owed_units += units

    def begun(self, item: Item, tenant: Tenant[Item]) -> None:
        """The engine has begun with a request that was taken out: charge its tenant for the input."""
        tenant.handed.remove(item)
        self._last = tenant
        units = INPUT_TOKEN_COST * item.input_token_count
        tenant.counter += units / tenant.weight
        tenant.owed[item] -= units
        tenant.owed_units -= units

    def charge(self, item: Item, tenant: Tenant[Item], units: float) -> None:
        """Charge a tenant for a request that the engine has begun with. units: of service."""
        tenant.counter += units / tenant.weight
        expected = min(units, tenant.owed[item])
        tenant.owed[item] -= expected
        tenant.owed_units -= expected

    def ended(self, item: Item, tenant: Tenant[Item]) -> None:
        """A request that was taken out has ended; what it did not cost is owed no more."""
        tenant.handed.discard(item)
        del tenant.ranks[item]
        tenant.owed_units -= tenant.owed.pop(item)
        if not tenant.owed:
            tenant.owed_units = 0.0  # sums of fractions may be off by some bits
        if tenant.waiting:
            self._note_turn(tenant)

    def level(self) -> float:
        """Where a tenant starts that comes back: with the least served of those that wait, else with the last that did."""
        queued = self._queued
        while queued:
            counter, number, tenant = queued[0]
            if not (tenant.waiting or tenant.handed):
                heapq.heappop(queued)
                tenant.is_listed = False
            elif tenant.counter != counter:
                heapq.heapreplace(queued, (tenant.counter, number, tenant))
            else:
                return counter
        return self._last.counter if self._last is not None else 0.0

    def _forget_idle(self) -> None:
        """Drop the tenants that would start at the level anyway, so that memory follows those that are active."""
        if len(self._tenants) < self._swept_at:
            return
        level = self.level()
        kept = {
            tenant.id.int: tenant
            for tenant in self._tenants.values()
            if tenant.waiting or tenant.owed or tenant.counter > level or tenant is self._last
        }
        self._tenants = kept
        self._swept_at = max(1000, 2 * len(kept))
