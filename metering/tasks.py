"""Background work as Celery tasks without arguments, which may run twice at once."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from celery.signals import worker_process_init  # type: ignore[import-untyped]
from sqlalchemy.ext.asyncio import AsyncEngine

from common.incidents import Retries
from common.settings import SettingInvalid, read
from metering.alerts.alerts import fire_due_alerts
from metering.alerts.webhooks import allows_private, deliver_alerts
from metering.celery_app import TIME_LIMIT_S, rating_request, task
from metering.core.errors import DatabaseUnavailable, InvalidValue, InvariantViolated
from metering.export.deliveries import export_usage
from metering.holds.recovery import sweep_expired_holds
from metering.ledger import rating
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import refresh_for_the_month
from metering.quotas import quota_admin
from metering.receipts.signing import load_signer
from metering.retention import RetentionSettings, apply_retention
from metering.store.db import Sessions, create_engine, create_sessions
from metering.store.refusals import AWAY, is_conflict, repeated
from metering.tenants.usage_subjects import archive_all_idle

log = logging.getLogger(__name__)
alerts = Retries("alert_look", passing=(DatabaseUnavailable,))
misstated_retries = Retries("misstated_usage")  # per message, which names the events

# Of a run, without its last step: rating shares the worker, and the next run continues.
RETENTION_BUDGET_S = 10.0

# Of alerts and export one holds the locks; the others take turns, for a millisecond at a time.
CONNECTIONS = 3


@task("weir.rate_pending")
def rate_pending() -> None:
    """Post usage that is not rated yet to the ledger."""
    rating_request.begun()
    run(_rate_pending)


async def _rate_pending(sessions: Sessions) -> None:
    try:
        await rate_all_pending(sessions)
    # The same events each second, until an operator corrects them.
    except InvariantViolated as misstated:
        if misstated_retries.is_due(str(misstated)):
            misstated_retries.failed(misstated, str(misstated))


@task("weir.sweep_expired_holds")
def sweep() -> None:
    """Expire the holds whose processes no longer renew them."""
    try:
        signer = load_signer(os.environ)
    except InvalidValue as error:
        log.error("receipts of swept holds are not signed: %s", error)
        signer = None
    run(lambda _: sweep_expired_holds(database_url(), signer=signer))


@task("weir.delete_past_counters")
def delete_past_counters() -> None:
    """Delete quota counters of past windows."""
    run(quota_admin.delete_all_past_counters)


@task("weir.archive_idle_usage_subjects")
def archive_idle_usage_subjects() -> None:
    """Archive the end users and label values that no request has used for long."""
    run(archive_all_idle)


@task("weir.keep_partitions")
def keep_partitions() -> None:
    """Create the partitions of coming months ahead of time."""
    run(_keep_partitions)


async def _keep_partitions(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await rating.create_partitions(session)


@task("weir.apply_retention")
def remove_old_details() -> None:
    """Remove the details of usage, and the audit entries, that are older than the settings."""
    try:
        given = read(RetentionSettings, os.environ)
    except SettingInvalid as error:
        log.error("no details are removed: %s", error)
        return
    run(lambda sessions: _remove(sessions, given))


async def _remove(sessions: Sessions, given: RetentionSettings) -> None:
    removal = await apply_retention(
        sessions, given, actor="billing worker", budget_s=RETENTION_BUDGET_S
    )
    if removal.obstacles:
        log.warning("a month's usage is due for removal: %s", "; ".join(removal.obstacles))


@task("weir.refresh_prepaid")
def refresh_prepaid() -> None:
    """Enable prepaid credit that begins with a new month."""
    run(refresh_for_the_month)


@task("weir.fire_alerts")
def fire_alerts() -> None:
    """Create and deliver the alerts that are due."""
    try:
        private = allows_private(os.environ)
    except InvalidValue as error:
        log.error("alerts are not delivered: %s", error)
        return

    async def fire_and_deliver(sessions: Sessions) -> None:
        with alerts.survive("scan"):
            await fire_due_alerts(sessions)
        await deliver_alerts(sessions, private=private)

    run(fire_and_deliver)


@task("weir.export_usage")
def export() -> None:
    """Export rated usage if a destination is configured."""
    try:
        run(lambda sessions: export_usage(sessions, os.environ))
    except InvalidValue as error:
        log.error("nothing is exported: %s", error)


# Of a worker process whose tasks run in its main thread: to connect costs more CPU than the work of
# most tasks.
_kept: tuple[asyncio.Runner, AsyncEngine] | None = None


@worker_process_init.connect  # type: ignore[untyped-decorator]
def keep_connections(**_: Any) -> None:
    """Keep event loop and connections between tasks. Thread pools do not send the signal."""
    global _kept
    _kept = new_context()


def new_context() -> tuple[asyncio.Runner, AsyncEngine]:
    return asyncio.Runner(), create_engine(database_url(), pool_size=CONNECTIONS)


def run(work: Callable[[Sessions], Awaitable[object]]) -> None:
    """Run a task's work, and repeat it after a conflict.

    After a failure, its connections are closed, which releases its locks.
    """
    runner, engine = _kept or new_context()

    async def bounded() -> None:
        keeps = False
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                await repeated(lambda: work(create_sessions(engine)))
            keeps = _kept is not None
        finally:
            if not keeps:
                await engine.dispose()

    try:
        runner.run(bounded())
    except* (*AWAY, DatabaseUnavailable) as group:
        # The work is still pending, and the schedule runs it again.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cause = error.__cause__ or error
        what = "other work was in the way" if is_conflict(cause) else "the database is away"
        log.warning("%s: %s", what, str(cause).partition("\n")[0])
    finally:
        if _kept is None:
            runner.close()


def database_url() -> str:
    return os.environ["WEIR_DATABASE_URL"]
