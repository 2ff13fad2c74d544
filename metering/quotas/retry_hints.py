"""When a request that a quota refused will fit: by what runs, by what ended lately, and by what was promised before.

Each hint is a promise of room that is given once: the next client is told the next place or the next window, and within a window
the returns are spread, so that those who wait exactly as long as they were told come one after the other and find room. Nothing
here is a reservation. Who does not wait may take what was promised, and a request may run longer than almost all before it did; the
hint errs on the late side for the second. Pure: times are seconds of the database's clock, handed in.
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

from metering.quotas.quota_rules import Claim, Kind, QuotaRule, QuotaState, Unit, window_end, window_start

KEY_PROMISES_MAX = 500  # outstanding ones of one key that keeps its word: a crowd of clients behind one key is no attack

ORGANIZATION_PROMISES_MAX = 2000  # of all its keys

BROKEN_PROMISES_MAX = 8  # of one key, beyond as many as it has kept

DOUBTED_PROMISES_MAX = 16  # outstanding ones of a key that has broken more

GRACE_S_MIN, GRACE_SHARE = 2.0, 0.5  # how late a client may be: clocks, jitter, the way of the message; and a share of the wait

REMEMBERED_MAX = 64  # returns of one key, after which older ones count half


RequestKey = tuple[uuid.UUID, uuid.UUID]  # project and request id


class Asker(NamedTuple):
    """Behind a request: whose promises are counted together."""

    organization_id: uuid.UUID
    api_key_id: uuid.UUID


@dataclass(slots=True)
class Record:
    """How often one key's requests came back when told, and did not."""

    kept: int = 0
    broken: int = 0

    @property
    def is_doubted(self) -> bool:
        """Whether it mostly does not come back."""
        return self.broken > self.kept + BROKEN_PROMISES_MAX


class PromiseKeeping:
    """Outstanding promises by request, and what became of earlier ones by key."""

    def __init__(self) -> None:
        self._outstanding: dict[RequestKey, tuple[float, Asker]] = {}
        self._due: list[tuple[float, float, RequestKey]] = []  # when it is broken, and the time told
        self._by_key: Counter[uuid.UUID] = Counter()
        self._by_organization: Counter[uuid.UUID] = Counter()
        self._records: dict[uuid.UUID, Record] = {}  # the latest to change last

    def may_have_one_more(self, asker: Asker, now_s: float) -> bool:
        """Whether room may be laid aside for another request of this key."""
        self._note_broken(now_s)
        most = DOUBTED_PROMISES_MAX if self.is_doubted(asker.api_key_id) else KEY_PROMISES_MAX
        within = self._by_organization[asker.organization_id] < ORGANIZATION_PROMISES_MAX
        return within and self._by_key[asker.api_key_id] < most

    def is_doubted(self, api_key_id: uuid.UUID) -> bool:
        """Whether this key's requests mostly do not come back: what is promised to them then puts nobody off."""
        record = self._records.get(api_key_id)
        return record is not None and record.is_doubted

    def made(self, request: RequestKey, asker: Asker, now_s: float, at_s: float) -> None:
        """A request was told to come then, with room laid aside."""
        self._forget(request)
        self._outstanding[request] = (at_s, asker)
        self._by_key[asker.api_key_id] += 1
        self._by_organization[asker.organization_id] += 1
        heapq.heappush(self._due, (at_s + max(GRACE_S_MIN, GRACE_SHARE * (at_s - now_s)), at_s, request))
        if len(self._due) > 2 * len(self._outstanding) + REMEMBERED_MAX:
            self._drop_past()

    def returned(self, request: RequestKey, now_s: float) -> None:
        """A request asks again, or was let in. Too early is not yet kept."""
        at_s, asker = self._outstanding.get(request, (None, None))
        if at_s is not None and asker is not None and now_s >= at_s:
            self._forget(request)
            self._count(asker.api_key_id, kept=True)

    def _note_broken(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, at_s, request = heapq.heappop(self._due)
            standing = self._outstanding.get(request)
            if standing is not None and standing[0] == at_s:
                self._forget(request)
                self._count(standing[1].api_key_id, kept=False)

    def _drop_past(self) -> None:
        """Of promises that were kept, or given again with another time, nothing is due: some would be so for a month only."""
        due: dict[RequestKey, tuple[float, float, RequestKey]] = {}
        for each in sorted(self._due):
            standing = self._outstanding.get(each[2])
            if standing is not None and standing[0] == each[1]:
                due.setdefault(each[2], each)
        self._due = list(due.values())  # sorted, and so a heap

    def _count(self, api_key_id: uuid.UUID, *, kept: bool) -> None:
        record = self._records.pop(api_key_id, None) or Record()
        self._records[api_key_id] = record
        record.kept += kept
        record.broken += not kept
        if record.kept + record.broken > REMEMBERED_MAX:
            record.kept, record.broken = record.kept // 2, record.broken // 2
        if len(self._records) > ORGANIZATION_PROMISES_MAX:
            del self._records[next(iter(self._records))]

    def _forget(self, request: RequestKey) -> None:
        standing = self._outstanding.pop(request, None)
        if standing is not None:
            for counts, key in ((self._by_key, standing[1].api_key_id), (self._by_organization, standing[1].organization_id)):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]


N = TypeVar("N", int, float)


LATE_SHARE = 0.98  # of the requests before, so many were no longer and no larger than is reckoned with

LATE_DEVIATIONS = 4.0  # standard deviations that a place is left later than expected, over the root of the number of places

DURATION_UNKNOWN_S = 5.0  # of a request, where none has ended yet: an answer of some hundred tokens

EARLY_FACTOR = 2  # so much more than a request needs has to come back: newcomers take some of it

APART_SHARE = 0.7  # of the mean distance of those who take all places in turn

SPREAD_SHARE, SPREAD_MAX_S = 0.1, 5.0  # of a window's beginning, over which returns are spread

GOLDEN = 0.6180339887498949  # multiples of it, without their whole part, fill an interval evenly from the first one on

# Least wait. A forecast is up to a quarter of a second old, so a place may be overdue that the quota still counts.
HINT_S_MIN = 0.05

WINDOW_COUNT_MAX = 1000  # promises reach no further; who would come later still is told the last one

ROUND_COUNT_MAX = 50  # of looking for a time that suits all quotas

NOBODY = uuid.UUID(int=0)  # whose a promise is of which nobody asks who has it

PROMISE_COUNT_MAX = 10_000  # of one quota: beyond it nothing is remembered, and hints repeat the last one


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A live hold. age_s: since its admission."""

    claim: Claim
    age_s: float


class History:
    """How long the latest requests ran, and how many tokens they delivered."""

    def __init__(self, durations_s: Sequence[float] = (), outputs: Sequence[int] = ()) -> None:
        self.durations_s = sorted(durations_s)
        self.mean_s = statistics.fmean(durations_s) if durations_s else DURATION_UNKNOWN_S
        self.deviation_s = statistics.pstdev(durations_s) if durations_s else 0.0
        # What almost no request delivers more than; None if nothing is known.
        self.output_token_count = late(sorted(outputs)) if outputs else None

    def left_s(self, age_s: float) -> float:
        """How much longer a request of this age runs, at the latest but for few: as those did that became so old."""
        older = self.durations_s[bisect.bisect_right(self.durations_s, age_s) :]
        # Older than all that are known: what has run so long may well run half as long again.
        return late(older) - age_s if older else max(self.mean_s - age_s, age_s / 2)

    def mean_left_s(self, age_s: float) -> float:
        """How much longer it runs in the mean."""
        older = self.durations_s[bisect.bisect_right(self.durations_s, age_s) :]
        return statistics.fmean(older) - age_s if older else max(self.mean_s - age_s, age_s / 2)


def late(values: Sequence[N]) -> N:
    """The value that almost none of the sorted values is above."""
    return values[math.ceil(LATE_SHARE * len(values)) - 1]


@dataclass(slots=True)
class Forecast:
    """What will become free of one quota, as far as is known, and what of it was promised.

    at_s: when it was made. process_count: processes that admit against the quota and promise on their own, each its share.
    """

    rule: QuotaRule
    at_s: float
    history: History
    process_count: int
    running: Sequence[RunningRequest]
    # When a client was told to return, with how much, and by which key.
    promises: list[tuple[float, int, uuid.UUID]] = field(default_factory=list)
    # When each is expected to be left; of those that are free no more than are promised, since a limit may be any number.
    _places: list[float] = field(default_factory=list)
    _releases: list[tuple[float, int]] = field(default_factory=list)  # when, and how much will have come back by then
    _promised: Counter[datetime] = field(default_factory=Counter)  # by the start of the window
    _remaining: int | None = None  # in the window of now, when the forecast was made

    def __post_init__(self) -> None:
        """Lay out what becomes free, less what was promised to clients that have not come back yet."""
        self.promises = sorted(promise for promise in self.promises if promise[0] > self.at_s)
        if self.rule.kind is Kind.CONCURRENCY:
            ends = sorted(self.at_s + self.history.mean_left_s(each.age_s) for each in self.running)
            limit = self.rule.limit_value or 0
            # Running beyond a limit that was lowered: the first that end make no room.
            ends = ends[max(len(ends) - limit, 0) :]
            self._places = [self.at_s] * min(limit - len(ends), PROMISE_COUNT_MAX) + ends
        else:
            total = 0
            released = ((self.at_s + self.history.left_s(each.age_s), self._comes_back(each.claim)) for each in self.running)
            for at, amount in sorted(released):
                total += amount
                self._releases.append((at, total))
        for at, amount, _ in self.promises:
            self._lay_aside(at, amount)

    def earliest(self, state: QuotaState, asked: int, amount: int, from_s: float) -> float:
        """The first time from `from_s` on at which there is room that was not promised; infinite if there will be none.

        asked: what the request needs at least; amount: what it will take.
        """
        if asked > (self.rule.limit_value or 0):
            return math.inf
        if len(self.promises) >= PROMISE_COUNT_MAX:
            at = max(self.promises[-1][0], from_s)  # the last of all
        elif self.rule.kind is Kind.CONCURRENCY:
            at = self._place(from_s)
        else:
            at = self._room(state, asked, amount, from_s)
        limit = self.rule.limit_at(datetime.fromtimestamp(at, UTC))
        return math.inf if limit is None or asked > limit else at  # a raise may end before there is room

    def promise(self, at_s: float, amount: int, api_key_id: uuid.UUID = NOBODY) -> None:
        """Remember that a client was told to come then."""
        if len(self.promises) < PROMISE_COUNT_MAX:
            bisect.insort(self.promises, (at_s, amount, api_key_id))
            self._lay_aside(at_s, amount)

    def amount(self, claim: Claim, asked: int) -> int:
        """What a request will take in all: its whole first slice, as much output as others had, at least what it asks for."""
        if self.rule.kind is Kind.CONCURRENCY or self.rule.kind is Kind.REQUESTS:
            return asked
        output = max(self.history.output_token_count or 0, claim.leased_token_count)
        return max(claim._replace(leased_token_count=output).held(self.rule), asked)

    def _lay_aside(self, at_s: float, amount: int) -> None:
        if self.rule.kind is not Kind.CONCURRENCY:
            self._promised[self._start(at_s)] += amount
            return
        # Other processes promise at the same pace. The place that is sure to be left last before then: others serve others.
        for _ in range(min(self.process_count, len(self._places))):
            index = max(bisect.bisect_right(self._places, at_s - self._margin_s) - 1, 0)
            left = self._places[index]
            if at_s - left > 2 * (self.history.mean_s + self._margin_s):
                return  # promised when requests were slower, or none was known: others fit in before it, at a distance
            del self._places[index]
            bisect.insort(self._places, max(left, at_s) + self.history.mean_s)

    def _place(self, from_s: float) -> float:
        """When a place is left that no process has promised."""
        rounds, index = divmod(self.process_count - 1, len(self._places))
        left = self._places[index] + rounds * self.history.mean_s
        return self._apart(max(left + self._margin_s, from_s)) if left > self.at_s else from_s

    def _apart(self, at_s: float) -> float:
        """The first time from then on that keeps a distance to every promise: who comes all at once needs all places free."""
        gap_s = APART_SHARE * (self.history.mean_s + self._margin_s) * self.process_count / (self.rule.limit_value or 1)
        index = bisect.bisect_right(self.promises, (at_s - gap_s, 0, NOBODY))
        while index < len(self.promises) and self.promises[index][0] < at_s + gap_s:
            at_s = max(at_s, self.promises[index][0] + gap_s)
            index += 1
        return at_s

    @property
    def _margin_s(self) -> float:
        """How much later than expected a place may be left. The more there are, the less all of them together are late."""
        return LATE_DEVIATIONS * self.history.deviation_s * math.sqrt(self.process_count / (self.rule.limit_value or 1))

    def _room(self, state: QuotaState, asked: int, amount: int, from_s: float) -> float:
        """When a window has room: this one, by what running requests give back, or the first of those to come."""
        start = self._start(from_s)
        carried = 0
        if start == self._start(self.at_s):
            end_s = self._end(start)
            # What came back since the forecast was made is in its releases.
            self._remaining = state.remaining if self._remaining is None else min(self._remaining, state.remaining)
            needed = amount - self._remaining + self._promised[start] * self.process_count
            if needed <= 0 and asked <= state.remaining:
                return from_s
            index = bisect.bisect_left(self._releases, EARLY_FACTOR * needed, key=lambda release: release[1])
            if index < len(self._releases) and max(self._releases[index][0], from_s) < end_s:
                return max(self._releases[index][0], from_s)
            start = datetime.fromtimestamp(end_s, UTC)
            carried = sum(each.claim.held(self.rule) for each in self.running if self._outlives(each, end_s))
        # Who is told to come back tomorrow or next month is told of the first such window: by then nobody keeps a place.
        for _ in range(WINDOW_COUNT_MAX if self.rule.unit is Unit.MINUTE else 0):
            room = ((self.rule.limit_at(start) or 0) - carried) // self.process_count - self._promised[start]
            if amount <= room or (not self._promised[start] and asked <= room):
                break
            start, carried = datetime.fromtimestamp(self._end(start), UTC), 0
        begin_s = start.timestamp()
        spread_s = min(SPREAD_SHARE * (self._end(start) - begin_s), SPREAD_MAX_S)
        return max(begin_s + len(self.promises) * GOLDEN % 1.0 * spread_s, from_s)

    def _outlives(self, running: RunningRequest, at_s: float) -> bool:
        return self.at_s + self.history.left_s(running.age_s) > at_s

    def _comes_back(self, claim: Claim) -> int:
        """What a running request gives back at its end, by what others delivered."""
        output = self.history.output_token_count
        if output is None:
            return 0
        likely = min(max(output, claim.posted_token_count - claim.input_token_count), claim.leased_token_count)
        return claim.held(self.rule) - claim.consumed(self.rule, claim.input_token_count, likely)

    def _start(self, at_s: float) -> datetime:
        return window_start(self.rule.dimension, datetime.fromtimestamp(at_s, UTC))

    def _end(self, start: datetime) -> float:
        end = window_end(self.rule.dimension, start)
        assert end is not None
        return end.timestamp()


def promise(
    wanted: Sequence[tuple[Forecast, QuotaState, int]], claim: Claim, now_s: float, api_key_id: uuid.UUID | None = NOBODY
) -> float:
    """Seconds after which all quotas have room for a claim, which is promised then; infinite if they never have. Never 0.

    wanted: each enforced quota that the request meets, and what it asks of it at least. claim: with the lease that it would get.
    api_key_id: whom it is promised to; None lays nothing aside, so that the next one is told the same.
    """
    at = now_s + HINT_S_MIN
    needs = [(plan, state, asked, plan.amount(claim, asked)) for plan, state, asked in wanted]
    for _ in range(ROUND_COUNT_MAX):
        suits = max(plan.earliest(state, asked, amount, at) for plan, state, asked, amount in needs)
        if suits == math.inf or suits <= at:
            break
        at = suits
    if suits == math.inf:
        return math.inf
    for plan, _, _, amount in needs if api_key_id is not None else ():
        plan.promise(at, amount, api_key_id or NOBODY)
    return at - now_s
