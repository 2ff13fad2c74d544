"""Connections to PostgreSQL: one SQLAlchemy engine per process, and the URL forms that drivers want.

Administration and reports use sessions; the hot path (`holds.py`) uses psycopg directly on its own connections.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from sqlalchemy import URL, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from metering.errors import StoreAway

STATEMENT_TIMEOUT_MS = 10_000  # far above the slowest report measured; a runaway statement must not hold rows for ever

Sessions = async_sessionmaker[AsyncSession]


def sqlalchemy_url(database_url: str) -> URL:
    """The URL for SQLAlchemy's psycopg driver, whatever PostgreSQL scheme the setting came with."""
    return make_url(database_url).set(drivername="postgresql+psycopg")


def psycopg_conninfo(database_url: str) -> str:
    """The URL for psycopg itself."""
    return sqlalchemy_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)


def create_engine(database_url: str, *, pool_size: int = 5) -> AsyncEngine:
    """An asyncio engine with bounded pool and statement timeout. The caller disposes of it.

    Its sessions raise StoreAway for a database that is away or does not answer in time.
    """
    engine = create_async_engine(
        sqlalchemy_url(database_url),
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"options": connection_options()},
    )
    event.listen(engine.sync_engine, "handle_error", raise_store_away)
    return engine


def raise_store_away(context: ExceptionContext) -> None:
    """Tell an outage in the domain's words, without the statement and its values."""
    if context.is_pre_ping:
        return  # the pool's own test of a connection: a dead one is replaced, which nobody needs to hear of
    if isinstance(context.original_exception, psycopg.OperationalError | psycopg.InterfaceError):
        raise StoreAway("the database does not answer") from context.original_exception


def connection_options(extra: Sequence[str] = ()) -> str:
    """libpq `options` that every connection gets."""
    settings = (
        f"statement_timeout={STATEMENT_TIMEOUT_MS}",
        "timezone=UTC",
        "idle_in_transaction_session_timeout=10000",
    )
    return " ".join(f"-c {setting}" for setting in (*settings, *extra))


def create_sessions(engine: AsyncEngine) -> Sessions:
    """Sessions whose objects stay readable after commit; nothing loads lazily."""
    return async_sessionmaker(engine, expire_on_commit=False)
