"""Holds of one process: taken, extended and ended through group commit on a connection of its own.

Owns the list of holds that this process answers for, and the ends that it owes them. A hold that this process forgets (a crash, an
answer lost with its connection) ends all the same: by the journal's recovery, by `Renew`, or by expiry.
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
from metering.hold_connection import BATCH_SIZE_MAX, CONNECT_TIMEOUT_S, EXPIRY_S, HoldConnection
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

RENEW_INTERVAL_S = 15.0  # a quarter of the expiry: three renewals may fail before anything is lost
WAITING_COUNT_MAX = 10_000  # admissions beyond this wait longer than a client would
SETTLE_RETRY_MAX_S = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HoldStatistics:
    """Holds that this process answers for, and how its operations were batched."""

    live_hold_count: int
    group_commit: GroupCommitStatistics


class HoldStore:
    """The one way in which this process touches holds. `run` must be running for any other call to return."""

    def __init__(self, database_url: str, owner_id: uuid.UUID, *, expiry_s: float = EXPIRY_S) -> None:
        self.owner_id = owner_id
        self._expiry_s = expiry_s
        self._connection = HoldConnection(database_url, owner_id, expiry_s=expiry_s)
        self._live: set[uuid.UUID] = set()
        self._spared: set[uuid.UUID] = set()
        self._owed: dict[uuid.UUID, Settle | Void] = {}
        self._closed = False
        self._commits: GroupCommit[HoldOperation, HoldAnswer] = GroupCommit(
            self._execute,
            orphaned=self._orphaned,
            droppable=lambda op: isinstance(op, Admit | Extend),
            batch_size_max=BATCH_SIZE_MAX,
            waiting_count_max=WAITING_COUNT_MAX,
            overflow=lambda: StoreAway("the database does not keep up with admissions"),
        )

    async def run(self) -> None:
        """Run batches and renew expiries until cancelled; whoever still waits then is told `StoreAway`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_batches(), name="hold batches")
                tasks.create_task(self._renew_regularly(), name="hold renewal")
        finally:
            self._closed = True
            self._commits.close(StoreAway("this process is shutting down"))
            await self._connection.close()

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
        """End a hold with its usage. Tries until the database has answered, even after the caller was cancelled.

        Raises: InvariantViolated, HoldEnded; StoreAway only if `run` has ended: the journal's recovery settles it then.
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
                if self._closed:
                    raise
                log.warning("hold_end_delayed", hold_id=str(op.hold_id), cause=str(away))
            try:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            except asyncio.CancelledError:
                self._owed[op.hold_id] = op
                raise
            delay_s = min(delay_s * 2, SETTLE_RETRY_MAX_S)

    async def _run_batches(self) -> None:
        while True:
            await self._commits.run_batch()

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s * RENEW_INTERVAL_S / EXPIRY_S)
            owed, self._owed = self._owed, {}
            for op in owed.values():
                self._commits.post(op)
            self._commits.post(Renew(self.owner_id, frozenset()))

    async def _execute(self, operations: Sequence[HoldOperation]) -> Sequence[HoldAnswer | Exception]:
        # The set of live holds is taken here, between batches, when no admission can be half known.
        current = frozenset(self._live)
        spared = frozenset(self._spared)
        batch = [replace(op, hold_ids=current, spared_ids=spared) if isinstance(op, Renew) else op for op in operations]
        answers = await self._connection.execute(batch)
        for op, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Admitted):
                self._live.add(answer.hold_id)
            elif isinstance(op, Settle | Void) and not isinstance(answer, StoreAway):
                self._live.discard(op.hold_id)
                if isinstance(answer, InvariantViolated):
                    # Voiding it would lose what was delivered, renewing it would hold its quotas for ever.
                    self._spared.add(op.hold_id)
        return answers

    def _orphaned(self, op: HoldOperation, answer: HoldAnswer | Exception) -> None:
        """Nobody takes the answer: end what an admission obtained, and do later what could not be done now."""
        if isinstance(answer, Admitted):
            self._commits.post(Void(answer.hold_id))
        elif isinstance(op, Settle | Void) and isinstance(answer, StoreAway):
            self._owed[op.hold_id] = op
        elif isinstance(op, Settle) and isinstance(answer, Exception):
            log.error("hold_end_refused", hold_id=str(op.hold_id), cause=str(answer))


async def sweep_expired_holds(database_url: str, *, limit: int = 1000) -> int:
    """Expire holds whose owners have been silent too long, by the database's clock; tells how many. Safe anywhere, anytime.

    Raises: psycopg.OperationalError or StoreAway if the database is away.
    """
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(database_url), autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
    ) as connection:
        cursor = await connection.execute(
            "SELECT id FROM holds WHERE state = 'held' AND expires_at <= now() ORDER BY expires_at LIMIT %s", (limit,)
        )
        overdue = [Expire(row[0]) for row in await cursor.fetchall()]
    answers: list[HoldAnswer | Exception] = []
    async with HoldConnection(database_url, uuid.uuid4()) as holds:
        for start in range(0, len(overdue), BATCH_SIZE_MAX):
            answers += await holds.execute(overdue[start : start + BATCH_SIZE_MAX])
    for answer in answers:
        if isinstance(answer, StoreAway):
            raise answer
    return sum(1 for answer in answers if isinstance(answer, Ended) and answer.done)
