"""What one connection has read of rules, prices and keys, and may go on believing until the database tells of a change.

Every change of a quota, a key or a price leaves a row in `rule_changes` (triggers). A batch that has its locks asks for the rows
that its connection could not see when it last asked, in a statement of its own: what was read before and is not named there stands.
Each connection has its own memory, since another server, or the same one restored, may know of other changes.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from metering.billing.pricing import TokenPrices, embedding_terms
from metering.holds.exchange import Connection
from metering.holds.lease_clock import boot_time_s
from metering.models import ServiceTier
from metering.operations import Payer
from metering.quotas.quota_rules import CounterKey, Kind, QuotaRule

# One row: the time, the snapshot to ask with next time, and whom changes were about since the one asked with; NULL: all.
SELECT_CHANGES = """
SELECT now(), pg_current_snapshot()::text, ARRAY(
    SELECT subject_id FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before))
"""
AGE_MAX = timedelta(hours=1)  # far less than rows of `rule_changes` are kept
COUNT_MAX = 65_536  # of each kind: some 30 MB; beyond it all is read anew

TermsKey = tuple[Payer, str, ServiceTier, bool]  # the last: of requests to embed


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


@dataclass(frozen=True, slots=True)
class Terms:
    """What decides about admissions of a key for a model and tier, to embed or not. quota_ids: numbers. until: None: for ever."""

    rules: tuple[QuotaRule, ...]
    quota_ids: tuple[int, ...]
    prices: TokenPrices
    until: datetime | None
    weighings: tuple[Weighing, ...]

    @classmethod
    def of(
        cls,
        rules: tuple[QuotaRule, ...],
        quota_ids: tuple[int, ...],
        prices: TokenPrices,
        until: datetime | None,
        *,
        embedding: bool = False,
    ) -> Terms:
        """With what follows from these."""
        charged = embedding_terms(prices) if embedding else prices
        return cls(rules, quota_ids, prices, until, tuple(Weighing.of(rule, charged) for rule in rules))


@dataclass(slots=True)
class Known:
    """The memory of one connection. totals: of counters, used and held when last seen: a guess, which never decides."""

    clock: Callable[[], float] = boot_time_s
    snapshot: str | None = None
    terms: dict[TermsKey, Terms] = field(default_factory=dict)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    prices: dict[int, TokenPrices] = field(default_factory=dict)  # by version; those never change
    totals: dict[CounterKey, int] = field(default_factory=dict)
    _asked_at: datetime | None = None
    _asked_at_s: float = 0.0
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
        for subject_id in key[0].subject_ids:
            self._terms_of.setdefault(subject_id.int, set()).add(key)

    def saw(self, totals: Iterable[tuple[CounterKey, int]]) -> None:
        """Counters as they were just committed."""
        if len(self.totals) > COUNT_MAX:
            self.totals.clear()
        self.totals.update(totals)

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
            self.terms.pop(key, None)
            for other in key[0].subject_ids:  # else keys that were revoked would be listed under their organization for ever
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
