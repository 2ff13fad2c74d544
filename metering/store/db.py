"""Connections to PostgreSQL: one SQLAlchemy engine per process, psycopg connections with bounded waits, and the store gate.

The gate knows whether PostgreSQL is away. While it is, one attempt at a time is let through, after growing pauses with a random
part; all other calls raise `StoreAway` at once. So an outage costs a process a few attempts per second however many clients come,
and processes that lost the database together do not come back together.

A bounded connection waits for an answer no longer than it may, whatever the server or the network does. The server's own limits do
not help where it is frozen or the network swallows everything, and cancelling a call makes psycopg ask that same server to cancel.
So the socket is shut down: readers fail at once, and the server learns of it as soon as it reads anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Self

import psycopg
from sqlalchemy import URL, event, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry

from common.backoff import Backoff
from metering.core.errors import StoreAway

BACKOFF_LEAST_S = 0.05  # a database that is restarted is missed for no longer than that
BACKOFF_MOST_S = 2.0  # how late, and half as much again, the end of a long outage is noticed
CONNECT_TIMEOUT_S = 5  # beyond it the attempt counts as failed; a local network answers within milliseconds


class StoreGate:
    """Not thread-safe: one event loop asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random) -> None:
        """clock: in seconds. jitter: a random number from 0 to 1."""
        self._clock = clock
        self._jitter = jitter
        self.away_since: float | None = None  # None while the database answers
        self._backoff = Backoff(BACKOFF_LEAST_S, BACKOFF_MOST_S)
        self._next_attempt_at = -math.inf
        self._attempting = False

    @property
    def away_s(self) -> float | None:
        """For how long the database has not answered; None while it does. Starts with the first failure, not with the outage."""
        return None if self.away_since is None else self._clock() - self.away_since

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt is let through; at least a moment."""
        return max(self._next_attempt_at - self._clock(), BACKOFF_LEAST_S)

    def refusal(self) -> StoreAway | None:
        """Return what whoever needs the database is told while it is away and no attempt is due; None if it may be asked."""
        if self.away_since is not None and (self._attempting or self._clock() < self._next_attempt_at):
            return StoreAway("the database does not answer", retry_after_s=max(self.pause_s, 1.0))
        return None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Connect inside the block, whose error counts as a failure. Raises: `refusal`, without trying."""
        if (refusal := self.refusal()) is not None:
            raise refusal
        if self.away_since is None:  # as many at once as there are pools and places in them
            try:
                yield
            except Exception:
                self.failed()
                raise
            return
        self._attempting = True
        try:
            yield
        except BaseException:
            self.failed()
            raise
        finally:
            self._attempting = False

    def answered(self) -> None:
        """The database has answered something."""
        if self.away_since is not None:
            self.away_since = None
            self._backoff.reset()

    def failed(self) -> None:
        """An attempt to connect came to nothing, or the database went silent."""
        if self.away_since is None:
            self.away_since = self._clock()
        pause_s = self._backoff.next_s() * (0.5 + self._jitter())
        self._next_attempt_at = self._clock() + pause_s


ANSWER_TIMEOUT_S = 12.0  # above the server's own statement timeout, which comes first where the server is well
KEEPALIVES: dict[str, Any] = {  # a peer that is gone without a word is found within half a minute; ignored on Unix sockets
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# Every other value of an operator's waits for the server's own disk at least, and some for standbys: they are left alone.
COMMIT_DURABLY = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"

_patience_s: ContextVar[float] = ContextVar("patience_s", default=ANSWER_TIMEOUT_S)


@contextmanager
def patience(answer_timeout_s: float) -> Iterator[None]:
    """Wait for each answer so long at most, inside the block: where a caller waits who has less time than a report takes."""
    before = _patience_s.set(answer_timeout_s)
    try:
        yield
    finally:
        _patience_s.reset(before)


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Raises psycopg.OperationalError where an answer takes longer than `ANSWER_TIMEOUT_S`; the connection is then closed.

    What it commits is on the server's disk: `synchronous_commit = off` of a server, database or role does not hold here.
    """

    @classmethod
    async def connect(cls, *args: Any, **parameters: Any) -> Self:
        """Connect, and demand durable commits. Raises: psycopg.OperationalError."""
        try:
            connection = await super().connect(*args, **parameters)
        except BaseException as error:
            # The error's frames hold the socket of an attempt that is cancelled: it would be open until a garbage collection.
            traceback.clear_frames(error.__traceback__)
            raise
        try:
            await connection.execute(COMMIT_DURABLY)
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """See psycopg: every exchange with the server goes through here."""
        timer = asyncio.get_running_loop().call_later(_patience_s.get(), self.abort)
        try:
            return await super().wait(gen, *args, **kwargs)
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Shut the socket down under whoever waits for it. Does nothing on a connection that is closed."""
        with suppress(psycopg.OperationalError, OSError), socket.socket(fileno=os.dup(self.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


STATEMENT_TIMEOUT_MS = 10_000  # far above the slowest report measured; a runaway statement must not hold rows for ever
IDLE_IN_TRANSACTION_TIMEOUT_MS = 10_000  # whoever sleeps so long in a transaction is frozen, and must not keep its rows locked
POOL_SIZE = 5  # lookups take a millisecond: so many at once serve thousands per second
POOL_WAIT_S = 5.0  # beyond it the pool is stuck behind a database that is too slow: refuse rather than hang

# The last one is no outage of the server's, but this process has slept in a transaction, which the server has ended.
# A server that is read-only has just lost its place to another one.
AWAY = (
    psycopg.OperationalError
    | psycopg.InterfaceError
    | psycopg.errors.IdleInTransactionSessionTimeout
    | psycopg.errors.ReadOnlySqlTransaction
)

Sessions = async_sessionmaker[AsyncSession]


def sqlalchemy_url(database_url: str) -> URL:
    """The URL for SQLAlchemy's psycopg driver, whatever PostgreSQL scheme the setting came with."""
    return make_url(database_url).set(drivername="postgresql+psycopg")


def psycopg_conninfo(database_url: str) -> str:
    return sqlalchemy_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)


def create_engine(database_url: str, *, pool_size: int = POOL_SIZE, gate: StoreGate | None = None) -> AsyncEngine:
    """An asyncio engine with bounded pool and statement timeout. The caller disposes of it.

    Its sessions raise StoreAway for a database that is away or does not answer in time. gate: shared with all others of this
    process that connect to the same database; one of its own if it is not given.
    """
    gate = gate or StoreGate()
    engine = create_async_engine(
        sqlalchemy_url(database_url),
        poolclass=gated_pool(gate),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        pool_pre_ping=True,
        connect_args={"options": connection_options(), "async_creator_fn": gated_connect(gate)},
    )
    event.listen(engine.sync_engine, "handle_error", raise_store_away)
    return engine


def gated_pool(gate: StoreGate) -> type[AsyncAdaptedQueuePool]:
    """A pool that gives nothing out while the database is known to be away."""

    class GatedPool(AsyncAdaptedQueuePool):
        """Raises: StoreAway, also where every connection stays busy for too long."""

        def _do_get(self) -> ConnectionPoolEntry:
            if gate.away_since is not None and (refusal := gate.refusal()) is not None:
                raise refusal
            try:
                return super()._do_get()
            except PoolTimeout as busy:
                raise StoreAway("the database is too slow: all connections to it are busy") from busy

    return GatedPool


def gated_connect(gate: StoreGate) -> Callable[..., Awaitable[BoundedConnection]]:
    """How the pool connects: when the gate lets it, and with bounded patience."""

    async def connect(*args: Any, **parameters: Any) -> BoundedConnection:
        with gate.attempt():
            settings = {"connect_timeout": CONNECT_TIMEOUT_S, **KEEPALIVES, **parameters}
            connection = await BoundedConnection.connect(*args, **settings)
        gate.answered()
        return connection

    return connect


def raise_store_away(context: ExceptionContext) -> None:
    """Tell an outage in the domain's words, without the statement and its values."""
    if context.is_pre_ping:
        return  # the pool's own test of a connection: a dead one is replaced, which nobody needs to hear of
    if isinstance(context.original_exception, AWAY):
        raise StoreAway("the database does not answer") from context.original_exception


def connection_options(extra: Sequence[str] = ()) -> str:
    """libpq `options` that every connection gets. extra: settings that count instead of these."""
    settings = (
        f"statement_timeout={STATEMENT_TIMEOUT_MS}",
        f"idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_TIMEOUT_MS}",
        "timezone=UTC",
        "application_name=weir",
        "tcp_keepalives_idle=30",  # the server, too, finds out that its client is gone
    )
    return " ".join(f"-c {setting}" for setting in (*settings, *extra))


def create_sessions(engine: AsyncEngine) -> Sessions:
    """Sessions whose objects stay readable after commit; nothing loads lazily."""
    return async_sessionmaker(engine, expire_on_commit=False)


def create_lookups(engine: AsyncEngine) -> Sessions:
    """Sessions for single questions, each without a transaction around it: that would be two more ways to the database and back."""
    return create_sessions(engine.execution_options(isolation_level="AUTOCOMMIT"))


async def undurable_settings(sessions: Sessions) -> list[str]:
    """Return the settings of the server by which a crash of its machine loses or corrupts what was committed."""
    async with sessions() as session:
        found = await session.execute(
            text("SELECT name FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'")
        )
        return sorted(found.scalars())


@contextlib.asynccontextmanager
async def lock_holder(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """A session outside any transaction, for advisory locks that last as long as the block. Those of a lost connection are gone."""
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        try:
            yield session
        finally:
            with contextlib.suppress(StoreAway, PendingRollbackError):  # of a broken connection; the server frees its locks
                await session.execute(text("SELECT pg_advisory_unlock_all()"))


async def try_lock(locks: AsyncSession, name: str) -> bool:
    """Take the advisory lock of a name on the session of `lock_holder`; False if another session has it."""
    return bool(await locks.scalar(text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))"), {"name": name}))


async def database_now(session: AsyncSession) -> datetime:
    """Return the time of the database at which the transaction has begun."""
    now: datetime = (await session.execute(text("SELECT now()"))).scalar_one()
    return now


async def read_one_moment(session: AsyncSession, statement_max_s: float) -> None:
    """Let the transaction only read, all of it as of one moment, and no statement of it take longer. Call it first of all."""
    await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    await session.execute(text(f"SET LOCAL statement_timeout = {int(statement_max_s * 1000)}"))
