"""Holds of one process: taken, extended and ended through group commit on a connection of its own.

Owns the connection, its reconnection, and the list of holds that this process answers for. A hold that this process forgets (a
crash, an answer lost with its connection) ends all the same: by the journal's recovery, by `Renew`, or by expiry.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
import structlog

from metering.db import connection_options, psycopg_conninfo
from metering.errors import InvariantViolated, StoreAway
from metering.group_commit import GroupCommit, GroupCommitStatistics
from metering.hold_batch import execute_batch
from metering.hold_rows import Connection
from metering.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    HoldAnswer,
    HoldOperation,
    Renew,
    Settle,
    Settled,
    Void,
)

EXPIRY_S = 60.0  # a process may be silent so long (a pause, a slow database) before its holds are taken from it
RENEW_INTERVAL_S = 15.0  # a quarter of the expiry: three renewals may fail before anything is lost
BATCH_SIZE_MAX = 500  # beyond this a batch costs more in memory than it saves in round trips (bench/admission.py)
WAITING_COUNT_MAX = 10_000  # admissions beyond this wait longer than a client would
CONFLICT_ATTEMPTS_MAX = 5  # two processes racing for the same new request id need one repetition
CONNECT_TIMEOUT_S = 5
SETTLE_RETRY_MAX_S = 5.0

log = structlog.get_logger(__name__)

RETRYABLE = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.UniqueViolation)


@dataclass(frozen=True, slots=True)
class HoldStatistics:
    """Holds that this process answers for, and how its operations were batched."""

    live_hold_count: int
    group_commit: GroupCommitStatistics


class HoldStore:
    """The one way in which this process touches holds. `run` must be running for any other call to return."""

    def __init__(self, database_url: str, owner_id: uuid.UUID, *, expiry_s: float = EXPIRY_S) -> None:
        self.owner_id = owner_id
        self._conninfo = psycopg_conninfo(database_url)
        self._expiry_s = expiry_s
        self._connection: Connection | None = None
        self._live: set[uuid.UUID] = set()
        self._commits: GroupCommit[HoldOperation, HoldAnswer] = GroupCommit(
            self._execute,
            orphaned=self._orphaned,
            droppable=lambda op: isinstance(op, Admit | Extend),
            batch_size_max=BATCH_SIZE_MAX,
            waiting_count_max=WAITING_COUNT_MAX,
            overflow=lambda: StoreAway("the database does not keep up with admissions"),
        )

    async def run(self) -> None:
        """Run batches and renew expiries until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_batches(), name="hold batches")
                tasks.create_task(self._renew_regularly(), name="hold renewal")
        finally:
            await self._disconnect()

    async def admit(self, op: Admit) -> Admitted:
        """Take a hold.

        Raises: QuotaExceeded, PriceMissing, KeyInvalid, RequestIdReused, RequestInFlight, RequestSettled, StoreAway.
        """
        answer = await self._commits.submit(op)
        assert isinstance(answer, Admitted)
        return answer

    async def extend(self, op: Extend) -> Extended:
        """Lease more output tokens. Raises: QuotaExceeded, HoldEnded, StoreAway; the lease is then what it was."""
        answer = await self._commits.submit(op)
        assert isinstance(answer, Extended)
        return answer

    async def settle(self, op: Settle) -> Settled:
        """End a hold with its usage. Tries until the database has answered, since the usage must not be lost.

        Raises: InvariantViolated, HoldEnded.
        """
        answer = await self._until_answered(op)
        assert isinstance(answer, Settled)
        return answer

    async def void(self, hold_id: uuid.UUID) -> None:
        """End a hold as if it had never been. Tries until the database has answered."""
        await self._until_answered(Void(hold_id))

    def statistics(self) -> HoldStatistics:
        """Never blocks."""
        return HoldStatistics(len(self._live), self._commits.statistics())

    async def _until_answered(self, op: Settle | Void) -> HoldAnswer:
        delay_s = 0.05
        while True:
            try:
                return await self._commits.submit(op)
            except StoreAway as away:
                log.warning("hold_end_delayed", hold_id=str(op.hold_id), cause=str(away))
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, SETTLE_RETRY_MAX_S)

    async def _run_batches(self) -> None:
        while True:
            await self._commits.run_batch()

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s * RENEW_INTERVAL_S / EXPIRY_S)
            self._commits.post(Renew(self.owner_id, frozenset()))

    async def _execute(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        # The set of live holds is taken here, between batches, when no admission can be half known.
        current = frozenset(self._live)
        batch = [replace(op, hold_ids=current) if isinstance(op, Renew) else op for op in operations]
        answers = await self._execute_repeatedly(batch)
        for op, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Admitted):
                self._live.add(answer.hold_id)
            elif isinstance(op, Settle | Void | Expire) and not isinstance(answer, StoreAway | InvariantViolated):
                # A settlement that failed stays ours: a renewal would void its hold, and with it what was delivered.
                self._live.discard(op.hold_id)
        return answers

    async def _execute_repeatedly(self, batch: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        """Run a batch; repeat it after a conflict, split it after a failure that one operation brought into it."""
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            try:
                connection = await self._connected()
                return await execute_batch(connection, batch, owner_id=self.owner_id, expiry_s=self._expiry_s)
            except RETRYABLE as conflict:
                log.info("hold_batch_repeated", cause=type(conflict).__name__, operation_count=len(batch))
                await self._disconnect()
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as away:
                log.warning("database_away", cause=str(away).strip())
                await self._disconnect()
                return [StoreAway("the database does not answer")] * len(batch)
            except Exception as broken:
                await self._disconnect()
                if len(batch) > 1:
                    return [answer for op in batch for answer in await self._execute_repeatedly([op])]
                log.exception("hold_operation_failed", operation=type(batch[0]).__name__)
                return [InvariantViolated(f"{type(batch[0]).__name__} failed: {broken!r}")]
            except BaseException:
                await self._disconnect()
                raise
        return [StoreAway("the database reports one conflict after another")] * len(batch)

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
            )
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _orphaned(self, op: HoldOperation, answer: HoldAnswer) -> None:
        """The caller of an admission is gone: nobody would ever end the hold it was given."""
        if isinstance(op, Admit) and isinstance(answer, Admitted):
            self._commits.post(Void(answer.hold_id))


async def sweep_expired_holds(database_url: str, *, limit: int = 1000) -> int:
    """Expire holds whose owners have been silent too long, by the database's clock; tells how many. Safe anywhere, anytime."""
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(database_url), autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
    ) as connection:
        cursor = await connection.execute(
            "SELECT id FROM holds WHERE state = 'held' AND expires_at <= now() ORDER BY expires_at LIMIT %s", (limit,)
        )
        overdue = [Expire(row[0]) for row in await cursor.fetchall()]
        if not overdue:
            return 0
        answers = await execute_batch(connection, overdue, owner_id=uuid.uuid4(), expiry_s=EXPIRY_S)
    return sum(1 for answer in answers if isinstance(answer, Ended) and answer.done)
