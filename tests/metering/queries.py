"""Single statements in transactions of their own, for tests that look into the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.store.db import Sessions

Values = Mapping[str, object]


async def execute(sessions: Sessions, statement: str, values: Values | None = None) -> None:
    """Run a statement and commit."""
    async with sessions.begin() as session:
        await session.execute(text(statement), values)


async def execute_unguarded(sessions: Sessions, *statements: str) -> None:
    """Run statements in one transaction without triggers and foreign keys, and commit."""
    async with sessions.begin() as session:
        await session.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in statements:
            await session.execute(text(statement))


async def fetch_rows(sessions: Sessions, query: str, values: Values | None = None) -> Sequence[Any]:
    """Run a statement, commit and return all its rows."""
    async with sessions.begin() as session:
        return (await session.execute(text(query), values)).all()


async def fetch_row(sessions: Sessions, query: str, values: Values | None = None) -> Any:
    """Return the only row of a query."""
    [row] = await fetch_rows(sessions, query, values)
    return row


async def fetch_column(sessions: Sessions, query: str, values: Values | None = None) -> list[Any]:
    """Return the first column of a query."""
    return [row[0] for row in await fetch_rows(sessions, query, values)]


async def fetch_value(sessions: Sessions, query: str, values: Values | None = None) -> Any:
    """Return the first value of a query, or None if it has no rows."""
    return next(iter(await fetch_column(sessions, query, values)), None)


ROWS_READ = text("""
SELECT relname, seq_tup_read + idx_tup_fetch AS read
FROM pg_stat_xact_user_tables
WHERE seq_tup_read + idx_tup_fetch > 0
""")


async def rows_read(session: AsyncSession) -> Counter[str]:
    """Return the number of rows that the session's connection has read, by table.

    It grows while statistics are not flushed, which a transaction never does: compare two of one.
    """
    return Counter({row.relname: int(row.read) for row in await session.execute(ROWS_READ)})
