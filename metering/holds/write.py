"""What one batch of hold operations writes back, and commits, in one round trip. No decisions."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.core.models import HoldState
from metering.holds.counter_rows import counter_writes
from metering.holds.known import HoldTerms
from metering.holds.operations import Admit, Settle, Settled
from metering.quotas.quotas import Counters
from metering.receipts.chaining import BatchSigner, Chains, IssuedReceipt, SignedBatch
from metering.store.exchange import (
    UUID_OID,
    Connection,
    Statement,
    Value,
    array,
    bigint_array,
    bytes_array,
    exchange,
    id_array,
    id_bytes_array,
    id_number_array,
    packed_array,
    text_array,
    time_array,
)

# What holds have in common comes once for all that have it: `terms` is their place in those arrays.
INSERT_HOLDS = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels,
                   owner_id, input_token_count, leased_token_count, quota_ids, admitted_at, charged_at, expires_at, embedding)
SELECT id, (%s::uuid[])[terms], (%s::uuid[])[terms], (%s::uuid[])[terms], request_id, payload_hash, (%s::text[])[terms],
       (%s::bigint[])[terms], coalesce(labels::jsonb, '{}'), %s::uuid, input_token_count, leased_token_count,
       (%s::uuid[])[(%s::int[])[terms]:(%s::int[])[terms]], now(), now(), now() + make_interval(secs => %s), (%s::bool[])[terms]
FROM unnest(%s::uuid[], %s::int[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::bigint[])
    AS v(id, terms, request_id, payload_hash, labels, input_token_count, leased_token_count)
"""

EXTEND_HOLDS = """
UPDATE holds h SET cached_input_token_count = v.cached, leased_token_count = v.leased, delivered_token_count = v.delivered,
    posted_token_count = v.posted, posted_cost_picos = v.posted_cost, posted_minutes = v.posted_minutes::bigint[],
    charged_at = v.charged_at, expires_at = now() + make_interval(secs => %s)
FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::timestamptz[])
    AS v(id, cached, leased, delivered, posted, posted_cost, posted_minutes, charged_at)
WHERE h.id = v.id
"""

END_HOLDS = """
UPDATE holds h SET state = v.state, cached_input_token_count = v.cached, delivered_token_count = v.delivered, ended_at = now()
FROM unnest(%s::uuid[], %s::text[], %s::bigint[], %s::bigint[]) AS v(id, state, cached, delivered)
WHERE h.id = v.id
"""

# Whoever else has a hold under lock is ending it: renewing it would be in vain, and waiting could deadlock.
RENEW_HOLDS = """
UPDATE holds SET expires_at = now() + make_interval(secs => %s)
WHERE id IN (SELECT id FROM holds WHERE owner_id = %s AND state = 'held' AND id = ANY(%s::uuid[]) FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id
"""

UPDATE_CHAINS = """
UPDATE receipt_chains c SET last_sequence = v.sequence, last_hash = v.hash, last_settled_at = v.settled_at
FROM unnest(%s::uuid[], %s::bigint[], %s::bytea[], %s::timestamptz[]) AS v(project_id, sequence, hash, settled_at)
WHERE c.project_id = v.project_id
"""

# The first three values are empty where no key signs.
INSERT_USAGE_EVENTS = """
WITH signed AS (
    INSERT INTO receipt_batches (key_id, hashes, signature) SELECT key_id, decode(hashes, 'hex'), decode(signature, 'hex')
    FROM (SELECT %s AS key_id, %s AS hashes, %s AS signature) AS v WHERE key_id <> '' RETURNING id
)
INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,
    cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count, price_version_id, cost_picos,
    timings, labels, recovered, admitted_at, settled_at, receipt_sequence, previous_receipt_hash, receipt_hash,
    embedding_token_count, migration_count, receipt_batch_id)
SELECT h.id, v.part, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, v.outcome, v.input, v.cached,
    v.generated, v.delivered, v.billed, h.price_version_id, v.cost, v.timings::jsonb, h.labels, v.recovered, h.admitted_at,
    v.settled_at, v.sequence, v.previous_hash, v.hash, v.embedding, v.migrations, (SELECT id FROM signed)
FROM unnest(%s::uuid[], %s::smallint[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
            %s::bigint[], %s::text[], %s::bool[], %s::timestamptz[], %s::bigint[], %s::bytea[], %s::bytea[],
            %s::bigint[], %s::integer[])
    AS v(hold_id, part, outcome, input, cached, generated, delivered, billed, cost, timings, recovered, settled_at, sequence,
         previous_hash, hash, embedding, migrations)
JOIN holds h ON h.id = v.hold_id
"""


class Extension(NamedTuple):
    """The new values of a hold that was extended. posted_cost_picos: the money that its posted tokens are worth."""

    hold_id: uuid.UUID
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_cost_picos: int
    posted_minutes: tuple[int, ...]
    charged_at: datetime


class End(NamedTuple):
    """The new values of a hold that has ended."""

    hold_id: uuid.UUID
    state: HoldState
    cached_input_token_count: int
    delivered_token_count: int


class NewHold(NamedTuple):
    """A hold to insert."""

    admit: Admit
    terms: HoldTerms
    leased_token_count: int


# A usage event to insert, in the order of INSERT_USAGE_EVENTS: the number of its hold, part, outcome; input, cached, generated,
# delivered and billed tokens, cost; timings as JSON, whether recovered; of its receipt time, place, hash before and hash; embedded
# tokens; migrations.
UsageRow = tuple[int, int, str, int, int, int, int, int, int, str | None, bool, datetime, int, bytes, bytes, int, int]


def usage_row(usage: Settled, part: int, op: Settle, receipt: IssuedReceipt, *, recovered: bool) -> UsageRow:
    """One part of what a hold has used."""
    return (
        usage.hold_id.int,
        part,
        usage.outcome,
        usage.input_token_count,
        usage.cached_input_token_count,
        usage.generated_token_count,
        usage.delivered_token_count,
        usage.billed_token_count,
        usage.cost_picos,
        None if op.timings is None else json.dumps(op.timings),
        recovered,
        receipt.settled_at,
        receipt.sequence,
        receipt.previous_hash,
        receipt.hash,
        usage.embedding_token_count,
        op.migration_count,
    )


@dataclass(slots=True)
class BatchWrites:
    """All that a batch changes. Extensions and ends by the number of the hold."""

    chains: Chains
    holds: list[NewHold] = field(default_factory=list)
    extensions: dict[int, Extension] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    events: list[UsageRow] = field(default_factory=list)
    renewed: list[tuple[uuid.UUID, frozenset[uuid.UUID]]] = field(default_factory=list)


async def write_and_commit(
    connection: Connection,
    owner_id: uuid.UUID,
    expiry_s: float,
    counters: Counters,
    writes: BatchWrites,
    signer: BatchSigner | None = None,
) -> list[frozenset[uuid.UUID]]:
    """Sign the receipts, write all changes and commit, in one round trip. Returns the holds that each renewal moved."""
    statements: list[Statement] = []
    if writes.holds:
        statements.append(insertion(owner_id, expiry_s, writes.holds))
    if writes.extensions:
        statements.append((EXTEND_HOLDS, (expiry_s, *extension_columns(list(writes.extensions.values())))))
    if writes.ends:
        statements.append((END_HOLDS, end_columns(list(writes.ends.values()))))
    if writes.events:
        statements += usage_writes(writes.chains, writes.events, signer)
    first_renewal = len(statements)
    for renewing_owner_id, hold_ids in writes.renewed:
        statements.append((RENEW_HOLDS, (expiry_s, str(renewing_owner_id), id_array(hold_ids))))
    rows = await exchange(connection, [*statements, *counter_writes(counters), ("COMMIT", ())])
    return [frozenset(row[0] for row in found) for found in rows[first_renewal : len(statements)]]


def usage_writes(chains: Chains, events: Sequence[UsageRow], signer: BatchSigner | None) -> list[Statement]:
    """Usage events with their receipts, which are signed here."""
    signed = chains.sign(signer)
    return [
        (UPDATE_CHAINS, chain_columns(chains)),
        (INSERT_USAGE_EVENTS, (*batch_values(signed), *usage_event_columns(events))),
    ]


def insertion(owner_id: uuid.UUID, expiry_s: float, holds: Sequence[NewHold]) -> Statement:
    """INSERT_HOLDS with its values."""
    places: dict[int, int] = {}
    terms: list[HoldTerms] = []
    of_holds: list[int] = []
    for _, each, _ in holds:
        place = places.get(id(each))
        if place is None:
            terms.append(each)
            place = places[id(each)] = len(terms)
        of_holds.append(place)
    ends = list(itertools.accumulate(len(each.quota_ids) for each in terms))
    admits = [op for op, _, _ in holds]
    return INSERT_HOLDS, (
        id_bytes_array([each.payer_ids[:16] for each in terms]),
        id_bytes_array([each.project_id for each in terms]),
        id_bytes_array([each.payer_ids[32:] for each in terms]),
        text_array([each.model for each in terms]),
        bigint_array([each.prices.version for each in terms]),
        str(owner_id),
        packed_array(UUID_OID, [quota_id for each in terms for quota_id in each.packed_quota_ids]),
        array([end - len(each.quota_ids) + 1 for end, each in zip(ends, terms, strict=True)]),
        array(ends),
        expiry_s,
        array([each.embedding for each in terms]),
        id_array([op.hold_id for op in admits]),
        array(of_holds),
        id_array([op.request_id for op in admits]),
        bytes_array([op.payload_hash for op in admits]),
        text_array([json.dumps(op.labels) if op.labels else None for op in admits]),
        bigint_array([op.input_token_count for op in admits]),
        bigint_array([lease for _, _, lease in holds]),
    )


def extension_columns(extensions: Sequence[Extension]) -> tuple[Value, ...]:
    """One list per column of EXTEND_HOLDS."""
    return (
        id_array(each.hold_id for each in extensions),
        array(each.cached_input_token_count for each in extensions),
        array(each.leased_token_count for each in extensions),
        array(each.delivered_token_count for each in extensions),
        array(each.posted_token_count for each in extensions),
        array(each.posted_cost_picos for each in extensions),
        text_array(array(each.posted_minutes) for each in extensions),
        array(each.charged_at for each in extensions),
    )


def end_columns(ends: Sequence[End]) -> tuple[Value, ...]:
    """One list per column of END_HOLDS."""
    return (
        id_array(each.hold_id for each in ends),
        array(each.state for each in ends),
        array(each.cached_input_token_count for each in ends),
        array(each.delivered_token_count for each in ends),
    )


def chain_columns(chains: Chains) -> tuple[Value, ...]:
    """One list per column of UPDATE_CHAINS."""
    heads = [chains.heads[project_id] for project_id in chains.changed]
    return (
        id_bytes_array([head.project_id for head in heads]),
        bigint_array([head.sequence for head in heads]),
        bytes_array([head.hash for head in heads]),
        time_array([head.settled_at for head in heads]),
    )


def batch_values(batch: SignedBatch | None) -> tuple[str, str, str]:
    """The first values of INSERT_USAGE_EVENTS."""
    return ("", "", "") if batch is None else (batch.key_id, b"".join(batch.hashes).hex(), batch.signature.hex())


def usage_event_columns(events: Sequence[UsageRow]) -> tuple[Value, ...]:
    """One list per column of INSERT_USAGE_EVENTS."""
    columns = zip(*events, strict=True)
    holds, parts, outcomes, *counts, timings, recovered, settled, sequences, previous, hashes, embedded, migrations = columns
    return (
        id_number_array(holds),
        array(parts),
        array(outcomes),
        *map(bigint_array, counts),
        text_array(timings),
        array(recovered),
        time_array(settled),
        bigint_array(sequences),
        bytes_array(previous),
        bytes_array(hashes),
        bigint_array(embedded),
        array(migrations),
    )
