"""Batches of hold operations, each one transaction that is written whole or not at all. There are two ways.

The quick way (`plan_…`, `take`) locks nothing beforehand: operations are decided by what the process remembers, and written in one
round trip. Nothing is decided that the database does not see for itself, in the same transaction: that the holds are as they were,
that no rule, price or key has changed since it was read, that it is the minute that was reckoned with, that every counter has room
for all that the batch adds to it, that no request id is taken, and that the chains of receipts end where they did. Where it sees
anything else nothing is done, and the batch goes the long way, as does whatever needs more than that all of it fits. Counters are
moved, not set: so two such batches, of one process or of several, are exact in any order, and wait for each other only to commit.

The long way (`execute_batch`) locks what it decides by: read, decide in memory, write back. Within a batch what ends goes first, so
that its room serves what is admitted.

`HoldConnection` runs them. It is opened when needed and dropped after every failure. Every operation is answered whatever happens:
a conflict is repeated, a database that is away or too slow answers `StoreAway`, and an operation that breaks its batch is found by
running each one alone.

The decisions are in `decide.py`; what is read and locked in `read.py`, what is written in `write.py`.
"""

from __future__ import annotations

import asyncio
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

from metering.core.errors import InvariantViolated, MeteringError, StoreAway
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
from metering.holds.standing_holds import execute_binds
from metering.holds.write import GuardFailed, changed_holds, counter_writes, moved_counters, new_holds, renewals, usage_writes
from metering.quotas import quotas
from metering.quotas.quota_rules import CounterKey, window_starts
from metering.quotas.quotas import Counters, QuotaExceeded, Unsure
from metering.quotas.refusals import Refusals, Refused
from metering.receipts.chaining import BatchSigner, Chains
from metering.store.db import CONNECT_TIMEOUT_S, KEEPALIVES, BoundedConnection, StoreGate, connection_options, psycopg_conninfo
from metering.store.exchange import Connection, Statement, columns, exchange, id_array, id_number_array

EXPIRY_S = 60.0  # a process may be silent so long (a pause, a slow database) before its holds are taken from it

BATCH_SIZE_MAX = 128  # a batch is decided in one turn of the event loop, at some 0.03 ms for each operation (bench/admission.py)

CONFLICT_ATTEMPTS_MAX = 5  # two processes racing for the same new request id need one repetition

BATCH_TIMEOUT_S = 8.0  # above the server's own time limits: only a frozen server or a network that swallows all takes longer

SERVER_LIMITS = (
    # Batches take milliseconds. A process that sleeps so long between two statements of one is frozen, and has counters locked that
    # every other process waits for.
    "idle_in_transaction_session_timeout=2000",
    "lock_timeout=4000",  # above it, so that a batch outwaits a frozen one
    "statement_timeout=6000",
)

# Every statement of a batch finds its rows by key. So it is planned once, since planning takes as long as running it; and for the
# indexes, whatever the tables look like then: a plan that was made while they were empty would go on reading all of them.
PLANS = (
    "plan_cache_mode=force_generic_plan",
    "enable_seqscan=off",
    "enable_hashjoin=off",
    "enable_mergejoin=off",
    "jit=off",
)


# On each new connection: the database may be another one than before, and nobody could verify what a key signed that it lacks.
PUBLISH_KEY = "INSERT INTO receipt_keys (id, public_key) VALUES (%s, %s) ON CONFLICT DO NOTHING"


log = structlog.get_logger(__name__)


Op = TypeVar("Op")

IDLE = psycopg.pq.TransactionStatus.IDLE

Answers = Coroutine[Any, Any, list[HoldAnswer | Exception]]


CONFLICTS = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.UniqueViolation)

# OSError includes the time-out; a server that is read-only has just lost its place to another one; and it is this process that has
# slept in a transaction if the server has ended that.
AWAY = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
    OSError,
)

MINUTE = timedelta(minutes=1)
EARLIEST = datetime.min.replace(tzinfo=UTC)
NO_CORRECTION = 0, 0  # of what a quota has used and holds
CLOCK_ERROR = timedelta(seconds=1)  # of the time that a receipt says: far less than a transaction may take
# After the lock that whoever sets a quota holds alone, or with the holds under lock, and in a statement of its own: it sees what
# was committed meanwhile. The index would refuse a request id that is taken, but only once the counters are locked; and if the hold
# that has it is just being ended it waits for that, which waits for the counters.
CHECK_KNOWN = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)
) AND NOT EXISTS (
    SELECT FROM unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) JOIN holds h USING (project_id, request_id)
    WHERE h.state <> 'voided'))::int
"""


@dataclass(slots=True)
class Trip:
    """Operations that are decided, in the minute of `now`, if the transaction begins from `since` on and before `until`.

    decided: each with its place in its batch and its answer.
    """

    decisions: Decisions
    since: datetime
    until: datetime
    decided: list[tuple[int, HoldOperation, HoldAnswer]] = field(default_factory=list)


# What a decision raises, having changed nothing, if its operation has to go the long way.
LONG_WAY = (MeteringError, Unsure)


def plan_admissions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Admissions that fit by all that is known; None if there is none, or if anything else is in the batch: it may make room."""
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
        except LONG_WAY:
            continue
        trip.decided.append((place, op, answer))
        if until is not None and until < trip.until:
            trip.until = until
    return trip if trip.decided else None


def unknown_rules(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> set[int]:
    """Give own holds that are ended or extended their rules as they are known; return the numbers of those that are not."""
    missing: set[int] = set()
    for op in batch:
        if isinstance(op, Settle | Extend) and (hold := own.get(op.hold_id.int)) is not None:
            rules = known.charged.get(hold.terms) or known.rules_of(hold.terms)
            if len(rules) < len(hold.terms.quota_ids):
                missing.update(hold.terms.quota_ids)
            hold.rules = rules
    return missing


def plan_ends(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Settlements of own holds; None if there is none, or if holds are renewed, which is about all at once.

    What is ended one way or the other is forgotten.
    """
    ended = [(place, op, own.pop(op.hold_id.int, None)) for place, op in enumerate(batch) if isinstance(op, Settle | Void)]
    trip = new_trip(known) if ended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    holds, settle = trip.decisions.reads.holds, trip.decisions.settle
    for place, op, hold in ended:
        if hold is not None and isinstance(op, Settle) and len(hold.rules) == len(hold.terms.quota_ids):
            holds[hold.id.int] = hold
            try:
                trip.decided.append((place, op, settle(op)))
            except LONG_WAY:
                continue
    return trip if trip.decided else None


def plan_extensions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Extensions of own holds that fit by all that is known; None if there is none, or if holds are renewed."""
    extended = [(place, op) for place, op in enumerate(batch) if isinstance(op, Extend)]
    trip = new_trip(known) if extended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    reads = trip.decisions.reads
    for place, op in extended:
        if op.hold_id.int in reads.holds:
            continue  # a second one goes by what the first has made of the hold
        hold = own.pop(op.hold_id.int, None)
        if hold is None or len(hold.rules) < len(hold.terms.quota_ids):
            continue
        ends = [rule.raised_until for rule in hold.rules if rule.raised_until is not None]
        reads.holds[op.hold_id.int] = hold
        try:
            if any(end <= reads.now for end in ends):
                raise Unsure
            trip.decided.append((place, op, trip.decisions.extend(op)))
            trip.until = min((trip.until, *ends))
        except LONG_WAY:
            remember(own, (hold,))
    return trip if trip.decided else None


def seems_to_fit(known: Known, op: Admit) -> bool:
    """Whether an admission fits by all that is known, which is a guess. Changes nothing."""
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
    """Return a trip without operations; None if nothing is known."""
    now = known.now()
    if now is None or known.snapshot is None:
        return None
    minute = window_starts(now)[1]
    return Trip(Decisions(BatchReads(now), Counters(now, known.counters, guessed=True)), minute, minute + MINUTE)


async def take(
    connection: Connection, known: Known, own: OwnHolds, trip: Trip, *, owner: str, expiry_s: float, signer: BatchSigner | None
) -> None:
    """Write what was decided, and complete the answers.

    Raises: what the database raises where something is not as it was thought to be.
    """
    writes, counters = trip.decisions.writes, trip.decisions.counters
    keys, moves = moved_counters(counters.all_moves(), counters.limits)
    try:
        if writes.events:
            await write_ends(connection, known, trip, moves, signer)
            return
        inserts = new_holds(writes, owner, expiry_s)
        # Counters before new holds: whoever waits for a request id of another has its counters, like everybody else.
        statements = [*changed_holds(writes, expiry_s), check(known, trip), *moves, *inserts]
        _, [(now, snapshot, _)], *rows = await exchange(connection, [(BEGIN_ADMITTING, ()), *statements] if inserts else statements)
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
        if isinstance(answer, Admitted):  # the counters as they really were, and when
            states = answer.quotas
            answer.admitted_at = states.now = now
            moved = [corrections.get((rule.number, starts[rule.window]), NO_CORRECTION) for rule in states.rules]
            states.counts = [(used + a, held + b) for (used, held), (a, b) in zip(states.counts, moved, strict=True)]


async def write_ends(
    connection: Connection, known: Known, trip: Trip, moves: Sequence[Statement], signer: BatchSigner | None
) -> None:
    """End holds with their usage: in one round trip where nobody else continues the chains of receipts, else in two."""
    writes, now = trip.decisions.writes, trip.decisions.reads.now
    ends = changed_holds(writes, 0.0)
    projects = {event[0].terms.project_id for event in writes.events}
    found = [known.heads.get(project_id) for project_id in projects]
    heads = [each[0] for each in found if each is not None and each[1]]
    if len(heads) == len(projects):
        trip.since, trip.until = now - CLOCK_ERROR, now + CLOCK_ERROR
        chains = Chains.of_rows(now, [(head.project_id, head.sequence, head.hash, head.settled_at) for head in heads])
        for project_id in projects:  # until it is known that they were right
            del known.heads[project_id]
        statements = [*ends, check(known, trip), *usage_writes(chains, writes.events, signer), *moves]
        _, [(now, snapshot, _)], *_ = await exchange(connection, statements)
        locked = {head.project_id: head.sequence for head in heads}
        known.heads |= {head.project_id: (head, True) for head in heads}
    else:
        trip.since, trip.until = EARLIEST, LATEST
        lock = LOCK_CHAINS, (id_array([event[0].id for event in writes.events]),)
        _, _, rows, [(now, snapshot, _)] = await exchange(connection, [("BEGIN", ()), *ends, lock, check(known, trip)])
        chains = Chains.of_rows(now, rows)
        locked = {head.project_id: head.sequence for head in chains.heads.values()}
        await exchange(connection, [*usage_writes(chains, writes.events, signer), *moves, ("COMMIT", ())])
    known.asked(now, snapshot, ())
    known.continued(locked, chains.heads)


def check(known: Known, trip: Trip) -> Statement:
    """CHECK_KNOWN with its values."""
    requests = [(hold.terms.project_id, op.request_id.int.to_bytes(16, "big")) for op, hold in trip.decisions.writes.holds]
    ids = columns("uu", requests) if requests else (NO_IDS, NO_IDS)
    return CHECK_KNOWN, (str(trip.since), str(trip.until), known.snapshot, *ids)


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


class HoldConnection:
    """Runs one batch at a time. Use as context manager, or `close` it."""

    def __init__(
        self,
        database_url: str,
        owner_id: uuid.UUID,
        *,
        expiry_s: float = EXPIRY_S,
        gate: StoreGate | None = None,
        signer: BatchSigner | None = None,
        own: OwnHolds | None = None,
    ) -> None:
        """gate: shared with all others of this process that connect to the same database.

        signer: of the receipts, if they are signed. own: shared with all others that act for the same owner.
        """
        self._conninfo = psycopg_conninfo(database_url)
        self._owner_id = owner_id
        self._owner = str(owner_id)
        self._expiry_s = expiry_s
        self._gate = gate or StoreGate()
        self._signer = signer
        self._own: OwnHolds = {} if own is None else own
        self.refusals = Refusals()
        self._connection: BoundedConnection | None = None
        self._known: Known | None = None  # what the connection knows

    async def __aenter__(self) -> HoldConnection:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def seems_to_fit(self, op: Admit) -> bool:
        """Whether an admission fits by all that this connection has read, which is a guess. Sends no query."""
        return self._known is not None and seems_to_fit(self._known, op)

    async def execute(self, batch: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """Answer each operation in order. After `StoreAway` it is unknown whether the operation was done."""
        if self._known is not None and (missing := unknown_rules(self._known, self._own, batch)):
            await self._execute(partial(self._learn_rules, missing), [])
            if self._known is not None:
                unknown_rules(self._known, self._own, batch)
        done: dict[int, HoldAnswer | Exception] = {}
        for plan in (plan_admissions, plan_ends, plan_extensions):  # what ends comes before what is extended
            if self._known is not None and (trip := plan(self._known, self._own, batch)) is not None:
                found = await self._execute(partial(self._take, trip), [op for _, op, _ in trip.decided])
                done |= zip([place for place, _, _ in trip.decided], found, strict=False)
                if len(done) == len(batch):
                    break
        if len(done) == len(batch) > 0:
            answers = [done[place] for place in range(len(batch))]
        else:
            left = iter(await self._execute(self._lock_and_decide, [op for place, op in enumerate(batch) if place not in done]))
            answers = [done[place] if place in done else next(left) for place in range(len(batch))]
        for op, answer in zip(batch, answers, strict=True) if self.refusals.awaits_returns else ():
            if isinstance(op, Admit) and isinstance(answer, Admitted):
                self.refusals.let_in((op.payer.project_id, op.request_id))
        return answers

    async def _lock_and_decide(self, connection: Connection, operations: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """The long way."""
        return await execute_batch(
            connection,
            operations,
            owner_id=self._owner_id,
            expiry_s=self._expiry_s,
            refusals=self.refusals,
            signer=self._signer,
            own=self._own,
        )

    async def _learn_rules(
        self, missing: Collection[int], connection: Connection, _: Sequence[HoldOperation]
    ) -> list[HoldAnswer | Exception]:
        """Read what of the rules of own holds is not known; where that fails they go the long way.

        What changes them from now on is seen by the checks of every batch.
        """
        [rows] = await exchange(connection, [(SELECT_RULES_BY_ID, (id_number_array(list(missing)),))])
        known_of(connection).add_rules(rules_of_rows(connection, rows).values())
        return []

    async def _take(self, trip: Trip, connection: Connection, operations: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """All of the operations at once, or none, which then go the long way: nothing is committed and nothing answered."""
        try:
            assert self._known is not None, "a connection that is open is known"
            await take(connection, self._known, self._own, trip, owner=self._owner, expiry_s=self._expiry_s, signer=self._signer)
        except (*CONFLICTS, psycopg.DataError, psycopg.IntegrityError, ValueError) as unforeseen:
            log.debug("batch_goes_the_long_way", cause=type(unforeseen).__name__, operation_count=len(operations))
            if connection.pgconn.transaction_status != IDLE:
                await exchange(connection, [("ROLLBACK", ())])
            return []
        except AWAY:
            raise
        except Exception as broken:  # the plan is of all together: only the long way can find out whom it is about
            log.warning("batch_goes_the_long_way", cause=repr(broken), operation_count=len(operations))
            await self.close()
            return []
        return [answer for _, _, answer in trip.decided]

    async def bind(self, binds: Sequence[Bind], renewal: Renew) -> list[HoldAnswer | Exception]:
        """The same for requests that were let in without the database.

        renewal: of all that its owner knows. It comes first, since it voids what admissions obtained whose answers were lost, under
        the same request ids; so nothing else may be under way. Where one of these is taken all the same, it comes once more: what a
        frozen server commits as it wakes up stands there now.
        """
        answers: list[HoldAnswer | Exception] = []
        for _ in range(2):
            [renewed] = await self.execute([renewal])
            if isinstance(renewed, StoreAway):
                return [renewed] * len(binds)
            answers = await self._execute(execute_binds, binds)
            if Ended(done=False) not in answers:
                break
        return answers

    async def _execute(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            try:
                return await self._execute_in_time(run, batch)
            except StoreAway as away:
                return [away] * len(batch)
            except CONFLICTS as conflict:
                log.info("hold_batch_repeated", cause=type(conflict).__name__, operation_count=len(batch))
                await self.close()
            except AWAY as away:
                log.warning("database_away", cause=str(away).strip() or type(away).__name__)
                await self.close()
                return [StoreAway("the database does not answer", retry_after_s=max(self._gate.pause_s, 1.0))] * len(batch)
            except Exception as broken:
                await self.close()
                if len(batch) > 1:
                    return [answer for op in batch for answer in await self._execute(run, [op])]
                log.exception("hold_operation_failed", operation=[type(op).__name__ for op in batch])
                return [InvariantViolated(f"{type(op).__name__} failed: {broken!r}") for op in batch]
            except BaseException:
                await self.close()
                raise
        return [StoreAway("the database reports one conflict after another")] * len(batch)

    async def close(self) -> None:
        """Drop the connection. The next batch opens another one."""
        connection, self._connection, self._known = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def _execute_in_time(
        self, run: Callable[[Connection, Sequence[Op]], Answers], batch: Sequence[Op]
    ) -> list[HoldAnswer | Exception]:
        """One attempt. A connection that breaks is no outage: the database may have been restarted. One that says nothing is."""
        connection = self._connection or await self._connect()
        silent = False

        def give_up() -> None:
            nonlocal silent
            silent = True
            connection.abort()

        timer = asyncio.get_running_loop().call_later(BATCH_TIMEOUT_S, give_up)
        try:
            answers = await run(connection, batch)
        except AWAY:
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
                options=connection_options((*SERVER_LIMITS, *PLANS)),
                **KEEPALIVES,
            )
            self._connection, self._known = connection, known_of(connection)
            if self._signer is not None:
                await connection.execute(PUBLISH_KEY, (self._signer.key_id, self._signer.public_key))
        return connection
