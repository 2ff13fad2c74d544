"""Forecast of when a quota has room for a refused request.

From running requests, recent durations and reservations. Pure: times are seconds of the database's
clock, passed in.
"""

from __future__ import annotations

import bisect
import math
import statistics
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from common.retry_after import MARGIN, RETRY_S_MIN, RequestKey, Reservations, first_gap
from metering.quotas.quota_rules import (
    Charge,
    Kind,
    QuotaRule,
    QuotaState,
    Unit,
    bucket_of,
    window_ends,
    window_starts,
)

# Part of a window over whose start retries are spread, and its maximum.
SPREAD_SHARE, SPREAD_S_MAX = 0.1, 5.0
LATE_SHARE = 0.98  # quantile of earlier requests' durations and outputs that a forecast assumes
LATE_DEVIATIONS = 2.0  # added to the mean duration; many places average out
DURATION_UNKNOWN_S = 5.0  # assumed when no request has ended yet: a response of some hundred tokens
# Multiple of the needed amount that must be released: new requests take some of it.
EARLY_FACTOR = 2
ROUND_COUNT_MAX = 50  # iterations in search of a time that suits all quotas

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A live hold, admitted `age_s` seconds ago."""

    charge: Charge
    age_s: float


class History:
    """Durations and delivered tokens of the latest requests."""

    def __init__(self, durations_s: Sequence[float] = (), outputs: Sequence[int] = ()) -> None:
        self.durations_s = sorted(durations_s)
        self.mean_s = statistics.fmean(durations_s) if durations_s else DURATION_UNKNOWN_S
        self.deviation_s = statistics.pstdev(durations_s) if durations_s else 0.0
        # Output that almost no request exceeds; None if unknown.
        self.output_token_count = late(sorted(outputs)) if outputs else None

    def left_s(self, age_s: float) -> float:
        """Estimate the remaining seconds of a request of this age; few take longer."""
        older = self.durations_s[bisect.bisect_right(self.durations_s, age_s) :]
        # Older than all known requests: assume that it runs half as long again.
        return late(older) - age_s if older else max(self.mean_s - age_s, age_s / 2)


def late(values: Sequence[N]) -> N:
    """Return the `LATE_SHARE` quantile of sorted values: few are larger."""
    return values[math.ceil(LATE_SHARE * len(values)) - 1]


@dataclass(slots=True)
class Forecast:
    """Expected room of one quota, less what is reserved.

    `at_s` is the time of the forecast. `process_count` processes admit against the quota, each
    reserving its own share.
    """

    rule: QuotaRule
    at_s: float
    history: History
    process_count: int
    running: Sequence[RunningRequest]
    reservations: Reservations = field(default_factory=Reservations)
    # Expected end of each running request, the amount that it releases, and that of all up to it.
    _ends: list[float] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _moments: list[float] = field(default_factory=list)  # of reservations, ascending
    _full_until: float = -math.inf  # no place is free between the first end and this time
    _reserved: Counter[datetime] = field(default_factory=Counter)  # by the start of the window

    def __post_init__(self) -> None:
        """Compute the room that becomes free, and the part of it that is reserved."""
        total = 0
        for at, amount in sorted(
            (self.at_s + self.history.left_s(each.age_s), self._comes_back(each.charge))
            for each in self.running
        ):
            total += amount
            self._ends.append(at)
            self._released.append(total)
        for reservation in self.reservations.trusted(self.at_s):
            self._lay_aside(reservation.ready_at, int(reservation.amount))

    def earliest(
        self, state: QuotaState, minimum: int, amount: int, from_s: float, spread: float
    ) -> float:
        """Find the first time from `from_s` on with unreserved room; infinite if there is none.

        `minimum` is the amount that the request needs, `amount` the one that it is expected to
        take. `spread`, from 0 to 1, chooses a time in the beginning of a window.
        """
        if minimum > (self.rule.limit_value or 0):
            return math.inf
        if self.rule.kind is Kind.CONCURRENCY:
            at = self._next_end(from_s)
        elif self.rule.unit is Unit.WINDOW:
            at = self._slipped(state, minimum, amount, from_s, spread)
        else:
            at = self._room(state, minimum, amount, from_s, spread)
        if at == math.inf:
            return at
        limit = self.rule.limit_at(datetime.fromtimestamp(at, UTC))
        # An override may end before there is room.
        return math.inf if limit is None or minimum > limit else at

    def reserve(
        self, request: RequestKey, owner_id: uuid.UUID, amount: int, now_s: float, wait_s: float
    ) -> bool:
        """Reserve room for a request, and return whether that was possible."""
        is_made = self.reservations.make(request, owner_id, amount, now_s, wait_s)
        if is_made:
            self._lay_aside(now_s + wait_s, amount)
        return is_made

    def amount(self, charge: Charge, minimum: int) -> int:
        """Estimate the amount that a request takes, at least the amount it asks for."""
        if self.rule.kind is Kind.CONCURRENCY or self.rule.kind is Kind.REQUESTS:
            return minimum
        output = max(self.history.output_token_count or 0, charge.leased_token_count)
        return max(charge._replace(leased_token_count=output).held(self.rule), minimum)

    def _lay_aside(self, at_s: float, amount: int) -> None:
        if self.rule.kind is Kind.CONCURRENCY:
            bisect.insort(self._moments, at_s)
        else:
            self._reserved[self._start(at_s)] += amount

    def _next_end(self, from_s: float) -> float:
        """Find when a place is free that no other request was given.

        Places are given one by one, at the pace at which requests end.
        """
        limit, taken = self.rule.limit_value or 1, len(self._ends)
        first = self.at_s
        if taken >= limit:  # after a lowered limit, the first that end free no place
            first = self._ends[min(taken - limit + self.process_count, taken) - 1]
        share = self.process_count / limit
        duration_s = self.history.mean_s + LATE_DEVIATIONS * self.history.deviation_s * share**0.5
        gap_s = MARGIN * duration_s * share
        at_s = max(first, self._full_until, from_s)
        is_contiguous = at_s > from_s
        at_s = first_gap(self._moments, at_s, gap_s)
        if is_contiguous:
            self._full_until = at_s
        return at_s

    def _room(
        self, state: QuotaState, minimum: int, amount: int, from_s: float, spread: float
    ) -> float:
        """Find when a window has room: the current one, or the first later one."""
        start = self._start(from_s)
        if start == self._start(self.at_s):
            needed = amount - state.remaining + self._reserved[start] * self.process_count
            if needed <= 0 and minimum <= state.remaining:
                return from_s
            released_s = max(self._released_at(needed), from_s)
            if released_s < self._end(start) or self.rule.unit is Unit.LIFETIME:
                return released_s
            start = datetime.fromtimestamp(self._end(start), UTC)
        # Clients told to retry in an hour, tomorrow or later get the first such window.
        while self.rule.unit is Unit.MINUTE and self._reserved[start]:
            room = (self.rule.limit_at(start) or 0) // self.process_count - self._reserved[start]
            if amount <= room:
                break
            start = datetime.fromtimestamp(self._end(start), UTC)
        begin_s = start.timestamp()
        spread_s = min(SPREAD_SHARE * (self._end(start) - begin_s), SPREAD_S_MAX)
        return max(begin_s + spread * spread_s, from_s)

    def _slipped(
        self, state: QuotaState, minimum: int, amount: int, from_s: float, spread: float
    ) -> float:
        """Find when enough has left a rolling window, or running requests have released it."""
        reserved = sum(self._reserved.values()) * self.process_count
        needed = amount - state.remaining + reserved
        if needed <= 0 and minimum <= state.remaining:
            return from_s
        at, left = state.resets_at, 0
        for start, counted in state.buckets:
            left += counted
            if left >= needed:
                at = self.rule.leaves_at(start)
                break
        assert at is not None
        spread_s = min(
            SPREAD_SHARE * bucket_of(self.rule.window_minutes).total_seconds(), SPREAD_S_MAX
        )
        free_s = min(at.timestamp() + spread * spread_s, self._released_at(needed))
        return max(free_s, from_s)

    def _released_at(self, needed: int) -> float:
        """Find when running requests have released an amount; infinite if they do not."""
        index = bisect.bisect_left(self._released, EARLY_FACTOR * needed)
        return self._ends[index] if index < len(self._ends) else math.inf

    def _comes_back(self, charge: Charge) -> int:
        """Estimate the amount that a running request releases when it ends."""
        output = self.history.output_token_count
        if output is None or not self.rule.counts_tokens:
            return 0
        likely = min(
            max(output, charge.posted_token_count - charge.input_token_count),
            charge.leased_token_count,
        )
        tokens = charge.input_token_count, likely, min(charge.reasoning_token_count, likely)
        return charge.held(self.rule) - charge.consumed(self.rule, tokens)

    def _start(self, at_s: float) -> datetime:
        return window_starts(datetime.fromtimestamp(at_s, UTC))[self.rule.window]

    def _end(self, start: datetime) -> float:
        end = window_ends(start)[self.rule.window]
        return math.inf if end is None else end.timestamp()


def reserve(
    demands: Sequence[tuple[Forecast, QuotaState, int]],
    charge: Charge,
    now_s: float,
    request: RequestKey | None,
    owner_id: uuid.UUID,
) -> float:
    """Return the seconds, more than 0, until all quotas have room for a charge, or infinity.

    `demands` has each enforced quota that applies, and the minimum amount requested of it. `charge`
    has the requested lease. The room is reserved for `request`; with None nothing is.
    """
    at = now_s + RETRY_S_MIN
    spread = demands[0][0].reservations.spread()
    needs = [
        (plan, state, minimum, plan.amount(charge, minimum)) for plan, state, minimum in demands
    ]
    for _ in range(ROUND_COUNT_MAX):
        suits = max(
            plan.earliest(state, minimum, amount, at, spread)
            for plan, state, minimum, amount in needs
        )
        if suits == math.inf:
            return math.inf
        if suits <= at:
            break
        at = suits
    wait_s = at - now_s
    if request is None:
        return wait_s
    are_reserved = [
        plan.reserve(request, owner_id, amount, now_s, wait_s) for plan, _, _, amount in needs
    ]
    # Without a reservation, others are told the same moment.
    return wait_s if all(are_reserved) else wait_s + spread * min(wait_s, SPREAD_S_MAX)
