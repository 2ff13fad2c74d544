"""Reads and locks of a batch of hold operations: holds, their usage, rules and prices, as values.

Statements are pipelined (`store/pipeline.py`), and rows in the connection's cache
(`hold_cache.py`) are not read again: a batch costs two or three round trips whatever its size. No
decisions here.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from metering.core.models import HoldState, QuotaDimension, QuotaSubject
from metering.holds.decide import (
    END_USERS_MAX,
    LATEST,
    NOTHING_USED,
    AdmissionTerms,
    BatchReads,
    Creation,
    EventSums,
    Hold,
    HoldTerms,
    Member,
    MemberKey,
    MemberName,
    SameRequest,
    TermsKey,
)
from metering.holds.hold_cache import SELECT_CHANGES, cache_of
from metering.holds.operations import Admit
from metering.holds.write import counter_columns, key_columns
from metering.pricing.prices import TOKEN_PRICES, PriceBook, TokenPrices
from metering.quotas.quota_recount import QUOTA_LOCK
from metering.quotas.quota_rules import (
    FOR_END_USERS,
    FOR_LABEL,
    UNITS,
    CounterKey,
    QuotaRule,
    Unit,
    Weights,
    window_ends,
)
from metering.quotas.quotas import Counter, Counters
from metering.receipts.chaining import BATCHES_OF_HOLDS, ISSUED_OF_HOLDS, Chains, issued_of_rows
from metering.receipts.subjects import NO_LABELS, Labels, Subjects
from metering.store.pipeline import (
    Connection,
    Row,
    Statement,
    Value,
    array,
    id_array,
    id_bytes_array,
    id_number_array,
    run_pipeline,
    text_array,
    time_array,
)
from metering.tenants.usage_subjects import NAME_LOCK

# The limit in force: a temporary override ends by the database's clock.
RULE_COLUMNS = """
concat(id, '.', version, '.', override_until > now()) AS version, id, subject, subject_id, model,
dimension,
CASE WHEN deleted_at IS NOT NULL THEN NULL WHEN override_until > now() THEN override_limit_value
    ELSE limit_value END AS in_force,
input_weight_milli, cached_input_weight_milli, output_weight_milli, enforced,
limit_value AS base_limit_value,
CASE WHEN override_until > now() THEN override_until END AS override_until,
for_each, within_id, selector_id, window_minutes, set_by_organization,
CASE WHEN within_id IS NULL THEN '' ELSE coalesce((
    SELECT CASE WHEN kind = 'label' THEN label_key || '=' || name ELSE name END
    FROM usage_subjects u WHERE u.id = subject_id), '') END AS subject_name,
CASE WHEN within_id IS NULL AND for_each = '' THEN '' ELSE coalesce((
    SELECT name FROM projects p WHERE p.id = coalesce(within_id, subject_id)), '') END
    AS scope_name,
CASE WHEN subject = 'api_key' AND selector_id IS NOT NULL THEN (
    SELECT substr(s.for_each, 5) FROM quotas s WHERE s.id = quota_terms.selector_id) ELSE '' END
    AS group_name
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
        if rule is None or rule.subject_name != row[-3]:  # erased
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


def rule_of(columns: Row) -> QuotaRule:
    """Build a rule from the columns RULE_COLUMNS, without the version."""
    quota_id, subject, subject_id, model, dimension, limit_value, *weights = columns[:9]
    subject_and_dimension = QuotaSubject(subject), subject_id, model, QuotaDimension(dimension)
    return QuotaRule(quota_id, *subject_and_dimension, limit_value, Weights(*weights), *columns[9:])


LOCK_COUNTERS = """
SELECT c.quota_id, c.window_start, c.used, c.held, c.carried
FROM quota_counters c
JOIN unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start)
    USING (quota_id, window_start)
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
# Also the buckets from the first one that a rolling window counts; later ones too, because the
# clock may have been set back.
LOCK_BUCKETS = """
SELECT c.quota_id, c.window_start, c.used, c.held, c.carried
FROM unnest(%s::uuid[], %s::timestamptz[], %s::timestamptz[]) AS k(quota_id, first, last)
JOIN quota_counters c
    ON c.quota_id = k.quota_id AND c.window_start >= k.first AND c.window_start <= k.last
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
# Buckets of a limit are opened one after the other: otherwise two transactions that begin in two
# buckets could each insert one without seeing the other's.
LOCK_WINDOWS = """
SELECT pg_advisory_xact_lock(hashtextextended(id::text, 1466263922))
FROM (SELECT DISTINCT id FROM unnest(%s::uuid[]) AS o(id) ORDER BY id) AS o
"""
INSERT_COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start, kept_until, carried)
SELECT quota_id, window_start, kept_until, CASE WHEN kept_until IS NULL THEN 0 END
FROM unnest(%s::uuid[], %s::timestamptz[], %s::timestamptz[])
    AS k(quota_id, window_start, kept_until)
ORDER BY quota_id, window_start
ON CONFLICT DO NOTHING RETURNING quota_id, window_start
"""

# Fields of `EventSums`: sums over the usage events of a hold, and the outcome of the last part.
EVENT_SUMS = ", ".join(
    {
        "part_count": "count(*)::int",
        "outcome": "coalesce((array_agg(outcome ORDER BY part DESC))[1], '')",
    }.get(name, f"coalesce(sum({name}), 0)::bigint")
    for name in EventSums._fields
)

BEGIN_ADMITTING = f"SELECT pg_advisory_xact_lock_shared({QUOTA_LOCK})"

SELECT_HOLDS = """
SELECT h.id, state, price_version_id, input_token_count, cached_input_token_count,
    leased_token_count, delivered_token_count, posted_token_count, posted_minutes, quota_ids,
    admitted_at, charged_at, expires_at, request_id,
    uuid_send(h.organization_id) || uuid_send(project_id) || uuid_send(api_key_id)
        || uuid_send(request_id),
    model, embedding, reasoning_token_count, end_user_id, labels, u.name, u.receipt_salt
FROM holds h
LEFT JOIN usage_subjects u ON u.id = h.end_user_id
WHERE h.id = ANY(%s::uuid[])
ORDER BY h.id
FOR UPDATE OF h
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
FROM quota_terms
WHERE own_deleted_at IS NULL
  AND deleted_at IS NULL
  AND NOT for_new_keys
  AND left(for_each, 4) <> 'key:'
  AND subject_id = ANY(%s::uuid[])
"""

SELECT_RULES_BY_ID = f"SELECT {RULE_COLUMNS} FROM quota_terms WHERE id = ANY(%s::uuid[])"

# Where there are limits of usage subjects: the label keys of each organization, one index search
# for each, and the scopes in which an end user has a limit of its own.
SELECT_LIMITED = """
WITH RECURSIVE keys AS (
    SELECT o.id, (
        SELECT min(label_key) FROM usage_subjects u
        WHERE u.organization_id = o.id AND u.kind = 'label') AS label_key
    FROM unnest(%s::uuid[]) AS o(id)
    UNION ALL
    SELECT k.id, (
        SELECT min(label_key) FROM usage_subjects u
        WHERE u.organization_id = k.id AND u.kind = 'label' AND u.label_key > k.label_key)
    FROM keys k
    WHERE k.label_key IS NOT NULL
)
SELECT id, 'label:' || label_key FROM keys WHERE label_key IS NOT NULL
UNION ALL
SELECT w.id, 'end_user'
FROM unnest(%s::uuid[]) AS w(id)
WHERE EXISTS (
    SELECT FROM quotas q
    WHERE q.within_id = w.id
      AND q.subject = 'end_user'
      AND q.selector_id IS NULL
      AND q.deleted_at IS NULL)
"""

_NAMED = """
FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[])
    AS a(organization_id, kind, label_key, name)
JOIN usage_subjects s USING (organization_id, kind, label_key, name)
"""
SELECT_MEMBERS = f"""
SELECT organization_id, kind, label_key, name, s.id, s.receipt_salt, false,
    s.archived_at IS NOT NULL, s.last_used_on < (now() AT TIME ZONE 'UTC')::date
{_NAMED}
"""
SELECT_MEMBER_RULES = f"""
SELECT {RULE_COLUMNS}
FROM quota_terms
WHERE own_deleted_at IS NULL
  AND deleted_at IS NULL
  AND subject_id = ANY(ARRAY(SELECT s.id {_NAMED}))
"""
# Locked by all who create or archive usage subjects, before counters in every process.
INSERT_SUBJECT_COUNTS = """
INSERT INTO usage_subject_counts (organization_id)
SELECT id FROM unnest(%s::uuid[]) AS o(id) ORDER BY id ON CONFLICT DO NOTHING
"""
LOCK_SUBJECT_COUNTS = """
SELECT organization_id, end_user_count, label_value_count
FROM usage_subject_counts
WHERE organization_id = ANY(%s::uuid[])
ORDER BY organization_id
FOR UPDATE
"""
# The names that an administrator's open transaction is creating: inserting them would wait for it,
# and it may wait for the lock of admissions.
LOCK_NAMES = f"""
SELECT organization_id, kind, label_key, name
FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[])
    AS a(organization_id, kind, label_key, name)
WHERE NOT pg_try_advisory_xact_lock({NAME_LOCK})
"""

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
    end_user_id: uuid.UUID | None
    labels: dict[str, str]
    end_user: str | None
    salt: bytes | None

    @property
    def label_names(self) -> list[MemberName]:
        """Names of the usage subjects that its labels are."""
        organization_id = uuid.UUID(bytes=self.receipt_ids[:16])
        return [(organization_id, "label", *each) for each in self.labels.items()]

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
            subjects=Subjects(self.end_user or "", self.salt or b"", Labels(self.labels))
            if self.end_user_id is not None or self.labels
            else None,
        )


async def read_and_lock(
    connection: Connection,
    hold_ids: Collection[uuid.UUID],
    admits: Sequence[Admit] = (),
    billed_ids: Collection[uuid.UUID] = (),
    end_users_max: int = END_USERS_MAX,
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
        reads.end_users_max = end_users_max
        await take_members(connection, reads, admits)
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
    values: dict[MemberName, Member] = {}
    if expired:
        subjects = {row.receipt_ids[start : start + 16] for row in expired for start in (0, 16, 32)}
        subjects |= {row.end_user_id.bytes for row in expired if row.end_user_id is not None}
        [rule_rows] = await run_pipeline(connection, [(SELECT_RULES, (id_bytes_array(subjects),))])
        values, of_values = await read_members(
            connection, {name for row in expired for name in row.label_names}
        )
        later = [*rules_of_rows(connection, rule_rows).values(), *of_values]
    terms: dict[tuple[object, ...], HoldTerms] = {}
    for row in rows:
        numbers = tuple(quota_id.int for quota_id in row.quota_ids)
        key = row.receipt_ids[:48], row.model, row.embedding, row.price_version_id, numbers
        common = terms.get(key)
        if common is None:
            common = terms[key] = HoldTerms(*key[:3], cache.prices[row.price_version_id], numbers)
        charged = [rules[number] for number in numbers]
        if row.state == HoldState.EXPIRED:
            scopes = {row.receipt_ids[start : start + 16] for start in (0, 16, 32)}
            of_hold = scopes | {values[each].id.bytes for each in row.label_names if each in values}
            if row.end_user_id is not None:
                of_hold.add(row.end_user_id.bytes)
            charged += [
                rule
                for rule in later
                if rule.subject_id.bytes in of_hold
                and not rule.for_each
                and (rule.within_id is None or rule.within_id.bytes in scopes)
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
        (
            SELECT_LIMITED,
            (
                id_array({each.organization_id for each in payers}),
                id_array(
                    {scope for each in payers for scope in (each.organization_id, each.project_id)}
                ),
            ),
        ),
    ]


def take_admission_reads(
    connection: Connection, reads: BatchReads, admits: Sequence[Admit], answers: Sequence[list[Row]]
) -> list[Row]:
    """Store the results of `admission_reads` in `reads` and in the cache.

    Returns the rows of SELECT_SAME_REQUEST.
    """
    rule_rows, same, keys, in_force, next_prices, limits = answers
    limited: dict[int, set[str]] = {}
    for scope, name in limits:
        limited.setdefault(scope.int, set()).add(name)
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
        known = cache.terms.get(key)
        current = book.find(model, payer.currency_code, payer.organization_id, tier)
        if current is None or key[0] not in expiries:
            continue
        subjects = (payer.organization_id.int, payer.project_id.int, payer.api_key_id.int)
        scopes = [(subject, each) for subject in subjects for each in dict.fromkeys(("", model))]
        applied = [rule for scope in scopes for rule in by_subject.get(scope, ())]
        rules = tuple(rule for rule in applied if not rule.for_each)
        selectors = tuple(rule for rule in applied if rule.for_each)
        names = {rule.for_each for rule in selectors}
        names = names.union(*(limited.get(each, ()) for each in subjects[:2]))
        label_keys = (each.removeprefix(FOR_LABEL) for each in names if each != FOR_END_USERS)
        validity_ends = (
            *(rule.override_until for rule in applied),
            expiries[key[0]],
            next_price_at[model, payer.currency_code],
        )
        common = HoldTerms(
            payer.receipt_ids, model, embedding, current, tuple(rule.number for rule in rules)
        )
        until = min((each for each in validity_ends if each is not None), default=None)
        terms[key] = AdmissionTerms(
            payer, common, rules, until, selectors, tuple(sorted(label_keys)), frozenset(names)
        )
        if known is not None and known.equals(terms[key]):
            terms[key] = known  # with its members
        else:
            cache.add_terms(key, terms[key])
    reads.terms = terms
    return same


async def read_members(
    connection: Connection, names: Collection[MemberName]
) -> tuple[dict[MemberName, Member], list[QuotaRule]]:
    """Read the usage subjects of these names, and their limits."""
    if not names:
        return {}, []
    parameters = name_columns(names)
    members, rules = await run_pipeline(
        connection, [(SELECT_MEMBERS, parameters), (SELECT_MEMBER_RULES, parameters)]
    )
    found = {row[:4]: Member(*row) for row in members}
    return found, list(rules_of_rows(connection, rules).values())


def name_columns(names: Collection[MemberName]) -> tuple[Value, ...]:
    """Pack names of usage subjects into array parameters."""
    organization_ids, kinds, label_keys, values = zip(*sorted(names), strict=True)
    return (
        id_array(organization_ids),
        text_array(kinds),
        text_array(label_keys),
        text_array(values),
    )


class MemberReads:
    """Usage subjects of a batch with their limits; those to be created have ids already."""

    def __init__(self, found: dict[MemberName, Member], rules: Sequence[QuotaRule]) -> None:
        self.members = found
        self._rules: dict[int, list[QuotaRule]] = {}
        for rule in rules:
            self._rules.setdefault(rule.subject_id.int, []).append(rule)
        self._new_rules: dict[tuple[int, int], QuotaRule] = {}

    def terms_of(self, base: AdmissionTerms, key: MemberKey, day_end: datetime) -> AdmissionTerms:
        """Build the terms of requests with this end user and these values of limited labels."""
        rules: list[QuotaRule] = []
        new_rules: list[QuotaRule] = []
        changed: list[Member] = []
        end_user, subjects = 0, None
        for for_each, name in names_of(base, key):
            selectors = [each for each in base.selectors if each.for_each == for_each]
            member = self.members.get(name)
            if member is None:
                if for_each != FOR_END_USERS and not selectors:
                    continue  # a label value without a limit has no row
                member = self.members[name] = Member(*name, uuid.uuid4(), is_new=True)
            if for_each == FOR_END_USERS:
                end_user, subjects = member.id.int, Subjects(member.name, member.salt, NO_LABELS)
            if member.is_new or member.is_archived or member.is_idle:
                changed.append(member)
            own = self.rules_of(base, member)
            taken = {rule.target for rule in own}
            given = [self._given(each, member) for each in selectors if each.target not in taken]
            rules += [*own, *given]
            new_rules += given
        common = base.common
        all_rules = (*base.rules, *rules)
        terms = AdmissionTerms(
            base.payer,
            HoldTerms(
                common.payer_ids,
                common.model,
                common.embedding,
                common.prices,
                tuple(rule.number for rule in all_rules),
                end_user,
                subjects,
            ),
            all_rules,
            min(
                each
                for each in (day_end, base.until, *(rule.override_until for rule in rules))
                if each is not None
            ),
            limited=base.limited,
        )
        if changed or new_rules:
            terms.creation = Creation(base, key, tuple(changed), tuple(new_rules))
        return terms

    def rules_of(self, base: AdmissionTerms, member: Member) -> list[QuotaRule]:
        """Find the limits of a usage subject in force: its own before those of selectors."""
        payer = base.payer
        own = [
            rule
            for rule in self._rules.get(member.id.int, ())
            if rule.within_id in (payer.organization_id, payer.project_id)
            and rule.model in ("", base.common.model)
        ]
        single = {rule.target for rule in own if rule.selector_id is None}
        return [rule for rule in own if rule.selector_id is None or rule.target not in single]

    def _given(self, selector: QuotaRule, member: Member) -> QuotaRule:
        key = selector.number, member.id.int
        rule = self._new_rules.get(key)
        if rule is None:
            rule = self._new_rules[key] = selector.of_subject(
                uuid.uuid4().int, member.id, member.shown
            )
        return rule


def names_of(base: AdmissionTerms, key: MemberKey) -> Iterator[tuple[str, MemberName]]:
    """Yield `for_each` and the name of each usage subject of a request."""
    organization_id = base.payer.organization_id
    if key[0]:
        yield FOR_END_USERS, (organization_id, "end_user", "", key[0])
    for label_key, value in zip(base.label_keys, key[1:], strict=True):
        if value:
            yield FOR_LABEL + label_key, (organization_id, "label", label_key, value)


async def take_members(connection: Connection, reads: BatchReads, admits: Sequence[Admit]) -> None:
    """Add the terms of requests with an end user or a limited label to `reads` and the cache.

    If rows are missing or archived, the organization's count is locked before they are read again,
    so that no name and no selector gets two rows.
    """
    requested: dict[tuple[TermsKey, MemberKey], None] = {}
    for op in admits:
        if op.end_user or op.labels:
            payer = op.payer
            terms_key = payer.api_key_id.int, payer.currency_code, op.model, op.tier, op.embedding
            base = reads.terms.get(terms_key)
            if base is not None and (key := base.member_key(op)) is not None:
                requested[terms_key, key] = None
    if not requested:
        return
    names = {name for each, key in requested for _, name in names_of(reads.terms[each], key)}
    day_end = window_ends(reads.now)[UNITS.index(Unit.DAY)]
    assert day_end is not None

    async def build() -> list[AdmissionTerms]:
        found = MemberReads(*await read_members(connection, names))
        return [
            found.terms_of(reads.terms[terms_key], key, day_end) for terms_key, key in requested
        ]

    built = await build()
    creating = {
        each.payer.organization_id
        for each in built
        if each.creation is not None
        and (each.creation.rules or any(m.is_new or m.is_archived for m in each.creation.members))
    }
    if creating:
        ids = id_array(sorted(creating))
        new = {
            member.full_name
            for each in built
            if each.creation is not None
            for member in each.creation.members
            if member.is_new
        }
        locks: list[Statement] = [(INSERT_SUBJECT_COUNTS, (ids,)), (LOCK_SUBJECT_COUNTS, (ids,))]
        if new:
            locks.append((LOCK_NAMES, name_columns(new)))
        _, counts, *taken = await run_pipeline(connection, locks)
        reads.taken_names = {row for rows in taken for row in rows}
        for organization_id, end_user_count, label_value_count in counts:
            for kind, count in (("end_user", end_user_count), ("label", label_value_count)):
                reads.room[organization_id.int, kind] = reads.end_users_max - count
        built = await build()
    cache = cache_of(connection)
    for (terms_key, key), terms in zip(requested, built, strict=True):
        base = reads.terms[terms_key]
        base.members[key] = terms
        if terms.creation is None:
            cache.add_member(base, key, terms)
        else:
            reads.creations[terms.common] = terms.creation
    reads.members = built


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
    connection: Connection,
    now: datetime,
    keys: Collection[CounterKey],
    rolling: Mapping[int, QuotaRule],
) -> Counters:
    """Lock the counter rows in a fixed order; insert those of new windows.

    `rolling` are the rules with a rolling window, by number. Their present buckets are opened if
    `keys` has them.
    """
    counters = Counters(now)
    if not keys:
        return counters
    lock: Statement = LOCK_COUNTERS, key_columns(keys)
    opened = {key: rule for rule in rolling.values() if (key := rule.key(now)) in keys}
    if opened:
        await run_pipeline(
            connection, [(LOCK_WINDOWS, (id_number_array([number for number, _ in opened]),))]
        )
        firsts = [
            (key[0], opened[key].counted_from(now) if key in opened else key[1]) for key in keys
        ]
        lasts = time_array([LATEST if key in opened else key[1] for key in keys])
        lock = LOCK_BUCKETS, (*key_columns(firsts), lasts)
    [rows] = await run_pipeline(connection, [lock])
    missing = {*keys} - {(row[0].int, row[1]) for row in rows}
    if missing:
        inserted, rows = await run_pipeline(
            connection, [(INSERT_COUNTERS, counter_columns(missing, rolling)), lock]
        )
        counters.created = frozenset((row[0].int, row[1]) for row in inserted)
    stored = {(row[0].int, row[1]): row[4] for row in rows}
    counters.rows = {(row[0].int, row[1]): Counter(row[2], row[3]) for row in rows}
    for rule in opened.values():
        counters.open(rule, stored)
    for key, carried in stored.items():
        if carried and key[0] not in counters.opened:
            counters.carried[key] = carried
            counters.rows[key].used += carried
    return counters
