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
    Scale,
    money_scale,
    window_end,
    window_starts,
)

Tokens = tuple[int, int]  # input and output

# A counter that has come so far stays there, for the rest of its window: "so much or more". Limits end there, too, so that none is
# passed; but where a limit only watches, or was set after the use, a request that was served has to be settled whatever it adds.
USED_MAX = 2**63 - 1  # what the column holds: some nine million units of money


class QuotaExceeded(MeteringError):
    """The request does not fit its limits. `QuotaFailure` lists them, the first to reset in front.

    requested: what it asked of each of them. claim: what an admission would have claimed with all
    of its first slice; met: every enforced limit it met, and what it asked of each. hint_s: seconds
    after which it will fit, where that was worked out (`retry_hints.py`); infinite if it never
    will.
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
    """The prepaid credit does not cover the least that the request costs. Waiting does not help.

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


NO_MOVE = 0, 0  # of used and held
NO_LIMIT = -1  # of a row that may be moved however full it is


class Unsure(Exception):
    """What was seen of the counters last does not tell what the decision is: the rows have to be locked and read."""


@dataclass(slots=True)
class Counter:
    """Working copy of one counter row."""

    used: int
    held: int


@dataclass(slots=True)
class Counters:
    """The locked counter rows of one batch, at one database time. created: those that the batch itself has inserted, empty.

    changed: what the rows were before the batch changed them: used and held.
    would_refuse: admissions of this batch that went past a quota which is not enforced, by counter.
    guessed: the rows are as they were seen last and not locked; some may be missing. What is decided then holds only if every row
    can be moved as the batch does within `limits`; a decision that would be another one for another row raises `Unsure`.
    moves: what is added to rows that are missing: used and held.
    """

    now: datetime
    rows: dict[CounterKey, Counter] = field(default_factory=dict)
    changed: dict[CounterKey, tuple[int, int]] = field(default_factory=dict)
    created: frozenset[CounterKey] = frozenset()
    would_refuse: dict[CounterKey, int] = field(default_factory=dict)
    guessed: bool = False
    limits: dict[CounterKey, int] = field(default_factory=dict)
    moves: dict[CounterKey, tuple[int, int]] = field(default_factory=dict)

    def add(self, key: CounterKey, used: int = 0, held: int = 0) -> None:
        """Move a counter. Going below zero is a bug of the caller and would break conservation."""
        if not used and not held:
            return
        if self.guessed and key not in self.limits:  # the row does not matter
            before = self.moves.get(key, NO_MOVE)
            self.moves[key] = min(before[0] + used, USED_MAX), before[1] + held
            return
        row = self.rows[key]
        if key not in self.changed:
            self.changed[key] = row.used, row.held
        row.held += held
        if self.guessed:  # what is added counts, and not where that leads to
            row.used += used
            return
        if row.used < USED_MAX:
            row.used = min(row.used + used, USED_MAX)
        assert row.used >= 0, f"counter {key} used {row.used} < 0"
        assert row.held >= 0, f"counter {key} held {row.held} < 0"

    def all_moves(self) -> dict[CounterKey, tuple[int, int]]:
        """Return what guessed rows are moved by, used and held."""
        moves = dict(self.moves)
        for key, (used, held) in self.changed.items():
            row, more = self.rows[key], moves.get(key, NO_MOVE)
            moves[key] = row.used - used + more[0], row.held - held + more[1]
        return {key: move for key, move in moves.items() if move != NO_MOVE}

    def remaining(self, rule: QuotaRule) -> int | None:
        """What may still be charged to the rule now; None for unlimited."""
        if rule.limit_value is None:
            return None
        row = self.row(rule.key(self.now))
        return rule.limit_value - row.used - row.held

    def row(self, key: CounterKey) -> Counter:
        """Return a row. Raises: Unsure for one that was never seen."""
        try:
            return self.rows[key]
        except KeyError:
            if self.guessed:
                raise Unsure from None
            raise

    def copy_for(self, rules: Iterable[QuotaRule]) -> Counters:
        """Counters of these rules to decide on without changing anything."""
        keys = {rule.key(self.now) for rule in rules}
        rows = {key: self.row(key) for key in keys}
        return Counters(self.now, {key: Counter(row.used, row.held) for key, row in rows.items()}, guessed=self.guessed)

    def state(self, rule: QuotaRule) -> QuotaState:
        """The rule as its subject may see it."""
        row = self.rows[rule.key(self.now)]
        return QuotaState(rule, row.used, row.held, self.now)

    def counts(self, rules: Iterable[QuotaRule]) -> list[tuple[int, int]]:
        """Return used and held of each rule as they are now, whatever comes later."""
        rows = [self.rows[rule.key(self.now)] for rule in rules]
        return [(row.used, row.held) for row in rows]


def admit(counters: Counters, rules: Sequence[QuotaRule], claim: Claim, wanted_token_count: int, least_token_count: int) -> Claim:
    """Charge a new claim to all rules, with as large a first slice of output tokens as fits, or to none.

    wanted_token_count: the slice asked for; least_token_count: below that the request is better refused than started.
    Raises: QuotaExceeded naming every rule that does not fit, the first to reset in front.
    """
    if charge_whole(counters, rules, money_scale(claim.prices), claim.input_token_count, wanted_token_count) is not None:
        return claim.leasing(wanted_token_count)
    if counters.guessed:
        raise Unsure
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


def charge_whole(
    counters: Counters, rules: Iterable[QuotaRule], money: Scale, input_token_count: int, output_token_count: int
) -> list[tuple[int, int]] | None:
    """Charge a new claim with all of a lease to all rules, or to none: what most admissions come to.

    Written out for its many calls; the amounts are those of `Claim.charge`. money: how the claim counts money. Returns used and
    held of each rule then; None if some rule has no room. Raises: Unsure.
    """
    starts, rows, changed = window_starts(counters.now), counters.rows, counters.changed
    charges: list[tuple[QuotaRule, CounterKey, Counter, int]] = []
    for rule in rules:
        key = rule.number, starts[rule.window]
        row = rows.get(key) or counters.row(key)
        amount = 1
        if rule.counts_tokens:
            scale = rule.token_scale or money
            amount = -(-(input_token_count * scale.dearest_input + output_token_count * scale.output) // scale.divisor)
        if rule.limit_value is not None and amount > rule.limit_value - row.used - row.held:
            return None
        charges.append((rule, key, row, amount))
    counts: list[tuple[int, int]] = []
    for rule, key, row, amount in charges:
        if amount and key not in changed:
            changed[key] = row.used, row.held
            if counters.guessed:
                counters.limits[key] = NO_LIMIT if rule.limit_value is None else rule.limit_value
        if rule.is_used_at_once:
            row.used += amount
        else:
            row.held += amount
        counts.append((row.used, row.held))
    return counts


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
        if counters.guessed:
            counters.row(new)
        if room is None or not rule.enforced:
            continue
        if old == new:  # its own present charge is not in its way
            room += held - used
        if one_more.held(rule) > room:
            failing.append(rule)
        elif (most := one_more.most_output(rule, room)) is not None and most < lease:
            lease = most
    if counters.guessed and (failing or lease < posted.leased_token_count + wanted_token_count):
        raise Unsure
    if failing:
        raise refusal(counters, failing, one_more)
    extended = posted.leasing(lease)
    for rule, (old, new, held, used) in zip(windowed, moves, strict=True):
        if counters.guessed:
            counters.limits[new] = rule.limit_value if rule.enforced and rule.limit_value is not None else NO_LIMIT
        counters.add(old, used=used, held=-held)
        counters.add(new, held=extended.held(rule))
    return extended


def end(counters: Counters, rules: Iterable[QuotaRule], claim: Claim, input_token_count: int, delivered_token_count: int) -> None:
    """Give back what the claim holds and leave what it consumed in `used`."""
    money, cached = money_scale(claim.prices), min(claim.cached_input_token_count, input_token_count)
    if not claim.posted_token_count:
        claimed = claim.input_token_count, claim.leased_token_count
        consumed = input_token_count - cached, cached, delivered_token_count
        end_whole(counters, rules, money, claim.charged_at, claimed, consumed)
        return
    starts = window_starts(claim.charged_at)
    for rule in rules:
        if rule.counts_tokens:
            scale = rule.token_scale or money
            used = claim.consumed_by(scale, input_token_count, delivered_token_count)
            counters.add((rule.number, starts[rule.window]), used, -claim.charge(scale, claim.leased_token_count))
        elif not rule.is_used_at_once:
            counters.add((rule.number, starts[rule.window]), 0, -1)


def end_whole(
    counters: Counters,
    rules: Iterable[QuotaRule],
    money: Scale,
    charged_at: datetime,
    claimed: Tokens,
    consumed: tuple[int, int, int],
) -> None:
    """The same for a claim of which nothing is posted, as of most; written out for its many calls.

    claimed: input and leased output. consumed: input that was not cached, cached input, output.
    """
    starts, moves, limits = window_starts(charged_at), counters.moves, counters.limits
    (sent, lease), (fresh, cached, output) = claimed, consumed
    for rule in rules:
        used, held = 0, 1
        if rule.counts_tokens:
            scale = rule.token_scale or money
            each, divisor = scale.output, scale.divisor
            used = -(-(fresh * scale.input + cached * scale.cached_input + output * each) // divisor)
            held = -(-(sent * scale.dearest_input + lease * each) // divisor)
        elif rule.is_used_at_once:
            continue
        key = rule.number, starts[rule.window]
        if not counters.guessed or key in limits:
            counters.add(key, used, -held)
        elif used or held:
            before = moves.get(key, NO_MOVE)
            moves[key] = min(before[0] + used, USED_MAX), before[1] - held


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
