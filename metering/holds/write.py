"""Writes of a batch of hold operations: holds, usage events with receipts, counters.

Statements that end or extend holds compare every column that may have changed since the decision,
and statements that increment counters check each limit: a batch decided from the cache
(`fast_path.py`) is written as a whole or not at all. For rows locked earlier these checks always
pass.

Lock order in every process: holds by id, chains by project, counters by (quota, window). No
decisions here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import msgspec
import psycopg

from metering.holds.decide import (
    BatchReads,
    BatchWrites,
    Hold,
    HoldOwner,
    HoldTerms,
    Member,
    UsageEvent,
)
from metering.holds.operations import Settle, Settled
from metering.quotas.quota_rules import USED_MAX, CounterKey, QuotaRule
from metering.quotas.quotas import NO_LIMIT, Counters
from metering.receipts.chaining import BatchSigner, Chains, IssuedReceipt, SignedBatch
from metering.receipts.subjects import NO_HASHES, new_salts
from metering.store.pipeline import (
    UUID_OID,
    Statement,
    array,
    bytes_array,
    id_array,
    id_bytes_array,
    id_number_array,
    number_array,
    packed_array,
    text_array,
    time_array,
)

# Raised by a failed check of a statement, as a division by zero that aborts the transaction.
GuardFailed = psycopg.errors.DivisionByZero

NO_BYTES = bytes_array(())
_encode_json = msgspec.json.Encoder().encode


def _numbers_of_row(columns: str) -> str:
    """Build the FROM item with the numbers of row `i`, which `numbers` has one row after the other.

    One array of numbers is sent and read faster than one for each of these columns.
    """
    names = columns.split()
    numbers = ", ".join(
        f"numbers[{len(names)} * i - {len(names) - index}] AS {name}"
        for index, name in enumerate(names, start=1)
    )
    return f"LATERAL (SELECT {numbers}) AS n"


# Values shared by several holds are sent once: `t` is their index in those arrays.
INSERT_HOLDS = f"""
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
    price_version_id, labels, process_id, input_token_count, leased_token_count, quota_ids,
    admitted_at, charged_at, expires_at, embedding, end_user_id)
SELECT ids[2 * i - 1], payers[4 * t - 3], payers[4 * t - 2], payers[4 * t - 1], ids[2 * i],
    payload_hash, models[terms[5 * t - 4]], terms[5 * t - 3], coalesce(labels::jsonb, '{{}}'),
    %s::uuid, input_token_count, leased_token_count,
    quota_ids[terms[5 * t - 2]:terms[5 * t - 1]],
    now(), now(), now() + make_interval(secs => %s), terms[5 * t] <> 0,
    nullif(payers[4 * t], '00000000-0000-0000-0000-000000000000')
FROM (SELECT %s::uuid[] AS payers, %s::text[] AS models, %s::bigint[] AS terms,
        %s::uuid[] AS quota_ids, %s::uuid[] AS ids, %s::bigint[] AS numbers) AS sent,
    unnest(%s::bytea[], %s::text[]) WITH ORDINALITY AS v(payload_hash, labels, i),
    {_numbers_of_row("t input_token_count leased_token_count")}
"""

INSERT_MEMBERS = """
INSERT INTO usage_subjects (id, organization_id, kind, label_key, name, receipt_salt, last_used_on)
SELECT v.*, (now() AT TIME ZONE 'UTC')::date
FROM unnest(%s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::text[], %s::bytea[]) AS v
"""
# Skips locked rows: another batch marks them for the same day, or they are being erased.
USE_MEMBERS = """
UPDATE usage_subjects SET last_used_on = (now() AT TIME ZONE 'UTC')::date, archived_at = NULL
WHERE id IN (
    SELECT id FROM usage_subjects
    WHERE id = ANY(%s::uuid[]) AND erased_at IS NULL
    ORDER BY id
    FOR NO KEY UPDATE SKIP LOCKED)
"""
INSERT_MEMBER_QUOTAS = """
INSERT INTO quotas (id, subject, subject_id, within_id, selector_id, model, dimension,
    window_minutes, limit_value, input_weight_milli, cached_input_weight_milli,
    output_weight_milli, enforced, alert_at, set_by_organization)
SELECT v.id, v.subject, v.subject_id, s.subject_id, s.id, s.model, s.dimension,
    s.window_minutes, s.limit_value, s.input_weight_milli, s.cached_input_weight_milli,
    s.output_weight_milli, s.enforced, s.alert_at, s.set_by_organization
FROM unnest(%s::uuid[], %s::text[], %s::uuid[], %s::uuid[])
    AS v(id, subject, subject_id, selector_id)
JOIN quotas s ON s.id = v.selector_id
"""
INSERT_MEMBER_COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start, kept_until)
SELECT * FROM unnest(%s::uuid[], %s::timestamptz[], %s::timestamptz[])
"""

EXTENDED = "cached leased delivered reasoning posted posted_cost leased_before quota_count"
# Each extension grows the lease, so comparing the lease detects another extension.
EXTEND_HOLDS = f"""
WITH extended AS (
    UPDATE holds h
    SET cached_input_token_count = cached, leased_token_count = leased,
        delivered_token_count = delivered, reasoning_token_count = reasoning,
        posted_token_count = posted, posted_cost_picos = posted_cost,
        posted_minutes = v.posted_minutes::bigint[],
        charged_at = now(), expires_at = now() + make_interval(secs => %s)
    FROM (SELECT %s::bigint[] AS numbers) AS sent,
        unnest(%s::uuid[], %s::text[]) WITH ORDINALITY AS v(id, posted_minutes, i),
        {_numbers_of_row(EXTENDED)}
    WHERE h.id = v.id
        AND h.ended_at IS NULL
        AND h.leased_token_count = leased_before
        AND cardinality(h.quota_ids) = quota_count
    RETURNING 1
) SELECT FROM extended HAVING 1 / (count(*) = %s)::int IS NULL
"""
# Compares `ended_at` instead of `state`: with `state` the server would scan all live holds.
END_HOLDS = f"""
WITH ended AS (
    UPDATE holds h
    SET state = v.state, cached_input_token_count = cached, delivered_token_count = delivered,
        reasoning_token_count = reasoning, ended_at = now()
    FROM (SELECT %s::bigint[] AS numbers) AS sent,
        unnest(%s::uuid[], %s::text[]) WITH ORDINALITY AS v(id, state, i),
        {_numbers_of_row("cached delivered reasoning leased posted quota_count")}
    WHERE h.id = v.id
        AND h.ended_at IS NULL
        AND h.leased_token_count = leased
        AND h.posted_token_count = posted
        AND cardinality(h.quota_ids) = quota_count
    RETURNING 1
) SELECT FROM ended HAVING 1 / (count(*) = %s)::int IS NULL
"""
# Skips locked holds: another transaction is ending them, and waiting for it could deadlock.
RENEW_HOLDS = """
UPDATE holds SET expires_at = now() + make_interval(secs => %s)
WHERE id IN (SELECT id
    FROM holds
    WHERE process_id = %s AND state = 'held' AND id = ANY(%s::uuid[])
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id
"""

UPDATE_CHAINS = """
WITH continued AS (
    UPDATE receipt_chains c
    SET last_sequence = v.sequence, last_hash = v.hash, last_settled_at = v.settled_at
    FROM unnest(%s::uuid[], %s::bigint[], %s::bytea[], %s::timestamptz[], %s::bytea[])
        AS v(project_id, sequence, hash, settled_at, hash_before)
    WHERE c.project_id = v.project_id AND c.last_hash = v.hash_before
    RETURNING 1
) SELECT FROM continued HAVING 1 / (count(*) = %s)::int IS NULL
"""
# Columns of a usage event, and the attributes of `Settled` that they get.
USED = {
    "input": "input_token_count",
    "cached": "cached_input_token_count",
    "generated": "generated_token_count",
    "delivered": "delivered_token_count",
    "billed": "billed_token_count",
    "cost": "cost_picos",
    "embedded": "embedding_token_count",
    "journalled": "journalled_token_count",
    "reasoning": "reasoning_token_count",
    "billed_reasoning": "billed_reasoning_token_count",
}
_used_numbers = attrgetter(*USED.values())
# The first three values are NULL if receipts are unsigned. Labels that were removed from the hold
# since its process read it are erased: their salt is not stored.
INSERT_USAGE_EVENTS = f"""
WITH signed AS (
    INSERT INTO receipt_batches (key_id, hashes, signature)
    SELECT key_id, hashes, signature
    FROM (SELECT %s::text AS key_id, %s::bytea AS hashes, %s::bytea AS signature) AS v
    WHERE key_id IS NOT NULL
    RETURNING id
)
INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id, request_id, model,
    outcome, input_token_count, cached_input_token_count, generated_token_count,
    delivered_token_count, billed_token_count, price_version_id, cost_picos, timings, labels,
    end_user_id, recovered, admitted_at, settled_at, receipt_sequence, previous_receipt_hash,
    receipt_hash,
    embedding_token_count, migration_count, journalled_token_count, reasoning_token_count,
    billed_reasoning_token_count, receipt_is_timed, receipt_end_user_hash, receipt_labels_hash,
    receipt_labels_salt, receipt_batch_id)
SELECT h.id, part, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model,
    v.outcome, input, cached, generated, delivered, billed, h.price_version_id, cost,
    v.timings::jsonb, h.labels, h.end_user_id, recovered <> 0, h.admitted_at, v.settled_at,
    sequence,
    v.previous_hash, v.hash, embedded, migrations, journalled, reasoning,
    billed_reasoning, v.timings IS NOT NULL, nullif(v.end_user_hash, ''),
    nullif(v.labels_hash, ''),
    CASE WHEN label_count > 0 AND label_count = (SELECT count(*) FROM jsonb_object_keys(h.labels))
        THEN v.labels_salt END,
    (SELECT id FROM signed)
FROM (SELECT %s::bigint[] AS numbers) AS sent,
    unnest(%s::uuid[], %s::text[], %s::text[], %s::timestamptz[], %s::bytea[], %s::bytea[],
        %s::bytea[], %s::bytea[], %s::bytea[])
        WITH ORDINALITY AS v(hold_id, outcome, timings, settled_at, previous_hash, hash,
            end_user_hash, labels_hash, labels_salt, i),
    {_numbers_of_row(" ".join(USED) + " part recovered migrations sequence label_count")},
    holds h
WHERE h.id = v.hold_id
"""


UPDATE_COUNTERS = """
UPDATE quota_counters c SET used = v.used, held = v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[])
    AS v(quota_id, window_start, used, held)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
# Opens buckets of rolling windows, and closes others: NULL.
ROLL_COUNTERS = """
UPDATE quota_counters c SET carried = v.carried
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[]) AS v(quota_id, window_start, carried)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
COUNT_WOULD_REFUSE = """
UPDATE quota_counters c SET would_refuse_count = c.would_refuse_count + v.admitted
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[]) AS v(quota_id, window_start, admitted)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
DELETE_COUNTERS = """
DELETE FROM quota_counters c
USING unnest(%s::uuid[], %s::timestamptz[]) AS v(quota_id, window_start)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
# Exact without a lock taken beforehand: an UPDATE that waits for another transaction re-checks its
# WHERE on the committed row (READ COMMITTED), so that a limit holds whatever was read before.
# A negative limit means no limit. A counter that reached USED_MAX stays there. A closed bucket of a
# rolling window carries NULL, so that no limit has room in it.
_incremented = f"""
WITH incremented AS (
    UPDATE quota_counters c
    SET held = c.held + n.held, used = CASE
        WHEN c.used <= {USED_MAX} - greatest(n.used, 0) AND c.used < {USED_MAX}
            THEN c.used + n.used
        ELSE {USED_MAX} END
    FROM (SELECT %s::bigint[] AS numbers) AS sent,
        unnest(%s::uuid[], %s::timestamptz[]) WITH ORDINALITY AS v(quota_id, window_start, i),
        {_numbers_of_row("used held limit_value")}
    WHERE c.quota_id = v.quota_id
        AND c.window_start = v.window_start
        AND (n.limit_value < 0 OR c.used <= n.limit_value - c.carried - c.held - n.used - n.held)
    RETURNING v.i AS ordinal, c.used + c.carried AS used, c.held
)
"""
INCREMENT = f"""{_incremented}
SELECT FROM incremented HAVING 1 / (count(*) = %s)::int IS NULL
"""
INCREMENT_AND_RETURN = f"""{_incremented}
SELECT i.ordinal, i.used, i.held, 1 / ((SELECT count(*) FROM incremented) = %s)::int
FROM (SELECT) one
LEFT JOIN incremented i ON true
"""


def renewals(writes: BatchWrites, expiry_s: float) -> list[Statement]:
    """Build statements that extend the expiry of holds; each returns the ids of those extended."""
    return [
        (RENEW_HOLDS, (expiry_s, str(process_id), id_array(hold_ids)))
        for process_id, hold_ids in writes.renewed
    ]


def changed_holds(writes: BatchWrites, expiry_s: float) -> list[Statement]:
    """Build the statements that extend and end holds; GuardFailed if a hold has changed."""
    statements: list[Statement] = []
    if writes.extensions:
        extended = [writes.extensions[number] for number in sorted(writes.extensions)]
        numbers: list[int] = []
        for hold, leased_before in extended:
            numbers += (
                hold.cached_input_token_count,
                hold.leased_token_count,
                hold.delivered_token_count,
                hold.reasoning_token_count,
                hold.posted_token_count,
                hold.posted_cost_picos,
                leased_before,
                len(hold.terms.quota_ids),
            )
        values = (
            number_array(numbers),
            id_array([hold.id for hold, _ in extended]),
            text_array([array(hold.posted_minutes) for hold, _ in extended]),
        )
        statements.append((EXTEND_HOLDS, (expiry_s, *values, len(extended))))
    if writes.ends:
        ids = sorted(writes.ends)
        ended = [writes.ends[number] for number in ids]
        numbers = []
        for hold in ended:
            numbers += (
                hold.cached_input_token_count,
                hold.delivered_token_count,
                hold.reasoning_token_count,
                hold.leased_token_count,
                hold.posted_token_count,
                len(hold.terms.quota_ids),
            )
        states = array([hold.state for hold in ended])
        statements.append(
            (END_HOLDS, (number_array(numbers), id_number_array(ids), states, len(ended)))
        )
    return statements


def member_writes(members: Collection[Member]) -> list[Statement]:
    """Build the statements that create new usage subjects, and mark the others as used today."""
    statements: list[Statement] = []
    if new := [each for each in members if each.is_new]:
        values = (
            id_array([each.id for each in new]),
            id_array([each.organization_id for each in new]),
            text_array([each.kind for each in new]),
            text_array([each.label_key for each in new]),
            text_array([each.name for each in new]),
            bytes_array([each.salt for each in new]),
        )
        statements.append((INSERT_MEMBERS, values))
    if used := [each.id for each in members if not each.is_new]:
        statements.append((USE_MEMBERS, (id_array(used),)))
    return statements


def new_members(reads: BatchReads, writes: BatchWrites, counters: Counters) -> list[Statement]:
    """Build the statements that create the usage subjects and limits of newly admitted requests."""
    members: dict[int, Member] = {}
    rules: dict[int, QuotaRule] = {}
    for _, hold in writes.holds if reads.creations else ():
        if (creation := reads.creations.get(hold.terms)) is not None:
            members |= {each.id.int: each for each in creation.members}
            rules |= {each.number: each for each in creation.rules}
    statements = member_writes(members.values())
    if rules:
        quotas = (
            id_number_array(list(rules)),
            text_array([each.subject for each in rules.values()]),
            id_array([each.subject_id for each in rules.values()]),
            id_array([each.selector_id for each in rules.values() if each.selector_id]),
        )
        keys = [key for key in counters.changed if key[0] in rules]
        statements += [
            (INSERT_MEMBER_QUOTAS, quotas),
            (INSERT_MEMBER_COUNTERS, counter_columns(keys, rules)),
        ]
    return statements


def new_holds(writes: BatchWrites, owner: HoldOwner) -> list[Statement]:
    """Build the statement that inserts new holds; an empty list if there are none."""
    if not writes.holds:
        return []
    indexes: dict[HoldTerms, int] = {}
    ids: list[int] = []
    numbers: list[int] = []
    for op, hold in writes.holds:
        ids += op.hold_id.int, op.request_id.int
        index = indexes.setdefault(hold.terms, len(indexes) + 1)
        numbers += index, op.input_token_count, hold.leased_token_count
    payers: list[bytes] = []
    terms: list[int] = []
    quota_ids: list[bytes] = []
    last = 0  # quota id
    models: dict[str, int] = {}  # finding an element of an array of texts reads those before it
    for each in indexes:
        payers.append(each.packed_payer_ids)
        quota_ids.append(each.packed_quota_ids)
        first, last = last + 1, last + len(each.quota_ids)
        model = models.setdefault(each.model, len(models) + 1)
        terms += model, each.prices.version, first, last, each.embedding
    values = (
        str(owner.process_id),
        owner.expiry_s,
        packed_array(UUID_OID, 4 * len(payers), payers),
        text_array(models),
        number_array(terms),
        packed_array(UUID_OID, last, quota_ids),
        id_number_array(ids),
        number_array(numbers),
        bytes_array([op.payload_hash for op, _ in writes.holds]),
        array(
            "NULL" if hold.subjects is None else hold.subjects.labels.element
            for _, hold in writes.holds
        ),
    )
    return [(INSERT_HOLDS, values)]


def usage_writes(
    chains: Chains, events: Sequence[UsageEvent], signer: BatchSigner | None
) -> list[Statement]:
    """Issue and sign receipts, and build the statements that insert them with their usage events.

    The statements fail with GuardFailed if another connection has extended a chain. Raises:
    ValueError for timings that JSON cannot represent.
    """
    if not events:
        return []
    numbers: list[int] = []
    salted = sum(hold.subjects is not None for hold, *_ in events)
    salts = iter(new_salts(salted) if salted else ())
    for hold, usage, part, op, recovered in events:
        salt = b"" if hold.subjects is None else next(salts)
        receipt = issue_receipt(chains, hold, usage, part, op, salt)
        numbers += _used_numbers(usage)
        numbers += part, recovered, op.migration_count, receipt.sequence
        numbers.append(0 if hold.subjects is None else len(hold.subjects.labels))
    receipts = chains.added
    hashes = [receipt.hash for receipt in receipts]
    batch = None if signer is None else SignedBatch.sign(signer, hashes)
    for receipt in receipts:
        receipt.batch = batch
    usage_columns = (
        *((batch.key_id, b"".join(hashes), batch.signature) if batch else (None, None, None)),
        number_array(numbers),
        id_number_array([hold.id.int for hold, *_ in events]),
        array([usage.outcome for _, usage, *_ in events]),
        text_array([timings_json(op) for _, _, _, op, _ in events]),
        time_array([receipt.settled_at for receipt in receipts]),
        bytes_array([receipt.previous_hash for receipt in receipts]),
        bytes_array(hashes),
        *subject_columns(receipts),
    )
    changed = chains.changed
    heads = [chains.heads[project_id] for project_id in changed]
    chain_columns = (
        id_bytes_array(changed),
        number_array([head.sequence for head in heads]),
        bytes_array([head.hash for head in heads]),
        time_array([head.settled_at for head in heads]),
        bytes_array(changed.values()),
        len(heads),
    )
    return [(UPDATE_CHAINS, chain_columns), (INSERT_USAGE_EVENTS, usage_columns)]


def subject_columns(receipts: Sequence[IssuedReceipt]) -> list[bytes]:
    """Pack hashes and salts of end users and labels; empty arrays if no receipt has any."""
    found = [receipt.hashes for receipt in receipts]
    if not any(found):
        return [NO_BYTES] * len(NO_HASHES)
    columns = zip(*[each or NO_HASHES for each in found], strict=True)
    return [bytes_array(column) if any(column) else NO_BYTES for column in columns]


def issue_receipt(
    chains: Chains, hold: Hold, usage: Settled, part: int, op: Settle, salt: bytes
) -> IssuedReceipt:
    """Append the receipt of a usage event to its project's chain, and add it to the answer.

    `salt` is for the labels of the request.
    """
    terms = hold.terms
    counts = (
        part,
        usage.input_token_count,
        usage.cached_input_token_count,
        usage.billed_token_count,
        usage.embedding_token_count,
        usage.billed_reasoning_token_count,
        terms.prices.version,
        usage.cost_picos,
    )
    ids = terms.payer_ids + hold.request_id.int.to_bytes(16, "big")
    labels = usage.currency_code, terms.model, usage.outcome
    admitted_at, subjects = hold.admitted_at, hold.subjects
    receipt = chains.append(ids, counts, admitted_at, labels, op.timings, subjects, salt)
    usage.receipts.append(receipt)
    return receipt


def timings_json(op: Settle) -> str | None:
    """Encode the timings of a settlement. Raises: ValueError if one is not a finite number."""
    if op.timings is None:
        return None
    encoded = _encode_json(op.timings).decode()
    if "null" in encoded:
        raise ValueError(f"timings must be numbers, got {op.timings}")
    return encoded


def key_columns(keys: Collection[CounterKey]) -> tuple[bytes, bytes]:
    """Pack counter keys into two array parameters."""
    return id_number_array([key[0] for key in keys]), time_array([key[1] for key in keys])


def counter_columns(
    keys: Collection[CounterKey], rules: Mapping[int, QuotaRule]
) -> tuple[bytes, bytes, str]:
    """Pack the keys of new counters, and until when each is kept.

    `rules` has at least those with a rolling window, by number.
    """
    kept = (
        rule.kept_until(start) if (rule := rules.get(number)) is not None else None
        for number, start in keys
    )
    return *key_columns(keys), text_array(None if each is None else str(each) for each in kept)


def counter_increments(counters: Counters) -> tuple[list[CounterKey], list[Statement]]:
    """Build a statement that increments counters within their limits; return the keys too.

    If a counter has a limit, the statement returns rows of the key's 1-based index, used and held.
    It fails with GuardFailed if a limit has no room or a counter row is missing.
    """
    limits, increments = counters.limits, counters.all_increments()
    keys = sorted(increments)  # without the amounts, which would make comparing slower
    if not keys:
        return [], []
    numbers: list[int] = []
    for key in keys:
        used, held = increments[key]
        numbers += used, held, limits.get(key, NO_LIMIT)
    values = (number_array(numbers), *key_columns(keys), len(keys))
    return keys, [(INCREMENT_AND_RETURN if limits else INCREMENT, values)]


def counter_writes(counters: Counters) -> list[Statement]:
    """Build the statements that write the decided values of counters."""
    if counters.unlocked:
        return counter_increments(counters)[1]
    statements: list[Statement] = []
    if counters.changed:
        changed = [(key, counters.rows[key]) for key in counters.changed]
        own = (row.used - counters.carried.get(key, 0) for key, row in changed)
        values = (array(own), array(row.held for _, row in changed))
        statements.append((UPDATE_COUNTERS, (*key_columns(counters.changed), *values)))
    if counters.rolled:
        carried = text_array(
            None if each is None else str(each) for each in counters.rolled.values()
        )
        statements.append((ROLL_COUNTERS, (*key_columns(counters.rolled), carried)))
    if counters.would_refuse:
        refusals = (*key_columns(counters.would_refuse), array(counters.would_refuse.values()))
        statements.append((COUNT_WOULD_REFUSE, refusals))
    if untouched := counters.created - counters.changed.keys():  # created for refused requests only
        statements.append((DELETE_COUNTERS, key_columns(untouched)))
    return statements
