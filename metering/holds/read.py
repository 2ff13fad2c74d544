"""What one batch of hold operations reads and locks, as values: holds, what was used of them, rules, prices. No decisions.

Statements go out together (`store/exchange.py`), and what the connection knows already is not read again (`known.py`): a batch
costs two or three round trips whatever its size.
"""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from metering.core.models import HoldState, QuotaDimension, QuotaSubject
from metering.holds.known import SELECT_CHANGES, HoldTerms, OwnHold, Terms, earliest, known_of
from metering.holds.operations import Admit, Settled
from metering.pricing.token_prices import PriceBook, TokenPrices, embedding_terms
from metering.quotas.quota_recount import QUOTA_LOCK
from metering.quotas.quota_rules import Claim, Payer, QuotaRule, Weights
from metering.receipts.chaining import BATCHES_OF_HOLDS, ISSUED_OF_HOLDS, Chains, IssuedReceipt, issued_of_rows
from metering.store.exchange import Connection, Row, Statement, array, exchange, id_array, text_array

# The limit of the moment: a raise ends by the database's clock.
RULE_COLUMNS = """
concat(id, '.', xmin, '.', raised_until > now()) AS version, id, subject, subject_id, model, dimension,
CASE WHEN deleted_at IS NOT NULL THEN NULL WHEN raised_until > now() THEN raised_limit_value ELSE limit_value END AS in_force,
input_weight_milli, cached_input_weight_milli, output_weight_milli, enforced, limit_value AS standing_limit_value,
CASE WHEN raised_until > now() THEN raised_until END AS raised_until
"""


class RuleCache:
    """Rules by the version of their row and whether a raise holds: every batch reads the same ones, and building one is slow.

    A row's id and the transaction that wrote it are together another for each version that a server ever commits. Another server,
    or the same one restored from a backup, may come to the same with another version: so each connection has its own.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rules: dict[str, QuotaRule] = {}

    def of(self, row: Row) -> QuotaRule:
        """One row of RULE_COLUMNS; the same object for the same version."""
        rule = self._rules.get(row[0])
        if rule is None:
            if len(self._rules) >= self._count_max:
                self._rules.clear()
            rule = self._rules[row[0]] = rule_of(*row[1:])
        return rule


RULE_COUNT_MAX = 32_768  # some 15 MB

RULES: weakref.WeakKeyDictionary[Connection, RuleCache] = weakref.WeakKeyDictionary()


def rules_of_rows(connection: Connection, rows: Iterable[Row]) -> dict[int, QuotaRule]:
    """Rules by number, from rows of RULE_COLUMNS that this connection has read."""
    cache = RULES.get(connection)
    if cache is None:
        cache = RULES[connection] = RuleCache(RULE_COUNT_MAX)
    return {rule.number: rule for rule in map(cache.of, rows)}


def rule_of(
    quota_id: uuid.UUID,
    subject: str,
    subject_id: uuid.UUID,
    model: str,
    dimension: str,
    limit_value: int | None,
    input_weight: int,
    cached_input_weight: int,
    output_weight: int,
    enforced: bool,
    standing_limit_value: int,
    raised_until: datetime | None,
) -> QuotaRule:
    """One row of RULE_COLUMNS but its version."""
    weights = Weights(input_weight, cached_input_weight, output_weight)
    place = (QuotaSubject(subject), subject_id, model, QuotaDimension(dimension))
    return QuotaRule(quota_id, *place, limit_value, weights, enforced, standing_limit_value, raised_until)


@dataclass(slots=True)
class HoldRow:
    """A locked hold, changed as the batch decides. receipt_ids: as a receipt has them, 64 bytes."""

    id: uuid.UUID
    state: str
    owner_id: uuid.UUID
    price_version_id: int
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_minutes: list[int]
    quota_ids: list[uuid.UUID]
    admitted_at: datetime
    charged_at: datetime
    expires_at: datetime
    request_id: uuid.UUID
    receipt_ids: bytes
    model: str
    embedding: bool

    @property
    def project_id(self) -> bytes:
        """Whose receipts its usage events get, as 16 bytes."""
        return self.receipt_ids[16:32]

    @property
    def unbound(self) -> bool:
        """Whether it was taken in advance and no request has been given to it (`standing_holds.py`)."""
        return self.request_id == self.id

    def claim(self, prices: TokenPrices, cached_input_token_count: int | None = None) -> Claim:
        """What the hold claims of its quotas; `cached_input_token_count` where more is known than the row has.

        What comes to be known after the input was posted changes nothing any more: it stands in windows that may be over.
        """
        cached = self.cached_input_token_count
        if cached_input_token_count is not None and not self.posted_token_count:
            cached = max(cached, cached_input_token_count)
        return Claim(
            embedding_terms(prices) if self.embedding else prices,
            self.input_token_count,
            cached,
            self.leased_token_count,
            self.posted_token_count,
            self.admitted_at,
            self.charged_at,
            tuple(self.posted_minutes),
        )

    def own(self, prices: TokenPrices) -> OwnHold:
        """What the process that has taken it remembers."""
        quota_ids = tuple(quota_id.int for quota_id in self.quota_ids)
        return OwnHold(
            HoldTerms(self.receipt_ids[:48], self.model, self.embedding, prices, quota_ids),
            self.request_id,
            self.input_token_count,
            self.cached_input_token_count,
            self.leased_token_count,
            self.delivered_token_count,
            self.posted_token_count,
            self.admitted_at,
            self.charged_at,
        )


class EventSums(NamedTuple):
    """What the usage events of one hold add up to; nothing for a hold that has none."""

    part_count: int = 0
    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    delivered_token_count: int = 0
    billed_token_count: int = 0
    cost_picos: int = 0
    outcome: str = ""
    embedding_token_count: int = 0

    @property
    def sent_token_count(self) -> int:
        """Tokens of the request's input, to be continued or to be embedded."""
        return self.input_token_count + self.embedding_token_count

    def settled(self, hold_id: uuid.UUID, currency_code: str, receipts: tuple[IssuedReceipt, ...] = ()) -> Settled:
        """The usage that stands."""
        return Settled(hold_id, *self[1:7], currency_code, self.outcome, self.embedding_token_count, receipts)

    def plus(self, part: Settled) -> EventSums:
        """With one more part."""
        return EventSums(
            self.part_count + 1,
            self.input_token_count + part.input_token_count,
            self.cached_input_token_count + part.cached_input_token_count,
            self.generated_token_count + part.generated_token_count,
            self.delivered_token_count + part.delivered_token_count,
            self.billed_token_count + part.billed_token_count,
            self.cost_picos + part.cost_picos,
            part.outcome,
            self.embedding_token_count + part.embedding_token_count,
        )


class SameRequest(NamedTuple):
    """A hold that exists for a request id, and its usage if it has ended."""

    state: str
    payload_hash: bytes
    settled: Settled | None


@dataclass(slots=True)
class BatchReads:
    """What the database holds at the beginning of a batch. Ids are looked up by their numbers, for the reason of `CounterKey`."""

    now: datetime
    chains: Chains
    holds: dict[int, HoldRow] = field(default_factory=dict)
    events: dict[int, EventSums] = field(default_factory=dict)  # by hold
    receipts: dict[int, list[IssuedReceipt]] = field(default_factory=dict)  # by hold
    same_requests: dict[tuple[int, int], SameRequest] = field(default_factory=dict)  # by project and request
    live_keys: set[int] = field(default_factory=set)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    prices_in_force: PriceBook = field(default_factory=PriceBook)
    prices: dict[int, TokenPrices] = field(default_factory=dict)
    _by_subject: dict[tuple[int, str], list[QuotaRule]] = field(default_factory=dict)
    _by_payer: dict[tuple[Payer, str], PayerRules] = field(default_factory=dict)
    _hold_terms: dict[tuple[Payer, str, int, bool], HoldTerms] = field(default_factory=dict)

    def rules_for(self, payer: Payer, model: str) -> PayerRules:
        """What a new request of the payer for the model is charged to; found once per batch, not once per request."""
        found = self._by_payer.get((payer, model))
        if found is None:
            if not self._by_subject:
                for rule in self.rules.values():
                    if rule.limit_value is not None:
                        self._by_subject.setdefault((rule.subject_id.int, rule.model), []).append(rule)
            get = self._by_subject.get
            rules: list[QuotaRule] = []
            for subject_id in (payer.organization_id, payer.project_id, payer.api_key_id):
                rules += get((subject_id.int, ""), ())
                if model:
                    rules += get((subject_id.int, model), ())
            found = self._by_payer[payer, model] = payer_rules(tuple(rules))
        return found

    def hold_terms(self, payer: Payer, model: str, prices: TokenPrices, *, embedding: bool) -> HoldTerms:
        """What new holds have in common; the same object for all that have the same."""
        key = payer, model, prices.version, embedding
        found = self._hold_terms.get(key)
        if found is None:
            quota_ids = self.rules_for(payer, model).quota_ids
            found = self._hold_terms[key] = HoldTerms(payer.receipt_ids, model, embedding, prices, quota_ids)
        return found

    def rules_of(self, hold: HoldRow) -> list[QuotaRule]:
        """The rules that a hold was charged to."""
        rules = self.rules
        return [rules[quota_id.int] for quota_id in hold.quota_ids]


class PayerRules(NamedTuple):
    """The rules that requests of one payer for one model are charged to. quota_ids: the numbers of theirs."""

    rules: tuple[QuotaRule, ...]
    quota_ids: tuple[int, ...]


@functools.lru_cache(maxsize=32_768)  # a payer's rules are the same objects from batch to batch
def payer_rules(rules: tuple[QuotaRule, ...]) -> PayerRules:
    """With their ids written out."""
    return PayerRules(rules, tuple(rule.number for rule in rules))


NO_IDS = id_array(())

# What the usage events of a hold add up to; the last part tells how it ended.
EVENT_SUMS = """
count(*)::int AS part_count, coalesce(sum(input_token_count), 0)::bigint AS input_token_count,
coalesce(sum(cached_input_token_count), 0)::bigint AS cached_input_token_count,
coalesce(sum(generated_token_count), 0)::bigint AS generated_token_count,
coalesce(sum(delivered_token_count), 0)::bigint AS delivered_token_count,
coalesce(sum(billed_token_count), 0)::bigint AS billed_token_count, coalesce(sum(cost_picos), 0)::bigint AS cost_picos,
coalesce((array_agg(outcome ORDER BY part DESC))[1], '') AS outcome,
coalesce(sum(embedding_token_count), 0)::bigint AS embedding_token_count
"""

BEGIN_ADMITTING = f"SELECT pg_advisory_xact_lock_shared({QUOTA_LOCK})"

SELECT_HOLDS = """
SELECT id, state, owner_id, price_version_id, input_token_count, cached_input_token_count, leased_token_count,
       delivered_token_count, posted_token_count, posted_minutes, quota_ids, admitted_at, charged_at, expires_at, request_id,
       uuid_send(organization_id) || uuid_send(project_id) || uuid_send(api_key_id) || uuid_send(request_id), model,
       embedding
FROM holds WHERE id = ANY(%s::uuid[]) ORDER BY id FOR UPDATE
"""

# Looks into all months, so it is asked only where something has ended. A statement of its own, after the holds are locked: joined
# to the locking one it would see the events as they were before the lock was waited for, and a hold that another process has just
# ended would look as if nothing had been used.
SELECT_EVENT_SUMS = f"SELECT hold_id, {EVENT_SUMS} FROM usage_events WHERE hold_id = ANY(%s) GROUP BY hold_id"

SELECT_ORPHANS = "SELECT id FROM holds WHERE owner_id = %s AND state = 'held' AND id <> ALL(%s)"

SELECT_SAME_REQUEST = """
SELECT h.project_id, h.request_id, h.state, h.payload_hash, h.id, p.currency_code
FROM holds h JOIN unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) USING (project_id, request_id)
JOIN price_versions p ON p.id = h.price_version_id
WHERE h.state <> 'voided'
"""

SELECT_LIVE_KEYS = """
SELECT id, expires_at FROM api_keys
WHERE id = ANY(%s::uuid[]) AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""

SELECT_RULES = f"""
SELECT {RULE_COLUMNS} FROM quotas WHERE deleted_at IS NULL AND NOT for_new_keys AND subject_id = ANY(%s::uuid[])
"""

SELECT_RULES_BY_ID = f"SELECT {RULE_COLUMNS} FROM quotas WHERE id = ANY(%s::uuid[])"

SELECT_PRICES_IN_FORCE = """
SELECT DISTINCT ON (p.model, p.currency_code, p.organization_id, p.tier) p.organization_id, p.tier, p.withdrawn, p.model,
       p.id AS version, p.currency_code, p.input_picos_per_token, p.cached_input_picos_per_token, p.output_picos_per_token,
       p.embedding_picos_per_token
FROM price_versions p JOIN unnest(%s::text[], %s::text[]) AS a(model, currency_code) USING (model, currency_code)
WHERE p.effective_at <= now() AND (p.organization_id IS NULL OR p.organization_id = ANY(%s::uuid[]))
ORDER BY p.model, p.currency_code, p.organization_id, p.tier, p.effective_at DESC
"""

SELECT_NEXT_PRICES = """
SELECT a.model, a.currency_code, (SELECT min(n.effective_at) FROM price_versions n
    WHERE n.model = a.model AND n.currency_code = a.currency_code AND n.effective_at > now())
FROM unnest(%s::text[], %s::text[]) AS a(model, currency_code)
"""

SELECT_PRICES_BY_ID = """
SELECT id AS version, currency_code, input_picos_per_token, cached_input_picos_per_token, output_picos_per_token,
       embedding_picos_per_token
FROM price_versions WHERE id = ANY(%s::bigint[])
"""

# After their holds and before any counter, in every process alike.
LOCK_CHAINS = """
SELECT uuid_send(project_id), last_sequence, last_hash, last_settled_at
FROM receipt_chains WHERE project_id IN (SELECT project_id FROM holds WHERE id = ANY(%s::uuid[])) ORDER BY project_id FOR UPDATE
"""


async def read_and_lock(
    connection: Connection,
    hold_ids: Collection[uuid.UUID],
    admits: Sequence[Admit] = (),
    billed_ids: Collection[uuid.UUID] = (),
) -> BatchReads:
    """Begin the transaction, lock the holds, read what decides about them and about new ones: in one round trip, as a rule.

    billed_ids: holds that may get a usage event, and with it a receipt: their projects' chains are locked. Each statement sees what
    the ones before it have locked. Where a hold has expired it begins once more, with the lock that admissions share.
    """
    known = known_of(connection)
    statements: list[Statement] = [("BEGIN", ())]
    if admits:
        statements.append((BEGIN_ADMITTING, ()))
    if hold_ids:
        statements.append((SELECT_HOLDS, (id_array(hold_ids),)))
    if billed_ids:
        statements.append((LOCK_CHAINS, (id_array(billed_ids),)))
    statements.append((SELECT_CHANGES, (known.snapshot,)))
    if admits:
        statements += admission_reads(admits)
    answers = iter(await exchange(connection, statements))
    next(answers)
    if admits:
        next(answers)
    held = next(answers) if hold_ids else []
    if not admits and any(row[1] == HoldState.EXPIRED for row in held):
        # Whoever sets a quota locks live holds only: what expired ones give back must not come between its sums and its commit.
        await exchange(connection, [("ROLLBACK", ())])
        _, _, held, *others = await exchange(connection, [statements[0], (BEGIN_ADMITTING, ()), *statements[1:]])
        answers = iter(others)
    heads = next(answers) if billed_ids else []
    [(now, snapshot, changes)] = next(answers)
    reads = BatchReads(now, Chains.of_rows(now, heads), {row[0].int: HoldRow(*row) for row in held})
    known.asked(now, snapshot, changes)
    same: list[Row] = []
    if admits:
        same = take_admission_reads(connection, reads, admits, list(answers))
    await add_rules_made_since(connection, [hold for hold in reads.holds.values() if hold.state == HoldState.EXPIRED])
    await know_what_holds_need(connection, reads)
    ended_holds = [hold.id for hold in reads.holds.values() if hold.state != HoldState.HELD]
    ended = id_array([*ended_holds, *(row[4] for row in same if row[2] != HoldState.HELD)])
    if ended != NO_IDS:
        sums, issued, batches = await exchange(
            connection, [(query, (ended,)) for query in (SELECT_EVENT_SUMS, ISSUED_OF_HOLDS, BATCHES_OF_HOLDS)]
        )
        reads.events = {row[0].int: EventSums(*row[1:]) for row in sums}
        for hold_id, receipt in issued_of_rows(issued, batches):
            reads.receipts.setdefault(hold_id.int, []).append(receipt)
    reads.same_requests = {(row[0].int, row[1].int): same_request(row, reads.events) for row in same}
    return reads


async def add_rules_made_since(connection: Connection, expired: Sequence[HoldRow]) -> None:
    """Beside those that they were charged to as they ran: rules that were made later have counted them as they had expired."""
    if not expired:
        return
    subjects = {hold.id: [uuid.UUID(bytes=hold.receipt_ids[place : place + 16]) for place in (0, 16, 32)] for hold in expired}
    [rows] = await exchange(connection, [(SELECT_RULES, (id_array({each for ids in subjects.values() for each in ids}),))])
    for rule in rules_of_rows(connection, rows).values():
        for hold in expired:
            if rule.subject_id in subjects[hold.id] and rule.model in ("", hold.model) and rule.id not in hold.quota_ids:
                hold.quota_ids.append(rule.id)


async def know_what_holds_need(connection: Connection, reads: BatchReads) -> None:
    """The rules that holds were charged to and their prices: from memory, or read after the holds were locked."""
    known = known_of(connection)
    holds = reads.holds.values()
    rules, missing = known.rules_for((quota_id for hold in holds for quota_id in hold.quota_ids), reads.now)
    versions = {hold.price_version_id for hold in holds} - known.prices.keys()
    if missing or versions:
        rule_rows, prices = await exchange(
            connection, [(SELECT_RULES_BY_ID, (id_array(missing),)), (SELECT_PRICES_BY_ID, (array(versions),))]
        )
        read = rules_of_rows(connection, rule_rows)
        known.add_rules(read.values())
        known.prices |= {row[0]: TokenPrices(*row) for row in prices}
        rules |= read
    reads.rules |= rules
    reads.prices |= {hold.price_version_id: known.prices[hold.price_version_id] for hold in holds}


def admission_reads(admits: Sequence[Admit]) -> list[Statement]:
    """What decides about new holds."""
    payers = {op.payer for op in admits}
    subjects = [subject for each in payers for subject in (each.organization_id, each.project_id, each.api_key_id)]
    wanted = {(op.model, op.payer.currency_code) for op in admits}
    priced = text_array(model for model, _ in wanted), text_array(currency for _, currency in wanted)
    return [
        (SELECT_RULES, (id_array(subjects),)),
        (SELECT_SAME_REQUEST, (id_array(op.payer.project_id for op in admits), id_array(op.request_id for op in admits))),
        (SELECT_LIVE_KEYS, (id_array(each.api_key_id for each in payers),)),
        (SELECT_PRICES_IN_FORCE, (*priced, id_array({each.organization_id for each in payers}))),
        (SELECT_NEXT_PRICES, priced),
    ]


def take_admission_reads(
    connection: Connection, reads: BatchReads, admits: Sequence[Admit], answers: Sequence[list[Row]]
) -> list[Row]:
    """The answers to `admission_reads`; the connection goes on knowing them. Returns the rows of SELECT_SAME_REQUEST."""
    rules, same, keys, in_force, next_prices = answers
    reads.rules = rules_of_rows(connection, rules)
    expiries = {row[0].int: row[1] for row in keys}
    reads.live_keys = set(expiries)
    for organization_id, tier, withdrawn, model, *version in in_force:
        prices = TokenPrices(*version)
        reads.prices_in_force.add(prices, model=model, organization_id=organization_id, tier=tier, withdrawn=withdrawn)
    next_price_at = {(model, currency_code): at for model, currency_code, at in next_prices}
    known = known_of(connection)
    for payer, model, tier, embedding in {(op.payer, op.model, op.tier, op.embedding) for op in admits}:
        current = reads.prices_in_force.find(model, payer.currency_code, payer.organization_id, tier)
        if current is None or payer.api_key_id.int not in expiries:
            continue
        found = reads.rules_for(payer, model)
        ends = [rule.raised_until for rule in found.rules]
        until = earliest([*ends, expiries[payer.api_key_id.int], next_price_at[model, payer.currency_code]])
        terms = Terms.of(payer, reads.hold_terms(payer, model, current, embedding=embedding), found.rules, until)
        known.add_terms((payer.api_key_id.int, model, tier, embedding), terms)
    return same


def same_request(row: tuple[Any, ...], events: Mapping[int, EventSums]) -> SameRequest:
    """One row of SELECT_SAME_REQUEST. events: of the holds that have ended."""
    _, _, state, payload_hash, hold_id, currency_code = row
    settled = None if state == HoldState.HELD else events.get(hold_id.int, EventSums()).settled(hold_id, currency_code)
    return SameRequest(state, payload_hash, settled)
