"""What one batch of hold operations writes back, and commits, in one round trip. No decisions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.holds.counter_rows import counter_writes
from metering.holds.exchange import (
    Connection,
    Statement,
    Value,
    array,
    bytes_array,
    exchange,
    id_array,
    id_number_array,
    text_array,
    time_array,
)
from metering.models import HoldState
from metering.operations import Admit, Settled
from metering.quotas.quotas import Counters
from metering.receipts.chaining import BatchSigner, Chains, IssuedReceipt, SignedBatch

INSERT_HOLDS = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels,
                   owner_id, input_token_count, leased_token_count, quota_ids, admitted_at, charged_at, expires_at, embedding)
SELECT id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels::jsonb,
       %s::uuid, input_token_count, leased_token_count, (%s::uuid[])[quotas_from:quotas_to], now(), now(),
       now() + make_interval(secs => %s), embedding
FROM unnest(%s::uuid[], %s::uuid[], %s::uuid[], %s::uuid[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::text[],
            %s::bigint[], %s::bigint[], %s::int[], %s::int[], %s::bool[])
    AS v(id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels,
         input_token_count, leased_token_count, quotas_from, quotas_to, embedding)
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
    """A hold to insert. quota_ids: as numbers."""

    admit: Admit
    price_version: int
    leased_token_count: int
    quota_ids: tuple[int, ...]


class NewUsageEvent(NamedTuple):
    """A usage event to insert."""

    settled: Settled
    part: int
    timings: dict[str, float] | None
    recovered: bool
    receipt: IssuedReceipt
    migration_count: int


@dataclass(slots=True)
class BatchWrites:
    """All that a batch changes. Extensions and ends by the number of the hold."""

    chains: Chains
    holds: list[NewHold] = field(default_factory=list)
    extensions: dict[int, Extension] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    events: list[NewUsageEvent] = field(default_factory=list)
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
        signed = writes.chains.sign(signer)
        statements.append((UPDATE_CHAINS, chain_columns(writes.chains)))
        statements.append((INSERT_USAGE_EVENTS, (*batch_values(signed), *usage_event_columns(writes.events))))
    first_renewal = len(statements)
    for renewing_owner_id, hold_ids in writes.renewed:
        statements.append((RENEW_HOLDS, (expiry_s, str(renewing_owner_id), id_array(hold_ids))))
    rows = await exchange(connection, [*statements, *counter_writes(counters), ("COMMIT", ())])
    return [frozenset(row[0] for row in found) for found in rows[first_renewal : len(statements)]]


def insertion(owner_id: uuid.UUID, expiry_s: float, holds: Sequence[NewHold]) -> Statement:
    """INSERT_HOLDS with its values: the quotas of all payers once, then one list per column; a hold tells which are its own."""
    quota_ids: list[int] = []
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for hold in holds:
        if hold.quota_ids not in places:
            places[hold.quota_ids] = len(quota_ids) + 1, len(quota_ids) + len(hold.quota_ids)
            quota_ids += hold.quota_ids
    admits = [hold.admit for hold in holds]
    payers = [op.payer for op in admits]
    return INSERT_HOLDS, (
        str(owner_id),
        id_number_array(quota_ids),
        expiry_s,
        id_array([op.hold_id for op in admits]),
        id_array([payer.organization_id for payer in payers]),
        id_array([payer.project_id for payer in payers]),
        id_array([payer.api_key_id for payer in payers]),
        id_array([op.request_id for op in admits]),
        bytes_array([op.payload_hash for op in admits]),
        text_array([op.model for op in admits]),
        array([hold.price_version for hold in holds]),
        text_array([json.dumps(op.labels) if op.labels else "{}" for op in admits]),
        array([op.input_token_count for op in admits]),
        array([hold.leased_token_count for hold in holds]),
        array([places[hold.quota_ids][0] for hold in holds]),
        array([places[hold.quota_ids][1] for hold in holds]),
        array([op.embedding for op in admits]),
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
        array(head.project_id.hex() for head in heads),
        array(head.sequence for head in heads),
        bytes_array(head.hash for head in heads),
        array(head.settled_at for head in heads),
    )


def batch_values(batch: SignedBatch | None) -> tuple[str, str, str]:
    """The first values of INSERT_USAGE_EVENTS."""
    return ("", "", "") if batch is None else (batch.key_id, b"".join(batch.hashes).hex(), batch.signature.hex())


def usage_event_columns(events: Sequence[NewUsageEvent]) -> tuple[Value, ...]:
    """One list per column of INSERT_USAGE_EVENTS."""
    settled = [event.settled for event in events]
    return (
        id_array(usage.hold_id for usage in settled),
        array(event.part for event in events),
        array(str(usage.outcome) for usage in settled),
        array(usage.input_token_count for usage in settled),
        array(usage.cached_input_token_count for usage in settled),
        array(usage.generated_token_count for usage in settled),
        array(usage.delivered_token_count for usage in settled),
        array(usage.billed_token_count for usage in settled),
        array(usage.cost_picos for usage in settled),
        text_array(None if event.timings is None else json.dumps(event.timings) for event in events),
        array(event.recovered for event in events),
        time_array(event.receipt.settled_at for event in events),
        array(event.receipt.sequence for event in events),
        bytes_array(event.receipt.previous_hash for event in events),
        bytes_array(event.receipt.hash for event in events),
        array(usage.embedding_token_count for usage in settled),
        array(event.migration_count for event in events),
    )
