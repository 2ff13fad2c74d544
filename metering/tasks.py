"""The background work as Celery tasks: each takes nothing, calls one function, and may run twice at once without harm."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine

import psycopg

from metering.celery_app import TIME_LIMIT_S, task
from metering.db import create_engine, create_sessions
from metering.errors import StoreAway
from metering.holds import sweep_expired_holds
from metering.rating import rate_all_pending

log = logging.getLogger(__name__)


@task("weir.rate_pending")
def rate_pending() -> None:
    """Post to the ledger what has been used since the last time."""
    run(_rate_pending())


@task("weir.sweep_expired_holds")
def sweep() -> None:
    """Settle the holds whose owners are gone."""
    run(sweep_expired_holds(database_url()))


async def _rate_pending() -> None:
    engine = create_engine(database_url(), pool_size=1)
    try:
        await rate_all_pending(create_sessions(engine))
    finally:
        await engine.dispose()


def run(work: Coroutine[object, object, object]) -> None:
    """Run it to its end, on a loop of its own: nothing outlives a task that a fork or a broken connection could spoil."""

    async def bounded() -> None:
        async with asyncio.timeout(TIME_LIMIT_S):
            await work

    try:
        asyncio.run(bounded())
    except (psycopg.OperationalError, StoreAway) as error:
        # The work is still there, and the clock comes round again.
        log.warning("the database is away: %s", str(error.__cause__ or error).partition("\n")[0])


def database_url() -> str:
    """Of the database that the worker works on."""
    return os.environ["WEIR_DATABASE_URL"]
