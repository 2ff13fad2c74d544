"""Cache of quota rules, prices, keys and of the process's own live holds.

Triggers write every change of a quota, key or price to `rule_changes`. After taking its locks, a
batch reads the rows committed since its connection's last read, and drops the entries they name.
Each connection has its own cache, because another server, or a restored one, has other changes.
Cached holds are unverified: the statement that ends or extends a hold compares its columns.
"""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from metering.holds.decide import AdmissionTerms, HoldTerms, MemberKey, TermsKey
from metering.holds.lease_clock import boot_time_s
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import CounterKey, QuotaRule
from metering.quotas.quotas import Counter
from metering.receipts.chaining import ChainHead
from metering.store.pipeline import Connection

# One row: time, snapshot for the next call, subjects changed since the given snapshot; NULL: all.
SELECT_CHANGES = """
SELECT now(), pg_current_snapshot()::text, ARRAY(
    SELECT subject_id FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before))
"""

AGE_MAX = timedelta(hours=1)  # far less than rows of `rule_changes` are kept
MEMBER_COUNT_MAX = 16_384  # terms of end users and label values, about 30 MB
COUNT_MAX = 65_536  # entries of each kind, about 30 MB; beyond it the cache starts empty


@dataclass(slots=True)
class HoldCache:
    """Cache of one connection, kept between batches.

    `counters` are the last values read; the database checks each decision made from them. `charged`
    has results of `rules_of`. `heads` are receipt chain heads, each with whether this connection
    alone has extended the chain since the last batch.
    """

    clock: Callable[[], float] = boot_time_s
    snapshot: str | None = None
    terms: dict[TermsKey, AdmissionTerms] = field(default_factory=dict)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    charged: dict[HoldTerms, tuple[QuotaRule, ...]] = field(default_factory=dict)
    prices: dict[int, TokenPrices] = field(default_factory=dict)  # by version; those never change
    counters: dict[CounterKey, Counter] = field(default_factory=dict)
    heads: dict[bytes, tuple[ChainHead, bool]] = field(default_factory=dict)
    _changes_read_at: datetime | None = None
    _changes_read_at_s: float = -math.inf
    _terms_of: dict[int, set[TermsKey]] = field(default_factory=dict)  # by subject, like the next
    _rules_of: dict[int, set[int]] = field(default_factory=dict)
    # By usage subject: terms and the keys of their members.
    _members_of: dict[int, set[tuple[AdmissionTerms, MemberKey]]] = field(default_factory=dict)
    _member_count: int = 0

    def now(self) -> datetime | None:
        """Estimate the database's time; None if the cache is older than `AGE_MAX`."""
        if self._changes_read_at is None:
            return None
        passed = timedelta(seconds=self.clock() - self._changes_read_at_s)
        return self._changes_read_at + passed if passed < AGE_MAX else None

    def apply_changes(
        self, now: datetime, snapshot: str, changes: Iterable[uuid.UUID | None]
    ) -> None:
        """Drop the entries named by a result of SELECT_CHANGES. `now` is the database's time."""
        if self._changes_read_at is not None and abs(now - self._changes_read_at) >= AGE_MAX:
            self._forget_all()
        for subject_id in changes:
            if subject_id is None:
                self._forget_all()
            else:
                self._forget(subject_id.int)
        self._changes_read_at, self._changes_read_at_s, self.snapshot = now, self.clock(), snapshot

    def rules_of(self, terms: HoldTerms) -> tuple[QuotaRule, ...]:
        """Look up the rules that holds with these terms are charged to; some may be missing."""
        rules = tuple([rule for rule in map(self.rules.get, terms.quota_ids) if rule is not None])
        if len(self.charged) > COUNT_MAX:
            self.charged.clear()
        self.charged[terms] = rules
        return rules

    def add_rules(self, rules: Iterable[QuotaRule]) -> None:
        """Add rules. They must have been read after `apply_changes`."""
        if len(self.rules) > COUNT_MAX:
            self.rules.clear()
            self._rules_of.clear()
        self.charged.clear()
        for rule in rules:
            self.rules[rule.number] = rule
            for subject_id in (rule.subject_id, rule.within_id):
                if subject_id is not None:
                    self._rules_of.setdefault(subject_id.int, set()).add(rule.number)

    def add_terms(self, key: TermsKey, terms: AdmissionTerms) -> None:
        """Add terms of admission. They must have been read after `apply_changes`."""
        if len(self.terms) > COUNT_MAX:
            self._forget_all()
        self.terms[key] = terms
        for subject_id in terms.payer.subject_ids:
            self._terms_of.setdefault(subject_id.int, set()).add(key)

    def add_member(self, base: AdmissionTerms, key: MemberKey, terms: AdmissionTerms) -> None:
        """Add terms of requests with an end user or label; they end with those of the key."""
        if self._member_count > MEMBER_COUNT_MAX:
            for each in self.terms.values():
                each.members.clear()
            self._members_of.clear()
            self._member_count = 0
        base.members[key] = terms
        self._member_count += 1
        subjects = {rule.subject_id.int for rule in terms.rules if rule.within_id is not None}
        for number in subjects | {terms.common.end_user}:
            self._members_of.setdefault(number, set()).add((base, key))

    def store_counters(self, counters: Mapping[CounterKey, Counter]) -> None:
        """Store the values of counters that were just committed."""
        if len(self.counters) > COUNT_MAX:
            self.counters.clear()
        self.counters |= counters

    def store_heads(self, locked: Mapping[bytes, int], heads: Mapping[bytes, ChainHead]) -> None:
        """Store the receipt chain heads that were just committed.

        `locked` has the sequence numbers read under the lock: they show whether another connection
        has extended a chain since.
        """
        if len(self.heads) > COUNT_MAX:
            self.heads.clear()
        for project_id, head in heads.items():
            before = self.heads.get(project_id)
            self.heads[project_id] = (
                head,
                before is not None
                and before[0].sequence == locked.get(project_id, before[0].sequence),
            )

    def rules_for(
        self, numbers: Iterable[int], now: datetime
    ) -> tuple[dict[int, QuotaRule], set[int]]:
        """Look up rules; also return the numbers to read, of missing rules and ended overrides."""
        cached: dict[int, QuotaRule] = {}
        missing: set[int] = set()
        for number in numbers:
            rule = self.rules.get(number)
            if rule is None or (rule.override_until is not None and rule.override_until <= now):
                missing.add(number)
            else:
                cached[number] = rule
        return cached, missing

    def _forget(self, subject: int) -> None:
        for key in self._terms_of.pop(subject, ()):
            terms = self.terms.pop(key, None)
            # Otherwise revoked keys would stay listed under their organization and project.
            for subject_id in terms.payer.subject_ids if terms else ():
                if (keys := self._terms_of.get(subject_id.int)) is not None:
                    keys.discard(key)
        for base, member_key in self._members_of.pop(subject, ()):
            base.members.pop(member_key, None)
        for number in self._rules_of.pop(subject, ()):
            self.rules.pop(number, None)
        self.charged.clear()

    def _forget_all(self) -> None:
        for each in (self.terms, self.rules, self.charged, self._terms_of, self._rules_of):
            each.clear()
        self._members_of.clear()
        self._member_count = 0


_caches: weakref.WeakKeyDictionary[Connection, HoldCache] = weakref.WeakKeyDictionary()


def cache_of(connection: Connection) -> HoldCache:
    """Return the connection's cache; create it if needed."""
    cache = _caches.get(connection)
    if cache is None:
        cache = _caches[connection] = HoldCache()
    return cache
