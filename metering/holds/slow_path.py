"""Slow path of a batch of hold operations: lock the rows, decide in memory, write back.

For operations that do not fit by the cache (`fast_path.py`), and those whose batch failed there.
Ends come first in a batch, so that their room is available to its admissions. `read.py` reads and
locks, `decide.py` decides, `write.py` writes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from metering.core.errors import MeteringError
from metering.core.models import HoldState
from metering.holds.decide import BatchReads, BatchWrites, Decisions, HoldOwner, store_holds
from metering.holds.hold_cache import HoldCache, cache_of
from metering.holds.operations import (
    Admit,
    Expire,
    Extend,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    Settle,
    Void,
)
from metering.holds.read import SELECT_ORPHANS, lock_counters, read_and_lock
from metering.holds.write import (
    GuardFailed,
    changed_holds,
    counter_writes,
    new_holds,
    new_members,
    renewals,
    usage_writes,
)
from metering.quotas import quotas
from metering.quotas.quota_rules import CounterKey, QuotaRule
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.quotas.refusals import Refusals, Refused
from metering.store.pipeline import Connection, id_array, run_pipeline

# Ends first, so that later operations can use their room; renewals touch no counter.
ORDER: dict[type[HoldOperation], int] = {
    Settle: 0,
    Void: 0,
    Expire: 0,
    Renew: 0,
    Extend: 1,
    Admit: 2,
}


async def execute_slow(
    connection: Connection,
    operations: Sequence[HoldOperation],
    *,
    owner: HoldOwner,
    refusals: Refusals,
) -> list[HoldAnswer | Exception]:
    """Execute operations in one transaction; return the result or refusal of each, in order.

    `connection` is in autocommit mode and for exclusive use. `refusals` counts admissions that
    quotas refuse and sets their retry-after. `owner.own` receives the holds taken and extended. A
    refused operation changes nothing. Raises: psycopg.Error; the batch may or may not be committed
    then, and the caller must close the connection.
    """
    orphans = await find_orphans(connection, operations)
    batch = [*operations, *(Void(hold_id) for hold_id in orphans)]
    try:
        reads, writes, answers = await decide_and_commit(connection, batch, owner, unread=True)
    except GuardFailed:  # a counter row is missing: the locking read below inserts it
        await run_pipeline(connection, [("ROLLBACK", ())])
        reads, writes, answers = await decide_and_commit(connection, batch, owner, unread=False)
    store_holds(owner.own, (hold for _, hold in writes.holds))
    store_holds(owner.own, (hold for hold, _ in writes.extensions.values()))
    if refused := refused_of(operations, answers):
        await refusals.note(connection, reads.now, refused)
    return [answers[index] for index in range(len(operations))]


async def decide_and_commit(
    connection: Connection,
    batch: Sequence[HoldOperation],
    owner: HoldOwner,
    *,
    unread: bool,
) -> tuple[BatchReads, BatchWrites, dict[int, HoldAnswer | Exception]]:
    """Decide and write a batch in one transaction.

    `unread` allows counters to be incremented without reading them. Raises: GuardFailed if a
    counter row is missing.
    """
    admits = [op for op in batch if isinstance(op, Admit)]
    hold_ids = {op.hold_id for op in batch if not isinstance(op, Admit | Renew)}
    billed_ids = {op.hold_id for op in batch if isinstance(op, Settle | Expire)}
    reads = await read_and_lock(connection, hold_ids, admits, billed_ids, owner.end_users_max)
    locked = {project_id: head.sequence for project_id, head in reads.chains.heads.items()}
    if unread and only_gives_back(reads, batch):
        counters = Counters(reads.now, unlocked=True)
    else:
        keys, rolling = counter_keys(reads, batch)
        counters = await lock_counters(connection, reads.now, keys, rolling)
        counters.rows |= {key: Counter(0, 0) for key in new_keys(reads)}
    decisions = Decisions(reads, counters)
    answers: dict[int, HoldAnswer | Exception] = {}
    for index in sorted(range(len(batch)), key=lambda i: ORDER[type(batch[i])]):
        try:
            answers[index] = decisions.decide(batch[index])
        except MeteringError as refusal:
            answers[index] = refusal
    writes = decisions.writes
    renewing = renewals(writes, owner.expiry_s)
    statements = [
        *renewing,
        *new_members(reads, writes, counters),
        *new_holds(writes, owner),
        *changed_holds(writes, owner.expiry_s),
        *usage_writes(reads.chains, writes.events, owner.signer),
        *counter_writes(counters),
    ]
    rows = await run_pipeline(connection, [*statements, ("COMMIT", ())])
    renewed = (Renewed(frozenset(row[0] for row in each)) for each in rows[: len(renewing)])
    answers.update(
        zip(
            (index for index in sorted(answers) if isinstance(batch[index], Renew)),
            renewed,
            strict=True,
        )
    )
    cache, gone = cache_of(connection), counters.created - counters.changed.keys()
    gone |= new_keys(reads) - counters.changed.keys()
    gone |= {key for key in counters.rows if not is_open(counters, key)}
    take_creations(cache, reads, writes)
    cache.store_counters({key: row for key, row in counters.rows.items() if key not in gone})
    cache.store_heads(
        locked, {project_id: reads.chains.heads[project_id] for project_id in reads.chains.changed}
    )
    return reads, writes, answers


def take_creations(cache: HoldCache, reads: BatchReads, writes: BatchWrites) -> None:
    """Cache the terms whose usage subjects and limits were just committed."""
    for hold_terms in {hold.terms for _, hold in writes.holds} if reads.creations else ():
        if (creation := reads.creations.get(hold_terms)) is not None:
            terms = creation.base.members[creation.key]
            terms.creation = None
            cache.add_member(creation.base, creation.key, terms)
    for creation in reads.creations.values():
        uncommitted = creation.base.members.get(creation.key)
        if uncommitted is not None and uncommitted.creation is not None:
            del creation.base.members[creation.key]


def only_gives_back(reads: BatchReads, batch: Sequence[HoldOperation]) -> bool:
    """Return True if no decision of the batch depends on the value of a counter."""
    if any(isinstance(op, Admit | Extend) for op in batch) or any(
        h.state == HoldState.EXPIRED for h in reads.holds.values()
    ):
        return False
    return not undone_ids(reads, batch)


def undone_ids(reads: BatchReads, batch: Sequence[HoldOperation]) -> set[uuid.UUID]:
    """Find the holds whose end changes amounts that their extensions have posted."""
    return {
        hold.id
        for op in batch
        if isinstance(op, Settle | Void | Expire)
        and (hold := reads.holds.get(op.hold_id.int)) is not None
        and hold.posted_token_count
        and (not isinstance(op, Settle) or hold.corrected_cached_tokens(op) is not None)
    }


async def find_orphans(
    connection: Connection, operations: Sequence[HoldOperation]
) -> list[uuid.UUID]:
    """Find the holds that renewing owners do not know, because the answer was lost."""
    orphans: list[uuid.UUID] = []
    for op in operations:
        if isinstance(op, Renew):
            ended = {o.hold_id for o in operations if not isinstance(o, Renew)}
            known_ids = id_array(op.hold_ids | op.spared_ids | ended)
            [rows] = await run_pipeline(
                connection, [(SELECT_ORPHANS, (str(op.process_id), known_ids))]
            )
            orphans += [row[0] for row in rows]
    return orphans


def is_open(counters: Counters, key: CounterKey) -> bool:
    """Return True unless the row is a closed bucket of a rolling window."""
    opened = counters.opened.get(key[0])
    return opened is None or opened[0] == key


def counter_keys(
    reads: BatchReads, batch: Sequence[HoldOperation]
) -> tuple[set[CounterKey], dict[int, QuotaRule]]:
    """Collect the keys of all counters that the batch may change, and rules with rolling windows.

    The rules are by number.
    """
    keys: set[CounterKey] = set()
    rules: list[QuotaRule] = []
    extended_ids = {op.hold_id for op in batch if isinstance(op, Extend)}
    undone = undone_ids(reads, batch)
    for hold in reads.holds.values():
        if hold.state in (HoldState.HELD, HoldState.EXPIRED):
            extends, undoes = hold.id in extended_ids, hold.id in undone
            keys |= quotas.touched_keys(
                hold.rules, hold.charge(), reads.now, extends=extends, undoes=undoes
            )
            rules += hold.rules
    for terms in (*reads.terms.values(), *reads.members):
        rules += terms.rules
        keys.update(rule.key(reads.now) for rule in terms.rules)
    return keys - new_keys(reads), {rule.number: rule for rule in rules if rule.window_minutes}


def new_keys(reads: BatchReads) -> set[CounterKey]:
    """Collect the counters of limits that the batch may create."""
    return {rule.key(reads.now) for each in reads.creations.values() for rule in each.rules}


def refused_of(
    operations: Sequence[HoldOperation], answers: Mapping[int, HoldAnswer | Exception]
) -> list[Refused]:
    """Collect the admissions of a batch that exceeded a quota."""
    refused: list[Refused] = []
    for index, op in enumerate(operations):
        if isinstance(op, Admit) and isinstance(answer := answers[index], QuotaExceeded):
            refused.append(
                Refused(
                    op.payer.organization_id,
                    answer,
                    op.payer.api_key_id,
                    (op.payer.project_id, op.request_id),
                )
            )
    return refused
