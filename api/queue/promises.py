"""Who was refused and told when to come back: a place is kept for each, so that the time told is true.

A promise is to one request, by its id, and is kept from the time told until its grace is over. Newcomers are counted behind all of
them, else they would take every place that becomes free meanwhile. Bounded, and without a clock of its own.
"""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from dataclasses import dataclass

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
