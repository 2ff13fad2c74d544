"""Fast path of a batch of hold operations: decided from the cache, written in one round trip.

It takes no locks beforehand. The database verifies each assumption in the same transaction: the
holds are unchanged, no rule, price or key has changed since it was read, the minute is the assumed
one, each counter has room for all that the batch adds, no request id is in use, and the receipt
chains end at the cached heads. If any check fails, the transaction has no effect and the batch
takes the slow path, as do operations that do not fit by the cache. Counters are incremented, not
set, so concurrent fast batches, of one or several processes, are exact in any order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import psycopg
import structlog
from msgspec import structs

from metering.core.errors import MeteringError
from metering.holds.decide import (
    LATEST,
    AdmissionTerms,
    BatchReads,
    Decisions,
    Hold,
    HoldOwner,
    OwnHolds,
    store_holds,
)
from metering.holds.hold_cache import HoldCache
from metering.holds.operations import (
    Admit,
    Admitted,
    Extend,
    HoldAnswer,
    HoldOperation,
    Renew,
    Settle,
    Void,
)
from metering.holds.read import BEGIN_ADMITTING, LOCK_CHAINS, NO_IDS
from metering.holds.write import changed_holds, counter_increments, new_holds, usage_writes
from metering.quotas.quota_rules import MINUTE, window_starts
from metering.quotas.quotas import Counters, Undecided
from metering.receipts.chaining import BatchSigner, ChainHead, Chains
from metering.store.pipeline import (
    Connection,
    Statement,
    id_array,
    id_bytes_array,
    id_number_array,
    run_pipeline,
)
from metering.store.refusals import LOST, REPEATED

log = structlog.get_logger(__name__)
IDLE = psycopg.pq.TransactionStatus.IDLE
EARLIEST = datetime.min.replace(tzinfo=UTC)
CLOCK_ERROR = timedelta(seconds=1)  # allowed in a receipt's time: less than a transaction may take

# Sent after QUOTA_LOCK or with the holds locked, as a separate statement, so that it sees all
# commits up to then. It checks request ids although a unique index does: the index does so only
# with the counters locked, and an insert that waits there for the hold's end would deadlock.
CHECK_ASSUMPTIONS = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz
    AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)
) AND NOT EXISTS (
    SELECT FROM unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id)
    JOIN holds h USING (project_id, request_id)
    WHERE h.state <> 'voided'))::int
"""

# Raised by a decision, with nothing changed, if its operation has to take the slow path.
NEEDS_SLOW_PATH = (MeteringError, Undecided)

ENDS, CHARGED = (Settle, Void), (Settle, Extend)  # kinds of operations


class FastBatch(msgspec.Struct, eq=False):
    """Operations decided from the cache, valid if the transaction begins in [since, until).

    `decided` has each operation with its index in the batch and its answer.
    """

    decisions: Decisions
    since: datetime
    until: datetime
    decided: list[tuple[int, HoldOperation, HoldAnswer]] = msgspec.field(default_factory=list)


def plan_admissions(
    cache: HoldCache, own: OwnHolds, batch: Sequence[HoldOperation]
) -> FastBatch | None:
    """Decide the admissions that fit by the cache.

    Returns None if none fits, or if the batch has other operations: they may release room that the
    admissions need.
    """
    fast = new_fast_batch(cache) if {*map(type, batch)} == {Admit} else None
    if fast is None:
        return None
    now, admit = fast.decisions.reads.now, fast.decisions.admit
    for index, op in enumerate(batch):
        if not isinstance(op, Admit) or op.only_asks or (terms := terms_of(cache, op)) is None:
            continue
        until = terms.until
        if until is not None and until <= now:
            continue
        try:
            answer = admit(op, terms)
        except NEEDS_SLOW_PATH:
            continue
        fast.decided.append((index, op, answer))
        if until is not None and until < fast.until:
            fast.until = until
    return fast if fast.decided else None


def terms_of(cache: HoldCache, op: Admit) -> AdmissionTerms | None:
    """Look up the cached terms of an admission; None if they are not cached."""
    terms = cache.terms.get(
        (op.payer.api_key_id.int, op.payer.currency_code, op.model, op.tier, op.embedding)
    )
    if terms is None:
        return None
    if terms.payer is not op.payer:
        if terms.payer != op.payer:
            return None
        terms.payer = op.payer  # equal; the next comparison is by identity
    if (op.end_user or op.labels) and (key := terms.member_key(op)) is not None:
        member = terms.members.get(key)
        return None if member is None or member.creation is not None else member
    return terms


def attach_rules(cache: HoldCache, own: OwnHolds, batch: Sequence[HoldOperation]) -> set[int]:
    """Set the rules of own holds that the batch ends or extends, from the cache.

    Returns the numbers of the rules that are not cached.
    """
    missing: set[int] = set()
    for op in batch:
        if isinstance(op, CHARGED) and (hold := own.get(op.hold_id.int)) is not None:
            rules = cache.charged.get(hold.terms) or cache.rules_of(hold.terms)
            if len(rules) < len(hold.terms.quota_ids):
                missing.update(hold.terms.quota_ids)
            hold.rules = rules
    return missing


def plan_settlements(
    cache: HoldCache, own: OwnHolds, batch: Sequence[HoldOperation]
) -> FastBatch | None:
    """Decide the settlements of own holds. Every hold that the batch ends is removed from `own`.

    Returns None if there are none, or if the batch has a renewal, which affects all holds.
    """
    ended = [
        (index, op, own.pop(op.hold_id.int, None))
        for index, op in enumerate(batch)
        if isinstance(op, ENDS)
    ]
    fast = new_fast_batch(cache) if ended and Renew not in map(type, batch) else None
    if fast is None:
        return None
    holds, settle = fast.decisions.reads.holds, fast.decisions.settle
    for index, op, hold in ended:
        if (
            hold is not None
            and isinstance(op, Settle)
            and len(hold.rules) == len(hold.terms.quota_ids)
        ):
            holds[hold.id.int] = hold
            try:
                fast.decided.append((index, op, settle(op)))
            except NEEDS_SLOW_PATH:
                continue
    return fast if fast.decided else None


def plan_extensions(
    cache: HoldCache, own: OwnHolds, batch: Sequence[HoldOperation]
) -> FastBatch | None:
    """Decide the extensions of own holds that fit by the cache; None if none, or with a renewal."""
    extended = [(index, op) for index, op in enumerate(batch) if isinstance(op, Extend)]
    fast = new_fast_batch(cache) if extended and Renew not in map(type, batch) else None
    if fast is None:
        return None
    reads = fast.decisions.reads
    for index, op in extended:
        if op.hold_id.int in reads.holds:
            continue  # a second extension needs the result of the first
        hold = own.pop(op.hold_id.int, None)
        if hold is None or len(hold.rules) < len(hold.terms.quota_ids):
            continue
        override_ends = [
            rule.override_until for rule in hold.rules if rule.override_until is not None
        ]
        reads.holds[op.hold_id.int] = hold
        try:
            if any(end <= reads.now for end in override_ends):
                raise Undecided
            fast.decided.append((index, op, fast.decisions.extend(op)))
            fast.until = min((fast.until, *override_ends))
        except NEEDS_SLOW_PATH:
            store_holds(own, (hold,))
    return fast if fast.decided else None


def seems_to_fit(cache: HoldCache, op: Admit) -> bool:
    """Return True if an admission fits by the cache, which may be outdated. Changes nothing."""
    now, terms = cache.now(), terms_of(cache, op)
    if now is None or terms is None or (terms.until is not None and terms.until <= now):
        return False
    reads = BatchReads(now, terms=cache.terms)
    counters = Counters(now, cache.counters, unlocked=True)
    try:
        Decisions(reads, counters).decide(structs.replace(op, only_asks=True))
    except (MeteringError, Undecided):
        return False
    return True


def new_fast_batch(cache: HoldCache) -> FastBatch | None:
    """Create a batch without operations; None if the cache is empty or too old."""
    now = cache.now()
    if now is None or cache.snapshot is None:
        return None
    minute = window_starts(now)[1]
    return FastBatch(
        Decisions(BatchReads(now), Counters(now, cache.counters, unlocked=True)),
        minute,
        minute + MINUTE,
    )


async def write_batch(
    connection: Connection,
    cache: HoldCache,
    fast: FastBatch,
    owner: HoldOwner,
) -> None:
    """Write the decisions in one round trip and complete the answers.

    Raises: the database's error if something assumed from the cache is wrong; nothing is written
    then.
    """
    writes, counters = fast.decisions.writes, fast.decisions.counters
    keys, increments = counter_increments(counters)
    try:
        if writes.events:
            await write_settlements(connection, cache, fast, increments, owner.signer)
            return
        inserts = new_holds(writes, owner)
        # Counters before new holds, as in every process: inserts may wait for another's request id.
        statements = [
            *changed_holds(writes, owner.expiry_s),
            assumption_check(cache, fast),
            *increments,
            *inserts,
        ]
        _, [(now, snapshot, _)], *rows = await run_pipeline(
            connection, [(BEGIN_ADMITTING, ()), *statements] if inserts else statements
        )
    except BaseException:
        for key in counters.changed:
            cache.counters.pop(key, None)
        raise
    cache.apply_changes(now, snapshot, ())
    corrections: dict[int, tuple[int, int]] = {}  # of the current windows, by rule
    for ordinal, used, held, _ in rows[0] if increments and counters.limits else ():
        key = keys[ordinal - 1]
        row = counters.rows.get(key)
        if row is not None and (used != row.used or held != row.held):
            corrections[key[0]] = used - row.used, held - row.held
            row.used, row.held = used, held
    changed: list[Hold] = []
    for _, hold in writes.holds:
        hold.admitted_at = hold.charged_at = now
        changed.append(hold)
    for hold, _ in writes.extensions.values():
        hold.charged_at = now
        changed.append(hold)
    store_holds(owner.own, changed)
    for _, _, answer in fast.decided:
        if isinstance(answer, Admitted):  # with actual counters and time instead of cached ones
            states = answer.quotas
            answer.admitted_at = states.now = now
            if corrections:
                states.correct(corrections)


async def write_settlements(
    connection: Connection,
    cache: HoldCache,
    fast: FastBatch,
    increments: Sequence[Statement],
    signer: BatchSigner | None,
) -> None:
    """End holds with their usage; one round trip if their receipt chains are cached, else two."""
    writes, now = fast.decisions.writes, fast.decisions.reads.now
    end_holds = changed_holds(writes, 0.0)
    if (chains := cached_chains(cache, fast)) is not None:
        fast.since, fast.until = now - CLOCK_ERROR, now + CLOCK_ERROR
        for project_id in chains.heads:  # restored below if the write succeeds
            del cache.heads[project_id]
        statements = [
            *end_holds,
            assumption_check(cache, fast),
            *usage_writes(chains, writes.events, signer),
            *increments,
        ]
        _, [(now, snapshot, _)], *_ = await run_pipeline(connection, statements)
        cache.apply_changes(now, snapshot, ())
        for project_id, head in chains.heads.items():
            cache.heads[project_id] = head, True
    else:
        fast.since, fast.until = EARLIEST, LATEST
        lock = LOCK_CHAINS, (id_array([event[0].id for event in writes.events]),)
        _, _, rows, [(now, snapshot, _)] = await run_pipeline(
            connection, [("BEGIN", ()), *end_holds, lock, assumption_check(cache, fast)]
        )
        chains = Chains.of_rows(now, rows)
        locked = {head.project_id: head.sequence for head in chains.heads.values()}
        await run_pipeline(
            connection, [*usage_writes(chains, writes.events, signer), *increments, ("COMMIT", ())]
        )
        cache.apply_changes(now, snapshot, ())
        cache.store_heads(locked, chains.heads)


def cached_chains(cache: HoldCache, fast: FastBatch) -> Chains | None:
    """Build the receipt chains of the settlements from the cache; None if one is not cached.

    The chains change the cached heads.
    """
    heads: dict[bytes, ChainHead] = {}
    for hold, *_ in fast.decisions.writes.events:
        project_id = hold.terms.project_id
        cached = cache.heads.get(project_id)
        if cached is None or not cached[1]:
            return None
        heads[project_id] = cached[0]
    return Chains.of_heads(fast.decisions.reads.now, heads)


def assumption_check(cache: HoldCache, fast: FastBatch) -> Statement:
    """Build the statement that verifies what the batch assumed from the cache."""
    project_ids = request_ids = NO_IDS
    if holds := fast.decisions.writes.holds:
        project_ids = id_bytes_array([hold.terms.project_id for _, hold in holds])
        request_ids = id_number_array([op.request_id.int for op, _ in holds])
    times = str(fast.since), str(fast.until)
    return CHECK_ASSUMPTIONS, (*times, cache.snapshot, project_ids, request_ids)


async def execute_fast(
    cache: HoldCache,
    fast: FastBatch,
    owner: HoldOwner,
    drop: Callable[[], Awaitable[None]],
    connection: Connection,
    operations: Sequence[HoldOperation],
) -> list[HoldAnswer | Exception]:
    """Write a batch decided from the cache and return its answers.

    Returns an empty list, with nothing committed, if the batch needs the slow path. `drop` closes
    the connection after an error that no wrong assumption explains.
    """
    try:
        await write_batch(connection, cache, fast, owner)
    except (*REPEATED, psycopg.DataError, psycopg.IntegrityError, ValueError) as unforeseen:
        log.debug(
            "batch_takes_slow_path",
            cause=type(unforeseen).__name__,
            operation_count=len(operations),
        )
        if connection.pgconn.transaction_status != IDLE:
            await run_pipeline(connection, [("ROLLBACK", ())])
        return []
    except LOST:
        raise
    except Exception as broken:  # only the slow path can find the operation that caused it
        log.warning("batch_takes_slow_path", cause=repr(broken), operation_count=len(operations))
        await drop()
        return []
    return [answer for _, _, answer in fast.decided]
