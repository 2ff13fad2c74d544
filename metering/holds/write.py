"""Writes of a batch of hold operations: holds, usage events with receipts, counters.

Statements that end or extend holds compare every column that may have changed since the decision,
and statements that increment counters check each limit: a batch decided from the cache
(`fast_path.py`) is written as a whole or not at all. For rows locked earlier these checks always
pass.

Lock order in every process: holds by id, chains by project, counters by (quota, window). No
decisions here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

import msgspec
import psycopg

from metering.holds.decide import BatchWrites, Hold, HoldTerms
from metering.holds.operations import Settle, Settled
from metering.quotas.quota_rules import CounterKey
from metering.quotas.quotas import NO_LIMIT, USED_MAX, Counters
from metering.receipts.chaining import BatchSigner, Chains, SignedBatch
from metering.store.pipeline import (
    UUID_OID,
    Packed,
    Statement,
    array,
    columns,
    id_array,
    id_number_array,
    packed_array,
    time_array,
)

# Raised by a failed check of a statement, as a division by zero that aborts the transaction.
GuardFailed = psycopg.errors.DivisionByZero

_encode_json = msgspec.json.Encoder().encode

# Values shared by several holds are sent once: `terms` is their index in those arrays.
INSERT_HOLDS = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
    price_version_id, labels, process_id, input_token_count, leased_token_count, quota_ids,
    admitted_at, charged_at, expires_at, embedding)
SELECT id, (%s::uuid[])[terms], (%s::uuid[])[terms], (%s::uuid[])[terms], request_id, payload_hash,
    (%s::text[])[terms], (%s::bigint[])[terms], coalesce(labels::jsonb, '{}'), %s::uuid,
    input_token_count, leased_token_count, (%s::uuid[])[(%s::int[])[terms]:(%s::int[])[terms]],
    now(), now(), now() + make_interval(secs => %s), (%s::bool[])[terms]
FROM unnest(%s::uuid[], %s::int[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::bigint[])
    AS v(id, terms, request_id, payload_hash, labels, input_token_count, leased_token_count)
"""

# Each extension grows the lease, so comparing the lease detects another extension.
EXTEND_HOLDS = """
WITH extended AS (
    UPDATE holds h
    SET cached_input_token_count = v.cached, leased_token_count = v.leased,
        delivered_token_count = v.delivered, reasoning_token_count = v.reasoning,
        posted_token_count = v.posted, posted_cost_picos = v.posted_cost,
        posted_minutes = v.posted_minutes::bigint[],
        charged_at = now(), expires_at = now() + make_interval(secs => %s)
    FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
            %s::bigint[], %s::text[], %s::bigint[], %s::int[])
        AS v(id, cached, leased, delivered, reasoning, posted, posted_cost, posted_minutes,
            leased_before, quota_count)
    WHERE h.id = v.id
        AND h.ended_at IS NULL
        AND h.leased_token_count = v.leased_before
        AND cardinality(h.quota_ids) = v.quota_count
    RETURNING 1
) SELECT 1 / (count(*) = %s)::int FROM extended
"""
# Compares `ended_at` instead of `state`: with `state` the server would scan all live holds.
END_HOLDS = """
WITH ended AS (
    UPDATE holds h
    SET state = v.state, cached_input_token_count = v.cached, delivered_token_count = v.delivered,
        reasoning_token_count = v.reasoning, ended_at = now()
    FROM unnest(%s::uuid[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
            %s::bigint[], %s::int[])
        AS v(id, state, cached, delivered, reasoning, leased, posted, quota_count)
    WHERE h.id = v.id
        AND h.ended_at IS NULL
        AND h.leased_token_count = v.leased
        AND h.posted_token_count = v.posted
        AND cardinality(h.quota_ids) = v.quota_count
    RETURNING 1
) SELECT 1 / (count(*) = %s)::int FROM ended
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
) SELECT 1 / (count(*) = %s)::int FROM continued
"""
# The first three values are empty if receipts are unsigned.
INSERT_USAGE_EVENTS = """
WITH signed AS (
    INSERT INTO receipt_batches (key_id, hashes, signature)
    SELECT key_id, decode(hashes, 'hex'), decode(signature, 'hex')
    FROM (SELECT %s AS key_id, %s AS hashes, %s AS signature) AS v
    WHERE key_id <> ''
    RETURNING id
)
INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id, request_id, model,
    outcome, input_token_count, cached_input_token_count, generated_token_count,
    delivered_token_count, billed_token_count, price_version_id, cost_picos, timings, labels,
    recovered, admitted_at, settled_at, receipt_sequence, previous_receipt_hash, receipt_hash,
    embedding_token_count, migration_count, journalled_token_count, reasoning_token_count,
    billed_reasoning_token_count, receipt_is_timed, receipt_batch_id)
SELECT h.id, v.part, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model,
    v.outcome, v.input, v.cached, v.generated, v.delivered, v.billed, h.price_version_id, v.cost,
    v.timings::jsonb, h.labels, v.recovered, h.admitted_at, v.settled_at, v.sequence,
    v.previous_hash, v.hash, v.embedding, v.migrations, v.journalled, v.reasoning,
    v.billed_reasoning, v.timings IS NOT NULL, (SELECT id FROM signed)
FROM unnest(%s::uuid[], %s::smallint[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[],
        %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::bool[], %s::timestamptz[],
        %s::bigint[], %s::bytea[], %s::bytea[], %s::bigint[], %s::integer[], %s::bigint[],
        %s::bigint[], %s::bigint[])
    AS v(hold_id, part, outcome, input, cached, generated, delivered, billed, cost, timings,
        recovered, settled_at, sequence, previous_hash, hash, embedding, migrations, journalled,
        reasoning, billed_reasoning)
JOIN holds h ON h.id = v.hold_id
"""


UPDATE_COUNTERS = """
UPDATE quota_counters c SET used = v.used, held = v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[])
    AS v(quota_id, window_start, used, held)
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
# A negative limit means no limit. A counter that reached USED_MAX stays there.
_increment_form = f"""
WITH incremented AS (
    UPDATE quota_counters c
    SET held = c.held + v.held, used = CASE
        WHEN c.used <= {USED_MAX} - greatest(v.used, 0) AND c.used < {USED_MAX}
            THEN c.used + v.used
        ELSE {USED_MAX} END
    FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[], %s::bigint[])
        WITH ORDINALITY AS v(quota_id, window_start, used, held, limit_value, ordinal)
    WHERE c.quota_id = v.quota_id
        AND c.window_start = v.window_start
        AND (v.limit_value < 0 OR c.used <= v.limit_value - c.held - v.used - v.held)
    RETURNING v.ordinal, c.used, c.held
)
SELECT i.ordinal, i.used, i.held, 1 / ((SELECT count(*) FROM incremented) = %s)::int
FROM (SELECT) one
LEFT JOIN incremented i ON {{which}}
"""
INCREMENT_AND_RETURN = _increment_form.format(which="true")
INCREMENT = _increment_form.format(which="i.ordinal = 1")


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
        rows = [
            (
                hold.id.bytes,
                hold.cached_input_token_count,
                hold.leased_token_count,
                hold.delivered_token_count,
                hold.reasoning_token_count,
                hold.posted_token_count,
                hold.posted_cost_picos,
                array(hold.posted_minutes),
                leased_before,
                len(hold.terms.quota_ids),
            )
            for hold, leased_before in extended
        ]
        statements.append((EXTEND_HOLDS, (expiry_s, *columns("unnnnnnsnv", rows), len(rows))))
    if writes.ends:
        ended = [
            (
                number.to_bytes(16, "big"),
                hold.state,
                hold.cached_input_token_count,
                hold.delivered_token_count,
                hold.reasoning_token_count,
                hold.leased_token_count,
                hold.posted_token_count,
                len(hold.terms.quota_ids),
            )
            for number, hold in sorted(writes.ends.items())
        ]
        statements.append((END_HOLDS, (*columns("uvnnnnnv", ended), len(ended))))
    return statements


def new_holds(writes: BatchWrites, owner: str, expiry_s: float) -> list[Statement]:
    """Build the statement that inserts new holds; an empty list if there are none."""
    if not writes.holds:
        return []
    indexes: dict[HoldTerms, int] = {}
    rows = [
        (
            op.hold_id.int.to_bytes(16, "big"),
            indexes.setdefault(hold.terms, len(indexes) + 1),
            op.request_id.int.to_bytes(16, "big"),
            op.payload_hash,
            json.dumps(op.labels) if op.labels else None,
            op.input_token_count,
            hold.leased_token_count,
        )
        for op, hold in writes.holds
    ]
    quota_ids: list[bytes] = []
    terms = []
    for each in indexes:
        first = len(quota_ids) + 1
        quota_ids += each.packed_quota_ids
        ids = each.payer_ids
        terms.append(
            (
                ids[:16],
                ids[16:32],
                ids[32:],
                each.model,
                each.prices.version,
                first,
                len(quota_ids),
                each.embedding,
            )
        )
    *payers, models, versions, firsts, lasts, embeddings = columns("uuusnvvv", terms)
    packed_ids = packed_array(UUID_OID, quota_ids)
    values = (
        *payers,
        models,
        versions,
        owner,
        packed_ids,
        firsts,
        lasts,
        expiry_s,
        embeddings,
        *columns("uvubsnn", rows),
    )
    return [(INSERT_HOLDS, values)]


def usage_writes(
    chains: Chains,
    events: Iterable[tuple[Hold, Settled, int, Settle, bool]],
    signer: BatchSigner | None,
) -> list[Statement]:
    """Issue and sign receipts, and build the statements that insert them with their usage events.

    `events` is as in `BatchWrites`. The statements fail with GuardFailed if another connection has
    extended a chain.
    """
    rows = []
    for hold, usage, part, op, recovered in events:
        terms, timings = hold.terms, op.timings
        receipt = chains.append(
            terms.payer_ids + hold.request_id.int.to_bytes(16, "big"),
            (
                part,
                usage.input_token_count,
                usage.cached_input_token_count,
                usage.billed_token_count,
                usage.embedding_token_count,
                usage.billed_reasoning_token_count,
                terms.prices.version,
                usage.cost_picos,
            ),
            hold.admitted_at,
            (usage.currency_code, terms.model, usage.outcome),
            timings,
        )
        usage.receipts.append(receipt)
        rows.append(
            (
                hold.id.int.to_bytes(16, "big"),
                part,
                usage.outcome,
                usage.input_token_count,
                usage.cached_input_token_count,
                usage.generated_token_count,
                usage.delivered_token_count,
                usage.billed_token_count,
                usage.cost_picos,
                None if timings is None else _encode_json(timings).decode(),
                recovered,
                receipt.settled_at,
                receipt.sequence,
                receipt.previous_hash,
                receipt.hash,
                usage.embedding_token_count,
                op.migration_count,
                usage.journalled_token_count,
                usage.reasoning_token_count,
                usage.billed_reasoning_token_count,
            )
        )
    if not rows:
        return []
    signed = "", "", ""
    if signer is not None:
        batch = SignedBatch.sign(signer, [receipt.hash for receipt in chains.added])
        signed = batch.key_id, b"".join(batch.hashes).hex(), batch.signature.hex()
        for receipt in chains.added:
            receipt.batch = batch
    heads = [
        (project_id, head.sequence, head.hash, head.settled_at, before)
        for project_id, before in chains.changed.items()
        for head in (chains.heads[project_id],)
    ]
    return [
        (UPDATE_CHAINS, (*columns("unbtb", heads), len(heads))),
        (INSERT_USAGE_EVENTS, (*signed, *columns("uvvnnnnnnsvtnbbnvnnn", rows))),
    ]


def key_columns(keys: Collection[CounterKey]) -> tuple[Packed, Packed]:
    """Pack counter keys into two array parameters."""
    return id_number_array([number for number, _ in keys]), time_array([start for _, start in keys])


def counter_increments(
    increments: Mapping[CounterKey, tuple[int, int]], limits: Mapping[CounterKey, int]
) -> tuple[list[CounterKey], list[Statement]]:
    """Build a statement that increments counters within their limits; return the keys too.

    If a counter has a limit, the statement returns rows of the key's 1-based index, used and held.
    It fails with GuardFailed if a limit has no room or a counter row is missing.
    """
    if not increments:
        return [], []
    keys = sorted(increments)
    rows = [
        (key[0].to_bytes(16, "big"), key[1], *increments[key], limits.get(key, NO_LIMIT))
        for key in keys
    ]
    return keys, [
        (INCREMENT_AND_RETURN if limits else INCREMENT, (*columns("utnnn", rows), len(keys)))
    ]


def counter_writes(counters: Counters) -> list[Statement]:
    """Build the statements that write the decided values of counters."""
    if counters.unlocked:
        return counter_increments(counters.all_increments(), counters.limits)[1]
    statements: list[Statement] = []
    if counters.changed:
        rows = [counters.rows[key] for key in counters.changed]
        values = (array(row.used for row in rows), array(row.held for row in rows))
        statements.append((UPDATE_COUNTERS, (*key_columns(counters.changed), *values)))
    if counters.would_refuse:
        refusals = (*key_columns(counters.would_refuse), array(counters.would_refuse.values()))
        statements.append((COUNT_WOULD_REFUSE, refusals))
    if untouched := counters.created - counters.changed.keys():  # created for refused requests only
        statements.append((DELETE_COUNTERS, key_columns(untouched)))
    return statements
