"""The background work as Celery tasks: each takes nothing, calls one function, and may run twice at once without harm."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

import psycopg

from common.incidents import Retries
from metering.alerts.alerts import look_for_alerts
from metering.alerts.delivering import allows_private, deliver_alerts
from metering.celery_app import TIME_LIMIT_S, rating_hurry, task
from metering.core.errors import InvalidValue, InvariantViolated, StoreAway
from metering.export.deliveries import export_usage
from metering.holds.recovery import sweep_expired_holds
from metering.ledger import rating
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import refresh_for_the_month
from metering.quotas import quota_admin
from metering.receipts.signing import load_signer
from metering.store.db import Sessions, create_engine, create_sessions

log = logging.getLogger(__name__)
alerts = Retries("alert_look", passing=(StoreAway,))
misstated_retries = Retries("misstated_usage")  # by what names the events

ALERT_CONNECTIONS = 3  # as for the export, below
EXPORT_CONNECTIONS = 3  # one holds the locks; the others take turns, for a millisecond at a time


@task("weir.rate_pending")
def rate_pending() -> None:
    """Post to the ledger what has been used since the last time."""
    rating_hurry.begun()
    run(_rate_pending)


async def _rate_pending(sessions: Sessions) -> None:
    try:
        await rate_all_pending(sessions)
    except InvariantViolated as misstated:  # the same events each second, until a person corrects them
        if misstated_retries.is_due(str(misstated)):
            misstated_retries.failed(misstated, str(misstated))


@task("weir.sweep_expired_holds")
def sweep() -> None:
    """Settle the holds whose owners are gone."""
    try:
        signer = load_signer(os.environ)
    except InvalidValue as error:
        log.error("receipts of swept holds are not signed: %s", error)
        signer = None
    run(lambda _: sweep_expired_holds(database_url(), signer=signer))


@task("weir.delete_past_counters")
def delete_past_counters() -> None:
    """Keep the counters of quotas from growing for ever."""
    run(quota_admin.delete_all_past_counters)


@task("weir.keep_partitions")
def keep_partitions() -> None:
    """Make the partitions of coming months, before anything is used in them."""
    run(_keep_partitions)


async def _keep_partitions(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await rating.keep_ahead(session)


@task("weir.refresh_prepaid")
def refresh_prepaid() -> None:
    """After a month's begin: let prepaid organizations use the credit that begins with it."""
    run(refresh_for_the_month)


@task("weir.fire_alerts")
def fire_alerts() -> None:
    """Find the limits of which so much is used that somebody wants to know, and tell those who do."""
    try:
        private = allows_private(os.environ)
    except InvalidValue as error:
        log.error("nobody is told of alerts: %s", error)
        return

    async def look_and_deliver(sessions: Sessions) -> None:
        with alerts.survive("look"):
            await look_for_alerts(sessions)
        await deliver_alerts(sessions, private=private)

    run(look_and_deliver, ALERT_CONNECTIONS)


@task("weir.export_usage")
def export() -> None:
    """Hand rated usage over to whoever bills it, if anybody does."""
    try:
        run(lambda sessions: export_usage(sessions, os.environ), EXPORT_CONNECTIONS)
    except InvalidValue as error:
        log.error("nothing is exported: %s", error)


def run(work: Callable[[Sessions], Awaitable[object]], connection_count: int = 1) -> None:
    """Run it to its end, on a loop of its own: nothing outlives a task that a fork or a broken connection could spoil."""

    async def bounded() -> None:
        engine = create_engine(database_url(), pool_size=connection_count)
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                await work(create_sessions(engine))
        finally:
            await engine.dispose()

    try:
        asyncio.run(bounded())
    except* (psycopg.OperationalError, StoreAway) as group:
        # The work is still there, and the clock comes round again.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        log.warning("the database is away: %s", str(error.__cause__ or error).partition("\n")[0])


def database_url() -> str:
    return os.environ["WEIR_DATABASE_URL"]
