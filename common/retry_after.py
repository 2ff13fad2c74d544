"""Retry-after: when a refused request will find room, and the room that is kept for it until then.

Quotas, in `metering/quotas/`, and the queues before engines, in `api/queue/`, refuse by the same
rules:

- The moment is the expected one at which room becomes free that no other request was given: a
  queue knows its order and its rate, a quota has a `Forecast`. It errs on the late side.
- A request has one moment. If it returns early, it is told the same one again.
- Room is reserved for it from that moment until a grace is over. Requests that were told to wait
  come before new ones. Owners whose requests mostly do not return reserve hardly anything.
- Requests that would be told the same moment are spread by a counter.

No retry-after is a guarantee: a quota cannot keep new requests out, and a running request may take
longer than nearly all before it. Pure: times are seconds of one clock, passed in.
"""

from __future__ import annotations

import bisect
import heapq
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

RETRY_S_MIN = 0.05  # with a shorter retry-after a client would spin
EARLY_S = 0.001  # a client's timer may fire this much too early
MARGIN = 1.2  # factor of an expected wait: a retry that comes too early is refused again
# How late a client may return: clocks, jitter, network; and a share of its wait.
GRACE_S_MIN, GRACE_SHARE = 2.0, 0.5
# Of one quota, and of one key in it: many clients behind one key are not an attack.
QUOTA_RESERVATIONS_MAX, KEY_RESERVATIONS_MAX = 2000, 500
MISSED_MAX = 8  # requests of an owner that did not return, in excess of those that did
DOUBTED_RESERVATIONS_MAX = 16  # of an owner that has more
# The fractional parts of its multiples fill an interval evenly from the first one on.
GOLDEN = 0.6180339887498949

# Longest wait in seconds that is written in a unit, and the seconds of the unit.
WAIT_UNITS = ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days"))

RequestKey = tuple[uuid.UUID, uuid.UUID]  # project or tenant, and request id


def wait_text(wait_s: float) -> str:
    """Format a wait for a message, rounded up: `0.3 s`, `54 s`, `4 min`, `3 h`, `9 days`."""
    if wait_s < 1:
        return f"{math.ceil(wait_s * 10) / 10:.1f} s"
    unit_s, unit = next(each[1:] for each in WAIT_UNITS if wait_s < each[0])
    return f"{math.ceil(wait_s / unit_s)} {unit}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room reserved for a refused request. `amount` is in units of the quota or the queue."""

    owner_id: uuid.UUID
    amount: float
    ready_at: float
    expires_at: float


class Reservations:
    """Reservations of one quota or one queue, by request and by owner."""

    def __init__(
        self, count_max: int = QUOTA_RESERVATIONS_MAX, owner_count_max: int = KEY_RESERVATIONS_MAX
    ) -> None:
        self._count_max, self._owner_count_max = count_max, owner_count_max
        self._by_request: dict[RequestKey, Reservation] = {}
        self._amounts: dict[uuid.UUID, float] = {}
        self._moments: defaultdict[uuid.UUID, list[float]] = defaultdict(list)  # ascending
        self._expiries: list[tuple[float, RequestKey]] = []
        # By owner: requests that did not return, less those that did.
        self._missed: Counter[uuid.UUID] = Counter()
        self._spread_count = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request: RequestKey) -> bool:
        return request in self._by_request

    def count(self, owner_id: uuid.UUID) -> int:
        """Count the reservations of one owner."""
        return len(self._moments.get(owner_id, ()))

    def owners(self) -> Iterable[uuid.UUID]:
        """Return the owners that have reservations."""
        return self._amounts

    def amount(self, owner_id: uuid.UUID) -> float:
        """Return the amount reserved for all requests of one owner."""
        return self._amounts.get(owner_id, 0.0)

    def next_moment(self, owner_id: uuid.UUID, at: float, gap_s: float) -> float:
        """Find the first time from `at` on with no reservation of this owner within `gap_s`."""
        return first_gap(self._moments.get(owner_id, ()), at, gap_s)

    def is_doubted(self, owner_id: uuid.UUID) -> bool:
        """Return True if most of this owner's requests do not return."""
        return self._missed[owner_id] > MISSED_MAX

    def trusted(self, now: float) -> Iterator[Reservation]:
        """Iterate over reservations of later moments, without those of doubted owners."""
        return (
            each
            for each in self._by_request.values()
            if each.ready_at > now and not self.is_doubted(each.owner_id)
        )

    def spread(self) -> float:
        """Return the next of numbers from 0 to 1 that are evenly spread at any time."""
        self._spread_count += 1
        return (self._spread_count - 1) * GOLDEN % 1.0

    def make(
        self, request: RequestKey, owner_id: uuid.UUID, amount: float, now: float, wait_s: float
    ) -> bool:
        """Reserve room for a request in `wait_s` seconds; return False if there are too many."""
        self.forget_expired(now)
        owner_max = DOUBTED_RESERVATIONS_MAX if self.is_doubted(owner_id) else self._owner_count_max
        if len(self) >= self._count_max or self.count(owner_id) >= owner_max:
            return False
        self._remove(request)
        expires_at = now + wait_s + max(GRACE_S_MIN, GRACE_SHARE * wait_s)
        self._by_request[request] = Reservation(owner_id, amount, now + wait_s, expires_at)
        self._amounts[owner_id] = self.amount(owner_id) + amount
        bisect.insort(self._moments[owner_id], now + wait_s)
        heapq.heappush(self._expiries, (expires_at, request))
        if len(self._expiries) > 2 * len(self) + self._count_max:  # a month may pass until then
            self._expiries = sorted(
                (each.expires_at, request) for request, each in self._by_request.items()
            )
        return True

    def is_due(self, request: RequestKey, now: float) -> bool:
        """Return whether a request has a reservation and has waited long enough to use it."""
        return request in self._by_request and not self.left_s(request, now)

    def left_s(self, request: RequestKey, now: float) -> float:
        """Return the seconds until a request may use its reservation; 0 if it may or has none."""
        reservation = self._by_request.get(request)
        if reservation is None or now >= reservation.ready_at - EARLY_S:
            return 0.0
        return max(reservation.ready_at - now, RETRY_S_MIN)

    def returned(self, request: RequestKey) -> None:
        """Remove the reservation of a request that has returned or was admitted, if it has one."""
        reservation = self._remove(request)
        if reservation is not None and self._missed[reservation.owner_id]:
            self._missed[reservation.owner_id] -= 1

    def forget_expired(self, now: float) -> None:
        """Remove the reservations of requests that did not return in time."""
        while self._expiries and self._expiries[0][0] <= now:
            _, request = heapq.heappop(self._expiries)
            reservation = self._by_request.get(request)
            if reservation is not None and reservation.expires_at <= now:
                self._remove(request)
                missed = self._missed[reservation.owner_id] + 1
                self._missed[reservation.owner_id] = min(missed, 2 * MISSED_MAX)

    def _remove(self, request: RequestKey) -> Reservation | None:
        reservation = self._by_request.pop(request, None)
        if reservation is not None:
            owner_id = reservation.owner_id
            self._amounts[owner_id] -= reservation.amount
            moments = self._moments[owner_id]
            del moments[bisect.bisect_left(moments, reservation.ready_at)]
            if not moments:
                del self._amounts[owner_id], self._moments[owner_id]
        return reservation


def first_gap(moments: Sequence[float], at: float, gap_s: float) -> float:
    """Find the first time from `at` on that is `gap_s` from each of the ascending moments."""
    index = bisect.bisect_right(moments, at - gap_s)
    while index < len(moments) and moments[index] < at + gap_s:
        at = max(at, moments[index] + gap_s)
        index += 1
    return at
