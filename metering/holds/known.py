"""What one process may go on believing without reading it again: rules, prices and keys, and its own live holds.

Every change of a quota, a key or a price leaves a row in `rule_changes` (triggers). A batch that has its locks asks for the rows
that its connection could not see when it last asked, in a statement of its own: what was read before and is not named there stands.
Each connection has its own memory, since another server, or the same one restored, may know of other changes. What is remembered of
holds is a guess: the statement that ends or extends a hold compares what can have changed.
"""

from __future__ import annotations

import math
import operator
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from metering.core.models import ServiceTier
from metering.holds.counter_rows import packed_key
from metering.holds.lease_clock import boot_time_s
from metering.holds.operations import Admit
from metering.pricing.token_prices import TokenPrices, embedding_terms
from metering.quotas.quota_rules import CounterKey, Kind, Payer, QuotaRule, window_starts
from metering.store.exchange import Connection, packed_id

NO_LIMIT = -1  # of a quota that is removed, or counts only


class Return(NamedTuple):
    """What a rule counts of a claim that ends or moves on: a place, or tokens by these factors, rounded up.

    number, packed_number: of the quota, the second as `packed_id` has it. limit_value: how far it may be charged, or NO_LIMIT.
    window: see `QuotaRule`. per_held_input: at which input is held until something is posted.
    """

    number: int
    packed_number: bytes
    limit_value: int
    window: int
    is_place: bool
    per_held_input: int
    per_input: int
    per_cached_input: int
    per_output: int
    divisor: int

    @classmethod
    def of(cls, rule: QuotaRule, prices: TokenPrices) -> Return | None:
        """None for a rule that gets nothing back."""
        if rule.kind is Kind.REQUESTS:
            return None
        limit = rule.limit_value if rule.enforced and rule.limit_value is not None else NO_LIMIT
        place = rule.number, packed_id(rule.number), limit, rule.window
        if rule.kind is Kind.CONCURRENCY:
            return cls(*place, True, 0, 0, 0, 0, 1)
        scale = rule.scale(prices)
        dearest = max(scale.input, scale.cached_input)
        factors = scale.input, scale.cached_input, scale.output, scale.divisor
        return cls(*place, False, dearest, *factors)

    def amount(self, input_token_count: int, cached_input_token_count: int, output_token_count: int) -> int:
        """The same as `Scale.amount`."""
        fresh = (input_token_count - cached_input_token_count) * self.per_input
        return -(-(fresh + cached_input_token_count * self.per_cached_input + output_token_count * self.per_output) // self.divisor)


@dataclass(slots=True, eq=False)
class HoldTerms:
    """What holds of one key for one model have in common: whose they are, their price, what they are charged to.

    payer_ids: organization, project and key as a receipt has them, 48 bytes. quota_ids: numbers. packed_quota_ids: the same as
    elements of a packed array. returns: what their ends give back by these rules (`Known.returns_of`). Those of one batch are
    grouped by identity, and live from batch to batch.
    """

    payer_ids: bytes
    model: str
    embedding: bool
    prices: TokenPrices
    quota_ids: tuple[int, ...]
    packed_quota_ids: list[bytes] = field(init=False)
    returns: tuple[tuple[QuotaRule, ...], tuple[Return, ...]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Work out once what each batch needs."""
        self.packed_quota_ids = list(map(packed_id, self.quota_ids))

    @property
    def project_id(self) -> bytes:
        """16 bytes."""
        return self.payer_ids[16:32]


class OwnHold(NamedTuple):
    """A live hold."""

    terms: HoldTerms
    request_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    admitted_at: datetime
    charged_at: datetime


class OwnHolds:
    """By the numbers of their ids. Holds that no request has yet are not among them: binding changes them."""

    def __init__(self) -> None:
        self._holds: dict[int, OwnHold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def admitted(self, op: Admit, terms: HoldTerms, leased_token_count: int, now: datetime) -> None:
        """A hold was taken."""
        number, request_id = op.hold_id.int, op.request_id
        if request_id.int != number:
            self._holds[number] = OwnHold(terms, request_id, op.input_token_count, 0, leased_token_count, 0, 0, now, now)

    def extended(self, hold_id: uuid.UUID, hold: OwnHold) -> None:
        """It stands otherwise now."""
        if hold.request_id != hold_id:
            self._holds[hold_id.int] = hold

    def get(self, number: int) -> OwnHold | None:
        """What is known of a hold."""
        return self._holds.get(number)

    def take(self, number: int) -> OwnHold | None:
        """What is known of a hold that is to be ended, and to be forgotten whatever comes of that."""
        return self._holds.pop(number, None)


# One row: the time, the snapshot to ask with next time, and whom changes were about since the one asked with; NULL: all.
SELECT_CHANGES = """
SELECT now(), pg_current_snapshot()::text, ARRAY(
    SELECT subject_id FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before))
"""

AGE_MAX = timedelta(hours=1)  # far less than rows of `rule_changes` are kept

COUNT_MAX = 65_536  # of each kind: some 30 MB; beyond it all is read anew


TermsKey = tuple[int, str, ServiceTier, bool]  # the key's number, and at last: of requests to embed


class Weighing(NamedTuple):
    """What a new claim is charged by one rule: `fixed`, or tokens by these factors, rounded up. window: see `QuotaRule`."""

    number: int
    window: int
    limit_value: int
    is_used_at_once: bool
    fixed: int
    per_input: int
    per_output: int
    divisor: int

    @classmethod
    def of(cls, rule: QuotaRule, prices: TokenPrices) -> Weighing:
        """Worked out once, and then the same as `Claim.held` of a claim of which nothing is posted."""
        place = rule.number, rule.window, rule.limit_value or 0
        if rule.kind in (Kind.CONCURRENCY, Kind.REQUESTS):
            return cls(*place, rule.kind is Kind.REQUESTS, 1, 0, 0, 1)
        scale = rule.scale(prices)
        return cls(*place, False, 0, max(scale.input, scale.cached_input), scale.output, scale.divisor)

    def amount(self, input_token_count: int, output_token_count: int) -> int:
        """For so many tokens."""
        return self.fixed or -(-(input_token_count * self.per_input + output_token_count * self.per_output) // self.divisor)


@dataclass(slots=True)
class Meter:
    """A counter as the connection has seen it last. total: used and held; a guess, which never decides.

    packed: its key (`packed_key`). used, held: what a batch adds to it, and after the commit of that what stands there.
    """

    packed: bytes
    total: int
    used: int = 0
    held: int = 0


# How an admission is charged by one rule: its meter, and what its `Weighing` says from `limit_value` on.
Metering = tuple[Meter, int, bool, int, int, int, int]


@dataclass(slots=True)
class Terms:
    """What decides about admissions of a key for a model and tier, to embed or not. until: None: for ever.

    common: what the holds that are taken have. metered: the minute that `meterings` are of.
    """

    payer: Payer
    common: HoldTerms
    rules: tuple[QuotaRule, ...]
    until: datetime | None
    weighings: tuple[Weighing, ...]
    metered: datetime | None = None
    meterings: tuple[Metering, ...] = ()

    @classmethod
    def of(cls, payer: Payer, common: HoldTerms, rules: tuple[QuotaRule, ...], until: datetime | None) -> Terms:
        """With what follows from these."""
        charged = embedding_terms(common.prices) if common.embedding else common.prices
        return cls(payer, common, rules, until, tuple(Weighing.of(rule, charged) for rule in rules))


@dataclass(slots=True)
class Known:
    """The memory of one connection."""

    clock: Callable[[], float] = boot_time_s
    snapshot: str | None = None
    terms: dict[TermsKey, Terms] = field(default_factory=dict)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    prices: dict[int, TokenPrices] = field(default_factory=dict)  # by version; those never change
    meters: dict[CounterKey, Meter] = field(default_factory=dict)
    _asked_at: datetime | None = None
    _asked_at_s: float = -math.inf
    _terms_of: dict[int, set[TermsKey]] = field(default_factory=dict)  # by subject, like the next
    _rules_of: dict[int, set[int]] = field(default_factory=dict)

    def now(self) -> datetime | None:
        """About what the database's clock shows; None if it was not asked for so long that nothing is known any more."""
        if self._asked_at is None:
            return None
        passed = timedelta(seconds=self.clock() - self._asked_at_s)
        return self._asked_at + passed if passed < AGE_MAX else None

    def asked(self, now: datetime, snapshot: str, changes: Iterable[uuid.UUID | None]) -> None:
        """The answer to SELECT_CHANGES, at a time of the database's clock."""
        if self._asked_at is not None and abs(now - self._asked_at) >= AGE_MAX:
            self._forget_all()
        for subject_id in changes:
            if subject_id is None:
                self._forget_all()
            else:
                self._forget(subject_id.int)
        self._asked_at, self._asked_at_s, self.snapshot = now, self.clock(), snapshot

    def returns_of(self, terms: HoldTerms) -> tuple[Return, ...] | None:
        """What the end of such a hold gives back, by its rules as they are now; None if one of these is not known."""
        rules = tuple(map(self.rules.get, terms.quota_ids))
        if terms.returns is not None and all(map(operator.is_, terms.returns[0], rules)):
            return terms.returns[1]
        known = tuple(rule for rule in rules if rule is not None)
        if len(known) < len(rules):
            return None
        charged = embedding_terms(terms.prices) if terms.embedding else terms.prices
        returns = tuple(each for rule in known if (each := Return.of(rule, charged)) is not None)
        terms.returns = known, returns
        return returns

    def terms_of(self, op: Admit) -> Terms | None:
        """What decides about an admission, if that is known."""
        terms = self.terms.get((op.payer.api_key_id.int, op.model, op.tier, op.embedding))
        return terms if terms is not None and (terms.payer is op.payer or terms.payer == op.payer) else None

    def add_rules(self, rules: Iterable[QuotaRule]) -> None:
        """Rules that were read after `asked`."""
        if len(self.rules) > COUNT_MAX:
            self._forget_all()
        for rule in rules:
            self.rules[rule.number] = rule
            self._rules_of.setdefault(rule.subject_id.int, set()).add(rule.number)

    def add_terms(self, key: TermsKey, terms: Terms) -> None:
        """The same for admissions."""
        if len(self.terms) > COUNT_MAX:
            self._forget_all()
        self.terms[key] = terms
        for subject_id in terms.payer.subject_ids:
            self._terms_of.setdefault(subject_id.int, set()).add(key)

    def saw(self, totals: Iterable[tuple[CounterKey, int]]) -> None:
        """Counters as they were just committed: used and held."""
        if len(self.meters) > COUNT_MAX:
            self.meters.clear()
        for key, total in totals:
            meter = self.meters.get(key)
            if meter is None:
                self.meters[key] = Meter(packed_key(key), total)
            else:
                meter.total = total

    def meterings_of(self, terms: Terms, minute: datetime) -> tuple[Metering, ...] | None:
        """How admissions under these terms are charged in a minute; None if a counter is not known."""
        if terms.metered != minute:
            starts = window_starts(minute)
            meters = [self.meters.get((each.number, starts[each.window])) for each in terms.weighings]
            if None in meters:
                return None
            found = zip(meters, terms.weighings, strict=True)
            terms.meterings = tuple((meter, *each[2:]) for meter, each in found if meter is not None)
            terms.metered = minute
        return terms.meterings

    def rules_for(self, quota_ids: Iterable[uuid.UUID], now: datetime) -> tuple[dict[int, QuotaRule], set[uuid.UUID]]:
        """Rules that are known, and which of these have to be read: also those whose raise has just ended."""
        found: dict[int, QuotaRule] = {}
        missing: set[uuid.UUID] = set()
        for quota_id in quota_ids:
            rule = self.rules.get(quota_id.int)
            if rule is None or (rule.raised_until is not None and rule.raised_until <= now):
                missing.add(quota_id)
            else:
                found[rule.number] = rule
        return found, missing

    def _forget(self, subject: int) -> None:
        for key in self._terms_of.pop(subject, ()):
            terms = self.terms.pop(key, None)
            others = terms.payer.subject_ids if terms else ()
            for other in others:  # else keys that were revoked would be listed under their organization for ever
                if (listed := self._terms_of.get(other.int)) is not None:
                    listed.discard(key)
        for number in self._rules_of.pop(subject, ()):
            self.rules.pop(number, None)

    def _forget_all(self) -> None:
        for each in (self.terms, self.rules, self._terms_of, self._rules_of):
            each.clear()


def earliest(times: Sequence[datetime | None]) -> datetime | None:
    """The first of those times that are known."""
    return min((each for each in times if each is not None), default=None)


_known: weakref.WeakKeyDictionary[Connection, Known] = weakref.WeakKeyDictionary()


def known_of(connection: Connection) -> Known:
    """What this connection knows."""
    known = _known.get(connection)
    if known is None:
        known = _known[connection] = Known()
    return known
