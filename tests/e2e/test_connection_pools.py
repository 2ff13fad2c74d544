"""Separate connection pools: a customer's reports delay neither administration nor lookups."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator

import grpc
import psycopg
import pytest

from api.access.servicer import WAITING_PER_KEY_MAX
from metering.store.db import psycopg_conninfo
from tests.calls import Calls
from tests.service import Refusal, Service, until

REPORTS = 40  # twice as many as may run and wait
WAITING = (
    "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'ledger_entries'::regclass"
)


@pytest.fixture
def poll(service: Service) -> Iterator[psycopg.Connection[tuple[int]]]:
    """Yield a connection that can list waiting locks."""
    with psycopg.connect(psycopg_conninfo(service.database_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def locked(service: Service, poll: psycopg.Connection[tuple[int]]) -> Iterator[None]:
    """Lock the ledger during the test, so that every report waits."""
    poll.execute("SELECT 1")
    with psycopg.connect(psycopg_conninfo(service.database_url)) as connection:
        connection.execute("LOCK TABLE ledger_entries IN ACCESS EXCLUSIVE MODE")
        yield
        connection.rollback()


@pytest.mark.usefixtures("locked")
async def test_reports_delay_no_other(
    service: Service, poll: psycopg.Connection[tuple[int]]
) -> None:
    payer, other = await service.tenant(), await service.tenant()
    _, finance = await service.new_key(payer, "billing")
    _, admin = await service.new_key(payer, "admin")
    doomed, _ = await service.new_key(other, "inference")
    running_max = service.settings.database.report_connections_max - 1
    refused_count = REPORTS - running_max - WAITING_PER_KEY_MAX
    refusals: list[Refusal] = []

    def waiting_count() -> int:
        [count] = poll.execute(WAITING).fetchone() or (0,)
        return count

    async with (
        service.channel() as reading,
        service.channel() as acting,
        asyncio.TaskGroup() as tasks,
    ):
        billing = Calls(reading, finance)

        async def report() -> None:
            refusals.append(
                await billing.refused("GetMonthReport", organization=payer.name, month="2026-01")
            )

        reports = [tasks.create_task(report()) for _ in range(REPORTS)]
        await until(lambda: waiting_count() == running_max, "the reports to wait")
        await until(lambda: len(refusals) == refused_count, "the others to be refused")

        await Calls(acting, admin)("RevokeApiKey", api_key=str(doomed.id))
        models = await Calls(acting, other.secret)("ListModels")
        with await asyncio.to_thread(urllib.request.urlopen, service.metrics_url) as scraped:
            metrics = scraped.read().decode()

        assert waiting_count() == running_max, "the reports still wait"
        for task in reports:
            task.cancel()

    assert len(models.models) == 1
    assert "\nweir_cluster_backlog_up 1.0\n" in metrics
    assert {(each.code, each.reason, each.retry_after_s) for each in refusals} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REPORTS", 1.0)
    }
