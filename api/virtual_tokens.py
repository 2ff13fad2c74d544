"""Fair order between tenants: a virtual token counter for each, and the next request is that of the one that was served least.

Pure data and arithmetic: no clock, no tasks, no bounds. One `Line` per service tier; a tenant's counter in one says nothing of
another.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: its virtual token counter, with weights. Between any
two tenants that both wait throughout, the service (input and output tokens by their costs, divided by the tenant's weight) differs
by at most twice max(input cost x longest input, output cost x most tokens that one tenant has with the engine at once). A tenant
that comes back from idling starts where the least served of the waiting ones stands, so that nobody saves up credit.
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


@dataclass(slots=True, eq=False)
class Tenant(Generic[Item]):
    """One tenant's part of a line. counter: service so far, in units by weight. running_count: taken out and not ended."""

    id: uuid.UUID
    weight: float
    counter: float = 0.0
    waiting: dict[Item, None] = field(default_factory=dict)  # in order of arrival; a dict, so that any of them can leave at once
    waiting_input_tokens: int = 0
    waiting_output_tokens_max: int = 0
    running_count: int = 0
    is_listed: bool = False  # whether the line's heap has an entry of it

    @property
    def first(self) -> Item:
        """The one that has waited longest."""
        return next(iter(self.waiting))


class Line(Generic[Item]):
    """Tenants of one tier, and what of theirs waits."""

    def __init__(self) -> None:
        self._tenants: dict[uuid.UUID, Tenant[Item]] = {}
        # (counter, number of the first that waits, tenant): both only grow, so an outdated entry is too low, never too high.
        self._heap: list[tuple[float, int, uuid.UUID]] = []
        self._count = 0
        self._last: Tenant[Item] | None = None  # the one whose leaving emptied the line
        self._swept_at = 1000  # tenants known before the idle ones among them are looked for

    def __len__(self) -> int:
        return self._count

    def waiting_tenants(self) -> Iterator[Tenant[Item]]:
        """Those of whom something waits."""
        return (tenant for tenant in self._tenants.values() if tenant.waiting)

    def find(self, tenant_id: uuid.UUID) -> Tenant[Item] | None:
        """What is known of a tenant; None for one that would start where the others stand."""
        return self._tenants.get(tenant_id)

    def join(self, item: Item, tenant_id: uuid.UUID, weight: float) -> Tenant[Item]:
        """Put a request at the end of its tenant's own line. weight: more than 0; the latest one given holds from now on."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[tenant_id] = Tenant(tenant_id, weight)
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self.level())
        tenant.weight = weight
        tenant.waiting[item] = None
        tenant.waiting_input_tokens += item.input_token_count
        tenant.waiting_output_tokens_max += item.output_token_count_max
        self._count += 1
        if not tenant.is_listed:
            tenant.is_listed = True
            heapq.heappush(self._heap, (tenant.counter, tenant.first.number, tenant_id))
        return tenant

    def leave(self, item: Item, tenant: Tenant[Item]) -> None:
        """Forget a request that waits no more, without any charge."""
        del tenant.waiting[item]
        tenant.waiting_input_tokens -= item.input_token_count
        tenant.waiting_output_tokens_max -= item.output_token_count_max
        self._count -= 1
        if not self._count:
            self._last = tenant

    def next_tenant(self) -> Tenant[Item] | None:
        """Whose first request is the next: the least counter, and of equal ones the longest wait. None if nothing waits."""
        while self._heap:
            counter, number, tenant_id = self._heap[0]
            tenant = self._tenants[tenant_id]
            if not tenant.waiting:
                heapq.heappop(self._heap)
                tenant.is_listed = False
            elif (tenant.counter, tenant.first.number) != (counter, number):
                heapq.heapreplace(self._heap, (tenant.counter, tenant.first.number, tenant_id))
            else:
                return tenant
        return None

    def take(self, tenant: Tenant[Item]) -> Item:
        """Take out what waits first of a tenant, mostly the next one, and charge it for the input. `ended` follows once."""
        item = tenant.first
        self.leave(item, tenant)
        tenant.running_count += 1
        self._charge(tenant, INPUT_TOKEN_COST * item.input_token_count)
        return item

    def generated(self, tenant: Tenant[Item], token_count: int) -> None:
        """Charge a tenant for output of a request that was taken out."""
        self._charge(tenant, OUTPUT_TOKEN_COST * token_count)

    def ended(self, tenant: Tenant[Item]) -> None:
        """A request that was taken out has ended."""
        tenant.running_count -= 1

    def level(self) -> float:
        """Where a tenant starts that comes back: with the least served of those that wait, else with the last that did."""
        least = self.next_tenant()
        if least is not None:
            return least.counter
        return self._last.counter if self._last is not None else 0.0

    def _charge(self, tenant: Tenant[Item], cost: float) -> None:
        tenant.counter += cost / tenant.weight

    def _forget_idle(self) -> None:
        """Drop the tenants that would start at the level anyway, so that memory follows those that are active."""
        if len(self._tenants) < self._swept_at:
            return
        level = self.level()
        kept = {
            tenant.id: tenant
            for tenant in self._tenants.values()
            if tenant.is_listed or tenant.waiting or tenant.running_count or tenant.counter > level or tenant is self._last
        }
        self._tenants = kept
        self._swept_at = max(1000, 2 * len(kept))
