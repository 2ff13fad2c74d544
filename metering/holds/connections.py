"""The two connections on which holds of one process are taken and ended, and the batches that run on each.

Admissions have one of their own, so that a batch of them and one of all else are under way at the same time. A connection is
opened when needed and dropped after every failure. Every operation is answered whatever happens: a conflict is repeated, a
database that is away or too slow answers `StoreAway`, and an operation that breaks its batch is found by running each one alone.
From the answers follows what is known of this process's holds: which are live, until when they are ours, whether the database is
there.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import psycopg
import structlog

from metering.core.errors import InvariantViolated, StoreAway
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.batch import (
    Trip,
    execute_batch,
    learn_rules,
    plan_admissions,
    plan_ends,
    plan_extensions,
    seems_to_fit,
    take,
    unknown_rules,
)
from metering.holds.journal import Bind
from metering.holds.known import Known, OwnHolds, known_of
from metering.holds.lease_clock import LeaseClock
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Extend,
    Extended,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    Settle,
    Settled,
    Void,
)
from metering.holds.standing_holds import StandingHolds, execute_binds
from metering.quotas.refusals import Refusals
from metering.receipts.chaining import BatchSigner
from metering.store.db import CONNECT_TIMEOUT_S, KEEPALIVES, BoundedConnection, StoreGate, connection_options, psycopg_conninfo
from metering.store.exchange import Connection, exchange

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
        """Read what of the rules of own holds is not known; where that fails they go the long way."""
        await learn_rules(connection, known_of(connection), missing)
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


class PairedConnections:
    """Runs one batch at a time on each. What needs both takes the turns of both, that of admissions first."""

    def __init__(
        self,
        database_url: str,
        owner_id: uuid.UUID,
        *,
        expiry_s: float,
        gate: StoreGate,
        signer: BatchSigner | None,
        leases: LeaseClock,
        standing: StandingHolds | None,
        used: Callable[[], None],
        came_back: Callable[[], None],
    ) -> None:
        """standing: what is set aside for an outage, if anything.

        used, came_back: called when usage has been written, when the database answers again after it was away or admissions have
        been lost; must not block.
        """
        self._leases = leases
        self._standing = standing
        self.own: OwnHolds = {}
        self._owner_id = owner_id
        self._gate = gate
        self._others, self._admitting = (
            HoldConnection(database_url, owner_id, expiry_s=expiry_s, gate=gate, signer=signer, own=self.own) for _ in range(2)
        )
        self._admission_turn, self._turn = asyncio.Lock(), asyncio.Lock()
        self._spared: set[uuid.UUID] = set()
        self._used = used
        self._came_back = came_back
        self._answered_at: float | None = None
        self._is_answering = False
        self._has_lost_admissions = False  # whose answers never came: whatever they have taken stands in the way of a second try

    async def close(self) -> None:
        """Drop both connections."""
        for connection in (self._others, self._admitting):
            await connection.close()

    @property
    def has_answered(self) -> bool:
        """Whether the database has answered this process at all."""
        return self._answered_at is not None

    @property
    def refusals(self) -> Mapping[tuple[QuotaDimension, QuotaSubject], int]:
        """Admissions that quotas have refused, by the dimension and the subject of the quota in front."""
        return self._admitting.refusals.counts

    def is_quiet(self, for_s: float) -> bool:
        """Whether nothing has been heard of the database for so long."""
        return self._answered_at is None or self._leases.now() - self._answered_at >= for_s

    async def execute(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        """A batch of all but admissions."""
        if not (self._has_given() or Renew in map(type, operations)):
            async with self._turn:
                return await self._execute_on(self._others, operations)
        # Whoever renews ends what nobody knows of: no admission may be half known then.
        async with self._admission_turn, self._turn:
            if not await self._bind():
                return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._others, operations)

    def seems_to_fit(self, op: Admit) -> bool:
        """Whether an admission fits by all that was read for others, which is a guess. Sends no query."""
        return not self._has_given() and self._admitting.seems_to_fit(op)

    async def execute_admissions(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        """A batch of admissions."""
        async with self._admission_turn:
            if self._has_given():
                async with self._turn:
                    if not await self._bind():
                        return [StoreAway("the database does not answer")] * len(operations)
            return await self._execute_on(self._admitting, operations)

    async def _execute_on(
        self, connection: HoldConnection, operations: Sequence[HoldOperation]
    ) -> Sequence[HoldAnswer | Exception]:
        sent_at = self._leases.now()
        batch = [self._renewal() if isinstance(op, Renew) else op for op in operations]
        answers = await connection.execute(batch)
        self._note(batch, answers, sent_at)
        self._note_answer()
        return answers

    def _note_answer(self) -> None:
        """Note whether the database is there; tell that it is again after an outage or a broken connection."""
        if self._gate.away_s is not None:
            self._is_answering = False
            return
        was_away = self._answered_at is not None and not self._is_answering
        self._answered_at, self._is_answering = self._leases.now(), True
        if was_away or self._has_lost_admissions:
            self._has_lost_admissions = False
            self._came_back()

    def _note(self, batch: Sequence[HoldOperation], answers: Sequence[HoldAnswer | Exception], sent_at: float) -> None:
        """Keep the list of live holds, and until when they are ours, as the database has just answered."""
        begun: list[uuid.UUID] = []
        ended: list[uuid.UUID] = []
        has_used = False
        for op, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Admitted):
                begun.append(answer.hold_id)
            elif isinstance(answer, StoreAway):
                self._has_lost_admissions = self._has_lost_admissions or type(op) is Admit
            elif isinstance(op, Settle | Void):
                ended.append(op.hold_id)
                has_used = has_used or isinstance(answer, Settled)
                if self._standing is not None:
                    self._standing.ended(op.hold_id)
                if isinstance(answer, InvariantViolated):
                    # Voiding it would lose what was delivered, renewing it would hold its quotas for ever.
                    self._spared.add(op.hold_id)
            elif isinstance(op, Extend) and isinstance(answer, Extended):
                self._leases.extend(op.hold_id, sent_at)
            elif isinstance(answer, Renewed):
                self._leases.renew(answer.hold_ids, sent_at)
        self._leases.begin(begun, sent_at)
        self._leases.end(ended)
        if has_used:
            self._used()

    def _renewal(self) -> Renew:
        """Of all holds that are live now."""
        return Renew(self._owner_id, frozenset(self._leases.hold_ids), frozenset(self._spared))

    def _has_given(self) -> bool:
        """Whether requests were let in that the database does not know of yet."""
        return self._standing is not None and bool(self._standing.given)

    async def _bind(self) -> bool:
        """After an outage, before all else: tell the database which request has which hold. Whether it was told."""
        standing = self._standing
        if standing is None or not standing.given:
            return True
        given = standing.given
        answers = await self._others.bind(given, self._renewal())
        if any(isinstance(answer, StoreAway) for answer in answers):
            self._note_answer()
            return False
        for bind, answer in zip(given, answers, strict=True):
            standing.bound(bind.hold_id)
            if answer != Ended(done=True):
                log.error("request_not_bound", hold_id=str(bind.hold_id), request_id=str(bind.request_id), cause=str(answer))
        return True
