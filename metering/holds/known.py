"""What one process may go on believing without reading it again: rules, prices and keys, and its own live holds.

Every change of a quota, a key or a price leaves a row in `rule_changes` (triggers). A batch that has its locks asks for the rows
that its connection could not see when it last asked, in a statement of its own: what was read before and is not named there stands.
Each connection has its own memory, since another server, or the same one restored, may know of other changes. What is remembered of
holds is a guess: the statement that ends or extends a hold compares what can have changed.
"""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from metering.holds.decide import AdmissionTerms, Hold, HoldTerms, TermsKey
from metering.holds.lease_clock import boot_time_s
from metering.holds.operations import Admit
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import CounterKey, QuotaRule
from metering.quotas.quotas import Counter
from metering.receipts.chaining import ChainHead
from metering.store.exchange import Connection

# One row: the time, the snapshot to ask with next time, and whom changes were about since the one asked with; NULL: all.
SELECT_CHANGES = """
SELECT now(), pg_current_snapshot()::text, ARRAY(
    SELECT subject_id FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before))
"""

AGE_MAX = timedelta(hours=1)  # far less than rows of `rule_changes` are kept
COUNT_MAX = 65_536  # of each kind: some 30 MB; beyond it all is read anew


# Live holds of this process as they stand in the database, as far as it was told, by the numbers of their ids. Holds that no
# request has yet are not among them: binding changes them.
OwnHolds = dict[int, Hold]


def remember(own: OwnHolds, holds: Iterable[Hold]) -> None:
    """Note holds that were taken or extended."""
    for hold in holds:
        number = hold.id.int
        if hold.request_id.int != number:  # as `Hold.unbound`
            own[number] = hold


@dataclass(slots=True)
class Known:
    """The memory of one connection. counters: as they were seen last, a guess that never decides. charged: answers of `rules_of`.

    heads: of chains; only those that nobody else has continued between two batches of this connection are guessed with.
    """

    clock: Callable[[], float] = boot_time_s
    snapshot: str | None = None
    terms: dict[TermsKey, AdmissionTerms] = field(default_factory=dict)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    charged: dict[HoldTerms, tuple[QuotaRule, ...]] = field(default_factory=dict)
    prices: dict[int, TokenPrices] = field(default_factory=dict)  # by version; those never change
    counters: dict[CounterKey, Counter] = field(default_factory=dict)
    heads: dict[bytes, tuple[ChainHead, bool]] = field(default_factory=dict)  # with whether it is guessed with
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

    def terms_of(self, op: Admit) -> AdmissionTerms | None:
        """What decides about an admission, if that is known."""
        terms = self.terms.get((op.payer.api_key_id.int, op.payer.currency_code, op.model, op.tier, op.embedding))
        return terms if terms is not None and (terms.payer is op.payer or terms.payer == op.payer) else None

    def rules_of(self, terms: HoldTerms) -> tuple[QuotaRule, ...]:
        """Return the rules that holds are charged to as they are now, without those that are not known."""
        found = tuple([rule for rule in map(self.rules.get, terms.quota_ids) if rule is not None])
        if len(self.charged) > COUNT_MAX:
            self.charged.clear()
        self.charged[terms] = found
        return found

    def add_rules(self, rules: Iterable[QuotaRule]) -> None:
        """Rules that were read after `asked`."""
        if len(self.rules) > COUNT_MAX:
            self._forget_all()
        self.charged.clear()
        for rule in rules:
            self.rules[rule.number] = rule
            self._rules_of.setdefault(rule.subject_id.int, set()).add(rule.number)

    def add_terms(self, key: TermsKey, terms: AdmissionTerms) -> None:
        """The same for admissions."""
        if len(self.terms) > COUNT_MAX:
            self._forget_all()
        self.terms[key] = terms
        for subject_id in terms.payer.subject_ids:
            self._terms_of.setdefault(subject_id.int, set()).add(key)

    def saw(self, counters: Mapping[CounterKey, Counter]) -> None:
        """Counters as they were just committed."""
        if len(self.counters) > COUNT_MAX:
            self.counters.clear()
        self.counters |= counters

    def continued(self, locked: Mapping[bytes, int], heads: Mapping[bytes, ChainHead]) -> None:
        """Chains as they were just committed. locked: their places in the chain before, where these were read."""
        if len(self.heads) > COUNT_MAX:
            self.heads.clear()
        for project_id, head in heads.items():
            before = self.heads.get(project_id)
            self.heads[project_id] = head, before is not None and before[0].sequence == locked.get(project_id, before[0].sequence)

    def rules_for(self, numbers: Iterable[int], now: datetime) -> tuple[dict[int, QuotaRule], set[int]]:
        """Rules that are known, and which of these have to be read: also those whose raise has just ended."""
        found: dict[int, QuotaRule] = {}
        missing: set[int] = set()
        for number in numbers:
            rule = self.rules.get(number)
            if rule is None or (rule.raised_until is not None and rule.raised_until <= now):
                missing.add(number)
            else:
                found[number] = rule
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
        self.charged.clear()

    def _forget_all(self) -> None:
        for each in (self.terms, self.rules, self.charged, self._terms_of, self._rules_of):
            each.clear()


_known: weakref.WeakKeyDictionary[Connection, Known] = weakref.WeakKeyDictionary()


def known_of(connection: Connection) -> Known:
    """What this connection knows."""
    known = _known.get(connection)
    if known is None:
        known = _known[connection] = Known()
    return known
