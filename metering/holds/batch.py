"""Batches of hold operations: one transaction each, atomic, on a fast or a slow path.

The fast path (`plan_…`, `take`) takes no locks beforehand: it decides from cached rows and writes
in one round trip. The database verifies each assumption in the same transaction: the holds are
unchanged, no rule, price or key has changed since it was read, the minute is the assumed one, each
counter has room for all that the batch adds, no request id is in use, and the receipt chains end
at the cached heads. If any check fails, the transaction has no effect and the batch takes the slow
path, as do operations that do not fit by the cache. Counters are incremented, not set, so
concurrent fast batches, of one or several processes, are exact in any order.

The slow path (`execute_batch`) locks the rows that it decides by: read, decide in memory, write
back. Ends come first in a batch, so that their room is available to its admissions.

`HoldConnection` runs batches. It connects on demand and drops the connection after every failure.
Every operation is answered: conflicts are retried, an unavailable or slow database answers
`DatabaseUnavailable`, and the operation that breaks a batch is found by running each one alone.

`decide.py` holds the decisions, `read.py` the reads and locks, `write.py` the writes.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import psycopg
import structlog
from msgspec import structs

from common.backoff import Backoff
from metering.core.errors import (
    DatabaseUnavailable,
    InvariantViolated,
    MeteringError,
    WriteConflict,
)
from metering.core.models import HoldState
from metering.holds.decide import LATEST, BatchReads, BatchWrites, Decisions
from metering.holds.journal import Bind
from metering.holds.known import Known, OwnHolds, known_of, remember
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    Settle,
    Void,
)
from metering.holds.preauthorized_holds import execute_binds
from metering.holds.read import (
    BEGIN_ADMITTING,
    LOCK_CHAINS,
    NO_IDS,
    SELECT_ORPHANS,
    SELECT_RULES_BY_ID,
    lock_counters,
    read_and_lock,
    rules_of_rows,
)
from metering.holds.write import (
    GuardFailed,
    changed_holds,
    counter_writes,
    moved_counters,
    new_holds,
    renewals,
    usage_writes,
)
from metering.quotas import quotas
from metering.quotas.quota_rules import CounterKey, window_starts
from metering.quotas.quotas import Counters, QuotaExceeded, Unsure
from metering.quotas.refusals import Refusals, Refused
from metering.receipts.chaining import BatchSigner, Chains
from metering.store.db import (
    CONNECT_TIMEOUT_S,
    KEEPALIVES,
    BoundedConnection,
    StoreGate,
    connection_options,
    psycopg_conninfo,
)
from metering.store.exchange import (
    Connection,
    Statement,
    columns,
    exchange,
    id_array,
    id_number_array,
)
from metering.store.refusals import AWAY, CONFLICTS, PAUSE_MAX_S, PAUSE_MIN_S, cause_of

EXPIRY_S = 60.0  # longest pause of a process (suspension, slow database) that keeps its holds

BATCH_SIZE_MAX = 128  # decided in one event-loop turn, 0.03 ms per operation (bench/admission.py)

CONFLICT_ATTEMPTS_MAX = 5  # two processes racing for the same new request id need one retry

BATCH_TIMEOUT_S = 8.0  # above the server's time limits: exceeded by a frozen server or network only

SERVER_LIMITS = (
    # Batches take milliseconds. A process that pauses longer between two statements is frozen, and
    # holds counter locks that every other process waits for.
    "idle_in_transaction_session_timeout=2000",
    "lock_timeout=4000",  # above it, so that a batch outwaits a frozen one
    "statement_timeout=6000",
)

# Every statement of a batch finds its rows by key. Generic plans, because planning costs as much as
# running; index scans only, because a plan made on empty tables would keep scanning them.
PLANS = (
    "plan_cache_mode=force_generic_plan",
    "enable_seqscan=off",
    "enable_hashjoin=off",
    "enable_mergejoin=off",
    "jit=off",
)

# Ends the connections of the same process to this database, and waits at most 1 s for each. The
# application name contains the owner's id.
TERMINATE_OTHERS = """
SELECT pg_terminate_backend(pid, 1000)
FROM pg_stat_get_activity(NULL)
WHERE application_name = current_setting('application_name')
  AND datid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid <> pg_backend_pid()
"""

# Sent on each new connection: the database may have been replaced, and receipts signed with a key
# that it lacks could not be verified.
PUBLISH_KEY = "INSERT INTO receipt_keys (id, public_key) VALUES (%s, %s) ON CONFLICT DO NOTHING"

log = structlog.get_logger(__name__)

Op = TypeVar("Op")

IDLE = psycopg.pq.TransactionStatus.IDLE

Answers = Coroutine[Any, Any, list[HoldAnswer | Exception]]

REPEATED = (*CONFLICTS, psycopg.errors.UniqueViolation)
LOST = (*AWAY, OSError)  # OSError includes the timeout

MINUTE = timedelta(minutes=1)
EARLIEST = datetime.min.replace(tzinfo=UTC)
NO_CORRECTION = 0, 0  # of a quota's used and held amounts
CLOCK_ERROR = timedelta(seconds=1)  # allowed in a receipt's time: less than a transaction may take
# Sent after QUOTA_LOCK or with the holds locked, as a separate statement, so that it sees all
# commits up to then. It checks request ids although a unique index does: the index does so only
# with the counters locked, and an insert that waits there for the hold's end would deadlock.
CHECK_KNOWN = """
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
SLOW_PATH = (MeteringError, Unsure)
# Ends first, so that later operations can use their room; renewals touch no counter.
ORDER: dict[type[HoldOperation], int] = {
    Settle: 0,
    Void: 0,
    Expire: 0,
    Renew: 0,
    Extend: 1,
    Admit: 2,
}


@dataclass(slots=True)
class Trip:
    """Decided operations of a fast path; valid if the transaction begins in [since, until).

    decided: each operation with its index in the batch and its answer.
    """

    decisions: Decisions
    since: datetime
    until: datetime
    decided: list[tuple[int, HoldOperation, HoldAnswer]] = field(default_factory=list)


def plan_admissions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Plan the admissions that fit by the cache; None if there are none, or other operations.

    Other operations may release room that the admissions need.
    """
    trip = new_trip(known)
    if trip is None or not batch or {*map(type, batch)} != {Admit}:
        return None
    now, admit = trip.decisions.reads.now, trip.decisions.admit
    for place, op in enumerate(batch):
        if not isinstance(op, Admit) or op.only_asks or (terms := known.terms_of(op)) is None:
            continue
        until = terms.until
        if until is not None and until <= now:
            continue
        try:
            answer = admit(op, terms)
        except SLOW_PATH:
            continue
        trip.decided.append((place, op, answer))
        if until is not None and until < trip.until:
            trip.until = until
    return trip if trip.decided else None


def unknown_rules(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> set[int]:
    """Set cached rules of own holds that are ended or extended; return the numbers not cached."""
    missing: set[int] = set()
    for op in batch:
        if isinstance(op, Settle | Extend) and (hold := own.get(op.hold_id.int)) is not None:
            rules = known.charged.get(hold.terms) or known.rules_of(hold.terms)
            if len(rules) < len(hold.terms.quota_ids):
                missing.update(hold.terms.quota_ids)
            hold.rules = rules
    return missing


def plan_ends(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Plan the settlements of own holds; None if there are none, or a renewal (affects all holds).

    Removes every hold that the batch ends from `own`.
    """
    ended = [
        (place, op, own.pop(op.hold_id.int, None))
        for place, op in enumerate(batch)
        if isinstance(op, Settle | Void)
    ]
    trip = new_trip(known) if ended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    holds, settle = trip.decisions.reads.holds, trip.decisions.settle
    for place, op, hold in ended:
        if (
            hold is not None
            and isinstance(op, Settle)
            and len(hold.rules) == len(hold.terms.quota_ids)
        ):
            holds[hold.id.int] = hold
            try:
                trip.decided.append((place, op, settle(op)))
            except SLOW_PATH:
                continue
    return trip if trip.decided else None


def plan_extensions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Plan the extensions of own holds that fit by the cache; None if none, or a renewal."""
    extended = [(place, op) for place, op in enumerate(batch) if isinstance(op, Extend)]
    trip = new_trip(known) if extended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    reads = trip.decisions.reads
    for place, op in extended:
        if op.hold_id.int in reads.holds:
            continue  # a second extension needs the result of the first
        hold = own.pop(op.hold_id.int, None)
        if hold is None or len(hold.rules) < len(hold.terms.quota_ids):
            continue
        ends = [rule.override_until for rule in hold.rules if rule.override_until is not None]
        reads.holds[op.hold_id.int] = hold
        try:
            if any(end <= reads.now for end in ends):
                raise Unsure
            trip.decided.append((place, op, trip.decisions.extend(op)))
            trip.until = min((trip.until, *ends))
        except SLOW_PATH:
            remember(own, (hold,))
    return trip if trip.decided else None


def seems_to_fit(known: Known, op: Admit) -> bool:
    """Return whether an admission fits by the cache, which may be outdated. Changes nothing."""
    now, terms = known.now(), known.terms_of(op)
    if now is None or terms is None or (terms.until is not None and terms.until <= now):
        return False
    reads = BatchReads(now, terms=known.terms)
    counters = Counters(now, known.counters, guessed=True)
    try:
        Decisions(reads, counters).decide(structs.replace(op, only_asks=True))
    except (MeteringError, Unsure):
        return False
    return True


def new_trip(known: Known) -> Trip | None:
    """Return a trip without operations; None if the cache is empty or too old."""
    now = known.now()
    if now is None or known.snapshot is None:
        return None
    minute = window_starts(now)[1]
    return Trip(
        Decisions(BatchReads(now), Counters(now, known.counters, guessed=True)),
        minute,
        minute + MINUTE,
    )


async def take(
    connection: Connection,
    known: Known,
    own: OwnHolds,
    trip: Trip,
    *,
    owner: str,
    expiry_s: float,
    signer: BatchSigner | None,
) -> None:
    """Write the decisions in one round trip and complete the answers.

    Raises: the database's error if a cached assumption does not hold; nothing is written then.
    """
    writes, counters = trip.decisions.writes, trip.decisions.counters
    keys, moves = moved_counters(counters.all_moves(), counters.limits)
    try:
        if writes.events:
            await write_ends(connection, known, trip, moves, signer)
            return
        inserts = new_holds(writes, owner, expiry_s)
        # Counters before new holds, as in every process: inserts may wait for another's request id.
        statements = [*changed_holds(writes, expiry_s), check(known, trip), *moves, *inserts]
        _, [(now, snapshot, _)], *rows = await exchange(
            connection, [(BEGIN_ADMITTING, ()), *statements] if inserts else statements
        )
    except BaseException:
        for key in counters.changed:
            known.counters.pop(key, None)
        raise
    known.asked(now, snapshot, ())
    corrections: dict[CounterKey, tuple[int, int]] = {}
    for place, used, held, _ in rows[0] if moves and counters.limits else ():
        row = counters.rows.get(keys[place - 1])
        if row is not None:
            corrections[keys[place - 1]] = used - row.used, held - row.held
            row.used, row.held = used, held
    for _, hold in writes.holds:
        hold.admitted_at = hold.charged_at = now
    for hold, _ in writes.extensions.values():
        hold.charged_at = now
    remember(own, [hold for _, hold in writes.holds])
    remember(own, [hold for hold, _ in writes.extensions.values()])
    starts = window_starts(now)
    for _, _, answer in trip.decided:
        if isinstance(answer, Admitted):  # with actual counters and time instead of cached ones
            states = answer.quotas
            answer.admitted_at = states.now = now
            if corrections:
                moved = [
                    corrections.get((rule.number, starts[rule.window]), NO_CORRECTION)
                    for rule in states.rules
                ]
                states.counts = [
                    (used + a, held + b)
                    for (used, held), (a, b) in zip(states.counts, moved, strict=True)
                ]


async def write_ends(
    connection: Connection,
    known: Known,
    trip: Trip,
    moves: Sequence[Statement],
    signer: BatchSigner | None,
) -> None:
    """End holds with their usage; one round trip if their receipt chains are cached, else two."""
    writes, now = trip.decisions.writes, trip.decisions.reads.now
    ends = changed_holds(writes, 0.0)
    projects = {event[0].terms.project_id for event in writes.events}
    cached = [known.heads.get(project_id) for project_id in projects]
    heads = [each[0] for each in cached if each is not None and each[1]]
    if len(heads) == len(projects):
        trip.since, trip.until = now - CLOCK_ERROR, now + CLOCK_ERROR
        chains = Chains.of_rows(
            now, [(head.project_id, head.sequence, head.hash, head.settled_at) for head in heads]
        )
        for project_id in projects:  # restored below if the exchange succeeds
            del known.heads[project_id]
        statements = [
            *ends,
            check(known, trip),
            *usage_writes(chains, writes.events, signer),
            *moves,
        ]
        _, [(now, snapshot, _)], *_ = await exchange(connection, statements)
        locked = {head.project_id: head.sequence for head in heads}
        known.heads |= {head.project_id: (head, True) for head in heads}
    else:
        trip.since, trip.until = EARLIEST, LATEST
        lock = LOCK_CHAINS, (id_array([event[0].id for event in writes.events]),)
        _, _, rows, [(now, snapshot, _)] = await exchange(
            connection, [("BEGIN", ()), *ends, lock, check(known, trip)]
        )
        chains = Chains.of_rows(now, rows)
        locked = {head.project_id: head.sequence for head in chains.heads.values()}
        await exchange(
            connection, [*usage_writes(chains, writes.events, signer), *moves, ("COMMIT", ())]
        )
    known.asked(now, snapshot, ())
    known.continued(locked, chains.heads)


def check(known: Known, trip: Trip) -> Statement:
    """Return CHECK_KNOWN with its values."""
    requests = [
        (hold.terms.project_id, op.request_id.int.to_bytes(16, "big"))
        for op, hold in trip.decisions.writes.holds
    ]
    ids = columns("uu", requests) if requests else (NO_IDS, NO_IDS)
    return CHECK_KNOWN, (str(trip.since), str(trip.until), known.snapshot, *ids)


async def execute_batch(
    connection: Connection,
    operations: Sequence[HoldOperation],
    *,
    process_id: uuid.UUID,
    expiry_s: float,
    refusals: Refusals | None = None,
    signer: BatchSigner | None = None,
    own: OwnHolds | None = None,
) -> list[HoldAnswer | Exception]:
    """Run the operations in one transaction; return each one's result or refusal, in order.

    connection: in autocommit mode, for exclusive use. refusals: counts admissions that quotas
    refuse, and sets their retry-after. signer: of receipts; None: unsigned. own: receives the holds
    taken and extended. A refused operation changes nothing. Raises: errors of the database; then
    the batch may or may not be committed, and the caller must drop the connection.
    """
    orphans = await find_orphans(connection, operations)
    batch = [*operations, *(Void(hold_id) for hold_id in orphans)]
    try:
        reads, writes, answers = await decide_and_commit(
            connection, batch, process_id, expiry_s, signer, unread=True
        )
    except GuardFailed:  # a counter row is missing: the locking read below inserts it
        await exchange(connection, [("ROLLBACK", ())])
        reads, writes, answers = await decide_and_commit(
            connection, batch, process_id, expiry_s, signer, unread=False
        )
    if own is not None:
        remember(
            own,
            [
                *(hold for _, hold in writes.holds),
                *(hold for hold, _ in writes.extensions.values()),
            ],
        )
    if refusals is not None and (refused := refused_of(operations, answers)):
        await refusals.note(connection, reads.now, refused)
    return [answers[index] for index in range(len(operations))]


async def decide_and_commit(
    connection: Connection,
    batch: Sequence[HoldOperation],
    process_id: uuid.UUID,
    expiry_s: float,
    signer: BatchSigner | None,
    *,
    unread: bool,
) -> tuple[BatchReads, BatchWrites, dict[int, HoldAnswer | Exception]]:
    """Decide and write a batch in one transaction.

    unread: allows incrementing counters unread. Raises: GuardFailed if a counter row is missing.
    """
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
        *new_holds(writes, str(process_id), expiry_s),
        *changed_holds(writes, expiry_s),
        *usage_writes(reads.chains, writes.events, signer),
        *counter_writes(counters),
    ]
    rows = await exchange(connection, [*statements, ("COMMIT", ())])
    renewed = (Renewed(frozenset(row[0] for row in each)) for each in rows[: len(renewing)])
    answers.update(
        zip(
            (index for index in sorted(answers) if isinstance(batch[index], Renew)),
            renewed,
            strict=True,
        )
    )
    known, gone = known_of(connection), counters.created - counters.changed.keys()
    known.saw({key: row for key, row in counters.rows.items() if key not in gone})
    known.continued(
        locked, {project_id: reads.chains.heads[project_id] for project_id in reads.chains.changed}
    )
    return reads, writes, answers


def only_gives_back(reads: BatchReads, batch: Sequence[HoldOperation]) -> bool:
    """Return whether all decisions of the batch are independent of the values of counters."""
    if any(isinstance(op, Admit | Extend) for op in batch) or any(
        h.state == HoldState.EXPIRED for h in reads.holds.values()
    ):
        return False
    return not undone_ids(reads, batch)


def undone_ids(reads: BatchReads, batch: Sequence[HoldOperation]) -> set[uuid.UUID]:
    """Return the holds whose end changes what their extensions have posted."""
    return {
        hold.id
        for op in batch
        if isinstance(op, Settle | Void | Expire)
        and (hold := reads.holds.get(op.hold_id.int)) is not None
        and hold.posted_token_count
        and (not isinstance(op, Settle) or hold.known_late(op) is not None)
    }


async def find_orphans(
    connection: Connection, operations: Sequence[HoldOperation]
) -> list[uuid.UUID]:
    """Return the holds of renewing owners that they do not know of, because the answer was lost."""
    orphans: list[uuid.UUID] = []
    for op in operations:
        if isinstance(op, Renew):
            ended = {o.hold_id for o in operations if not isinstance(o, Renew)}
            known = id_array(op.hold_ids | op.spared_ids | ended)
            [rows] = await exchange(connection, [(SELECT_ORPHANS, (str(op.process_id), known))])
            orphans += [row[0] for row in rows]
    return orphans


def counter_keys(reads: BatchReads, batch: Sequence[HoldOperation]) -> set[CounterKey]:
    """Return the keys of all counters that the batch may change."""
    keys: set[CounterKey] = set()
    extended_ids = {op.hold_id for op in batch if isinstance(op, Extend)}
    undone = undone_ids(reads, batch)
    for hold in reads.holds.values():
        if hold.state in (HoldState.HELD, HoldState.EXPIRED):
            extends, undoes = hold.id in extended_ids, hold.id in undone
            keys |= quotas.touched_keys(
                hold.rules, hold.claim(), reads.now, extends=extends, undoes=undoes
            )
    return keys | {rule.key(reads.now) for terms in reads.terms.values() for rule in terms.rules}


def refused_of(
    operations: Sequence[HoldOperation], answers: Mapping[int, HoldAnswer | Exception]
) -> list[Refused]:
    """Return the admissions of a batch that exceed a quota."""
    refused: list[Refused] = []
    for index, op in enumerate(operations):
        if isinstance(op, Admit) and isinstance(answer := answers[index], QuotaExceeded):
            refused.append(
                Refused(
                    op.payer.organization_id,
                    answer,
                    (op.payer.project_id, op.request_id),
                    op.payer.api_key_id,
                )
            )
    return refused


class HoldConnection:
    """Connection that runs one batch at a time. Use as a context manager, or call `close`."""

    def __init__(
        self,
        database_url: str,
        process_id: uuid.UUID,
        *,
        expiry_s: float = EXPIRY_S,
        gate: StoreGate | None = None,
        signer: BatchSigner | None = None,
        own: OwnHolds | None = None,
    ) -> None:
        """Store the parameters; the first batch connects.

        gate: shared by all connections of this process to the same database. signer: of receipts;
        None: unsigned. own: shared by all connections that act for the same owner.
        """
        self._conninfo = psycopg_conninfo(database_url)
        self._process_id = process_id
        self._owner = str(process_id)
        self._expiry_s = expiry_s
        self._gate = gate or StoreGate()
        self._signer = signer
        self._own: OwnHolds = {} if own is None else own
        self.refusals = Refusals()
        self._connection: BoundedConnection | None = None
        self._known: Known | None = None  # cache of the connection

    async def __aenter__(self) -> HoldConnection:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def seems_to_fit(self, op: Admit) -> bool:
        """Return whether an admission fits by the cache, which may be outdated. Sends no query."""
        return self._known is not None and seems_to_fit(self._known, op)

    async def execute(self, batch: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """Return answers in order. An operation with `DatabaseUnavailable` may be committed."""
        if self._known is not None and (missing := unknown_rules(self._known, self._own, batch)):
            await self._execute(partial(self._learn_rules, missing), [])
            if self._known is not None:
                unknown_rules(self._known, self._own, batch)
        done: dict[int, HoldAnswer | Exception] = {}
        for plan in (plan_admissions, plan_ends, plan_extensions):  # ends before extensions
            if (
                self._known is not None
                and (trip := plan(self._known, self._own, batch)) is not None
            ):
                taken = await self._execute(
                    partial(self._take, trip), [op for _, op, _ in trip.decided]
                )
                done |= zip([place for place, _, _ in trip.decided], taken, strict=False)
                if len(done) == len(batch):
                    break
        if len(done) == len(batch) > 0:
            answers = [done[place] for place in range(len(batch))]
        else:
            left = iter(
                await self._execute(
                    self._lock_and_decide,
                    [op for place, op in enumerate(batch) if place not in done],
                )
            )
            answers = [done[place] if place in done else next(left) for place in range(len(batch))]
        for op, answer in zip(batch, answers, strict=True) if self.refusals.awaits_returns else ():
            if isinstance(op, Admit) and isinstance(answer, Admitted):
                self.refusals.on_admitted((op.payer.project_id, op.request_id))
        return answers

    async def _lock_and_decide(
        self, connection: Connection, operations: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        """Run a batch on the slow path."""
        return await execute_batch(
            connection,
            operations,
            process_id=self._process_id,
            expiry_s=self._expiry_s,
            refusals=self.refusals,
            signer=self._signer,
            own=self._own,
        )

    async def _learn_rules(
        self, missing: Collection[int], connection: Connection, _: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        """Read rules of own holds into the cache; if that fails, they take the slow path.

        Later changes of these rules are detected by the checks of every batch.
        """
        [rows] = await exchange(
            connection, [(SELECT_RULES_BY_ID, (id_number_array(list(missing)),))]
        )
        known_of(connection).add_rules(rules_of_rows(connection, rows).values())
        return []

    async def _take(
        self, trip: Trip, connection: Connection, operations: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        """Run a trip; return no answers, with nothing committed, if it needs the slow path."""
        try:
            assert self._known is not None, "an open connection has a cache"
            await take(
                connection,
                self._known,
                self._own,
                trip,
                owner=self._owner,
                expiry_s=self._expiry_s,
                signer=self._signer,
            )
        except (*REPEATED, psycopg.DataError, psycopg.IntegrityError, ValueError) as unforeseen:
            log.debug(
                "batch_takes_slow_path",
                cause=type(unforeseen).__name__,
                operation_count=len(operations),
            )
            if connection.pgconn.transaction_status != IDLE:
                await exchange(connection, [("ROLLBACK", ())])
            return []
        except LOST:
            raise
        except Exception as broken:  # only the slow path can find the operation that caused it
            log.warning(
                "batch_takes_slow_path", cause=repr(broken), operation_count=len(operations)
            )
            await self.close()
            return []
        return [answer for _, _, answer in trip.decided]

    async def bind(self, binds: Sequence[Bind], renewal: Renew) -> list[HoldAnswer | Exception]:
        """Bind holds to requests that were admitted during an outage; return the answers in order.

        renewal: of all holds that the owner knows. Runs first, because it voids holds of the same
        request ids whose answers were lost; no other operation may run meanwhile. If a request id
        is still in use, both run once more: a frozen server may have committed late.
        """
        answers: list[HoldAnswer | Exception] = []
        for _ in range(2):
            [renewed] = await self.execute([renewal])
            if isinstance(renewed, DatabaseUnavailable):
                return [renewed] * len(binds)
            answers = await self._execute(execute_binds, binds)
            if Ended(done=False) not in answers:
                break
        return answers

    async def _execute(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        began_at, pauses, cause = time.monotonic(), Backoff(PAUSE_MIN_S, PAUSE_MAX_S), ""
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            try:
                return await self._execute_in_time(run, batch)
            except DatabaseUnavailable as away:
                return [away] * len(batch)
            except REPEATED as conflict:
                cause = type(conflict).__name__
                log.info("hold_batch_repeated", cause=cause, operation_count=len(batch))
                await self.close()
                if time.monotonic() - began_at > BATCH_TIMEOUT_S:
                    break
                await asyncio.sleep(pauses.next_s() * (0.5 + random.random()))
            except LOST as away:
                log.warning("database_away", cause=str(away).strip() or type(away).__name__)
                await self.close()
                return [
                    DatabaseUnavailable(cause_of(away), retry_after_s=max(self._gate.pause_s, 1.0))
                ] * len(batch)
            except Exception as broken:
                await self.close()
                if len(batch) > 1:
                    return [answer for op in batch for answer in await self._execute(run, [op])]
                log.exception(
                    "hold_operation_failed", operation=[type(op).__name__ for op in batch]
                )
                return [
                    InvariantViolated(f"{type(op).__name__} failed: {broken!r}") for op in batch
                ]
            except BaseException:
                await self.close()
                raise
        return [WriteConflict(cause)] * len(batch)

    async def end_other_connections(self) -> None:
        """Terminate all other connections of the same owner, which must be dead.

        The server still runs what a process sent before it died: a batch that waits for a lock
        commits later. After this call nothing more of it commits. Raises: DatabaseUnavailable.
        """
        [ended] = await self._execute(self._terminate_others, [None])
        if isinstance(ended, Exception):
            raise ended

    async def _terminate_others(
        self, connection: Connection, _: Sequence[None]
    ) -> list[HoldAnswer | Exception]:
        cursor = await connection.execute(TERMINATE_OTHERS)
        if all(terminated for [terminated] in await cursor.fetchall()):
            return [Ended(done=True)]
        return [DatabaseUnavailable("a connection of a dead process is still open")]

    async def close(self) -> None:
        """Drop the connection. The next batch opens a new one."""
        connection, self._connection, self._known = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def _execute_in_time(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        """Run one attempt; report an outage to the gate if it times out.

        A broken connection alone is not an outage: the database may have been restarted.
        """
        connection = self._connection or await self._connect()
        silent = False

        def give_up() -> None:
            nonlocal silent
            silent = True
            connection.abort()

        timer = asyncio.get_running_loop().call_later(BATCH_TIMEOUT_S, give_up)
        try:
            answers = await run(connection, batch)
        except LOST:
            if silent:
                self._gate.failed()
            raise
        finally:
            timer.cancel()
        self._gate.answered()
        return answers

    async def _connect(self) -> BoundedConnection:
        with self._gate.attempt():
            connection = await BoundedConnection.connect(
                self._conninfo,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                options=connection_options(
                    (*SERVER_LIMITS, *PLANS, f"application_name=weir-{self._owner}")
                ),
                **KEEPALIVES,
            )
            self._connection, self._known = connection, known_of(connection)
            if self._signer is not None:
                await connection.execute(
                    PUBLISH_KEY, (self._signer.key_id, self._signer.public_key)
                )
        return connection
