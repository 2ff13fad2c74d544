"""One batch of hold operations as one transaction that locks what it decides by: read, decide in memory, write back.

The decisions are in `decide.py`; what is read and locked in `read.py`, what is written in `write.py`. Within a batch what ends goes
first, so that its room serves what is admitted. What can do without the locks goes another way (`one_trip.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from metering.core.errors import MeteringError
from metering.core.models import HoldState
from metering.holds.decide import BatchReads, BatchWrites, Decisions
from metering.holds.known import OwnHolds, known_of, remember
from metering.holds.operations import Admit, Expire, Extend, HoldAnswer, HoldOperation, Renew, Renewed, Settle, Void
from metering.holds.read import SELECT_ORPHANS, lock_counters, read_and_lock
from metering.holds.write import GuardFailed, changed_holds, counter_writes, new_holds, renewals, usage_writes
from metering.quotas import quotas
from metering.quotas.quota_rules import CounterKey
from metering.quotas.quotas import Counters, QuotaExceeded
from metering.quotas.refusals import Refusals, Refused
from metering.receipts.chaining import BatchSigner
from metering.store.exchange import Connection, exchange, id_array

# Ends first, so that their room is there for what comes in; renewals touch no counter.
ORDER: dict[type[HoldOperation], int] = {Settle: 0, Void: 0, Expire: 0, Renew: 0, Extend: 1, Admit: 2}


async def execute_batch(
    connection: Connection,
    operations: Sequence[HoldOperation],
    *,
    owner_id: uuid.UUID,
    expiry_s: float,
    refusals: Refusals | None = None,
    signer: BatchSigner | None = None,
    own: OwnHolds | None = None,
) -> list[HoldAnswer | Exception]:
    """Run the operations in one transaction; answer each in order with its result or the error that refused it.

    refusals: counts admissions that quotas refuse, and tells each when to try again. signer: of the receipts, if they are signed.
    own: told of what is taken and extended here.
    connection: in autocommit mode and used by nobody else meanwhile. A refused operation changes nothing. Raises whatever the
    database raises; the caller must then drop the connection, and whether the batch was committed is unknown to it.
    """
    orphans = await find_orphans(connection, operations)
    batch = [*operations, *(Void(hold_id) for hold_id in orphans)]
    try:
        reads, writes, answers = await decide_and_commit(connection, batch, owner_id, expiry_s, signer, unread=True)
    except GuardFailed:  # a counter is not there: with its row locked that is decided about too
        await exchange(connection, [("ROLLBACK", ())])
        reads, writes, answers = await decide_and_commit(connection, batch, owner_id, expiry_s, signer, unread=False)
    if own is not None:
        remember(own, [*(hold for _, hold in writes.holds), *(hold for hold, _ in writes.extensions.values())])
    if refusals is not None and (refused := refused_of(operations, answers)):
        await refusals.note(connection, reads.now, refused)
    return [answers[index] for index in range(len(operations))]


async def decide_and_commit(
    connection: Connection,
    batch: Sequence[HoldOperation],
    owner_id: uuid.UUID,
    expiry_s: float,
    signer: BatchSigner | None,
    *,
    unread: bool,
) -> tuple[BatchReads, BatchWrites, dict[int, HoldAnswer | Exception]]:
    """One transaction. unread: whether counters may be moved without being read. Raises: GuardFailed if one is missing then."""
    admits = [op for op in batch if isinstance(op, Admit)]
    hold_ids = {op.hold_id for op in batch if not isinstance(op, Admit | Renew)}
    billed_ids = {op.hold_id for op in batch if isinstance(op, Settle | Expire)}
    reads = await read_and_lock(connection, hold_ids, admits, billed_ids)
    locked = {project_id: head.sequence for project_id, head in reads.chains.heads.items()}
    if unread and only_gives_back(reads, batch):
        counters = Counters(reads.now, guessed=True)
    else:
        counters = await lock_counters(connection, reads.now, counter_keys(reads, batch))
    decisions = Decisions(reads, counters)
    answers: dict[int, HoldAnswer | Exception] = {}
    for index in sorted(range(len(batch)), key=lambda i: ORDER[type(batch[i])]):
        try:
            answers[index] = decisions.decide(batch[index])
        except MeteringError as refusal:
            answers[index] = refusal
    writes = decisions.writes
    renewing = renewals(writes, expiry_s)
    statements = [
        *renewing,
        *new_holds(writes, str(owner_id), expiry_s),
        *changed_holds(writes, expiry_s),
        *usage_writes(reads.chains, writes.events, signer),
        *counter_writes(counters),
    ]
    rows = await exchange(connection, [*statements, ("COMMIT", ())])
    renewed = (Renewed(frozenset(row[0] for row in found)) for found in rows[: len(renewing)])
    answers.update(zip((index for index in sorted(answers) if isinstance(batch[index], Renew)), renewed, strict=True))
    known, gone = known_of(connection), counters.created - counters.changed.keys()
    known.saw({key: row for key, row in counters.rows.items() if key not in gone})
    known.continued(locked, {project_id: reads.chains.heads[project_id] for project_id in reads.chains.changed})
    return reads, writes, answers


def only_gives_back(reads: BatchReads, batch: Sequence[HoldOperation]) -> bool:
    """Whether no decision of the batch depends on how full a counter is."""
    if any(isinstance(op, Admit | Extend) for op in batch) or any(h.state == HoldState.EXPIRED for h in reads.holds.values()):
        return False
    undone = [reads.holds.get(op.hold_id.int) for op in batch if isinstance(op, Void | Expire)]
    return not any(hold is not None and hold.posted_token_count for hold in undone)


async def find_orphans(connection: Connection, operations: Sequence[HoldOperation]) -> list[uuid.UUID]:
    """Holds of a renewing owner that it does not know: their admission was committed, but the answer never reached it."""
    found: list[uuid.UUID] = []
    for op in operations:
        if isinstance(op, Renew):
            ended = {o.hold_id for o in operations if not isinstance(o, Renew)}
            known = id_array(op.hold_ids | op.spared_ids | ended)
            [rows] = await exchange(connection, [(SELECT_ORPHANS, (str(op.owner_id), known))])
            found += [row[0] for row in rows]
    return found


def counter_keys(reads: BatchReads, batch: Sequence[HoldOperation]) -> set[CounterKey]:
    """Every counter that the batch may touch."""
    keys: set[CounterKey] = set()
    extended_ids = {op.hold_id for op in batch if isinstance(op, Extend)}
    undone_ids = {op.hold_id for op in batch if isinstance(op, Void | Expire)}
    for hold in reads.holds.values():
        if hold.state in (HoldState.HELD, HoldState.EXPIRED):
            extends, undoes = hold.id in extended_ids, hold.id in undone_ids
            keys |= quotas.touched_keys(hold.rules, hold.claim(), reads.now, extends=extends, undoes=undoes)
    return keys | {rule.key(reads.now) for terms in reads.terms.values() for rule in terms.rules}


def refused_of(operations: Sequence[HoldOperation], answers: Mapping[int, HoldAnswer | Exception]) -> list[Refused]:
    """The admissions of a batch that do not fit a quota."""
    found: list[Refused] = []
    for index, op in enumerate(operations):
        if isinstance(op, Admit) and isinstance(answer := answers[index], QuotaExceeded):
            found.append(Refused(op.payer.organization_id, answer, (op.payer.project_id, op.request_id), op.payer.api_key_id))
    return found
