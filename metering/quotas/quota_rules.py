"""What a quota is and what a request weighs on it: windows, weights, the claim of one request. Pure, exact, integers only.

A quota on tokens or money counts a weighted sum of input, cached input and output tokens. The sum of one request is rounded up to
whole tokens once, over all that the request has been charged so far; every charge is a difference of two such sums. So whatever a
request holds, posts and gives back adds up to its one rounded sum, and nothing is ever lost between `used` and `held`.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, Protocol, overload

from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension, QuotaSubject
from metering.pricing.prices import TokenPrices

NO_WINDOW = datetime(1970, 1, 1, tzinfo=UTC)  # the one "window" of a dimension that never resets

WEIGHT_SCALE = 1000  # weights are thousandths


# A quota's id as a number, and the start of a window. UUIDs hash and compare in Python, at ten times the cost of a number, and a
# batch looks counters up hundreds of times.
CounterKey = tuple[int, datetime]


class Unit(StrEnum):
    """Over which calendar window (UTC) a quota counts. The values are those of PostgreSQL's `date_trunc`."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"


class Kind(StrEnum):
    """What a request is charged in."""

    CONCURRENCY = "concurrency"
    REQUESTS = "requests"
    TOKENS = "tokens"
    MONEY = "money"


class Weights(NamedTuple):
    """Thousandths that a token of each kind counts."""

    input: int = WEIGHT_SCALE
    cached_input: int = WEIGHT_SCALE
    output: int = WEIGHT_SCALE


PLAIN = Weights()

# What each dimension is charged in, over which window, and which tokens it counts: input, output.
DIMENSIONS: dict[QuotaDimension, tuple[Kind, Unit | None, bool, bool]] = {
    QuotaDimension.CONCURRENT_REQUESTS: (Kind.CONCURRENCY, None, False, False),
    QuotaDimension.REQUESTS_PER_MINUTE: (Kind.REQUESTS, Unit.MINUTE, False, False),
    QuotaDimension.TOKENS_PER_MINUTE: (Kind.TOKENS, Unit.MINUTE, True, True),
    QuotaDimension.INPUT_TOKENS_PER_MINUTE: (Kind.TOKENS, Unit.MINUTE, True, False),
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: (Kind.TOKENS, Unit.MINUTE, False, True),
    QuotaDimension.TOKENS_PER_DAY: (Kind.TOKENS, Unit.DAY, True, True),
    QuotaDimension.TOKENS_PER_MONTH: (Kind.TOKENS, Unit.MONTH, True, True),
    QuotaDimension.COST_PICOS_PER_DAY: (Kind.MONEY, Unit.DAY, True, True),
    QuotaDimension.COST_PICOS_PER_MONTH: (Kind.MONEY, Unit.MONTH, True, True),
    QuotaDimension.PREPAID_CREDIT_PICOS: (Kind.MONEY, None, True, True),
}


UNITS = (None, *Unit)  # in the order of `window_starts`


@functools.lru_cache(maxsize=4096)  # a batch asks for the same few moments again and again
def window_starts(at: datetime) -> tuple[datetime, ...]:
    """Starts of the calendar windows (UTC) that contain `at`: of the one that never resets, of minute, day and month."""
    minute = at.astimezone(UTC).replace(second=0, microsecond=0)
    day = minute.replace(hour=0, minute=0)
    return NO_WINDOW, minute, day, day.replace(day=1)


def window_start(dimension: QuotaDimension, at: datetime) -> datetime:
    """Start of the calendar window (UTC) that contains `at`."""
    return window_starts(at)[UNITS.index(DIMENSIONS[dimension][1])]


@functools.lru_cache(maxsize=4096)
def window_ends(at: datetime) -> tuple[datetime | None, ...]:
    """Ends of the windows of `window_starts`: when `used` starts again at zero; None for the one that never ends."""
    _, minute, day, month = window_starts(at)
    return None, minute + timedelta(minutes=1), day + timedelta(days=1), (month + timedelta(days=32)).replace(day=1)


def window_end(dimension: QuotaDimension, at: datetime) -> datetime | None:
    """End of the window that contains `at`; None if it never ends."""
    return window_ends(at)[UNITS.index(DIMENSIONS[dimension][1])]


@dataclass(frozen=True, slots=True)
class Scale:
    """A weighted sum: picos or thousandths per token, and how many of them make one unit of the quota."""

    input: int
    cached_input: int
    output: int
    divisor: int
    dearest_input: int = field(init=False, compare=False, repr=False)  # of the two: what input is held at until it is posted

    def __post_init__(self) -> None:
        """Work out once what every claim needs."""
        object.__setattr__(self, "dearest_input", max(self.input, self.cached_input))

    @property
    def factors(self) -> tuple[int, int, int]:
        """What a token of each kind counts, before the division."""
        return self.input, self.cached_input, self.output

    def amount(self, input_token_count: int, cached_input_token_count: int, output_token_count: int) -> int:
        """The sum in units of the quota, rounded up."""
        total = (
            (input_token_count - cached_input_token_count) * self.input
            + cached_input_token_count * self.cached_input
            + output_token_count * self.output
        )
        return total if self.divisor == 1 else -(-total // self.divisor)


@functools.lru_cache(maxsize=4096)
def token_scale(dimension: QuotaDimension, weights: Weights) -> Scale | None:
    """How a quota on tokens counts them; None for one on something else."""
    kind, _, counts_input, counts_output = DIMENSIONS[dimension]
    if kind is not Kind.TOKENS:
        return None
    factors = (weights.input * counts_input, weights.cached_input * counts_input, weights.output * counts_output)
    if all(factor % WEIGHT_SCALE == 0 for factor in factors):
        return Scale(factors[0] // WEIGHT_SCALE, factors[1] // WEIGHT_SCALE, factors[2] // WEIGHT_SCALE, divisor=1)
    return Scale(*factors, WEIGHT_SCALE)


@functools.lru_cache(maxsize=4096)
def money_scale(prices: TokenPrices) -> Scale:
    """How a quota on money counts tokens."""
    return Scale(prices.input_picos_per_token, prices.cached_input_picos_per_token, prices.output_picos_per_token, divisor=1)


@dataclass(frozen=True, slots=True, eq=False)
class QuotaRule:
    """One limit as it is enforced. Whoever reads one again and again gets the same object, so it is compared by identity.

    limit_value: in force now, so with a raise; None for one that was removed while holds were still charged to it.
    enforced: whether it refuses; one that is not only counts. standing_limit_value: without the raise; raised_until: its end, while
    it is in force.
    """

    id: uuid.UUID
    subject: QuotaSubject
    subject_id: uuid.UUID
    model: str
    dimension: QuotaDimension
    limit_value: int | None
    weights: Weights = PLAIN
    enforced: bool = True
    standing_limit_value: int | None = None
    raised_until: datetime | None = None
    number: int = field(init=False, compare=False, repr=False)  # of its counters' keys
    window: int = field(init=False, compare=False, repr=False)  # which of `UNITS` its windows are
    kind: Kind = field(init=False, compare=False, repr=False)
    token_scale: Scale | None = field(init=False, compare=False, repr=False)  # None for what does not count tokens
    is_used_at_once: bool = field(init=False, compare=False, repr=False)  # from the admission on, so that nothing is held
    counts_tokens: bool = field(init=False, compare=False, repr=False)  # by a scale; else each request counts 1

    def __post_init__(self) -> None:
        """Work out once what every request of the rule needs."""
        kind, unit, _, _ = DIMENSIONS[self.dimension]
        object.__setattr__(self, "number", self.id.int)
        object.__setattr__(self, "window", UNITS.index(unit))
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "token_scale", token_scale(self.dimension, self.weights))
        object.__setattr__(self, "is_used_at_once", kind is Kind.REQUESTS)
        object.__setattr__(self, "counts_tokens", kind is Kind.TOKENS or kind is Kind.MONEY)

    @property
    def unit(self) -> Unit | None:
        """Over which window it counts; None if it never resets."""
        return DIMENSIONS[self.dimension][1]

    @property
    def is_lifetime(self) -> bool:
        """Whether it counts money over all time: a wrong charge would never leave it by itself."""
        return self.kind is Kind.MONEY and self.unit is None

    def key(self, at: datetime) -> CounterKey:
        """The counter that a charge at this time goes to."""
        return self.number, window_starts(at)[self.window]

    def scale(self, prices: TokenPrices) -> Scale:
        """How it counts tokens; for quotas on tokens and money only."""
        return self.token_scale or money_scale(prices)

    def limit_at(self, at: datetime) -> int | None:
        """The limit in force at a later time, as far as is known now."""
        return self.standing_limit_value if self.raised_until is not None and at >= self.raised_until else self.limit_value


class Claim(NamedTuple):
    """What one live hold claims: the part of its row that quotas are charged by.

    cached_input_token_count: once something is posted it stays what it was then, since the input was posted by it.
    leased_token_count: output tokens that may be delivered in all. posted_token_count: input and output that were moved to `used`
    of the windows they were charged to; 0, or at least the input. posted_minutes: pairs of a minute since 1970 and what was posted
    up to its end, one for each minute that the charge has left.
    """

    prices: TokenPrices
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    posted_token_count: int
    admitted_at: datetime
    charged_at: datetime
    posted_minutes: tuple[int, ...] = ()

    def held(self, rule: QuotaRule) -> int:
        """What the claim holds of a quota."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY:
            return 1
        if kind is Kind.REQUESTS:
            return 0  # a request counts as used from its admission on
        return self.charge(rule.scale(self.prices), self.leased_token_count)

    def charge(self, scale: Scale, output_token_count: int) -> int:
        """What so much output would be charged, beyond what is posted.

        Until the input is posted it is held at the dearer of all and nothing cached: whatever the cache does makes it cheaper.
        """
        if self.posted_token_count:
            sent, cached = self.input_token_count, self.cached_input_token_count
            return scale.amount(sent, cached, output_token_count) - self.posted(scale)
        return -(-(self.input_token_count * scale.dearest_input + output_token_count * scale.output) // scale.divisor)

    def leasing(self, output_token_count: int) -> Claim:
        """Return the claim with another lease."""
        prices, sent, cached, _, posted, admitted_at, charged_at, minutes = self
        return Claim(prices, sent, cached, output_token_count, posted, admitted_at, charged_at, minutes)

    def posted(self, scale: Scale) -> int:
        """What was moved to `used` of earlier charges."""
        if not self.posted_token_count:
            return 0
        sent = self.input_token_count
        return scale.amount(sent, self.cached_input_token_count, self.posted_token_count - sent)

    def consumed(self, rule: QuotaRule, input_token_count: int, delivered_token_count: int) -> int:
        """What has to be added to `used` when the claim ends, or is posted, with these tokens. Never less than nothing."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY or kind is Kind.REQUESTS:
            return 0
        return self.consumed_by(rule.scale(self.prices), input_token_count, delivered_token_count)

    def consumed_by(self, scale: Scale, input_token_count: int, delivered_token_count: int) -> int:
        """The same for what counts tokens."""
        cached = min(self.cached_input_token_count, input_token_count)
        amount = scale.amount(input_token_count, cached, delivered_token_count)
        return max(amount - self.posted(scale), 0) if self.posted_token_count else amount

    def postings(self, rule: QuotaRule) -> Iterator[tuple[CounterKey, int]]:
        """Yield what extensions of the claim have added to `used` of each counter of a quota."""
        if not self.posted_token_count or rule.kind not in (Kind.TOKENS, Kind.MONEY):
            return
        scale, sent, before = rule.scale(self.prices), self.input_token_count, 0
        minutes = self.posted_minutes
        marks = [(datetime.fromtimestamp(minutes[i] * 60, UTC), minutes[i + 1]) for i in range(0, len(minutes), 2)]
        for at, posted_token_count in (*marks, (self.charged_at, self.posted_token_count)):
            amount = scale.amount(sent, self.cached_input_token_count, posted_token_count - sent)
            if amount > before:
                yield rule.key(at), amount - before
                before = amount

    def worth(self, rule: QuotaRule, input_token_count: int, output_token_count: int) -> int:
        """Return what so many tokens count for a quota on tokens or money, whatever is posted."""
        cached = min(self.cached_input_token_count, input_token_count)
        return rule.scale(self.prices).amount(input_token_count, cached, output_token_count)

    def most_output(self, rule: QuotaRule, room: int) -> int | None:
        """The largest lease whose charge is at most `room`; None if the quota does not count output."""
        kind = rule.kind
        if kind is Kind.CONCURRENCY or kind is Kind.REQUESTS:
            return None
        scale = rule.scale(self.prices)
        if not scale.output:
            return None
        if self.posted_token_count:
            cached = self.cached_input_token_count
            sent = (self.input_token_count - cached) * scale.input + cached * scale.cached_input
        else:
            sent = self.input_token_count * scale.dearest_input
        return (scale.divisor * (room + self.posted(scale)) - sent) // scale.output

    def moved_on(self, delivered_token_count: int, now: datetime) -> Claim:
        """The claim once everything delivered so far is posted to the windows it was charged to; the rest is charged now."""
        posted = self.input_token_count + delivered_token_count
        left = int(self.charged_at.timestamp()) // 60
        minutes = self.posted_minutes
        if left != int(now.timestamp()) // 60:
            minutes = (*minutes, left, posted)
        return self._replace(posted_token_count=posted, charged_at=now, posted_minutes=minutes)


USUAL_PERCENTS = (50, 80, 100)

PERCENT_MAX = 1000  # a limit that only watches may be passed; tenfold is a unit mixed up

LEFT_MAX_PICOS = 10**18  # a million units, as much as one grant may be

THRESHOLDS_MAX = 10  # of one limit: nobody acts on more

ALERTING = frozenset(dimension for dimension, (_, unit, *_) in DIMENSIONS.items() if unit in (Unit.DAY, Unit.MONTH))


def usual_thresholds(dimension: QuotaDimension) -> tuple[int, ...]:
    """Of a new limit of which nothing else is said."""
    return USUAL_PERCENTS if dimension in ALERTING else ()


def checked_percents(dimension: QuotaDimension, asked: Sequence[int]) -> tuple[int, ...]:
    """Thresholds of a limit in their order; none for no alerts. Raises: InvalidValue."""
    if asked and dimension not in ALERTING:
        alerting = ", ".join(str(each) for each in QuotaDimension if each in ALERTING)
        raise InvalidValue("alert_at", f"a limit on {dimension} does not alert: leave it out; those on {alerting} do")
    return _checked(asked, PERCENT_MAX, "percent of the limit")


def checked_lefts(asked: Sequence[int]) -> tuple[int, ...]:
    """Thresholds of prepaid credit in their order; none for no alerts. Raises: InvalidValue."""
    return _checked(asked, LEFT_MAX_PICOS, "picos of credit that are left")


def _checked(asked: Sequence[int], most: int, unit: str) -> tuple[int, ...]:
    if len(asked) > THRESHOLDS_MAX:
        raise InvalidValue("alert_at", f"give at most {THRESHOLDS_MAX} thresholds")
    for value in asked:
        if not 1 <= value <= most:
            raise InvalidValue("alert_at", f"{value} is none: give 1 to {most}, in {unit}")
    if len(set(asked)) != len(asked):
        raise InvalidValue("alert_at", "give each threshold once")
    return tuple(sorted(asked))


class QuotaState(NamedTuple):
    """One limit at a moment. Values in requests, tokens or picos by dimension.

    subject_name: the subject for people. It, raise_reason and would_refuse_count are empty where nobody looked them up.
    would_refuse_count: admissions of this window that the quota would have refused if it were enforced.
    for_new_keys: it limits nothing itself, but is copied to each key that is created under its subject. alert_at: percent of the
    limit, of prepaid credit picos that are left; empty where nobody looked it up.
    """

    rule: QuotaRule
    used: int
    held: int
    now: datetime
    subject_name: str = ""
    raise_reason: str = ""
    would_refuse_count: int = 0
    for_new_keys: bool = False
    alert_at: tuple[int, ...] = ()

    @property
    def quota_id(self) -> uuid.UUID:
        """Which quota."""
        return self.rule.id

    @property
    def subject(self) -> QuotaSubject:
        """What it hangs on."""
        return self.rule.subject

    @property
    def subject_id(self) -> uuid.UUID:
        """On which one."""
        return self.rule.subject_id

    @property
    def model(self) -> str:
        """The model that it limits; empty for all together."""
        return self.rule.model

    @property
    def dimension(self) -> QuotaDimension:
        """What it counts."""
        return self.rule.dimension

    @property
    def limit_value(self) -> int:
        """The limit in force, so with a raise."""
        return self.rule.limit_value or 0

    @property
    def remaining(self) -> int:
        """What may still be held; negative where it is not enforced, or has become less than what was used. At least -2**63."""
        return max(self.limit_value - self.used - self.held, -(2**63))

    @property
    def resets_at(self) -> datetime | None:
        """When `used` starts again at zero; None for concurrency."""
        return window_ends(self.now)[self.rule.window]

    @property
    def resets_in_s(self) -> float | None:
        """Seconds from `now` to `resets_at`."""
        resets_at = self.resets_at
        return None if resets_at is None else (resets_at - self.now).total_seconds()


class QuotaStates(Sequence[QuotaState]):
    """The states of several limits at one moment, built when they are asked for: most admissions are asked for none.

    counts: used and held of each.
    """

    __slots__ = ("counts", "now", "rules")

    def __init__(self, rules: tuple[QuotaRule, ...], counts: Sequence[tuple[int, int]], now: datetime) -> None:
        self.rules = rules
        self.counts = counts
        self.now = now

    def __len__(self) -> int:
        return len(self.rules)

    @overload
    def __getitem__(self, place: int) -> QuotaState: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[QuotaState]: ...

    def __getitem__(self, place: int | slice) -> QuotaState | Sequence[QuotaState]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return QuotaState(self.rules[place], *self.counts[place], self.now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # its counts are corrected once they are known


@dataclass(frozen=True, slots=True)
class Payer:
    """Whom a request is charged to."""

    organization_id: uuid.UUID
    project_id: uuid.UUID
    api_key_id: uuid.UUID
    currency_code: str

    def __hash__(self) -> int:
        """A key has one project, organization and currency. Of its number, since UUIDs hash in Python."""
        return hash(self.api_key_id.int)

    @property
    def subject_ids(self) -> frozenset[uuid.UUID]:
        """Everything that quotas of this payer can hang on."""
        return frozenset((self.organization_id, self.project_id, self.api_key_id))

    @property
    def receipt_ids(self) -> bytes:
        """Organization, project and key as a receipt begins with them, 48 bytes."""
        return self.organization_id.bytes + self.project_id.bytes + self.api_key_id.bytes


class Owner(Protocol):
    """Whose work something is: a payer, or the principal of a call."""

    @property
    def organization_id(self) -> uuid.UUID: ...

    @property
    def api_key_id(self) -> uuid.UUID: ...
