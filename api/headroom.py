"""Places in the batch that are kept for tenants who have just used them, so that a flood does not make each request of theirs wait.

An engine does not stop what it runs. Where one tenant's requests fill the whole batch, and more of them wait inside the engine,
another one's next request waits until some of them end, however little it asks for; fair order does not help it. So while tenants
are here that have less of the batch, nothing of a tenant waits inside the engine for a place, and they keep the places that they
had a moment ago: a small share of the batch in all. Where nobody else has been here, nothing is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from api.virtual_tokens import Item, Tenant

MEMORY_S = 10.0  # seconds for which a tenant's places are kept after its last request: thinking, not leaving
TENANTS_MAX = 64  # more are not looked at: few of them could be kept a place anyway


class Headroom(Generic[Item]):
    """Who was here lately, and with how many requests at once."""

    def __init__(self, share: float) -> None:
        """share: of the batch, what is kept at most; 0 keeps nothing."""
        self._share = share
        self._recent: OrderedDict[Tenant[Item], tuple[int, float]] = OrderedDict()  # most at once, and when it was last here

    def note(self, tenant: Tenant[Item], now: float) -> None:
        """A request of the tenant was given to the engine, or has ended there."""
        most, last_at = self._recent.get(tenant, (0, now))
        if now - last_at > MEMORY_S:
            most = 0
        self._recent[tenant] = (max(most, tenant.running_count), now)
        self._recent.move_to_end(tenant)
        if len(self._recent) > TENANTS_MAX:
            self._recent.popitem(last=False)

    def places_for(self, tenant: Tenant[Item], batch_size: int, now: float) -> int | None:
        """How many sequences the engine may have when this tenant is given its next turn; None if nobody has to be thought of.

        batch_size: sequences that the engine runs at once; 0 where it is not known.
        """
        kept, others = 0, False
        for other, most in self._with_less_than(tenant, now):
            others = True
            kept += max(0, most - other.running_count)
        return max(1, batch_size - min(kept, self.most_kept(batch_size))) if others and batch_size and self._share else None

    def most_kept(self, batch_size: int) -> int:
        """Places that are kept at most."""
        return int(batch_size * self._share)

    def instead_of(self, tenant: Tenant[Item], lead_max: float, now: float) -> Tenant[Item] | None:
        """Who may use a kept place while the next in the line may not: of those that wait, the one that was served least.

        lead_max: units of service by which it may be ahead of the one that it overtakes.
        """
        waiting = [other for other, _ in self._with_less_than(tenant, now) if other.waiting]
        least = min(waiting, key=lambda other: other.counter, default=None)
        return least if least is not None and least.counter - tenant.counter <= lead_max / least.weight else None

    def _with_less_than(self, tenant: Tenant[Item], now: float) -> Iterator[tuple[Tenant[Item], int]]:
        """Tenants that were here lately and have less of the batch by their weight, with the most they had of it."""
        for other, (most, last_at) in self._recent.items():
            if now - last_at <= MEMORY_S and other.running_count * tenant.weight < tenant.running_count * other.weight:
                yield other, most
