"""Admission decisions: whether a request fits its quotas, and the amounts it holds and uses. No
database, no clock.

A batch works on copies of the counter rows it has locked (`Counters`); the caller writes the
changed ones back in the same transaction. Conservation: for each counter, `held` is the sum of the
charges of live holds and `used` the sum of the amounts that settled or posted holds left there; a
charge is held in exactly one window at a time, that of the hold's `charged_at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from metering.core.errors import MeteringError
from metering.core.models import QuotaDimension, QuotaSubject
from metering.core.money import exact_text
from metering.quotas.quota_rules import (
    DIMENSIONS,
    NO_WINDOW,
    USED_MAX,
    Charge,
    CounterKey,
    Kind,
    QuotaRule,
    QuotaState,
    Scale,
    Tokens,
    Unit,
    money_scale,
    window_resets,
    window_starts,
)

NO_INCREMENT = 0, 0  # of used and held
NO_LIMIT = -1  # of a row that may be incremented regardless of its usage


def limit_text(state: QuotaState, requested: int, currency_code: str) -> str:
    """Describe a limit that a request exceeds: whose it is, its value, and the amount left."""
    name = subject_text(state)
    kind, unit, *_ = DIMENSIONS[state.dimension]
    model = f" of {state.model}" if state.model else ""
    window = window_text(unit, state.rule.window_minutes)
    limit, remaining = state.limit_value, max(state.remaining, 0)
    match kind:
        case Kind.CONCURRENCY:
            text = f"{name} may run {counted(limit, 'request')}{model} at once"
            done = f"has {state.used + state.held:,} running"
        case Kind.REQUESTS:
            text = f"{name} may make {counted(limit, 'request')}{model}{window}"
            done = f"has made {state.used + state.held:,}"
        case Kind.TOKENS:
            text = f"{name} may use {counted(limit, noun_of(state.dimension))}{model}{window}"
            done = f"has {remaining:,} left; this request needs {requested:,}"
        case Kind.MONEY:
            amounts = (exact_text(each, currency_code) for each in (limit, remaining, requested))
            allowed, left, needed = (f"{each} {currency_code}" for each in amounts)
            text = f"{name} may spend {allowed}{model and ' on'}{model.removeprefix(' of')}{window}"
            done = f"has {left} left; this request may cost {needed}"
    return f"{text} and {done}."


def window_text(unit: Unit | None, window_minutes: int) -> str:
    """Say over which window a limit counts, after its amount."""
    match unit:
        case None:
            return ""
        case Unit.LIFETIME:
            return " in total"
        case Unit.WINDOW:
            return f" in any {counted(window_minutes, 'minute')}"
        case _:
            return f" per {unit}"


def subject_text(state: QuotaState) -> str:
    """Name the subject of a limit at the beginning of a sentence."""
    names = {
        QuotaSubject.ORGANIZATION: "Your organization",
        QuotaSubject.PROJECT: "Your project",
        QuotaSubject.END_USER: "End user",
        QuotaSubject.LABEL: "Label",
    }
    name = names.get(state.subject, "This API key")
    if state.rule.group:
        return f"{name} of group {state.rule.group}"
    if state.rule.within_id is None:
        return name
    scope = state.rule.scope_name
    within = f"project {scope}" if scope else "your organization"
    return f"{name} {state.rule.subject_name} of {within}"


def noun_of(dimension: QuotaDimension) -> str:
    """Name one unit of a dimension that does not count money."""
    kind, _, counts_input, counts_output = DIMENSIONS[dimension]
    if kind is not Kind.TOKENS:
        return "request"
    if counts_input and counts_output:
        return "token"
    return "input token" if counts_input else "output token"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class QuotaExceeded(MeteringError):
    """The request does not fit its limits. `QuotaFailure` lists them, the first to reset in front.

    requested: the amount requested of each failing limit. charge: that of an admission with its
    whole first slice; None if there is none. met: every enforced limit that applies, with the
    amount requested of it. fits_in_s: seconds until the request fits, infinite if it never will;
    None if not computed (`forecast.py`).
    """

    reason = "QUOTA_EXCEEDED"

    def __init__(
        self, failing: Sequence[QuotaState], requested: Sequence[int], currency_code: str
    ) -> None:
        super().__init__(limit_text(failing[0], requested[0], currency_code))
        self.failing = tuple(failing)
        self.requested = tuple(requested)
        self.charge: Charge | None = None
        self.met: tuple[tuple[QuotaState, int], ...] = ()
        self.fits_in_s: float | None = None

    def __str__(self) -> str:
        parts = [super().__str__()]
        if others := len(self.failing) - 1:
            parts.append(
                "1 other limit is in the way too."
                if others == 1
                else f"{others} other limits are in the way too."
            )
        if not self.retry_helps:
            parts.append(self.remedy)
        return " ".join(parts)

    @property
    def remedy(self) -> str:
        """End of the message if waiting does not help."""
        return "Send a smaller request, or ask an administrator to raise the limit."

    @property
    def retry_helps(self) -> bool:
        """True if waiting can help; False if the request alone exceeds a limit, or none resets."""
        if self.fits_in_s == math.inf:
            return False
        return all(
            amount <= state.limit_value
            and (self.fits_in_s is not None or state.rule.unit is not Unit.LIFETIME)
            for amount, state in zip(self.requested, self.failing, strict=True)
        )

    @property
    def retry_after_s(self) -> float:
        """Seconds until the request fits, or the time until the last failing limit resets, or 1."""
        return (
            max(state.resets_in_s or 1.0 for state in self.failing)
            if self.fits_in_s is None
            else self.fits_in_s
        )


class InsufficientCredit(QuotaExceeded):
    """The prepaid credit does not cover the least that the request costs. Waiting does not help.

    failing: the credit quota in front, followed by the other limits that the request exceeds.
    """

    reason = "INSUFFICIENT_CREDIT"

    def __init__(
        self, failing: Sequence[QuotaState], requested: Sequence[int], currency_code: str
    ) -> None:
        super().__init__(failing, requested, currency_code)
        needed, left = (
            exact_text(picos, currency_code)
            for picos in (requested[0], max(failing[0].remaining, 0))
        )
        self.args = (
            f"Your organization has {left} {currency_code} of prepaid credit left that no running"
            f" request holds, and this request needs at least {needed} {currency_code}.",
        )

    @property
    def remedy(self) -> str:
        """Implement `QuotaExceeded.remedy`."""
        return "Add credit; a retry will fail too."

    @property
    def retry_helps(self) -> bool:
        """Always False: credit has to be added."""
        return False


class Undecided(Exception):
    """The last known counters do not determine a decision: lock and read the rows."""


@dataclass(slots=True)
class Counter:
    """Working copy of a counter row."""

    used: int
    held: int


class Counters(msgspec.Struct, eq=False):
    """Counter rows of one batch at one database time.

    `changed` has used and held as they were before the batch. `created` are the empty rows that it
    inserted. `would_refuse` counts, by counter, admissions that exceed a quota which is not
    enforced. With `unlocked`, the rows are the last known values and some may be missing: decisions
    are valid only if every row can be changed as the batch does within `limits`, and one that
    another row could change raises `Undecided`. `increments` are the used and held amounts added to
    missing rows.

    `carried` has what the open bucket of a rolling window counts beside its own charges, the sum of
    the others, which its `used` includes here. `opened` has, by number of the rule, the
    open bucket and the start of the first one that it counts. `rolled` are the amounts to carry in
    the table, None for a bucket to close.
    """

    now: datetime
    rows: dict[CounterKey, Counter] = msgspec.field(default_factory=dict)
    changed: dict[CounterKey, tuple[int, int]] = msgspec.field(default_factory=dict)
    created: frozenset[CounterKey] = frozenset()
    would_refuse: dict[CounterKey, int] = msgspec.field(default_factory=dict)
    unlocked: bool = False
    limits: dict[CounterKey, int] = msgspec.field(default_factory=dict)
    increments: dict[CounterKey, tuple[int, int]] = msgspec.field(default_factory=dict)
    carried: dict[CounterKey, int] = msgspec.field(default_factory=dict)
    opened: dict[int, tuple[CounterKey, datetime]] = msgspec.field(default_factory=dict)
    rolled: dict[CounterKey, int | None] = msgspec.field(default_factory=dict)

    def open(self, rule: QuotaRule, stored: Mapping[CounterKey, int | None]) -> None:
        """Open the present bucket of a rolling window: let it carry the others, and close those.

        `stored` has the amount that each row carries in the table, None if it is closed. It has
        every row that the rule counts, and later ones, all locked.
        """
        key = rule.key(self.now)
        first = rule.counted_from(self.now)
        others = [each for each in stored if each[0] == key[0] and each != key and each[1] >= first]
        total = sum(self.rows[each].used + self.rows[each].held for each in others)
        self.carried[key] = total
        self.rows[key].used += total
        self.opened[key[0]] = key, first
        self.rolled |= {each: None for each in others if stored[each] is not None}
        if stored[key] != total:
            self.rolled[key] = total

    def carries(self, key: CounterKey, other: CounterKey) -> bool:
        """Return True if what counts in the row of `other` is included in that of `key`."""
        if key == other:
            return True
        opened = self.opened.get(key[0])
        return opened is not None and opened[0] == key and other[1] >= opened[1]

    def add(self, key: CounterKey, used: int = 0, held: int = 0) -> None:
        """Add to a counter. The caller must not make it negative."""
        if not used and not held:
            return
        if self.unlocked and key not in self.limits:  # the row does not matter
            before = self.increments.get(key, NO_INCREMENT)
            self.increments[key] = min(before[0] + used, USED_MAX), before[1] + held
            return
        row = self.rows[key]
        if self.opened and (opened := self.opened.get(key[0])) is not None:
            current = opened[0]
            if current != key and self.carries(current, key):
                self.carried[current] += used + held
                self.rolled[current] = self.carried[current]
                self.rows[current].used += used + held
        if key not in self.changed:
            self.changed[key] = row.used, row.held
        row.held += held
        if self.unlocked:  # only the difference counts, the resulting value does not
            row.used += used
            return
        if row.used < USED_MAX:
            row.used = min(row.used + used, USED_MAX)
        assert row.used >= 0, f"counter {key} used {row.used} < 0"
        assert row.held >= 0, f"counter {key} held {row.held} < 0"

    def all_increments(self) -> dict[CounterKey, tuple[int, int]]:
        """Collect the used and held amounts to add to rows that are not locked."""
        increments, rows = self.increments.copy(), self.rows
        for key, (used, held) in self.changed.items():
            row, more = rows[key], increments.get(key, NO_INCREMENT)
            increments[key] = row.used - used + more[0], row.held - held + more[1]
        if NO_INCREMENT in increments.values():
            return {key: each for key, each in increments.items() if each != NO_INCREMENT}
        return increments

    def remaining(self, rule: QuotaRule) -> int | None:
        """Return the amount that may still be charged to the rule; None if it is unlimited."""
        if rule.limit_value is None:
            return None
        row = self.row(rule.key(self.now))
        return rule.limit_value - row.used - row.held

    def row(self, key: CounterKey) -> Counter:
        """Look up a counter. Raises: Undecided if its row is unknown."""
        try:
            return self.rows[key]
        except KeyError:
            if self.unlocked:
                raise Undecided from None
            raise

    def copy_for(self, rules: Iterable[QuotaRule]) -> Counters:
        """Copy the counters of these rules, to decide on without side effects."""
        keys = {rule.key(self.now) for rule in rules}
        rows = {key: self.row(key) for key in keys}
        return Counters(
            self.now,
            {key: Counter(row.used, row.held) for key, row in rows.items()},
            unlocked=self.unlocked,
        )

    def state(self, rule: QuotaRule) -> QuotaState:
        """Build the rule's state, as shown to its subject."""
        key = rule.key(self.now)
        row = self.rows[key]
        state = QuotaState(rule, row.used, row.held, self.now, rule.subject_name)
        return state._replace(buckets=self._buckets(key)) if key[0] in self.opened else state

    def _buckets(self, key: CounterKey) -> tuple[tuple[datetime, int], ...]:
        """Return start and amount of each bucket that an open one counts, itself included."""
        amounts = {
            each[1]: row.used + row.held - self.carried.get(each, 0)
            for each, row in self.rows.items()
            if each[0] == key[0] and self.carries(key, each)
        }
        return tuple(sorted(amounts.items()))

    def counts(self, rules: Iterable[QuotaRule]) -> list[tuple[int, int]]:
        """Copy the present used and held amounts of each rule."""
        rows = [self.rows[rule.key(self.now)] for rule in rules]
        return [(row.used, row.held) for row in rows]


def admit(
    counters: Counters,
    rules: Sequence[QuotaRule],
    charge: Charge,
    requested_token_count: int,
    minimum_token_count: int,
) -> Charge:
    """Add a new charge to all rules or to none, with as large a first slice of output as fits.

    `requested_token_count` is the size of the first slice; below `minimum_token_count` the request
    is refused. Raises: QuotaExceeded naming every rule that it exceeds, the first to reset in
    front.
    """
    if (
        admit_whole(
            counters,
            rules,
            money_scale(charge.prices),
            charge.input_token_count,
            requested_token_count,
        )
        is not None
    ):
        return charge.with_lease(requested_token_count)
    if counters.unlocked:
        raise Undecided
    smallest = charge._replace(leased_token_count=minimum_token_count)
    lease = requested_token_count
    failing: list[QuotaRule] = []
    not_enforced: list[QuotaRule] = []
    for rule in rules:
        room = counters.remaining(rule)
        if room is None or not (needed := admission_amount(rule, smallest)):
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
        error = exceeded(counters, failing, smallest)
        error.charge = charge._replace(leased_token_count=requested_token_count)
        # No room is promised for credit: it does not come back with time.
        met = (
            rule
            for rule in rules
            if rule.enforced and rule.dimension is not QuotaDimension.PREPAID_CREDIT_PICOS
        )
        error.met = tuple((counters.state(rule), admission_amount(rule, smallest)) for rule in met)
        raise error
    admitted = charge._replace(leased_token_count=lease)
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


def admit_whole(
    counters: Counters,
    rules: Iterable[QuotaRule],
    money: Scale,
    input_token_count: int,
    output_token_count: int,
) -> list[tuple[int, int]] | None:
    """Add a charge with its whole lease to all rules or to none: the common case of an admission.

    Inlined because it is called often; the amounts are those of `Charge.held_by`. `money` is the
    scale of the charge's prices. Returns the resulting used and held of each rule; None if a rule
    has no room. Raises: Undecided.
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
            if counters.unlocked:
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
    charge: Charge,
    delivered_token_count: int,
    requested_token_count: int,
    reasoning_token_count: int = 0,
) -> Charge:
    """Count delivered tokens as used in their window, and hold the rest in the current one.

    Grants as many of `requested_token_count` as fit, at least one; output that a quota does not
    count always fits. `reasoning_token_count` are delivered tokens known to be thinking. Raises:
    QuotaExceeded, without a change, if not even one fits.
    """
    money, leased = money_scale(charge.prices), charge.leased_token_count
    posted = charge.with_posting(delivered_token_count, reasoning_token_count, counters.now)
    old_starts, new_starts = window_starts(charge.charged_at), window_starts(counters.now)
    requested = lease = leased + requested_token_count
    failing: list[QuotaRule] = []
    limits: dict[CounterKey, int] = {}
    transfers: list[tuple[Scale, CounterKey, CounterKey, int, int]] = []
    for rule in rules:
        if not rule.counts_tokens:
            continue
        scale = rule.token_scale or money
        old, new = (rule.number, old_starts[rule.window]), (rule.number, new_starts[rule.window])
        held = charge.held_by(scale, leased)
        used = posted.posted(scale) - charge.posted(scale)
        transfers.append((scale, old, new, held, used))
        row, limit = counters.row(new), rule.limit_value
        if limit is None or not rule.enforced or not scale.dearest_output:
            limit = NO_LIMIT
        else:
            room = limit - row.used - row.held
            if counters.carries(new, old):  # its own present charge does not count against it
                room += held - used
            if posted.held_by(scale, leased + 1) > room:
                failing.append(rule)
            elif posted.held_by(scale, lease) > room:
                lease = posted.most_output(rule, room) or lease
        limits[new] = limit
    if counters.unlocked and (failing or lease < requested):
        raise Undecided
    if failing:
        raise exceeded(counters, failing, posted.with_lease(leased + 1))
    if counters.unlocked:
        counters.limits |= limits
    for scale, old, new, held, used in transfers:
        counters.add(old, used=used, held=-held)
        counters.add(new, held=posted.held_by(scale, lease))
    return posted.with_lease(lease)


def settle(
    counters: Counters,
    rules: Iterable[QuotaRule],
    charge: Charge,
    tokens: Tokens,
) -> None:
    """Release the amount that the charge holds, and add the consumed amount to `used`."""
    money, starts = money_scale(charge.prices), window_starts(charge.charged_at)
    if not charge.posted_token_count:
        sent, delivered, reasoning = tokens
        cached = min(charge.cached_input_token_count, sent)
        admitted_tokens = charge.input_token_count, charge.leased_token_count
        consumed = sent - cached, cached, delivered - reasoning, reasoning
        settle_unposted(counters, rules, money, starts, admitted_tokens, consumed)
        return
    for rule in rules:
        if rule.counts_tokens:
            scale = rule.token_scale or money
            used = charge.consumed_by(scale, tokens)
            counters.add(
                (rule.number, starts[rule.window]),
                used,
                -charge.held_by(scale, charge.leased_token_count),
            )
        elif not rule.is_used_at_once:
            counters.add((rule.number, starts[rule.window]), 0, -1)


def settle_unposted(
    counters: Counters,
    rules: Iterable[QuotaRule],
    money: Scale,
    starts: Mapping[int, datetime],
    admitted_tokens: tuple[int, int],
    consumed: tuple[int, int, int, int],
) -> None:
    """End a charge without postings, the common case; inlined because it is called often.

    `starts` are those of the windows charged (`window_starts`). `admitted_tokens` are input and
    leased output. `consumed` are uncached input, cached input, output without reasoning, and
    reasoning.
    """
    increments, limits = counters.increments, counters.limits
    (sent, lease), (fresh, cached, output, reasoning) = admitted_tokens, consumed
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
        if not counters.unlocked or key in limits:
            counters.add(key, used, -held)
        elif used or held:
            before = increments.get(key, NO_INCREMENT)
            increments[key] = min(before[0] + used, USED_MAX), before[1] - held


def expire(counters: Counters, rules: Sequence[QuotaRule], charge: Charge, billed: Tokens) -> None:
    """End a charge whose delivered tokens are unknown. `billed` are those of its usage event.

    Quotas keep the whole lease as used until the window ends, or the usage is reported, so that no
    limit is exceeded. Prepaid credit, which was paid for, is charged the billed tokens only.
    """
    lease = charge.leased_token_count
    whole = charge.input_token_count, lease, charge.dearest_reasoning(lease)
    windowed = [rule for rule in rules if not rule.is_credit]
    settle(counters, windowed, charge, whole)
    for rule in rules:
        if rule.is_credit:
            counters.add(rule.key(charge.charged_at), held=-charge.held(rule))
            subtract_postings(counters, charge, rule)
            counters.add(rule.key(charge.charged_at), used=charge.amount_of(rule, billed))


def correct_expired(
    counters: Counters,
    rules: Iterable[QuotaRule],
    charge: Charge,
    charged: Tokens,
    billed: Tokens,
    consumed: Tokens,
) -> None:
    """Correct `used` of an expired charge once its consumption is known.

    `charged` are the tokens charged to quotas at the expiry, `billed` those charged to prepaid
    credit. A window whose counter was deleted is long past and needs no correction.
    """
    for rule in rules:
        key = rule.key(charge.charged_at)
        if rule.is_credit:
            excess = charge.amount_of(rule, billed) - charge.amount_of(rule, consumed)
        else:
            excess = charge.consumed(rule, charged) - charge.consumed(rule, consumed)
        if key not in counters.created:
            counters.add(key, used=-excess)


def void(counters: Counters, rules: Iterable[QuotaRule], charge: Charge) -> None:
    """Undo the charge in every window that it or its extensions were charged to."""
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            counters.add(rule.key(charge.admitted_at), used=-1)
        else:
            counters.add(rule.key(charge.charged_at), held=-charge.held(rule))
            subtract_postings(counters, charge, rule)


def subtract_postings(counters: Counters, charge: Charge, rule: QuotaRule) -> None:
    """Subtract the postings of the charge's extensions from `used`, never below zero.

    A quota that was set later may lack the counter of an early window, or have one that does not
    count the charge.
    """
    for key, amount in charge.postings(rule):
        if key not in counters.created:
            counters.add(key, used=-min(amount, counters.rows[key].used))


def lower_postings(
    counters: Counters, rules: Iterable[QuotaRule], charge: Charge, cached_token_count: int
) -> None:
    """Lower the postings of a charge as if the cached input had been known at its extensions.

    Raises: Undecided if the counters are not locked: their values are unknown.
    """
    if counters.unlocked:
        raise Undecided
    known = charge._replace(cached_input_token_count=cached_token_count)
    for rule in rules:
        if not rule.counts_tokens:
            continue
        # Rounded sums differ by a token at most.
        counters.add(rule.key(charge.charged_at), held=known.held(rule) - charge.held(rule))
        excess: dict[CounterKey, int] = {}
        for each, sign in ((charge, 1), (known, -1)):
            for key, amount in each.postings(rule):
                excess[key] = excess.get(key, 0) + sign * amount
        for key, amount in excess.items():
            if key not in counters.created:  # as in `subtract_postings`
                counters.add(key, used=-min(amount, counters.rows[key].used))


def touched_keys(
    rules: Iterable[QuotaRule],
    charge: Charge,
    now: datetime,
    *,
    extends: bool,
    undoes: bool = False,
) -> set[CounterKey]:
    """Collect the keys of all counters that the end of this charge can change at `now`.

    `extends` also covers an extension, `undoes` an end that subtracts the postings of extensions.
    """
    keys: set[CounterKey] = set()
    for rule in rules:
        if rule.kind is Kind.REQUESTS:
            keys.add(rule.key(charge.admitted_at))
        else:
            keys.add(rule.key(charge.charged_at))
            if extends:
                keys.add(rule.key(now))
            if undoes:
                keys.update(key for key, _ in charge.postings(rule))
    return keys


def admission_amount(rule: QuotaRule, charge: Charge) -> int:
    """Compute the amount that an admission adds to a rule's counter."""
    return 1 if rule.kind is Kind.REQUESTS else charge.held(rule)


def exceeded(counters: Counters, failing: Sequence[QuotaRule], charge: Charge) -> QuotaExceeded:
    """Build the error for rules that do not fit.

    Credit comes first, since waiting does not restore it; then the first to reset, with concurrency
    in front and the lifetime at the end.
    """
    credit = QuotaDimension.PREPAID_CREDIT_PICOS
    never = datetime.max.replace(tzinfo=UTC)

    def order(rule: QuotaRule) -> tuple[bool, datetime, str, str]:
        return (
            rule.dimension is not credit,
            never
            if rule.unit is Unit.LIFETIME
            else window_resets(counters.now)[rule.window] or NO_WINDOW,
            rule.dimension.value,  # of several that reset at once, as at the end of a year
            str(rule.id),
        )

    ordered = sorted(failing, key=order)
    states = [counters.state(rule) for rule in ordered]
    amounts = [admission_amount(rule, charge) for rule in ordered]
    if ordered[0].dimension is credit:
        return InsufficientCredit(states, amounts, charge.prices.currency_code)
    return QuotaExceeded(states, amounts, charge.prices.currency_code)
