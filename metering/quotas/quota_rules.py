"""Quota rules and the amounts that requests are charged: windows, weights and charges. Pure, exact,
integers only.

A quota on tokens or money counts a weighted sum of input, cached input, output and reasoning
tokens. The sum of one request is rounded up to whole units once, over everything charged to it so
far; every charge is a difference of two such sums. So the amounts that a request holds, posts and
releases add up to its one rounded sum, and nothing is lost between `used` and `held`.

A token of output may turn out to be reasoning after it was delivered. Until the end of a request
its output is held at the higher of the two prices and posted at the lower one; the difference is
counted where the request ends.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol, TypeVar, overload

from metering.core.models import QuotaDimension, QuotaSubject
from metering.pricing.prices import TokenPrices

V = TypeVar("V")

NO_WINDOW = datetime(1970, 1, 1, tzinfo=UTC)  # the one "window" of a dimension that never resets
MINUTE = timedelta(minutes=1)

# A counter saturates here until its window ends. Limits have the same maximum, so none is exceeded;
# but where a limit is not enforced, or was set after the usage, a request that was served must be
# settled whatever it adds.
USED_MAX = 2**63 - 1  # what the column holds: some nine million units of money

WEIGHT_SCALE = 1000  # weights are thousandths

# `for_each` of a selector: each end user, or each value of the label after the prefix. That of keys
# is `key_groups.FOR_KEYS`.
FOR_END_USERS, FOR_LABEL = "end_user", "label:"

# A quota's id as a number, and the start of a window. UUIDs hash and compare in Python, at ten
# times the cost of a number, and a batch looks counters up hundreds of times.
CounterKey = tuple[int, datetime]

# Input, output, and those of the output that are reasoning.
Tokens = tuple[int, int, int]


# A rolling window is counted in buckets of whole minutes, at most this many.
BUCKETS_MAX = 60
BUCKETS_KEPT = timedelta(days=2)  # after they have left the window: longer than any request runs
WINDOW_MINUTES_MAX = 31 * 24 * 60  # a month, as of the longest calendar window


class Unit(StrEnum):
    """Window of a quota: one of the calendar (UTC), the lifetime, or a rolling one.

    Those of the calendar are named as in PostgreSQL's `date_trunc`. A week is the ISO week, which
    begins on Monday. A rolling window has `window_minutes`, which its quota says.
    """

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    LIFETIME = "lifetime"
    WINDOW = "window"

    @property
    def alerts(self) -> bool:
        """True if limits alert: shorter windows reset before a person reads the alert."""
        return self in (Unit.DAY, Unit.WEEK, Unit.MONTH, Unit.LIFETIME)


class Kind(StrEnum):
    """Unit that a quota charges: concurrent requests, requests, tokens or money."""

    CONCURRENCY = "concurrency"
    REQUESTS = "requests"
    TOKENS = "tokens"
    MONEY = "money"


class Measure(Enum):
    """Measure of a dimension: kind of charge, and whether it counts input and output tokens."""

    REQUESTS = Kind.REQUESTS, False, False
    TOKENS = Kind.TOKENS, True, True
    INPUT_TOKENS = Kind.TOKENS, True, False
    OUTPUT_TOKENS = Kind.TOKENS, False, True
    COST_PICOS = Kind.MONEY, True, True


class Weights(NamedTuple):
    """Weight of a token of each kind, in thousandths."""

    input: int = WEIGHT_SCALE
    cached_input: int = WEIGHT_SCALE
    output: int = WEIGHT_SCALE


def _measure_and_window(dimension: QuotaDimension) -> tuple[Kind, Unit | None, bool, bool]:
    match dimension:
        case QuotaDimension.CONCURRENT_REQUESTS:
            return Kind.CONCURRENCY, None, False, False
        case QuotaDimension.PREPAID_CREDIT_PICOS:
            return Kind.MONEY, None, True, True
    measure, _, unit = dimension.partition("_per_")
    kind, counts_input, counts_output = Measure[measure.upper()].value
    return kind, Unit(unit), counts_input, counts_output


# Kind of charge and window of each dimension, and whether it counts input tokens and output tokens.
DIMENSIONS = {dimension: _measure_and_window(dimension) for dimension in QuotaDimension}


UNITS = (None, *Unit)  # a window of the calendar is numbered by its index here


class ByWindow(dict[int, V]):
    """Values by the number of a window (`window_number`), each computed once.

    `calendar` are those of the windows in `UNITS`; each length of a rolling window is added when it
    is first asked for.
    """

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[int], V], calendar: Iterable[V]) -> None:
        super().__init__(enumerate(calendar))
        self._compute = compute

    def __missing__(self, window: int) -> V:
        """Compute the value of a rolling window."""
        value = self[window] = self._compute(window)
        return value


def window_number(dimension: QuotaDimension, window_minutes: int = 0) -> int:
    """Number the window of a dimension; a rolling one by its minutes, negative."""
    unit = DIMENSIONS[dimension][1]
    return -window_minutes if unit is Unit.WINDOW else UNITS.index(unit)


def bucket_of(window_minutes: int) -> timedelta:
    """Return the length of a rolling window's buckets."""
    return -(-window_minutes // BUCKETS_MAX) * MINUTE


@functools.lru_cache(maxsize=4096)  # a batch asks for the same few times repeatedly
def window_starts(at: datetime) -> ByWindow[datetime]:
    """Compute when the windows around `at` start; for a rolling one, its bucket.

    Times of one minute get the same objects, which are found in dictionaries several times faster.
    """
    return _windows((at - NO_WINDOW) // MINUTE)[0]


@functools.lru_cache(maxsize=4096)
def window_ends(at: datetime) -> ByWindow[datetime | None]:
    """Compute when the windows of `window_starts` end; None for the lifetime."""
    return _windows((at - NO_WINDOW) // MINUTE)[1]


@functools.lru_cache(maxsize=4096)
def window_resets(at: datetime) -> ByWindow[datetime | None]:
    """Compute when nothing that counts at `at` counts any more; None if it always does.

    A rolling window counts the buckets that begin up to its length before the present one: it is
    never shorter than its length, and a charge leaves it a bucket late at most.
    """
    return _windows((at - NO_WINDOW) // MINUTE)[2]


@functools.lru_cache(maxsize=4096)
def _windows(
    minutes: int,
) -> tuple[ByWindow[datetime], ByWindow[datetime | None], ByWindow[datetime | None]]:
    minute = NO_WINDOW + minutes * MINUTE
    hour = minute.replace(minute=0)
    day = hour.replace(hour=0)
    week, month = day - timedelta(days=day.weekday()), day.replace(day=1)
    bounds = {
        Unit.MINUTE: (minute, minute + MINUTE),
        Unit.HOUR: (hour, hour + timedelta(hours=1)),
        Unit.DAY: (day, day + timedelta(days=1)),
        Unit.WEEK: (week, week + timedelta(weeks=1)),
        Unit.MONTH: (month, (month + timedelta(days=32)).replace(day=1)),
    }
    starts, ends = zip(*(bounds.get(unit, (NO_WINDOW, None)) for unit in UNITS), strict=True)

    def bucket_start(window: int) -> datetime:
        return minute - (minute - NO_WINDOW) % bucket_of(-window)

    return (
        ByWindow(bucket_start, starts),
        ByWindow(lambda window: bucket_start(window) + bucket_of(-window), ends),
        ByWindow(lambda window: bucket_start(window) + bucket_of(-window) - window * MINUTE, ends),
    )


def window_start(dimension: QuotaDimension, at: datetime, window_minutes: int = 0) -> datetime:
    """Compute when the window that contains `at` starts; for a rolling one, its bucket."""
    return window_starts(at)[window_number(dimension, window_minutes)]


def window_end(dimension: QuotaDimension, at: datetime, window_minutes: int = 0) -> datetime | None:
    """Compute when the window that contains `at` ends; None if it never does."""
    return window_ends(at)[window_number(dimension, window_minutes)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Weights of input, cached input and output tokens, and the divisor of their sum."""

    input: int
    cached_input: int
    output: int
    divisor: int
    reasoning: int = -1  # a negative number: as output
    # The higher of both: the rate of input that is held, and that of output.
    dearest_input: int = field(init=False, compare=False, repr=False)
    dearest_output: int = field(init=False, compare=False, repr=False)
    # The lower of both: the rate of output that is posted.
    cheapest_output: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute once the values that every charge needs."""
        if self.reasoning < 0:
            object.__setattr__(self, "reasoning", self.output)
        object.__setattr__(self, "dearest_input", max(self.input, self.cached_input))
        object.__setattr__(self, "dearest_output", max(self.output, self.reasoning))
        object.__setattr__(self, "cheapest_output", min(self.output, self.reasoning))

    @property
    def factors(self) -> tuple[int, int, int]:
        """Weights before the division: of input, of cached input, and the highest of output."""
        return self.input, self.cached_input, self.dearest_output

    def amount(
        self,
        input_token_count: int,
        cached_input_token_count: int,
        output_token_count: int,
        reasoning_token_count: int = 0,
    ) -> int:
        """Compute the amount of tokens in units of the quota, rounded up.

        Cached tokens are part of the input, reasoning tokens part of the output.
        """
        return self.rounded(
            (input_token_count - cached_input_token_count) * self.input
            + cached_input_token_count * self.cached_input
            + (output_token_count - reasoning_token_count) * self.output
            + reasoning_token_count * self.reasoning
        )

    def rounded(self, total: int) -> int:
        """Divide a weighted sum into units of the quota, rounded up."""
        return total if self.divisor == 1 else -(-total // self.divisor)


@functools.lru_cache(maxsize=4096)
def token_scale(dimension: QuotaDimension, weights: Weights) -> Scale | None:
    """Build the scale of a quota on tokens; None for any other quota."""
    kind, _, counts_input, counts_output = DIMENSIONS[dimension]
    if kind is not Kind.TOKENS:
        return None
    factors = (
        weights.input * counts_input,
        weights.cached_input * counts_input,
        weights.output * counts_output,
    )
    if all(factor % WEIGHT_SCALE == 0 for factor in factors):
        return Scale(
            factors[0] // WEIGHT_SCALE,
            factors[1] // WEIGHT_SCALE,
            factors[2] // WEIGHT_SCALE,
            divisor=1,
        )
    return Scale(*factors, WEIGHT_SCALE)


@functools.lru_cache(maxsize=4096)
def money_scale(prices: TokenPrices) -> Scale:
    """Build the scale of a quota on money from prices."""
    return Scale(
        prices.input_picos_per_token,
        prices.cached_input_picos_per_token,
        prices.output_picos_per_token,
        divisor=1,
        reasoning=prices.reasoning_picos_per_token,
    )


@dataclass(frozen=True, slots=True, eq=False)
class QuotaRule:
    """One limit as it is enforced. Repeated reads return the same object: compare by identity.

    `limit_value` is the limit in force, including an override; None for a quota that was removed
    while holds were charged to it. If `enforced` is False, it counts but refuses nothing.
    `base_limit_value` is the limit without the override, which ends at `override_until`.

    `window_minutes` is the length of a rolling window, 0 for any other.

    A rule of an end user or label value counts requests within `within_id`; its `selector_id` is
    None if it has terms of its own. `subject_name` is the end user, or `KEY=VALUE`. `scope_name` is
    the project within which it counts, empty for the organization. With `for_each` the rule is a
    selector, which charges nothing itself. `group` is the group by which a key has the limit.
    """

    id: uuid.UUID
    subject: QuotaSubject
    subject_id: uuid.UUID
    model: str
    dimension: QuotaDimension
    limit_value: int | None
    weights: Weights = field(default_factory=Weights)
    enforced: bool = True
    base_limit_value: int | None = None
    override_until: datetime | None = None
    for_each: str = ""
    within_id: uuid.UUID | None = None
    selector_id: uuid.UUID | None = None
    window_minutes: int = 0
    set_by_organization: bool = False
    subject_name: str = ""
    scope_name: str = ""
    group: str = ""
    number: int = field(init=False, compare=False, repr=False)  # first part of its counter keys
    window: int = field(init=False, compare=False, repr=False)  # `window_number`
    kind: Kind = field(init=False, compare=False, repr=False)
    # None unless the quota counts tokens.
    token_scale: Scale | None = field(init=False, compare=False, repr=False)
    # Counted as used on admission, never held.
    is_used_at_once: bool = field(init=False, compare=False, repr=False)
    # By a scale; otherwise each request counts 1.
    counts_tokens: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute once the values that every request needs."""
        kind = DIMENSIONS[self.dimension][0]
        window = window_number(self.dimension, self.window_minutes)
        object.__setattr__(self, "number", self.id.int)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "token_scale", token_scale(self.dimension, self.weights))
        object.__setattr__(self, "is_used_at_once", kind is Kind.REQUESTS)
        object.__setattr__(self, "counts_tokens", kind is Kind.TOKENS or kind is Kind.MONEY)

    @property
    def target(self) -> tuple[uuid.UUID, QuotaDimension, int, str, bool]:
        """Scope, dimension, window, model and author: a subject has one limit for each target."""
        scope_id = self.within_id or self.subject_id
        what = self.dimension, self.window_minutes, self.model
        return scope_id, *what, self.set_by_organization

    def of_subject(self, number: int, subject_id: uuid.UUID, name: str) -> QuotaRule:
        """Build the rule that this selector gives to a usage subject."""
        kind = QuotaSubject.END_USER if self.for_each == FOR_END_USERS else QuotaSubject.LABEL
        return replace(
            self,
            id=uuid.UUID(int=number),
            subject=kind,
            subject_id=subject_id,
            for_each="",
            within_id=self.subject_id,
            selector_id=self.id,
            subject_name=name,
        )

    @property
    def unit(self) -> Unit | None:
        """Window that the rule counts over; None for concurrency and prepaid credit."""
        return DIMENSIONS[self.dimension][1]

    @property
    def is_credit(self) -> bool:
        """True for prepaid credit: what its owner paid for is given back, not kept to be safe."""
        return self.kind is Kind.MONEY and self.unit is None

    def counted_from(self, at: datetime) -> datetime:
        """Return the start of the first counter that a limit on a rolling window counts at `at`."""
        return window_starts(at)[self.window] - self.window_minutes * MINUTE

    def kept_until(self, start: datetime) -> datetime | None:
        """Return when the counter of a rolling window may be deleted; None for any other."""
        return self.leaves_at(start) + BUCKETS_KEPT if self.window_minutes else None

    def leaves_at(self, start: datetime) -> datetime:
        """Return when the bucket with this start leaves a rolling window."""
        return start + self.window_minutes * MINUTE + bucket_of(self.window_minutes)

    def key(self, at: datetime) -> CounterKey:
        """Return the key of the counter that a charge at this time counts in."""
        return self.number, window_starts(at)[self.window]

    def scale(self, prices: TokenPrices) -> Scale:
        """Return the scale of a quota on tokens or, from the prices, on money."""
        return self.token_scale or money_scale(prices)

    def limit_at(self, at: datetime) -> int | None:
        """Return the limit in force at a later time, according to the override known now."""
        return (
            self.base_limit_value
            if self.override_until is not None and at >= self.override_until
            else self.limit_value
        )


class Charge(NamedTuple):
    """Charge of one live hold: the columns of its row that quotas are computed from.

    `cached_input_token_count` is fixed by the first posting, which posts the input. Up to
    `leased_token_count` output tokens may be delivered. `posted_token_count` are input and output
    tokens moved to `used` of the windows they were charged to; 0, or at least the input.
    `posted_minutes` has, for each minute that the charge has left, the minute since 1970 and the
    tokens posted up to its end. `reasoning_token_count` are delivered tokens known to be thinking;
    it never falls.
    """

    prices: TokenPrices
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    posted_token_count: int
    admitted_at: datetime
    charged_at: datetime
    posted_minutes: tuple[int, ...] = ()
    reasoning_token_count: int = 0

    def held(self, rule: QuotaRule) -> int:
        """Compute the amount that the charge holds in a quota."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY:
            return 1
        if kind is Kind.REQUESTS:
            return 0  # a request counts as used on admission
        return self.held_by(rule.scale(self.prices), self.leased_token_count)

    def held_by(self, scale: Scale, output_token_count: int) -> int:
        """Compute the highest charge for output tokens, beyond the amount already posted.

        Until the input is posted, it is held at its highest rate, so cached tokens can only lower
        the charge. The same holds for output at the lower of its prices.
        """
        each = scale.dearest_output
        if self.posted_token_count:
            known = self.reasoning_token_count
            total = self._input_sum(scale) + known * scale.reasoning
            return scale.rounded(total + (output_token_count - known) * each) - self.posted(scale)
        return scale.rounded(
            self.input_token_count * scale.dearest_input + output_token_count * each
        )

    def dearest_reasoning(self, output_token_count: int) -> int:
        """Return how many output tokens are reasoning in the most expensive case."""
        prices = self.prices
        if prices.reasoning_picos_per_token > prices.output_picos_per_token:
            return output_token_count
        return self.reasoning_token_count

    def _input_sum(self, scale: Scale) -> int:
        """Compute the weighted sum of the posted input."""
        cached = self.cached_input_token_count
        return (self.input_token_count - cached) * scale.input + cached * scale.cached_input

    def with_lease(self, output_token_count: int) -> Charge:
        """Return a copy with another lease."""
        return self._replace(leased_token_count=output_token_count)

    def posted(self, scale: Scale) -> int:
        """Compute the amount that extensions have moved to `used`."""
        return self.posted_by(scale, self.posted_token_count)

    def posted_by(self, scale: Scale, posted_token_count: int) -> int:
        """Compute the amount in `used` once this many tokens are posted."""
        if not posted_token_count:
            return 0
        delivered = posted_token_count - self.input_token_count
        return scale.rounded(self._input_sum(scale) + delivered * scale.cheapest_output)

    def consumed(self, rule: QuotaRule, tokens: Tokens) -> int:
        """Compute the amount to add to `used` when the charge ends. Never negative."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY or kind is Kind.REQUESTS:
            return 0
        return self.consumed_by(rule.scale(self.prices), tokens)

    def consumed_by(self, scale: Scale, tokens: Tokens) -> int:
        """Compute the amount to add to `used` for a quota with this scale."""
        amount = self._amount(scale, tokens)
        return max(amount - self.posted(scale), 0) if self.posted_token_count else amount

    def _amount(self, scale: Scale, tokens: Tokens) -> int:
        sent, delivered, reasoning = tokens
        return scale.amount(sent, min(self.cached_input_token_count, sent), delivered, reasoning)

    def postings(self, rule: QuotaRule) -> Iterator[tuple[CounterKey, int]]:
        """Yield the amounts that extensions have added to `used`, each with its counter."""
        if not self.posted_token_count or rule.kind not in (Kind.TOKENS, Kind.MONEY):
            return
        scale, before = rule.scale(self.prices), 0
        minutes = self.posted_minutes
        marks = [
            (datetime.fromtimestamp(minutes[i] * 60, UTC), minutes[i + 1])
            for i in range(0, len(minutes), 2)
        ]
        for at, posted_token_count in (*marks, (self.charged_at, self.posted_token_count)):
            amount = self.posted_by(scale, posted_token_count)
            if amount > before:
                yield rule.key(at), amount - before
                before = amount

    def amount_of(self, rule: QuotaRule, tokens: Tokens) -> int:
        """Compute the amount of tokens for a quota on tokens or money."""
        return self._amount(rule.scale(self.prices), tokens)

    def most_output(self, rule: QuotaRule, room: int) -> int | None:
        """Compute the largest lease that costs at most `room`; None if output does not count."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY or kind is Kind.REQUESTS:
            return None
        scale = rule.scale(self.prices)
        each = scale.dearest_output
        if not each:
            return None
        if self.posted_token_count:
            fixed = self._input_sum(scale) + self.reasoning_token_count * (scale.reasoning - each)
        else:
            fixed = self.input_token_count * scale.dearest_input
        return (scale.divisor * (room + self.posted(scale)) - fixed) // each

    def with_posting(
        self, delivered_token_count: int, reasoning_token_count: int, now: datetime
    ) -> Charge:
        """Return a copy with the delivered tokens posted and the rest charged to the present."""
        posted = self.input_token_count + delivered_token_count
        left = int(self.charged_at.timestamp()) // 60
        minutes = self.posted_minutes
        if left != int(now.timestamp()) // 60:
            minutes = (*minutes, left, posted)
        return self._replace(
            posted_token_count=posted,
            charged_at=now,
            posted_minutes=minutes,
            reasoning_token_count=reasoning_token_count,
        )


class QuotaState(NamedTuple):
    """One limit at one time. Amounts are in requests, tokens or picos, by dimension.

    `subject_name`, `within_name`, `override_reason`, `would_refuse_count` and `alert_at` are empty
    unless they were read. `would_refuse_count` counts admissions of this window that the quota
    would have refused if it were enforced. `buckets` has start and amount of each counter of a
    rolling window. With `for_new_keys` the quota limits nothing itself, but
    is copied to each key created under its subject. `alert_at` is in percent of the limit or, for
    prepaid credit, in picos left. A planned limit is one that a selector gives with the first
    request.
    """

    rule: QuotaRule
    used: int
    held: int
    now: datetime
    subject_name: str = ""
    override_reason: str = ""
    would_refuse_count: int = 0
    for_new_keys: bool = False
    alert_at: tuple[int, ...] = ()
    within_name: str = ""
    is_planned: bool = False
    buckets: tuple[tuple[datetime, int], ...] = ()

    @property
    def quota_id(self) -> uuid.UUID:
        """Id of the quota."""
        return self.rule.id

    @property
    def subject(self) -> QuotaSubject:
        """Kind of subject that the quota limits."""
        return self.rule.subject

    @property
    def subject_id(self) -> uuid.UUID:
        """Id of the subject."""
        return self.rule.subject_id

    @property
    def model(self) -> str:
        """Model that the quota limits; empty for all models together."""
        return self.rule.model

    @property
    def dimension(self) -> QuotaDimension:
        """Dimension that the quota counts."""
        return self.rule.dimension

    @property
    def limit_value(self) -> int:
        """Limit in force, including a temporary override."""
        return self.rule.limit_value or 0

    @property
    def remaining(self) -> int:
        """Amount that may still be held, at least -2**63; negative if usage exceeds the limit."""
        return max(self.limit_value - self.used - self.held, -(2**63))

    @property
    def resets_at(self) -> datetime | None:
        """Time at which `used` resets to zero; None if it never does.

        In a rolling window it falls from bucket to bucket until then.
        """
        return window_resets(self.now)[self.rule.window]

    @property
    def resets_in_s(self) -> float | None:
        """Seconds from `now` to `resets_at`."""
        resets_at = self.resets_at
        return None if resets_at is None else (resets_at - self.now).total_seconds()


class QuotaStates(Sequence[QuotaState]):
    """States of several limits at one time, built on access because most admissions need none.

    `counts` has the used and held amounts of each.
    """

    __slots__ = ("counts", "now", "rules")

    def __init__(
        self, rules: tuple[QuotaRule, ...], counts: list[tuple[int, int]], now: datetime
    ) -> None:
        self.rules = rules
        self.counts = counts
        self.now = now

    def correct(self, corrections: Mapping[int, tuple[int, int]]) -> None:
        """Add to the used and held amounts of some rules, by their numbers."""
        counts = self.counts
        for index, rule in enumerate(self.rules):
            if (more := corrections.get(rule.number)) is not None:
                used, held = counts[index]
                counts[index] = used + more[0], held + more[1]

    def __len__(self) -> int:
        return len(self.rules)

    @overload
    def __getitem__(self, index: int) -> QuotaState: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[QuotaState]: ...

    def __getitem__(self, index: int | slice) -> QuotaState | Sequence[QuotaState]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return QuotaState(self.rules[index], *self.counts[index], self.now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # the counts are corrected once they are known


@dataclass(frozen=True, slots=True)
class Payer:
    """Organization, project, API key and currency that a request is charged to."""

    organization_id: uuid.UUID
    project_id: uuid.UUID
    api_key_id: uuid.UUID
    currency_code: str

    def __hash__(self) -> int:
        """Hash only the key's number: a key has one project, and UUIDs are hashed in Python."""
        return hash(self.api_key_id.int)

    @property
    def subject_ids(self) -> frozenset[uuid.UUID]:
        """Ids of all subjects whose quotas apply to this payer."""
        return frozenset((self.organization_id, self.project_id, self.api_key_id))

    @property
    def receipt_ids(self) -> bytes:
        """Ids of organization, project and key as a receipt begins, 48 bytes."""
        return self.organization_id.bytes + self.project_id.bytes + self.api_key_id.bytes


class Owner(Protocol):
    """Owner of work: an organization and a key. Payers and the principals of calls are owners."""

    @property
    def organization_id(self) -> uuid.UUID: ...
    @property
    def api_key_id(self) -> uuid.UUID: ...
