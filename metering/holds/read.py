"""Reads and locks of a batch of hold operations: holds, their usage, rules and prices, as values.

Statements are pipelined (`store/pipeline.py`), and rows in the connection's cache
(`hold_cache.py`) are not read again: a batch costs two or three round trips whatever its size. No
decisions here.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from metering.core.models import HoldState, QuotaDimension, QuotaSubject
from metering.holds.decide import (
    NOTHING_USED,
    AdmissionTerms,
    BatchReads,
    EventSums,
    Hold,
    HoldTerms,
    SameRequest,
)
from metering.holds.hold_cache import SELECT_CHANGES, cache_of
from metering.holds.operations import Admit
from metering.holds.write import key_columns
from metering.pricing.prices import TOKEN_PRICES, PriceBook, TokenPrices
from metering.quotas.quota_recount import QUOTA_LOCK
from metering.quotas.quota_rules import CounterKey, QuotaRule, Weights
from metering.quotas.quotas import Counter, Counters
from metering.receipts.chaining import BATCHES_OF_HOLDS, ISSUED_OF_HOLDS, Chains, issued_of_rows
from metering.store.pipeline import (
    Connection,
    Row,
    Statement,
    array,
    id_array,
    id_bytes_array,
    id_number_array,
    run_pipeline,
    text_array,
)

# The limit in force: a temporary override ends by the database's clock.
RULE_COLUMNS = """
concat(id, '.', xmin, '.', override_until > now()) AS version, id, subject, subject_id, model,
dimension,
CASE WHEN deleted_at IS NOT NULL THEN NULL WHEN override_until > now() THEN override_limit_value
    ELSE limit_value END AS in_force,
input_weight_milli, cached_input_weight_milli, output_weight_milli, enforced,
limit_value AS base_limit_value,
CASE WHEN override_until > now() THEN override_until END AS override_until
"""

RULE_COUNT_MAX = 32_768  # some 15 MB
RULES: weakref.WeakKeyDictionary[Connection, RuleCache] = weakref.WeakKeyDictionary()
NO_IDS = id_array(())


class RuleCache:
    """Cache of rules by row version and override state, because building a rule is slow.

    The row's id and the transaction that wrote it identify a version. A restored server may reuse
    them for another version, so each connection has its own cache.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rules: dict[str, QuotaRule] = {}

    def of(self, row: Row) -> QuotaRule:
        """Convert a row of RULE_COLUMNS to a rule; the same version gives the same object."""
        rule = self._rules.get(row[0])
        if rule is None:
            if len(self._rules) >= self._count_max:
                self._rules.clear()
            rule = self._rules[row[0]] = rule_of(row[1:])
        return rule


def rules_of_rows(connection: Connection, rows: Iterable[Row]) -> dict[int, QuotaRule]:
    """Convert rows of RULE_COLUMNS, read by this connection, to rules by number."""
    cache = RULES.get(connection)
    if cache is None:
        cache = RULES[connection] = RuleCache(RULE_COUNT_MAX)
    return {rule.number: rule for rule in map(cache.of, rows)}


def rule_of(columns: Sequence[Any]) -> QuotaRule:
    """Build a rule from the columns RULE_COLUMNS, without the version."""
    quota_id, subject, subject_id, model, dimension, limit_value, *rest = columns
    *weights, enforced, base_limit_value, override_until = rest
    key = (QuotaSubject(subject), subject_id, model, QuotaDimension(dimension))
    return QuotaRule(
        quota_id, *key, limit_value, Weights(*weights), enforced, base_limit_value, override_until
    )


LOCK_COUNTERS = """
SELECT c.quota_id, c.window_start, c.used, c.held
FROM quota_counters c
JOIN unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start)
    USING (quota_id, window_start)
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
INSERT_COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start)
SELECT quota_id, window_start
FROM unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start)
ORDER BY quota_id, window_start
ON CONFLICT DO NOTHING RETURNING quota_id, window_start
"""

# Sums of the usage events of a hold; the outcome is that of the last part.
EVENT_SUMS = """
count(*)::int AS part_count,
coalesce(sum(input_token_count), 0)::bigint AS input_token_count,
coalesce(sum(cached_input_token_count), 0)::bigint AS cached_input_token_count,
coalesce(sum(generated_token_count), 0)::bigint AS generated_token_count,
coalesce(sum(delivered_token_count), 0)::bigint AS delivered_token_count,
coalesce(sum(billed_token_count), 0)::bigint AS billed_token_count,
coalesce(sum(cost_picos), 0)::bigint AS cost_picos,
coalesce((array_agg(outcome ORDER BY part DESC))[1], '') AS outcome,
coalesce(sum(embedding_token_count), 0)::bigint AS embedding_token_count,
coalesce(sum(journalled_token_count), 0)::bigint AS journalled_token_count,
coalesce(sum(reasoning_token_count), 0)::bigint AS reasoning_token_count,
coalesce(sum(billed_reasoning_token_count), 0)::bigint AS billed_reasoning_token_count
"""

BEGIN_ADMITTING = f"SELECT pg_advisory_xact_lock_shared({QUOTA_LOCK})"

SELECT_HOLDS = """
SELECT id, state, price_version_id, input_token_count, cached_input_token_count, leased_token_count,
    delivered_token_count, posted_token_count, posted_minutes, quota_ids, admitted_at, charged_at,
    expires_at, request_id, uuid_send(organization_id) || uuid_send(project_id)
        || uuid_send(api_key_id) || uuid_send(request_id), model, embedding, reasoning_token_count
FROM holds
WHERE id = ANY(%s::uuid[])
ORDER BY id
FOR UPDATE
"""

# Scans all months, so it is sent only for ended holds. A separate statement after the holds are
# locked: joined to the locking one, its snapshot would precede the wait for the lock, and a hold
# ended meanwhile by another process would have no usage.
SELECT_EVENT_SUMS = (
    f"SELECT hold_id, {EVENT_SUMS} FROM usage_events WHERE hold_id = ANY(%s) GROUP BY hold_id"
)

SELECT_ORPHANS = "SELECT id FROM holds WHERE process_id = %s AND state = 'held' AND id <> ALL(%s)"

SELECT_SAME_REQUEST = """
SELECT h.project_id, h.request_id, h.state, h.payload_hash, h.id, p.currency_code
FROM holds h
JOIN unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) USING (project_id, request_id)
JOIN price_versions p ON p.id = h.price_version_id
WHERE h.state <> 'voided'
"""

SELECT_LIVE_KEYS = """
SELECT id, expires_at FROM api_keys
WHERE id = ANY(%s::uuid[]) AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""

SELECT_RULES = f"""
SELECT {RULE_COLUMNS}
FROM quotas
WHERE deleted_at IS NULL AND NOT for_new_keys AND subject_id = ANY(%s::uuid[])
"""

SELECT_RULES_BY_ID = f"SELECT {RULE_COLUMNS} FROM quotas WHERE id = ANY(%s::uuid[])"

SELECT_PRICES_IN_FORCE = f"""
SELECT DISTINCT ON (p.model, p.currency_code, p.organization_id, p.tier)
    p.organization_id, p.tier, p.withdrawn, p.model, {TOKEN_PRICES}
FROM price_versions p
JOIN unnest(%s::text[], %s::text[]) AS a(model, currency_code) USING (model, currency_code)
WHERE p.effective_at <= now() AND (p.organization_id IS NULL OR p.organization_id = ANY(%s::uuid[]))
ORDER BY p.model, p.currency_code, p.organization_id, p.tier, p.effective_at DESC
"""

SELECT_NEXT_PRICES = """
SELECT a.model, a.currency_code, (SELECT min(n.effective_at) FROM price_versions n
    WHERE n.model = a.model AND n.currency_code = a.currency_code AND n.effective_at > now())
FROM unnest(%s::text[], %s::text[]) AS a(model, currency_code)
"""

SELECT_PRICES_BY_ID = f"SELECT {TOKEN_PRICES} FROM price_versions p WHERE p.id = ANY(%s::bigint[])"

# Lock order in every process: holds, then receipt chains, then counters.
LOCK_CHAINS = """
SELECT uuid_send(project_id), last_sequence, last_hash, last_settled_at
FROM receipt_chains
WHERE project_id IN (SELECT project_id FROM holds WHERE id = ANY(%s::uuid[]))
ORDER BY project_id
FOR UPDATE
"""


class HoldRow(NamedTuple):
    """Row of SELECT_HOLDS. `receipt_ids` are organization, project, key and request, 64 bytes."""

    id: uuid.UUID
    state: str
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
    reasoning_token_count: int

    def hold(self, terms: HoldTerms, rules: Sequence[QuotaRule]) -> Hold:
        """Build the hold with these terms and rules."""
        return Hold(
            self.id,
            self.request_id,
            terms,
            rules,
            self.input_token_count,
            self.cached_input_token_count,
            self.leased_token_count,
            self.delivered_token_count,
            self.posted_token_count,
            tuple(self.posted_minutes),
            self.admitted_at,
            self.charged_at,
            self.state,
            self.expires_at,
            reasoning_token_count=self.reasoning_token_count,
        )


async def read_and_lock(
    connection: Connection,
    hold_ids: Collection[uuid.UUID],
    admits: Sequence[Admit] = (),
    billed_ids: Collection[uuid.UUID] = (),
) -> BatchReads:
    """Begin the transaction, lock the holds and read what all decisions need.

    `billed_ids` are the holds that may get a usage event and a receipt; their projects' receipt
    chains are locked. Each statement sees the rows locked by earlier ones. If a hold has expired,
    the transaction begins again with the shared lock of admissions.
    """
    cache = cache_of(connection)
    statements: list[Statement] = [("BEGIN", ())]
    if admits:
        statements.append((BEGIN_ADMITTING, ()))
    if hold_ids:
        statements.append((SELECT_HOLDS, (id_array(hold_ids),)))
    if billed_ids:
        statements.append((LOCK_CHAINS, (id_array(billed_ids),)))
    statements.append((SELECT_CHANGES, (cache.snapshot,)))
    if admits:
        statements += admission_reads(admits)
    answers = iter(await run_pipeline(connection, statements))
    next(answers)
    if admits:
        next(answers)
    held = next(answers) if hold_ids else []
    if not admits and any(row[1] == HoldState.EXPIRED for row in held):
        # Setting a quota locks live holds only; returns of expired holds must not fall between its
        # sums and its commit.
        await run_pipeline(connection, [("ROLLBACK", ())])
        _, _, held, *rest = await run_pipeline(
            connection, [statements[0], (BEGIN_ADMITTING, ()), *statements[1:]]
        )
        answers = iter(rest)
    heads = next(answers) if billed_ids else []
    [(now, snapshot, changes)] = next(answers)
    cache.apply_changes(now, snapshot, changes)
    reads = BatchReads(now, Chains.of_rows(now, heads))
    same: list[Row] = []
    if admits:
        same = take_admission_reads(connection, reads, admits, list(answers))
    await take_holds(connection, reads, [HoldRow(*row) for row in held])
    ended_ids = [hold.id for hold in reads.holds.values() if hold.state != HoldState.HELD]
    ended = id_array([*ended_ids, *(row[4] for row in same if row[2] != HoldState.HELD)])
    if ended != NO_IDS:
        sums, issued, batches = await run_pipeline(
            connection,
            [(query, (ended,)) for query in (SELECT_EVENT_SUMS, ISSUED_OF_HOLDS, BATCHES_OF_HOLDS)],
        )
        reads.events = {row[0].int: EventSums(*row[1:]) for row in sums}
        for hold_id, receipt in issued_of_rows(issued, batches):
            reads.receipts.setdefault(hold_id.int, []).append(receipt)
    reads.same_requests = {
        (row[0].int, row[1].int): same_request(row, reads.events) for row in same
    }
    return reads


async def take_holds(connection: Connection, reads: BatchReads, rows: Sequence[HoldRow]) -> None:
    """Add locked holds to `reads`, with rules and prices from the cache or the database.

    An expired hold also gets the rules created after it, which have counted its expired charge.
    """
    cache = cache_of(connection)
    rules, missing = cache.rules_for(
        (quota_id.int for row in rows for quota_id in row.quota_ids), reads.now
    )
    versions = {row.price_version_id for row in rows} - cache.prices.keys()
    if missing or versions:
        rule_rows, prices = await run_pipeline(
            connection,
            [
                (SELECT_RULES_BY_ID, (id_number_array(list(missing)),)),
                (SELECT_PRICES_BY_ID, (array(versions),)),
            ],
        )
        read = rules_of_rows(connection, rule_rows)
        cache.add_rules(read.values())
        cache.prices |= {row[0]: TokenPrices(*row) for row in prices}
        rules |= read
    expired = [row for row in rows if row.state == HoldState.EXPIRED]
    later: list[QuotaRule] = []
    if expired:
        subjects = {row.receipt_ids[start : start + 16] for row in expired for start in (0, 16, 32)}
        [rule_rows] = await run_pipeline(connection, [(SELECT_RULES, (id_bytes_array(subjects),))])
        later = list(rules_of_rows(connection, rule_rows).values())
    terms: dict[tuple[object, ...], HoldTerms] = {}
    for row in rows:
        numbers = tuple(quota_id.int for quota_id in row.quota_ids)
        key = row.receipt_ids[:48], row.model, row.embedding, row.price_version_id, numbers
        common = terms.get(key)
        if common is None:
            common = terms[key] = HoldTerms(*key[:3], cache.prices[row.price_version_id], numbers)
        charged = [rules[number] for number in numbers]
        if row.state == HoldState.EXPIRED:
            of_hold = [row.receipt_ids[start : start + 16] for start in (0, 16, 32)]
            charged += [
                rule
                for rule in later
                if rule.subject_id.bytes in of_hold
                and rule.model in ("", row.model)
                and rule.number not in numbers
            ]
        reads.holds[row.id.int] = row.hold(common, tuple(charged))


def admission_reads(admits: Sequence[Admit]) -> list[Statement]:
    """Build the statements that read the inputs of admissions."""
    payers = {op.payer for op in admits}
    subjects = [
        subject
        for each in payers
        for subject in (each.organization_id, each.project_id, each.api_key_id)
    ]
    models = {(op.model, op.payer.currency_code) for op in admits}
    priced = (
        text_array(model for model, _ in models),
        text_array(currency for _, currency in models),
    )
    return [
        (SELECT_RULES, (id_array(subjects),)),
        (
            SELECT_SAME_REQUEST,
            (
                id_array(op.payer.project_id for op in admits),
                id_array(op.request_id for op in admits),
            ),
        ),
        (SELECT_LIVE_KEYS, (id_array(each.api_key_id for each in payers),)),
        (SELECT_PRICES_IN_FORCE, (*priced, id_array({each.organization_id for each in payers}))),
        (SELECT_NEXT_PRICES, priced),
    ]


def take_admission_reads(
    connection: Connection, reads: BatchReads, admits: Sequence[Admit], answers: Sequence[list[Row]]
) -> list[Row]:
    """Store the results of `admission_reads` in `reads` and in the cache.

    Returns the rows of SELECT_SAME_REQUEST.
    """
    rule_rows, same, keys, in_force, next_prices = answers
    by_subject: dict[tuple[int, str], list[QuotaRule]] = {}
    for rule in rules_of_rows(connection, rule_rows).values():
        by_subject.setdefault((rule.subject_id.int, rule.model), []).append(rule)
    expiries = {row[0].int: row[1] for row in keys}
    reads.live_keys = set(expiries)
    book = PriceBook()
    for organization_id, tier, withdrawn, model, *version in in_force:
        book.add(
            TokenPrices(*version),
            model=model,
            organization_id=organization_id,
            tier=tier,
            withdrawn=withdrawn,
        )
    next_price_at = {(model, currency_code): at for model, currency_code, at in next_prices}
    cache, terms = cache_of(connection), {}
    for payer, model, tier, embedding in {
        (op.payer, op.model, op.tier, op.embedding) for op in admits
    }:
        key = payer.api_key_id.int, payer.currency_code, model, tier, embedding
        current = book.find(model, payer.currency_code, payer.organization_id, tier)
        if current is None or key[0] not in expiries:
            continue
        subjects = (payer.organization_id.int, payer.project_id.int, payer.api_key_id.int)
        scopes = [(subject, each) for subject in subjects for each in dict.fromkeys(("", model))]
        rules = tuple(rule for scope in scopes for rule in by_subject.get(scope, ()))
        validity_ends = (
            *(rule.override_until for rule in rules),
            expiries[key[0]],
            next_price_at[model, payer.currency_code],
        )
        common = HoldTerms(
            payer.receipt_ids, model, embedding, current, tuple(rule.number for rule in rules)
        )
        until = min((each for each in validity_ends if each is not None), default=None)
        terms[key] = AdmissionTerms(payer, common, rules, until)
        cache.add_terms(key, terms[key])
    reads.terms = terms
    return same


def same_request(row: Row, events: Mapping[int, EventSums]) -> SameRequest:
    """Return payload hash and usage of the first request with an id; the usage is None while it
    runs.

    `row` is one of SELECT_SAME_REQUEST; `events` has the usage of ended holds, by id.
    """
    _, _, state, payload_hash, hold_id, currency_code = row
    settled = (
        None
        if state == HoldState.HELD
        else events.get(hold_id.int, NOTHING_USED).settled(hold_id, currency_code, [])
    )
    return payload_hash, settled


async def lock_counters(
    connection: Connection, now: datetime, keys: Collection[CounterKey]
) -> Counters:
    """Lock the counter rows in a fixed order; insert those of new windows."""
    counters = Counters(now)
    if not keys:
        return counters
    columns = key_columns(keys)
    [rows] = await run_pipeline(connection, [(LOCK_COUNTERS, columns)])
    if len(rows) < len(keys):
        inserted, rows = await run_pipeline(
            connection, [(INSERT_COUNTERS, columns), (LOCK_COUNTERS, columns)]
        )
        counters.created = frozenset((row[0].int, row[1]) for row in inserted)
    counters.rows = {(row[0].int, row[1]): Counter(row[2], row[3]) for row in rows}
    return counters
