"""The decision whether a request fits its quotas, and what it holds and uses of them. Pure: no database, no clock.

A batch works on copies of the counter rows it has locked (`Counters`); whoever applies the batch writes the changed ones back in
the same transaction. Conservation: for each counter, `held` is the sum of what live holds claim of it and `used` the sum of what
ended or posted holds left there; a claim lives in exactly one window at a time, the one of the hold's `charged_at`.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from metering.errors import QuotaExceeded
from metering.models import QuotaDimension, QuotaSubject
from metering.operations import QuotaState
from metering.pricing import TokenPrices

NO_WINDOW = datetime(1970, 1, 1, tzinfo=UTC)  # the one "window" of a dimension that never resets
TOKEN_DIMENSIONS = frozenset({QuotaDimension.TOKENS_PER_MINUTE, QuotaDimension.TOKENS_PER_DAY, QuotaDimension.TOKENS_PER_MONTH})

CounterKey = tuple[uuid.UUID, datetime]
Tokens = tuple[int, int]  # input and output


@functools.lru_cache(maxsize=4096)  # a batch asks for the same few moments again and again
def window_start(dimension: QuotaDimension, at: datetime) -> datetime:
    """Start of the calendar window (UTC) that contains `at`."""
    at = at.astimezone(UTC)
    match dimension:
        case QuotaDimension.CONCURRENT_REQUESTS:
            return NO_WINDOW
        case QuotaDimension.REQUESTS_PER_MINUTE | QuotaDimension.TOKENS_PER_MINUTE:
            return at.replace(second=0, microsecond=0)
        case QuotaDimension.TOKENS_PER_DAY:
            return at.replace(hour=0, minute=0, second=0, microsecond=0)
        case QuotaDimension.TOKENS_PER_MONTH | QuotaDimension.COST_PICOS_PER_MONTH:
            return at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def window_end(dimension: QuotaDimension, at: datetime) -> datetime | None:
    """End of the window that contains `at`: the moment at which `used` starts again at zero. None if it never does."""
    start = window_start(dimension, at)
    match dimension:
        case QuotaDimension.CONCURRENT_REQUESTS:
            return None
        case QuotaDimension.REQUESTS_PER_MINUTE | QuotaDimension.TOKENS_PER_MINUTE:
            return start + timedelta(minutes=1)
        case QuotaDimension.TOKENS_PER_DAY:
            return start + timedelta(days=1)
        case QuotaDimension.TOKENS_PER_MONTH | QuotaDimension.COST_PICOS_PER_MONTH:
            return (start + timedelta(days=32)).replace(day=1)


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """One limit as it is enforced. limit_value: None for one that was removed while holds were still charged to it."""

    id: uuid.UUID
    subject: QuotaSubject
    subject_id: uuid.UUID
    model: str
    dimension: QuotaDimension
    limit_value: int | None

    def key(self, at: datetime) -> CounterKey:
        """The counter that a charge at this time goes to."""
        return self.id, window_start(self.dimension, at)


@dataclass(slots=True)
class Counter:
    """Working copy of one counter row."""

    used: int
    held: int


@dataclass(slots=True)
class Counters:
    """The locked counter rows of one batch, at one database time. created: those that the batch itself has inserted, empty."""

    now: datetime
    rows: dict[CounterKey, Counter] = field(default_factory=dict)
    changed: set[CounterKey] = field(default_factory=set)
    created: frozenset[CounterKey] = frozenset()

    def add(self, key: CounterKey, *, used: int = 0, held: int = 0) -> None:
        """Move a counter. Going below zero is a bug of the caller and would break conservation."""
        if not used and not held:
            return
        row = self.rows[key]
        row.used += used
        row.held += held
        assert row.used >= 0, f"counter {key} used {row.used} < 0"
        assert row.held >= 0, f"counter {key} held {row.held} < 0"
        self.changed.add(key)

    def remaining(self, rule: QuotaRule) -> int | None:
        """What may still be charged to the rule now; None for unlimited."""
        row = self.rows[rule.key(self.now)]
        return None if rule.limit_value is None else rule.limit_value - row.used - row.held

    def state(self, rule: QuotaRule) -> QuotaState:
        """The rule as its subject may see it."""
        row = self.rows[rule.key(self.now)]
        return QuotaState(
            quota_id=rule.id,
            subject=rule.subject,
            subject_id=rule.subject_id,
            model=rule.model,
            dimension=rule.dimension,
            limit_value=rule.limit_value or 0,
            used=row.used,
            held=row.held,
            now=self.now,
            resets_at=window_end(rule.dimension, self.now),
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What one live hold claims: the part of its row that quotas are charged by.

    leased_token_count: output tokens that may be delivered in all. posted_*: what was moved to `used` of earlier windows.
    """

    prices: TokenPrices
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    posted_token_count: int
    posted_cost_picos: int
    admitted_at: datetime
    charged_at: datetime

    def held(self, dimension: QuotaDimension) -> int:
        """What the claim holds of a quota of this dimension."""
        if dimension in TOKEN_DIMENSIONS:
            return self.input_token_count + self.leased_token_count - self.posted_token_count
        match dimension:
            case QuotaDimension.CONCURRENT_REQUESTS:
                return 1
            case QuotaDimension.COST_PICOS_PER_MONTH:
                if self.posted_token_count:  # the input among it; only output is still to come
                    return self.held(QuotaDimension.TOKENS_PER_MONTH) * self.prices.output_picos_per_token
                # The dearer of all or nothing cached: whatever the cache does can only make it cheaper.
                return max(
                    self.prices.cost_picos(self.input_token_count, cached, self.leased_token_count)
                    for cached in (0, self.input_token_count)
                )
            case _:
                return 0  # a request counts as used from its admission on

    def consumed(self, dimension: QuotaDimension, input_token_count: int, delivered_token_count: int) -> int:
        """What has to be added to `used` when the claim ends, or is posted, with these tokens.

        Never less than nothing: what was posted stays in its window, even if it turns out later that more of the input was cached.
        """
        if dimension in TOKEN_DIMENSIONS:
            return max(input_token_count + delivered_token_count - self.posted_token_count, 0)
        if dimension is QuotaDimension.COST_PICOS_PER_MONTH:
            cached = min(self.cached_input_token_count, input_token_count)
            cost = self.prices.cost_picos(input_token_count, cached, delivered_token_count)
            return max(cost - self.posted_cost_picos, 0)
        return 0

    def posted(self, delivered_token_count: int, now: datetime) -> Claim:
        """The claim once everything delivered so far is posted to the windows it was charged to; the rest is charged now."""
        cost = self.consumed(QuotaDimension.COST_PICOS_PER_MONTH, self.input_token_count, delivered_token_count)
        return replace(
            self,
            posted_token_count=self.input_token_count + delivered_token_count,
            posted_cost_picos=self.posted_cost_picos + cost,
            charged_at=now,
        )


def admit(counters: Counters, rules: Sequence[QuotaRule], claim: Claim, wanted_token_count: int, least_token_count: int) -> Claim:
    """Charge a new claim to all rules, with as large a first slice of output tokens as fits, or to none.

    wanted_token_count: the slice asked for; least_token_count: below that the request is better refused than started.
    Raises: QuotaExceeded naming every rule that does not fit, the first to reset in front.
    """
    smallest = replace(claim, leased_token_count=least_token_count)
    failing = [rule for rule in rules if not fits(counters, rule, demand(rule, smallest))]
    if failing:
        raise refusal(counters, failing, smallest)
    granted = min([wanted_token_count, *(least_token_count + room for room in token_room(counters, rules, smallest))])
    admitted = replace(claim, leased_token_count=granted)
    for rule in rules:
        if rule.dimension is QuotaDimension.REQUESTS_PER_MINUTE:
            counters.add(rule.key(counters.now), used=1)
        else:
            counters.add(rule.key(counters.now), held=admitted.held(rule.dimension))
    return admitted


def extend(
    counters: Counters, rules: Sequence[QuotaRule], claim: Claim, delivered_token_count: int, wanted_token_count: int
) -> Claim:
    """Post what was delivered to the window it was charged to, and move the rest, enlarged, into the window of now.

    Grants what fits of `wanted_token_count`, at least one token. Raises: QuotaExceeded if not even that; nothing has changed then.
    """
    posted = claim.posted(delivered_token_count, counters.now)
    windowed = [rule for rule in rules if rule.dimension in TOKEN_DIMENSIONS or is_cost(rule)]
    for rule in windowed:
        old = rule.key(claim.charged_at)
        counters.add(old, held=-claim.held(rule.dimension))
        counters.add(old, used=claim.consumed(rule.dimension, claim.input_token_count, delivered_token_count))
    one_more = replace(posted, leased_token_count=posted.leased_token_count + 1)
    failing = [rule for rule in windowed if not fits(counters, rule, demand(rule, one_more))]
    if failing:
        error = refusal(counters, failing, one_more)
        for rule in windowed:
            old = rule.key(claim.charged_at)
            counters.add(old, held=claim.held(rule.dimension))
            counters.add(old, used=-claim.consumed(rule.dimension, claim.input_token_count, delivered_token_count))
        raise error
    granted = min([wanted_token_count, *(1 + room for room in token_room(counters, windowed, one_more))])
    extended = replace(posted, leased_token_count=posted.leased_token_count + granted)
    for rule in windowed:
        counters.add(rule.key(counters.now), held=extended.held(rule.dimension))
    return extended


def end(counters: Counters, rules: Iterable[QuotaRule], claim: Claim, input_token_count: int, delivered_token_count: int) -> None:
    """Give back what the claim holds and leave what it consumed in `used`."""
    for rule in rules:
        key = rule.key(claim.charged_at)
        counters.add(key, held=-claim.held(rule.dimension))
        counters.add(key, used=claim.consumed(rule.dimension, input_token_count, delivered_token_count))


def give_back(counters: Counters, rules: Iterable[QuotaRule], claim: Claim, charged: Tokens, consumed: Tokens) -> None:
    """Take from `used` what a claim that has ended was charged beyond what it turned out to have consumed.

    charged, consumed: input and output tokens. A window whose counter is gone is long over: nothing is left there to give back to.
    """
    for rule in rules:
        key = rule.key(claim.charged_at)
        excess = claim.consumed(rule.dimension, *charged) - claim.consumed(rule.dimension, *consumed)
        if key not in counters.created:
            counters.add(key, used=-excess)


def void(counters: Counters, rules: Iterable[QuotaRule], claim: Claim) -> None:
    """Undo the claim as if it had never been admitted, but for what an extension has posted: its windows may be over."""
    for rule in rules:
        if rule.dimension is QuotaDimension.REQUESTS_PER_MINUTE:
            counters.add(rule.key(claim.admitted_at), used=-1)
        else:
            counters.add(rule.key(claim.charged_at), held=-claim.held(rule.dimension))


def touched_keys(rules: Iterable[QuotaRule], claim: Claim, now: datetime, *, extends: bool) -> set[CounterKey]:
    """Every counter that an end of this claim can touch at `now`, or also an extension."""
    keys: set[CounterKey] = set()
    for rule in rules:
        if rule.dimension is QuotaDimension.REQUESTS_PER_MINUTE:
            keys.add(rule.key(claim.admitted_at))
        else:
            keys.add(rule.key(claim.charged_at))
            if extends:
                keys.add(rule.key(now))
    return keys


def is_cost(rule: QuotaRule) -> bool:
    """Whether the rule counts money."""
    return rule.dimension is QuotaDimension.COST_PICOS_PER_MONTH


def demand(rule: QuotaRule, claim: Claim) -> int:
    """What a claim asks of a rule at the moment it is charged."""
    return 1 if rule.dimension is QuotaDimension.REQUESTS_PER_MINUTE else claim.held(rule.dimension)


def fits(counters: Counters, rule: QuotaRule, amount: int) -> bool:
    """Whether the rule has room for the amount now."""
    remaining = counters.remaining(rule)
    return remaining is None or amount <= remaining


def token_room(counters: Counters, rules: Iterable[QuotaRule], claim: Claim) -> Iterable[int]:
    """For each rule that limits tokens or money: output tokens that fit beyond what the claim already asks."""
    for rule in rules:
        remaining = counters.remaining(rule)
        if remaining is None:
            continue
        spare = remaining - demand(rule, claim)
        if rule.dimension in TOKEN_DIMENSIONS:
            yield spare
        elif is_cost(rule) and claim.prices.output_picos_per_token:
            yield spare // claim.prices.output_picos_per_token


def refusal(counters: Counters, failing: Sequence[QuotaRule], claim: Claim) -> QuotaExceeded:
    """The error for rules that do not fit: first the one that resets first, concurrency before all."""
    ordered = sorted(failing, key=lambda rule: (window_end(rule.dimension, counters.now) or NO_WINDOW, str(rule.id)))
    return QuotaExceeded([counters.state(rule) for rule in ordered], [demand(rule, claim) for rule in ordered])
