"""Forecast of when a refused request will fit, from running requests, recent durations and earlier
promises.

Each hint is a promise of room that is given once: the next client is given the next free place or
the next window, and within a window the retries are spread, so that clients that wait exactly as
long as told return one after the other and find room. No hint is a guarantee: a client that does
not wait may take promised room, and a request may run longer than nearly all before it. Hints err
on the late side for the latter. Pure: times are seconds of the database's clock, passed in.
"""

from __future__ import annotations

import bisect
import heapq
import math
import statistics
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from metering.quotas.quota_rules import (
    Charge,
    Kind,
    QuotaRule,
    QuotaState,
    Unit,
    window_end,
    window_start,
)

# Outstanding promises of one key that keeps them: many clients behind one key are not an attack.
KEY_RESERVATIONS_MAX = 500

ORGANIZATION_RESERVATIONS_MAX = 2000  # of all its keys

MISSED_RESERVATIONS_MAX = 8  # broken promises of one key in excess of kept ones

DOUBTED_RESERVATIONS_MAX = 16  # outstanding promises of a key that has broken more

# How late a client may retry: clocks, jitter, network; and a share of the wait.
GRACE_S_MIN, GRACE_SHARE = 2.0, 0.5

REMEMBERED_MAX = 64  # promises of one key, after which older ones count half

RequestKey = tuple[uuid.UUID, uuid.UUID]  # project and request id

N = TypeVar("N", int, float)
LATE_SHARE = 0.98  # quantile of earlier requests' durations and outputs that a forecast assumes
# Standard deviations added to the expected end, divided by the root of the number of places.
LATE_DEVIATIONS = 4.0
DURATION_UNKNOWN_S = 5.0  # assumed when no request has ended yet: a response of some hundred tokens
# Multiple of the needed amount that must be released: new requests take some of it.
EARLY_FACTOR = 2
APART_SHARE = 0.7  # of the mean interval between requests that use all places in turn
# The fractional parts of its multiples fill an interval evenly from the first one on.
GOLDEN = 0.6180339887498949
# Minimum wait. A forecast is up to 0.25 s old, so a place may be overdue that the quota still
# counts.
HINT_S_MIN = 0.05
WINDOW_COUNT_MAX = 1000  # promises reach no further; later requests are given the last window
ROUND_COUNT_MAX = 50  # iterations in search of a time that suits all quotas
UNKNOWN_KEY = uuid.UUID(int=0)  # key of a promise whose holder does not matter
# Of one quota: beyond it none is recorded, and hints repeat the last one.
RESERVATION_COUNT_MAX = 10_000


class Requester(NamedTuple):
    """Organization and key of a request, for which promises are counted."""

    organization_id: uuid.UUID
    api_key_id: uuid.UUID


@dataclass(slots=True)
class RetryRecord:
    """Number of promises to one key that were kept and broken."""

    kept: int = 0
    broken: int = 0

    @property
    def is_doubted(self) -> bool:
        """True if most of the key's requests do not return after a promise."""
        return self.broken > self.kept + MISSED_RESERVATIONS_MAX


class RetryReservations:
    """Promises by request, and the number of kept and broken ones by key."""

    def __init__(self) -> None:
        self._outstanding: dict[RequestKey, tuple[float, Requester]] = {}
        # Time at which the promise is broken, promised time, request.
        self._due: list[tuple[float, float, RequestKey]] = []
        self._by_key: Counter[uuid.UUID] = Counter()
        self._by_organization: Counter[uuid.UUID] = Counter()
        self._records: dict[uuid.UUID, RetryRecord] = {}  # the most recently changed last

    def accepts(self, requester: Requester, now_s: float) -> bool:
        """Return True if room may be reserved for another request of this key."""
        self._note_broken(now_s)
        maximum = (
            DOUBTED_RESERVATIONS_MAX
            if self.is_doubted(requester.api_key_id)
            else KEY_RESERVATIONS_MAX
        )
        within = self._by_organization[requester.organization_id] < ORGANIZATION_RESERVATIONS_MAX
        return within and self._by_key[requester.api_key_id] < maximum

    def is_doubted(self, api_key_id: uuid.UUID) -> bool:
        """Return True if most of this key's requests do not return after a promise."""
        record = self._records.get(api_key_id)
        return record is not None and record.is_doubted

    def add(self, request: RequestKey, requester: Requester, now_s: float, at_s: float) -> None:
        """Record a promise of room at `at_s` to a request."""
        self._forget(request)
        self._outstanding[request] = (at_s, requester)
        self._by_key[requester.api_key_id] += 1
        self._by_organization[requester.organization_id] += 1
        heapq.heappush(
            self._due, (at_s + max(GRACE_S_MIN, GRACE_SHARE * (at_s - now_s)), at_s, request)
        )
        if len(self._due) > 2 * len(self._outstanding) + REMEMBERED_MAX:
            self._drop_past()

    def note_retry(self, request: RequestKey, now_s: float) -> None:
        """Record that a request was retried or admitted. An early retry keeps no promise."""
        at_s, requester = self._outstanding.get(request, (None, None))
        if at_s is not None and requester is not None and now_s >= at_s:
            self._forget(request)
            self._count(requester.api_key_id, kept=True)

    def _note_broken(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, at_s, request = heapq.heappop(self._due)
            outstanding = self._outstanding.get(request)
            if outstanding is not None and outstanding[0] == at_s:
                self._forget(request)
                self._count(outstanding[1].api_key_id, kept=False)

    def _drop_past(self) -> None:
        """Drop due times of kept or renewed promises, which could stay for a month."""
        due: dict[RequestKey, tuple[float, float, RequestKey]] = {}
        for each in sorted(self._due):
            outstanding = self._outstanding.get(each[2])
            if outstanding is not None and outstanding[0] == each[1]:
                due.setdefault(each[2], each)
        self._due = list(due.values())  # sorted, and so a heap

    def _count(self, api_key_id: uuid.UUID, *, kept: bool) -> None:
        record = self._records.pop(api_key_id, None) or RetryRecord()
        self._records[api_key_id] = record
        record.kept += kept
        record.broken += not kept
        if record.kept + record.broken > REMEMBERED_MAX:
            record.kept, record.broken = record.kept // 2, record.broken // 2
        if len(self._records) > ORGANIZATION_RESERVATIONS_MAX:
            del self._records[next(iter(self._records))]

    def _forget(self, request: RequestKey) -> None:
        outstanding = self._outstanding.pop(request, None)
        if outstanding is not None:
            for counts, key in (
                (self._by_key, outstanding[1].api_key_id),
                (self._by_organization, outstanding[1].organization_id),
            ):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]


SPREAD_SHARE, SPREAD_MAX_S = 0.1, 5.0  # part of a window's start over which retries are spread


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

    def mean_left_s(self, age_s: float) -> float:
        """Compute the mean remaining seconds of a request of this age."""
        older = self.durations_s[bisect.bisect_right(self.durations_s, age_s) :]
        return statistics.fmean(older) - age_s if older else max(self.mean_s - age_s, age_s / 2)


def late(values: Sequence[N]) -> N:
    """Return the `LATE_SHARE` quantile of sorted values: few are larger."""
    return values[math.ceil(LATE_SHARE * len(values)) - 1]


@dataclass(slots=True)
class Forecast:
    """Expected free capacity of one quota, and the promises made of it.

    `at_s` is the time of the forecast. `process_count` processes admit against the quota, each
    promising its own share.
    """

    rule: QuotaRule
    at_s: float
    history: History
    process_count: int
    running: Sequence[RunningRequest]
    # Promised time, amount and key.
    reservations: list[tuple[float, int, uuid.UUID]] = field(default_factory=list)
    # Expected end of each place; free places only up to the maximum of promises, since a limit may
    # be any number.
    _ends: list[float] = field(default_factory=list)
    # Time, and total amount released by then.
    _releases: list[tuple[float, int]] = field(default_factory=list)
    _reserved: Counter[datetime] = field(default_factory=Counter)  # by the start of the window
    _remaining: int | None = None  # in the current window, when the forecast was made

    def __post_init__(self) -> None:
        """Compute the capacity that becomes free, less the promises already made."""
        self.reservations = sorted(
            reservation for reservation in self.reservations if reservation[0] > self.at_s
        )
        if self.rule.kind is Kind.CONCURRENCY:
            ends = sorted(self.at_s + self.history.mean_left_s(each.age_s) for each in self.running)
            limit = self.rule.limit_value or 0
            # Requests beyond a lowered limit: the first that end free no place.
            ends = ends[max(len(ends) - limit, 0) :]
            self._ends = [self.at_s] * min(limit - len(ends), RESERVATION_COUNT_MAX) + ends
        else:
            total = 0
            released = (
                (self.at_s + self.history.left_s(each.age_s), self._comes_back(each.charge))
                for each in self.running
            )
            for at, amount in sorted(released):
                total += amount
                self._releases.append((at, total))
        for at, amount, _ in self.reservations:
            self._lay_aside(at, amount)

    def earliest(self, state: QuotaState, minimum: int, amount: int, from_s: float) -> float:
        """Find the first time from `from_s` on with unpromised room; infinite if there is none.

        `minimum` is the amount that the request needs, `amount` the one that it is expected to
        take.
        """
        if minimum > (self.rule.limit_value or 0):
            return math.inf
        if len(self.reservations) >= RESERVATION_COUNT_MAX:
            at = max(self.reservations[-1][0], from_s)  # the last of all
        elif self.rule.kind is Kind.CONCURRENCY:
            at = self._free_at(from_s)
        else:
            at = self._room(state, minimum, amount, from_s)
        limit = self.rule.limit_at(datetime.fromtimestamp(at, UTC))
        # An override may end before there is room.
        return math.inf if limit is None or minimum > limit else at

    def reserve(self, at_s: float, amount: int, api_key_id: uuid.UUID = UNKNOWN_KEY) -> None:
        """Record that a client was told to retry at `at_s`."""
        if len(self.reservations) < RESERVATION_COUNT_MAX:
            bisect.insort(self.reservations, (at_s, amount, api_key_id))
            self._lay_aside(at_s, amount)

    def amount(self, charge: Charge, minimum: int) -> int:
        """Estimate the amount that a request takes, at least the amount it asks for."""
        if self.rule.kind is Kind.CONCURRENCY or self.rule.kind is Kind.REQUESTS:
            return minimum
        output = max(self.history.output_token_count or 0, charge.leased_token_count)
        return max(charge._replace(leased_token_count=output).held(self.rule), minimum)

    def _lay_aside(self, at_s: float, amount: int) -> None:
        if self.rule.kind is not Kind.CONCURRENCY:
            self._reserved[self._start(at_s)] += amount
            return
        # Other processes promise at the same rate: reserve the last place that is surely free by
        # then for each of them.
        for _ in range(min(self.process_count, len(self._ends))):
            index = max(bisect.bisect_right(self._ends, at_s - self._margin_s) - 1, 0)
            left = self._ends[index]
            if at_s - left > 2 * (self.history.mean_s + self._margin_s):
                # Promised when requests were slower or unknown: others fit in before it, at a
                # distance.
                return
            del self._ends[index]
            bisect.insort(self._ends, max(left, at_s) + self.history.mean_s)

    def _free_at(self, from_s: float) -> float:
        """Estimate when a concurrent request ends whose place no process has promised."""
        rounds, index = divmod(self.process_count - 1, len(self._ends))
        left = self._ends[index] + rounds * self.history.mean_s
        return self._apart(max(left + self._margin_s, from_s)) if left > self.at_s else from_s

    def _apart(self, at_s: float) -> float:
        """Find the first time from `at_s` on that is not too close to another promise."""
        gap_s = (
            APART_SHARE
            * (self.history.mean_s + self._margin_s)
            * self.process_count
            / (self.rule.limit_value or 1)
        )
        index = bisect.bisect_right(self.reservations, (at_s - gap_s, 0, UNKNOWN_KEY))
        while index < len(self.reservations) and self.reservations[index][0] < at_s + gap_s:
            at_s = max(at_s, self.reservations[index][0] + gap_s)
            index += 1
        return at_s

    @property
    def _margin_s(self) -> float:
        """Compute the margin, in seconds, on the end of a request; many requests average out."""
        return (
            LATE_DEVIATIONS
            * self.history.deviation_s
            * math.sqrt(self.process_count / (self.rule.limit_value or 1))
        )

    def _room(self, state: QuotaState, minimum: int, amount: int, from_s: float) -> float:
        """Find when a window has room: the current one, or the first later one."""
        start = self._start(from_s)
        carried = 0
        if start == self._start(self.at_s):
            end_s = self._end(start)
            # Amounts released since the forecast was made are in its releases.
            self._remaining = (
                state.remaining
                if self._remaining is None
                else min(self._remaining, state.remaining)
            )
            needed = amount - self._remaining + self._reserved[start] * self.process_count
            if needed <= 0 and minimum <= state.remaining:
                return from_s
            index = bisect.bisect_left(
                self._releases, EARLY_FACTOR * needed, key=lambda release: release[1]
            )
            if index < len(self._releases) and max(self._releases[index][0], from_s) < end_s:
                return max(self._releases[index][0], from_s)
            start = datetime.fromtimestamp(end_s, UTC)
            carried = sum(
                each.charge.held(self.rule) for each in self.running if self._outlives(each, end_s)
            )
        # Clients told to retry tomorrow or next month get the first such window: promises do not
        # last that long.
        for _ in range(WINDOW_COUNT_MAX if self.rule.unit is Unit.MINUTE else 0):
            room = (
                (self.rule.limit_at(start) or 0) - carried
            ) // self.process_count - self._reserved[start]
            if amount <= room or (not self._reserved[start] and minimum <= room):
                break
            start, carried = datetime.fromtimestamp(self._end(start), UTC), 0
        begin_s = start.timestamp()
        spread_s = min(SPREAD_SHARE * (self._end(start) - begin_s), SPREAD_MAX_S)
        return max(begin_s + len(self.reservations) * GOLDEN % 1.0 * spread_s, from_s)

    def _outlives(self, running: RunningRequest, at_s: float) -> bool:
        return self.at_s + self.history.left_s(running.age_s) > at_s

    def _comes_back(self, charge: Charge) -> int:
        """Estimate the amount that a running request releases when it ends."""
        output = self.history.output_token_count
        if output is None:
            return 0
        likely = min(
            max(output, charge.posted_token_count - charge.input_token_count),
            charge.leased_token_count,
        )
        tokens = charge.input_token_count, likely, min(charge.reasoning_token_count, likely)
        return charge.held(self.rule) - charge.consumed(self.rule, tokens)

    def _start(self, at_s: float) -> datetime:
        return window_start(self.rule.dimension, datetime.fromtimestamp(at_s, UTC))

    def _end(self, start: datetime) -> float:
        end = window_end(self.rule.dimension, start)
        assert end is not None
        return end.timestamp()


def reserve(
    demands: Sequence[tuple[Forecast, QuotaState, int]],
    charge: Charge,
    now_s: float,
    api_key_id: uuid.UUID | None = UNKNOWN_KEY,
) -> float:
    """Promise room for a charge; return the seconds until all quotas have it, or infinity.

    The result is more than 0. `demands` has each enforced quota that applies, and the minimum
    amount requested of it. `charge` has the requested lease. `api_key_id` None reserves nothing, so
    that the next request gets the same time.
    """
    at = now_s + HINT_S_MIN
    needs = [
        (plan, state, minimum, plan.amount(charge, minimum)) for plan, state, minimum in demands
    ]
    for _ in range(ROUND_COUNT_MAX):
        suits = max(
            plan.earliest(state, minimum, amount, at) for plan, state, minimum, amount in needs
        )
        if suits == math.inf or suits <= at:
            break
        at = suits
    if suits == math.inf:
        return math.inf
    for plan, _, _, amount in needs if api_key_id is not None else ():
        plan.reserve(at, amount, api_key_id or UNKNOWN_KEY)
    return at - now_s
