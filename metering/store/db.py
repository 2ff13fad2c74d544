"""Connections to PostgreSQL: one SQLAlchemy engine per process, and the URL forms that drivers want.

Administration and reports use sessions; the hot path (`holds.py`) uses psycopg directly on its own connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import psycopg
from sqlalchemy import URL, event, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry

from metering.errors import StoreAway
from metering.store.bounded_connection import KEEPALIVES, BoundedConnection
from metering.store.store_gate import CONNECT_TIMEOUT_S, StoreGate

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
    """The URL for psycopg itself."""
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
            gate.check()
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
