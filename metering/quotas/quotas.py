"""The decision whether a request fits its quotas, and what it holds and uses of them. Pure: no database, no clock.

A batch works on copies of the counter rows it has locked (`Counters`); whoever applies the batch writes the changed ones back in
the same transaction. Conservation: for each counter, `held` is the sum of what live holds claim of it and `used` the sum of what
settled or posted holds left there; a claim lives in exactly one window at a time, the one of the hold's `charged_at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from metering.core.errors import MeteringError
from metering.core.models import QuotaDimension
from metering.quotas.quota_rules import (
    NO_WINDOW,
    Claim,
    CounterKey,
    Kind,
    QuotaRule,
    QuotaState,
    money_scale,
    window_end,
    window_starts,
)

Tokens = tuple[int, int]  # input and output

# A counter that has come so far stays there, for the rest of its window: "so much or more". Limits end there, too, so that none is
# passed; but where a limit only watches, or was set after the use, a request that was served has to be settled whatever it adds.
USED_MAX = 2**63 - 1  # what the column holds: some nine million units of money


class QuotaExceeded(MeteringError):
    """The request does not fit. `failing` are the limits it does not fit, the one that resets first in front.

    requested: what it asked of each of them. claim: what an admission would have claimed with all of its first slice; met: every
    enforced limit it met, and what it asked of each. hint_s: seconds after which it will fit, where that was worked out
    (`retry_hints.py`); infinite if it never will.
    """

    reason = "QUOTA_EXCEEDED"

    def __init__(self, failing: Sequence[QuotaState], requested: Sequence[int]) -> None:
        first = failing[0]
        super().__init__(
            f"quota {first.dimension} of {first.subject} is used up: requested {requested[0]}, remaining "
            f"{max(first.remaining, 0)} of {first.limit_value} ({first.used} used, {first.held} held)"
        )
        self.failing = tuple(failing)
        self.requested = tuple(requested)
        self.claim: Claim | None = None
        self.met: tuple[tuple[QuotaState, int], ...] = ()
        self.hint_s: float | None = None

    @property
    def retry_helps(self) -> bool:
        """Whether waiting alone can make the request fit: not if it is more than a limit allows even when nothing is used of it."""
        if self.hint_s == math.inf:
            return False
        return all(amount <= state.limit_value for amount, state in zip(self.requested, self.failing, strict=True))

    @property
    def retry_after_s(self) -> float:
        """How long to wait: the hint, or until the last failing limit has reset; a moment where there is neither."""
        return max(state.resets_in_s or 1.0 for state in self.failing) if self.hint_s is None else self.hint_s


class InsufficientCredit(QuotaExceeded):
    """A prepaid organization has not the credit that the request asks for at least. Waiting does not help.

    failing: the credit in front, as a quota, and whatever else does not fit.
    """

    reason = "INSUFFICIENT_CREDIT"

    def __init__(self, failing: Sequence[QuotaState], requested: Sequence[int], currency_code: str) -> None:
        super().__init__(failing, requested)
        units, left = (Decimal(picos).scaleb(-12).normalize() for picos in (requested[0], max(failing[0].remaining, 0)))
        self.args = (
            f"the prepaid credit does not cover this request: it needs {units:f} {currency_code} at least, and {left:f} "
            "is left that no running request holds: add credit",
        )

    @property
    def retry_helps(self) -> bool:
        """Never by waiting: credit has to be added."""
        return False


@dataclass(slots=True)
class Counter:
    """Working copy of one counter row."""

    used: int
    held: int


@dataclass(slots=True)
class Counters:
    """The locked counter rows of one batch, at one database time. created: those that the batch itself has inserted, empty.

    would_refuse: admissions of this batch that went past a quota which is not enforced, by counter.
    unread: no row was read or locked; what is added is kept in `moves`, by counter: used and held. Enough for what only gives back.
    """

    now: datetime
    rows: dict[CounterKey, Counter] = field(default_factory=dict)
    changed: set[CounterKey] = field(default_factory=set)
    created: frozenset[CounterKey] = frozenset()
    would_refuse: dict[CounterKey, int] = field(default_factory=dict)
    unread: bool = False
    moves: dict[CounterKey, tuple[int, int]] = field(default_factory=dict)

    def add(self, key: CounterKey, *, used: int = 0, held: int = 0) -> None:
        """Move a counter. Going below zero is a bug of the caller and would break conservation."""
        if not used and not held:
            return
        if self.unread:
            before = self.moves.get(key, (0, 0))
            self.moves[key] = min(before[0] + used, USED_MAX), before[1] + held
            return
        row = self.rows[key]
        if row.used < USED_MAX:
            row.used = min(row.used + used, USED_MAX)
        row.held += held
        assert row.used >= 0, f"counter {key} used {row.used} < 0"
        assert row.held >= 0, f"counter {key} held {row.held} < 0"
        self.changed.add(key)

    def remaining(self, rule: QuotaRule) -> int | None:
        """What may still be charged to the rule now; None for unlimited."""
        if rule.limit_value is None:
            return None
        row = self.rows[rule.key(self.now)]
        return rule.limit_value - row.used - row.held

    def copy_for(self, rules: Iterable[QuotaRule]) -> Counters:
        """Counters of these rules to decide on without changing anything."""
        keys = {rule.key(self.now) for rule in rules}
        return Counters(self.now, {key: Counter(self.rows[key].used, self.rows[key].held) for key in keys})

    def state(self, rule: QuotaRule) -> QuotaState:
        """The rule as its subject may see it."""
        row = self.rows[rule.key(self.now)]
        return QuotaState(rule, row.used, row.held, self.now)


def admit(counters: Counters, rules: Sequence[QuotaRule], claim: Claim, wanted_token_count: int, least_token_count: int) -> Claim:
    """Charge a new claim to all rules, with as large a first slice of output tokens as fits, or to none.

    wanted_token_count: the slice asked for; least_token_count: below that the request is better refused than started.
    Raises: QuotaExceeded naming every rule that does not fit, the first to reset in front.
    """
    whole = claim._replace(leased_token_count=wanted_token_count)
    if charge_whole(counters, rules, whole):
        return whole
    smallest = claim._replace(leased_token_count=least_token_count)
    lease = wanted_token_count
    failing: list[QuotaRule] = []
    unheeded: list[QuotaRule] = []
    for rule in rules:
        room = counters.remaining(rule)
        if room is None:
            continue
        if demand(rule, smallest) > room:
            (failing if rule.enforced else unheeded).append(rule)
        elif rule.enforced and (most := smallest.most_output(rule, room)) is not None and most < lease:
            lease = most
    if failing:
        error = refusal(counters, failing, smallest)
        error.claim = claim._replace(leased_token_count=wanted_token_count)
        # Of credit nothing is promised: no time brings it back.
        met = (rule for rule in rules if rule.enforced and rule.dimension is not QuotaDimension.PREPAID_CREDIT_PICOS)
        error.met = tuple((counters.state(rule), demand(rule, smallest)) for rule in met)
        raise error
    admitted = claim._replace(leased_token_count=lease)
    now = counters.now
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            counters.add(rule.key(now), used=1)
        else:
            counters.add(rule.key(now), held=admitted.held(rule))
    for rule in unheeded:
        key = rule.key(now)
        counters.would_refuse[key] = counters.would_refuse.get(key, 0) + 1
    return admitted


def charge_whole(counters: Counters, rules: Sequence[QuotaRule], claim: Claim) -> bool:
    """Charge a new claim as it is to all rules, or to none and say so: what most admissions come to, at half the work."""
    charges: list[tuple[CounterKey, Counter, bool, int]] = []
    for rule in rules:
        key = rule.key(counters.now)
        row, amount = counters.rows[key], demand(rule, claim)
        if rule.limit_value is not None and amount > rule.limit_value - row.used - row.held:
            return False
        if amount:
            charges.append((key, row, rule.kind is Kind.REQUESTS, amount))
    for key, row, is_used_at_once, amount in charges:
        if is_used_at_once:
            row.used += amount
        else:
            row.held += amount
        counters.changed.add(key)
    return True


def extend(
    counters: Counters, rules: Sequence[QuotaRule], claim: Claim, delivered_token_count: int, wanted_token_count: int
) -> Claim:
    """Post what was delivered to the window it was charged to, and move the rest, enlarged, into the window of now.

    Grants what fits of `wanted_token_count`, at least one token. Raises: QuotaExceeded if not even that; nothing has changed then.
    """
    now = counters.now
    posted = claim.moved_on(delivered_token_count, now)
    one_more = posted._replace(leased_token_count=posted.leased_token_count + 1)
    windowed = [rule for rule in rules if rule.kind is Kind.TOKENS or rule.kind is Kind.MONEY]
    lease = posted.leased_token_count + wanted_token_count
    failing: list[QuotaRule] = []
    moves: list[tuple[CounterKey, CounterKey, int, int]] = []
    for rule in windowed:
        old, new = rule.key(claim.charged_at), rule.key(now)
        held, used = claim.held(rule), claim.consumed(rule, claim.input_token_count, delivered_token_count)
        moves.append((old, new, held, used))
        room = counters.remaining(rule)
        if room is None or not rule.enforced:
            continue
        if old == new:  # its own present charge is not in its way
            room += held - used
        if one_more.held(rule) > room:
            failing.append(rule)
        elif (most := one_more.most_output(rule, room)) is not None and most < lease:
            lease = most
    if failing:
        raise refusal(counters, failing, one_more)
    extended = posted._replace(leased_token_count=lease)
    for rule, (old, new, held, used) in zip(windowed, moves, strict=True):
        counters.add(old, used=used, held=-held)
        counters.add(new, held=extended.held(rule))
    return extended


def end(counters: Counters, rules: Iterable[QuotaRule], claim: Claim, input_token_count: int, delivered_token_count: int) -> None:
    """Give back what the claim holds and leave what it consumed in `used`."""
    starts, money = window_starts(claim.charged_at), money_scale(claim.prices)
    for rule in rules:
        kind = rule.kind
        if kind is Kind.CONCURRENCY:
            counters.add((rule.number, starts[rule.window]), held=-1)
        elif kind is not Kind.REQUESTS:
            scale = rule.token_scale or money
            used = claim.consumed_by(scale, input_token_count, delivered_token_count)
            counters.add((rule.number, starts[rule.window]), used=used, held=-claim.charge(scale, claim.leased_token_count))


def expire(counters: Counters, rules: Sequence[QuotaRule], claim: Claim, billed: Tokens) -> None:
    """End a claim whose delivered tokens are unknown. billed: input and output tokens of its usage event.

    Quotas with a window keep the whole lease as used until the window ends, so that no limit is exceeded. A lifetime quota would
    keep it for ever: it is left with what is billed.
    """
    whole = claim.input_token_count, claim.leased_token_count
    windowed = [rule for rule in rules if not rule.is_lifetime]
    end(counters, windowed, claim, *whole)
    for rule in rules:
        if rule.is_lifetime:
            counters.add(rule.key(claim.charged_at), held=-claim.held(rule))
            take_back(counters, claim, rule)
            counters.add(rule.key(claim.charged_at), used=claim.worth(rule, *billed))


def give_back(
    counters: Counters, rules: Iterable[QuotaRule], claim: Claim, charged: Tokens, billed: Tokens, consumed: Tokens
) -> None:
    """Correct `used` of an expired claim once it is known what it consumed.

    charged: what quotas with a window were charged when it expired; billed: what lifetime quotas were. All are input and output
    tokens. A window whose counter is gone is long over: nothing is left there to give back to.
    """
    for rule in rules:
        key = rule.key(claim.charged_at)
        if rule.is_lifetime:
            excess = claim.worth(rule, *billed) - claim.worth(rule, *consumed)
        else:
            excess = claim.consumed(rule, *charged) - claim.consumed(rule, *consumed)
        if key not in counters.created:
            counters.add(key, used=-excess)


def void(counters: Counters, rules: Iterable[QuotaRule], claim: Claim) -> None:
    """Undo the claim as if it had never been admitted, in every window that it or its extensions were charged to."""
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            counters.add(rule.key(claim.admitted_at), used=-1)
        else:
            counters.add(rule.key(claim.charged_at), held=-claim.held(rule))
            take_back(counters, claim, rule)


def take_back(counters: Counters, claim: Claim, rule: QuotaRule) -> None:
    """Take from `used` what extensions of the claim have posted, never below zero.

    A quota that was set later may have no counter of an early window, or one that does not count the claim.
    """
    for key, amount in claim.postings(rule):
        if key not in counters.created:
            counters.add(key, used=-min(amount, counters.rows[key].used))


def touched_keys(
    rules: Iterable[QuotaRule], claim: Claim, now: datetime, *, extends: bool, undoes: bool = False
) -> set[CounterKey]:
    """Every counter that an end of this claim can touch at `now`.

    extends: an extension may come as well. undoes: the end may take back what extensions have posted.
    """
    keys: set[CounterKey] = set()
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            keys.add(rule.key(claim.admitted_at))
        else:
            keys.add(rule.key(claim.charged_at))
            if extends:
                keys.add(rule.key(now))
            if undoes:
                keys.update(key for key, _ in claim.postings(rule))
    return keys


def demand(rule: QuotaRule, claim: Claim) -> int:
    """What a claim asks of a rule at the moment it is charged."""
    return 1 if rule.kind is Kind.REQUESTS else claim.held(rule)


def refusal(counters: Counters, failing: Sequence[QuotaRule], claim: Claim) -> QuotaExceeded:
    """The error for rules that do not fit: credit first, which no time brings back; then the one that resets first, concurrency
    before all.
    """
    credit = QuotaDimension.PREPAID_CREDIT_PICOS

    def order(rule: QuotaRule) -> tuple[bool, datetime, str]:
        return rule.dimension is not credit, window_end(rule.dimension, counters.now) or NO_WINDOW, str(rule.id)

    ordered = sorted(failing, key=order)
    states, amounts = [counters.state(rule) for rule in ordered], [demand(rule, claim) for rule in ordered]
    if ordered[0].dimension is credit:
        return InsufficientCredit(states, amounts, claim.prices.currency_code)
    return QuotaExceeded(states, amounts)
