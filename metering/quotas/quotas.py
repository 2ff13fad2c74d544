"""Admission decisions: whether a request fits its quotas, and the amounts it holds and uses. No
database, no clock.

A batch works on copies of the counter rows it has locked (`Counters`); the caller writes the
changed ones back in the same transaction. Conservation: for each counter, `held` is the sum of the
claims of live holds and `used` the sum of the amounts that settled or posted holds left there; a
claim is held in exactly one window at a time, that of the hold's `charged_at`.
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
    Tokens,
    money_scale,
    window_end,
    window_starts,
)

# A counter saturates here until its window ends. Limits have the same maximum, so none is exceeded;
# but where a limit is not enforced, or was set after the usage, a request that was served must be
# settled whatever it adds.
USED_MAX = 2**63 - 1  # what the column holds: some nine million units of money

NO_MOVE = 0, 0  # of used and held
NO_LIMIT = -1  # of a row that may be moved regardless of its usage


class QuotaExceeded(MeteringError):
    """The request does not fit its limits. `QuotaFailure` lists them, the first to reset in front.

    requested: amount requested of each. claim: the claim of an admission with its whole first
    slice; met: every enforced limit that applies, and the amount requested of each. hint_s: seconds
    until the request fits, if computed (`retry_hints.py`); infinite if it never will.
    """

    reason = "QUOTA_EXCEEDED"

    def __init__(self, failing: Sequence[QuotaState], requested: Sequence[int]) -> None:
        first = failing[0]
        super().__init__(
            f"quota {first.dimension.spelling} of {first.subject} is used up: requested"
            f" {requested[0]}, remaining {max(first.remaining, 0)} of {first.limit_value}"
            f" ({first.used} used, {first.held} held)"
        )
        self.failing = tuple(failing)
        self.requested = tuple(requested)
        self.claim: Claim | None = None
        self.met: tuple[tuple[QuotaState, int], ...] = ()
        self.hint_s: float | None = None

    @property
    def retry_helps(self) -> bool:
        """True if waiting can help; False if a limit would be exceeded by this request alone."""
        if self.hint_s == math.inf:
            return False
        return all(
            amount <= state.limit_value
            for amount, state in zip(self.requested, self.failing, strict=True)
        )

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait: the hint, or the time until the last failing limit resets, or 1."""
        return (
            max(state.resets_in_s or 1.0 for state in self.failing)
            if self.hint_s is None
            else self.hint_s
        )


class InsufficientCredit(QuotaExceeded):
    """The prepaid credit does not cover the least that the request costs. Waiting does not help.

    failing: the credit in front, as a quota, followed by the other limits that the request exceeds.
    """

    reason = "INSUFFICIENT_CREDIT"

    def __init__(
        self, failing: Sequence[QuotaState], requested: Sequence[int], currency_code: str
    ) -> None:
        super().__init__(failing, requested)
        units, left = (
            Decimal(picos).scaleb(-12).normalize()
            for picos in (requested[0], max(failing[0].remaining, 0))
        )
        self.args = (
            (
                f"the prepaid credit does not cover this request: it needs at least {units:f}"
                f" {currency_code}, and {left:f} is left that no running request holds: add credit"
            ),
        )

    @property
    def retry_helps(self) -> bool:
        """Always False: credit has to be added."""
        return False


class Unsure(Exception):
    """The last known counters do not determine the decision: the rows must be locked and read."""


@dataclass(slots=True)
class Counter:
    """Working copy of one counter row."""

    used: int
    held: int


@dataclass(slots=True)
class Counters:
    """Locked counter rows of one batch at one database time. created: rows it inserted, empty.

    changed: used and held of the rows before the batch changed them. would_refuse: admissions of
    this batch that exceed a quota which is not enforced, by counter. guessed: the rows are last
    known values and not locked; some may be missing. Decisions are then valid only if every row can
    be moved as the batch does within `limits`; a decision that another row could change raises
    `Unsure`. moves: used and held amounts added to missing rows.
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
        """Add to a counter. A result below zero is a bug of the caller."""
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
        if self.guessed:  # only the difference counts, the resulting value does not
            row.used += used
            return
        if row.used < USED_MAX:
            row.used = min(row.used + used, USED_MAX)
        assert row.used >= 0, f"counter {key} used {row.used} < 0"
        assert row.held >= 0, f"counter {key} held {row.held} < 0"

    def all_moves(self) -> dict[CounterKey, tuple[int, int]]:
        """Return the used and held amounts to add to guessed rows."""
        moves = dict(self.moves)
        for key, (used, held) in self.changed.items():
            row, more = self.rows[key], moves.get(key, NO_MOVE)
            moves[key] = row.used - used + more[0], row.held - held + more[1]
        return {key: move for key, move in moves.items() if move != NO_MOVE}

    def remaining(self, rule: QuotaRule) -> int | None:
        """Return the amount that may still be charged to the rule; None for unlimited."""
        if rule.limit_value is None:
            return None
        row = self.row(rule.key(self.now))
        return rule.limit_value - row.used - row.held

    def row(self, key: CounterKey) -> Counter:
        """Return a row. Raises: Unsure if the row is unknown."""
        try:
            return self.rows[key]
        except KeyError:
            if self.guessed:
                raise Unsure from None
            raise

    def copy_for(self, rules: Iterable[QuotaRule]) -> Counters:
        """Return a copy of the counters of these rules, to decide on without side effects."""
        keys = {rule.key(self.now) for rule in rules}
        rows = {key: self.row(key) for key in keys}
        return Counters(
            self.now,
            {key: Counter(row.used, row.held) for key, row in rows.items()},
            guessed=self.guessed,
        )

    def state(self, rule: QuotaRule) -> QuotaState:
        """Return the rule's state as shown to its subject."""
        row = self.rows[rule.key(self.now)]
        return QuotaState(rule, row.used, row.held, self.now)

    def counts(self, rules: Iterable[QuotaRule]) -> list[tuple[int, int]]:
        """Return the present used and held amounts of each rule, unaffected by later changes."""
        rows = [self.rows[rule.key(self.now)] for rule in rules]
        return [(row.used, row.held) for row in rows]


def admit(
    counters: Counters,
    rules: Sequence[QuotaRule],
    claim: Claim,
    wanted_token_count: int,
    least_token_count: int,
) -> Claim:
    """Charge a new claim to all rules or to none, with as large a first slice of output as fits.

    wanted_token_count: requested slice; least_token_count: minimum slice, below which the request
    is refused. Raises: QuotaExceeded naming every rule that the request exceeds, the first to reset
    in front.
    """
    if (
        charge_whole(
            counters, rules, money_scale(claim.prices), claim.input_token_count, wanted_token_count
        )
        is not None
    ):
        return claim.leasing(wanted_token_count)
    if counters.guessed:
        raise Unsure
    smallest = claim._replace(leased_token_count=least_token_count)
    lease = wanted_token_count
    failing: list[QuotaRule] = []
    not_enforced: list[QuotaRule] = []
    for rule in rules:
        room = counters.remaining(rule)
        if room is None or not (needed := demand(rule, smallest)):
            continue
        if needed > room:
            (failing if rule.enforced else not_enforced).append(rule)
        elif (
            rule.enforced
            and (largest := smallest.most_output(rule, room)) is not None
            and largest < lease
        ):
            lease = largest
    if failing:
        error = refusal(counters, failing, smallest)
        error.claim = claim._replace(leased_token_count=wanted_token_count)
        # No room is promised for credit: it does not come back with time.
        met = (
            rule
            for rule in rules
            if rule.enforced and rule.dimension is not QuotaDimension.PREPAID_CREDIT_PICOS
        )
        error.met = tuple((counters.state(rule), demand(rule, smallest)) for rule in met)
        raise error
    admitted = claim._replace(leased_token_count=lease)
    now = counters.now
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            counters.add(rule.key(now), used=1)
        else:
            counters.add(rule.key(now), held=admitted.held(rule))
    for rule in not_enforced:
        key = rule.key(now)
        counters.would_refuse[key] = counters.would_refuse.get(key, 0) + 1
    return admitted


def charge_whole(
    counters: Counters,
    rules: Iterable[QuotaRule],
    money: Scale,
    input_token_count: int,
    output_token_count: int,
) -> list[tuple[int, int]] | None:
    """Charge a claim with its whole lease to all rules or to none: the common case of an admission.

    Inlined because it is called often; the amounts are those of `Claim.charge`. money: weights of
    the claim's prices. Returns the resulting used and held of each rule; None if a rule has no
    room. Raises: Unsure.
    """
    starts, rows, changed = window_starts(counters.now), counters.rows, counters.changed
    charges: list[tuple[QuotaRule, CounterKey, Counter, int]] = []
    for rule in rules:
        key = rule.number, starts[rule.window]
        row = rows.get(key) or counters.row(key)
        amount = 1
        if rule.counts_tokens:
            scale = rule.token_scale or money
            amount = -(
                -(
                    input_token_count * scale.dearest_input
                    + output_token_count * scale.dearest_output
                )
                // scale.divisor
            )
        # An overdrawn limit does not refuse what it does not count.
        if (
            amount
            and rule.limit_value is not None
            and amount > rule.limit_value - row.used - row.held
        ):
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
    counters: Counters,
    rules: Sequence[QuotaRule],
    claim: Claim,
    delivered_token_count: int,
    wanted_token_count: int,
    reasoning_token_count: int = 0,
) -> Claim:
    """Post delivered tokens to the window they were charged to; move the rest to the current one.

    reasoning_token_count: delivered tokens known to be thinking. Grants as many of
    `wanted_token_count` as fit, at least one token; output that a quota does not count always fits.
    Raises: QuotaExceeded, without a change, if not even one fits.
    """
    now = counters.now
    posted = claim.moved_on(delivered_token_count, reasoning_token_count, now)
    one_more = posted._replace(leased_token_count=posted.leased_token_count + 1)
    windowed = [rule for rule in rules if rule.kind is Kind.TOKENS or rule.kind is Kind.MONEY]
    lease = posted.leased_token_count + wanted_token_count
    failing: list[QuotaRule] = []
    moves: list[tuple[CounterKey, CounterKey, int, int]] = []
    for rule in windowed:
        old, new = rule.key(claim.charged_at), rule.key(now)
        held = claim.held(rule)
        scale = rule.scale(claim.prices)
        used = posted.posted(scale) - claim.posted(scale)
        moves.append((old, new, held, used))
        room = counters.remaining(rule)
        if counters.guessed:
            counters.row(new)
        if room is None or not rule.enforced or not scale.dearest_output:
            continue
        if old == new:  # its own present charge does not count against it
            room += held - used
        if one_more.held(rule) > room:
            failing.append(rule)
        elif (largest := one_more.most_output(rule, room)) is not None and largest < lease:
            lease = largest
    if counters.guessed and (failing or lease < posted.leased_token_count + wanted_token_count):
        raise Unsure
    if failing:
        raise refusal(counters, failing, one_more)
    extended = posted.leasing(lease)
    for rule, (old, new, held, used) in zip(windowed, moves, strict=True):
        if counters.guessed:
            is_limited = rule.enforced and rule.scale(claim.prices).dearest_output
            counters.limits[new] = (
                rule.limit_value if is_limited and rule.limit_value is not None else NO_LIMIT
            )
        counters.add(old, used=used, held=-held)
        counters.add(new, held=extended.held(rule))
    return extended


def end(
    counters: Counters,
    rules: Iterable[QuotaRule],
    claim: Claim,
    tokens: Tokens,
) -> None:
    """Release the amount that the claim holds and add what it consumed to `used`."""
    money = money_scale(claim.prices)
    if not claim.posted_token_count:
        sent, delivered, reasoning = tokens
        cached = min(claim.cached_input_token_count, sent)
        claimed = claim.input_token_count, claim.leased_token_count
        consumed = sent - cached, cached, delivered - reasoning, reasoning
        end_whole(counters, rules, money, claim.charged_at, claimed, consumed)
        return
    starts = window_starts(claim.charged_at)
    for rule in rules:
        if rule.counts_tokens:
            scale = rule.token_scale or money
            used = claim.consumed_by(scale, tokens)
            counters.add(
                (rule.number, starts[rule.window]),
                used,
                -claim.charge(scale, claim.leased_token_count),
            )
        elif not rule.is_used_at_once:
            counters.add((rule.number, starts[rule.window]), 0, -1)


def end_whole(
    counters: Counters,
    rules: Iterable[QuotaRule],
    money: Scale,
    charged_at: datetime,
    claimed: tuple[int, int],
    consumed: tuple[int, int, int, int],
) -> None:
    """End a claim without postings, the common case; inlined because it is called often.

    claimed: input and leased output. consumed: input that was not cached, cached input, output
    without reasoning, reasoning.
    """
    starts, moves, limits = window_starts(charged_at), counters.moves, counters.limits
    (sent, lease), (fresh, cached, output, reasoning) = claimed, consumed
    for rule in rules:
        used, held = 0, 1
        if rule.counts_tokens:
            scale = rule.token_scale or money
            divisor = scale.divisor
            used = -(
                -(
                    fresh * scale.input
                    + cached * scale.cached_input
                    + output * scale.output
                    + reasoning * scale.reasoning
                )
                // divisor
            )
            held = -(-(sent * scale.dearest_input + lease * scale.dearest_output) // divisor)
        elif rule.is_used_at_once:
            continue
        key = rule.number, starts[rule.window]
        if not counters.guessed or key in limits:
            counters.add(key, used, -held)
        elif used or held:
            before = moves.get(key, NO_MOVE)
            moves[key] = min(before[0] + used, USED_MAX), before[1] - held


def expire(counters: Counters, rules: Sequence[QuotaRule], claim: Claim, billed: Tokens) -> None:
    """End a claim whose delivered tokens are unknown. billed: tokens of its usage event.

    Quotas with a window keep the whole lease as used until the window ends, so that no limit is
    exceeded. A lifetime quota would keep it for ever, so it is charged the billed tokens only.
    """
    lease = claim.leased_token_count
    whole = claim.input_token_count, lease, claim.dearest_reasoning(lease)
    windowed = [rule for rule in rules if not rule.is_lifetime]
    end(counters, windowed, claim, whole)
    for rule in rules:
        if rule.is_lifetime:
            counters.add(rule.key(claim.charged_at), held=-claim.held(rule))
            take_back(counters, claim, rule)
            counters.add(rule.key(claim.charged_at), used=claim.worth(rule, billed))


def give_back(
    counters: Counters,
    rules: Iterable[QuotaRule],
    claim: Claim,
    charged: Tokens,
    billed: Tokens,
    consumed: Tokens,
) -> None:
    """Correct `used` of an expired claim once its consumption is known.

    charged: tokens charged to quotas with a window at the expiry; billed: tokens charged to
    lifetime quotas. A window whose counter was deleted is long past and needs no correction.
    """
    for rule in rules:
        key = rule.key(claim.charged_at)
        if rule.is_lifetime:
            excess = claim.worth(rule, billed) - claim.worth(rule, consumed)
        else:
            excess = claim.consumed(rule, charged) - claim.consumed(rule, consumed)
        if key not in counters.created:
            counters.add(key, used=-excess)


def void(counters: Counters, rules: Iterable[QuotaRule], claim: Claim) -> None:
    """Undo the claim in every window that it or its extensions were charged to."""
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            counters.add(rule.key(claim.admitted_at), used=-1)
        else:
            counters.add(rule.key(claim.charged_at), held=-claim.held(rule))
            take_back(counters, claim, rule)


def take_back(counters: Counters, claim: Claim, rule: QuotaRule) -> None:
    """Subtract the postings of the claim's extensions from `used`, never below zero.

    A quota that was set later may lack the counter of an early window, or have one that does not
    count the claim.
    """
    for key, amount in claim.postings(rule):
        if key not in counters.created:
            counters.add(key, used=-min(amount, counters.rows[key].used))


def learn_cached(
    counters: Counters, rules: Iterable[QuotaRule], claim: Claim, cached_token_count: int
) -> None:
    """Lower the postings of a claim as if the cached input had been known at its extensions.

    Raises: Unsure on guessed counters, whose values are not known.
    """
    if counters.guessed:
        raise Unsure
    known = claim._replace(cached_input_token_count=cached_token_count)
    for rule in rules:
        if not rule.counts_tokens:
            continue
        # Rounded sums differ by a token at most.
        counters.add(rule.key(claim.charged_at), held=known.held(rule) - claim.held(rule))
        excess: dict[CounterKey, int] = {}
        for each, sign in ((claim, 1), (known, -1)):
            for key, amount in each.postings(rule):
                excess[key] = excess.get(key, 0) + sign * amount
        for key, amount in excess.items():
            if key not in counters.created:  # as in `take_back`
                counters.add(key, used=-min(amount, counters.rows[key].used))


def touched_keys(
    rules: Iterable[QuotaRule], claim: Claim, now: datetime, *, extends: bool, undoes: bool = False
) -> set[CounterKey]:
    """Return the key of every counter that an end of this claim can change at `now`.

    extends: an extension is possible as well. undoes: the end may subtract the postings of
    extensions.
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
    """Return the amount that a claim charges to a rule on admission."""
    return 1 if rule.kind is Kind.REQUESTS else claim.held(rule)


def refusal(counters: Counters, failing: Sequence[QuotaRule], claim: Claim) -> QuotaExceeded:
    """Return the error for rules that do not fit: credit first, which waiting does not restore;
    then the first to reset, with concurrency before all others.
    """
    credit = QuotaDimension.PREPAID_CREDIT_PICOS

    def order(rule: QuotaRule) -> tuple[bool, datetime, str]:
        return (
            rule.dimension is not credit,
            window_end(rule.dimension, counters.now) or NO_WINDOW,
            str(rule.id),
        )

    ordered = sorted(failing, key=order)
    states = [counters.state(rule) for rule in ordered]
    amounts = [demand(rule, claim) for rule in ordered]
    if ordered[0].dimension is credit:
        return InsufficientCredit(states, amounts, claim.prices.currency_code)
    return QuotaExceeded(states, amounts)
