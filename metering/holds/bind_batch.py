"""Gives holds that were taken in advance to the requests that used them while the database was away, as one transaction.

A hold taken in advance has its own id as request id and claims more than one request is expected to need. Binding writes the
request into the row and shrinks the claim to what the request was given, in the counters likewise. It may come after the hold has
expired: then the quotas were charged the whole claim as used, and the difference is given back there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from metering.holds.batch_reads import read_and_lock
from metering.holds.bindings import Bind
from metering.holds.counter_rows import lock_counters
from metering.holds.exchange import Connection, Value, array, bytes_array, exchange, id_array, text_array
from metering.holds.hold_rows import BatchReads, HoldRow
from metering.holds.hold_writes import BatchWrites, write_and_commit
from metering.models import HoldState
from metering.operations import Ended, HoldAnswer
from metering.quotas import quotas
from metering.quotas.quota_rules import CounterKey
from metering.quotas.quotas import Counters

NOBODY = uuid.UUID(int=0)  # no hold is inserted here, so none gets an owner
SELECT_USED_REQUESTS = """
SELECT h.project_id, h.request_id
FROM holds h JOIN unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) USING (project_id, request_id)
WHERE h.state <> 'voided'
"""
BIND_HOLDS = """
UPDATE holds h SET request_id = v.request_id, payload_hash = v.payload_hash, labels = v.labels::jsonb,
    input_token_count = v.input, leased_token_count = v.leased
FROM unnest(%s::uuid[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::bigint[])
    AS v(id, request_id, payload_hash, labels, input, leased)
WHERE h.id = v.id
"""


async def execute_binds(connection: Connection, binds: Sequence[Bind]) -> list[HoldAnswer | Exception]:
    """Bind the holds in one transaction; answer each in order with whether it is now bound to that request.

    One that is bound already is left as it is. One whose request id is in use by another hold stays unbound: what was delivered
    under it is recorded when it is settled, and not billed. Raises whatever the database raises.
    """
    reads = await read_and_lock(connection, {bind.hold_id for bind in binds})
    keys = {key for hold in reads.holds.values() for key in counter_keys(reads, hold)}
    counters = await lock_counters(connection, reads.now, keys)
    requests = id_array(b.payer.project_id for b in binds), id_array(b.request_id for b in binds)
    [used] = await exchange(connection, [(SELECT_USED_REQUESTS, requests)])
    taken = {(project_id, request_id) for project_id, request_id in used}
    answers: list[HoldAnswer | Exception] = []
    new: list[Bind] = []
    for bind in binds:
        hold = reads.holds.get(bind.hold_id.int)
        if hold is None or not hold.unbound:
            answers.append(Ended(done=hold is not None and hold.request_id == bind.request_id))
        elif (bind.payer.project_id, bind.request_id) in taken or hold.state not in (HoldState.HELD, HoldState.EXPIRED):
            answers.append(Ended(done=False))
        else:
            taken.add((bind.payer.project_id, bind.request_id))
            shrink(reads, counters, hold, bind)
            new.append(bind)
            answers.append(Ended(done=True))
    if new:
        await exchange(connection, [(BIND_HOLDS, bind_columns(new))])
    await write_and_commit(connection, NOBODY, 0.0, counters, BatchWrites(reads.chains))
    return answers


def counter_keys(reads: BatchReads, hold: HoldRow) -> set[CounterKey]:
    """The counters in which the hold's claim stands."""
    claim = hold.claim(reads.prices[hold.price_version_id])
    return quotas.touched_keys(reads.rules_of(hold), claim, reads.now, extends=False)


def shrink(reads: BatchReads, counters: Counters, hold: HoldRow, bind: Bind) -> None:
    """Make the claim that of the request."""
    rules = reads.rules_of(hold)
    before = hold.claim(reads.prices[hold.price_version_id])
    if hold.state == HoldState.EXPIRED:
        charged, granted = (hold.input_token_count, hold.leased_token_count), (bind.input_token_count, bind.leased_token_count)
        # Lifetime quotas keep nothing of an expired hold but what is billed, and of an unbound one nothing is.
        windowed = [rule for rule in rules if not rule.is_lifetime]
        quotas.give_back(counters, windowed, before, charged, (0, 0), granted)
        return
    after = before._replace(input_token_count=bind.input_token_count, leased_token_count=bind.leased_token_count)
    for rule in rules:
        counters.add(rule.key(before.charged_at), held=after.held(rule) - before.held(rule))


def bind_columns(binds: Sequence[Bind]) -> tuple[Value, ...]:
    """One list per column of BIND_HOLDS."""
    return (
        id_array(bind.hold_id for bind in binds),
        id_array(bind.request_id for bind in binds),
        bytes_array(bind.payload_hash for bind in binds),
        text_array(json.dumps(bind.labels) for bind in binds),
        array(bind.input_token_count for bind in binds),
        array(bind.leased_token_count for bind in binds),
    )
