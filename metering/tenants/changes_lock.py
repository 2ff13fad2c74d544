"""Changes share a lock, and a whole configuration takes it alone: so its plan is exact at its commit."""

from __future__ import annotations

import psycopg
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.errors import ChangesUnderWay, StoreAway

CHANGES_LOCK_ID = 7_355_609  # any fixed number that is ours
WAIT_MAX_S = 5.0  # below the time limit of statements, so that what is waited for can be told from a database that hangs


async def take_changes_lock(session: AsyncSession, *, alone: bool) -> None:
    """Hold the lock until the transaction ends. Raises: ChangesUnderWay if others keep it for too long."""
    lock = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
    await session.execute(select(func.set_config("lock_timeout", f"{WAIT_MAX_S}s", True)))
    try:
        await session.execute(select(lock(CHANGES_LOCK_ID)))
    except StoreAway as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise ChangesUnderWay from None
        raise
    await session.execute(select(func.set_config("lock_timeout", "0", True)))
