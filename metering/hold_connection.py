"""The connection on which batches of hold operations run: opened when needed, dropped after every failure.

Answers every operation whatever happens: a conflict is repeated, a database that is away or too slow answers `StoreAway`, and an
operation that breaks its batch is found by running each one alone, so that the others do not suffer from it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from types import TracebackType

import psycopg
import structlog

from metering.db import connection_options, psycopg_conninfo
from metering.errors import InvariantViolated, StoreAway
from metering.hold_batch import execute_batch
from metering.hold_rows import Connection
from metering.operations import HoldAnswer, HoldOperation

EXPIRY_S = 60.0  # a process may be silent so long (a pause, a slow database) before its holds are taken from it
BATCH_SIZE_MAX = 500  # beyond this a batch costs more in memory than it saves in round trips (bench/admission.py)
CONFLICT_ATTEMPTS_MAX = 5  # two processes racing for the same new request id need one repetition
CONNECT_TIMEOUT_S = 5
BATCH_TIMEOUT_S = 15.0  # above the server's own statement timeout: only a network that swallows everything takes longer

log = structlog.get_logger(__name__)

CONFLICTS = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.UniqueViolation)
# OSError includes the time-out; a server that is read-only has just lost its place to another one.
AWAY = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction, OSError)


class HoldConnection:
    """Runs one batch at a time. Use as context manager, or `close` it."""

    def __init__(self, database_url: str, owner_id: uuid.UUID, *, expiry_s: float = EXPIRY_S) -> None:
        self._conninfo = psycopg_conninfo(database_url)
        self._owner_id = owner_id
        self._expiry_s = expiry_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> HoldConnection:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def execute(self, batch: Sequence[HoldOperation]) -> list[HoldAnswer | Exception]:
        """Answer each operation in order. After `StoreAway` it is unknown whether the operation was done."""
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(BATCH_TIMEOUT_S):
                    connection = await self._connected()
                    return await execute_batch(connection, batch, owner_id=self._owner_id, expiry_s=self._expiry_s)
            except CONFLICTS as conflict:
                log.info("hold_batch_repeated", cause=type(conflict).__name__, operation_count=len(batch))
                await self.close()
            except AWAY as away:
                log.warning("database_away", cause=str(away).strip() or type(away).__name__)
                await self.close()
                return [StoreAway("the database does not answer")] * len(batch)
            except Exception as broken:
                await self.close()
                if len(batch) > 1:
                    return [answer for op in batch for answer in await self.execute([op])]
                log.exception("hold_operation_failed", operation=type(batch[0]).__name__)
                return [InvariantViolated(f"{type(batch[0]).__name__} failed: {broken!r}")]
            except BaseException:
                await self.close()
                raise
        return [StoreAway("the database reports one conflict after another")] * len(batch)

    async def close(self) -> None:
        """Drop the connection. The next batch opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
            )
        return self._connection
