"""PostgreSQL stops, dies and returns: streams continue up to their lease and settle afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2
from weir_client import Unavailable

from chaos.rounds import crash_postgres
from metering.core.errors import DatabaseUnavailable
from metering.core.models import QuotaDimension
from metering.holds.journal import FORMAT, FORMATS
from metering.holds.recovery import sweep_expired_holds
from metering.store.embedded_postgres import EmbeddedPostgres
from tests.faults.billed import Received, check_charged, lossless_stream
from tests.faults.conftest import Start
from tests.faults.servers import restart
from tests.metering.invariants import check_invariants
from tests.scraped import Scrape, scrape
from tests.service import (
    MODEL,
    PATIENCE_S,
    POLL_S,
    Service,
    bearer,
    log_events,
    refused,
    start,
    until,
    wait_for,
)

pytestmark = pytest.mark.faults

ON_THE_WAY = 100  # tokens in flight when a server is suspended: some messages of one token each
LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}


async def test_a_database_crash_loses_nothing(launch: Start, postgres: EmbeddedPostgres) -> None:
    service = launch(database_url=postgres.url, database_timeout_s=0.5)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        short = [start(max_output_tokens=120) for _ in range(6)]  # fits the first slice
        long = [start(max_output_tokens=3000) for _ in range(6)]
        await stream.send(*short, *long)
        for frame in (*short, *long):
            await stream.received(frame.request_id, 5)

        crash_postgres(postgres)

        for frame in short:
            await stream.received(frame.request_id, 120)  # without a database
        refusal = await stream.failed(await stream.begin())
        assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
        assert refusal.retry_after_s is not None
        async with service.channel() as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            listing = await refused(
                stub.ListModels(pb.ListModelsRequest(), metadata=bearer(tenant.secret))
            )
            assert (listing.code, listing.reason) == (refusal.code, refusal.reason)
        await until(
            lambda: len(waiting_settlements(service)) == 12,
            "all to come to the end of their leases",
        )
        away = await scrape_without_database(service)
        await asyncio.to_thread(restart, postgres)

        for frame in short:
            finished = await stream.finished(frame.request_id)
            assert finished.reason == types_pb2.FINISH_REASON_LENGTH
            assert finished.usage.delivered_token_count == 120
        for frame in long:
            refusal = await stream.failed(frame.request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.ABORTED, "INTERRUPTED")
            assert refusal.frame is not None
            received = len(stream.token_ids(frame.request_id))
            assert refusal.frame.usage.delivered_token_count == received <= 3 * 128
            event = service.database.event(tenant, frame.request_id)
            assert event["delivered_token_count"] == received
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20
    assert "held" not in service.database.holds(tenant)
    check_invariants(postgres.url, all_ended=True)
    check_reported(away, await scrape(service.metrics_url))


async def scrape_without_database(service: Service) -> Scrape:
    """Return the metrics once they are missing the database's, which are read every 10 s."""
    away = await scrape(service.metrics_url)
    async with asyncio.timeout(PATIENCE_S):
        while away.value("weir_cluster_backlog_up"):
            await asyncio.sleep(POLL_S)
            away = await scrape(service.metrics_url)
    return away


def check_reported(away: Scrape, back: Scrape) -> None:
    """Check the metrics during and after the outage: only those of the database are missing."""
    assert away.value("weir_database_unavailable_seconds") > 0
    assert away.value("weir_journal_unsettled_requests") == 12
    assert away.value("weir_cluster_backlog_up") == 0
    assert "weir_cluster_holds" not in away.names()
    refusals = {"model": MODEL, "reason": "DATABASE_UNAVAILABLE", "dimension": "", "subject": ""}
    assert away.value("weir_refusals_total", **refusals) == 1
    assert (
        back.value("weir_database_unavailable_seconds")
        == back.value("weir_journal_unsettled_requests")
        == 0
    )
    assert (
        back.value(
            "weir_requests_total", model=MODEL, tier="interactive", outcome="database_unavailable"
        )
        == 7
    ), "six of them delivered"
    assert back.value("weir_refusals_total", **refusals) == 1, "and were billed"


def waiting_settlements(service: Service) -> set[str]:
    """Return the holds whose settlement has been delayed."""
    delayed = log_events(service.log, "hold_operation_delayed")
    return {event["hold_id"] for event in delayed if event["operation"] == "Settle"}


async def test_streams_outlast_a_database_restart(
    launch: Start, postgres: EmbeddedPostgres
) -> None:
    service = launch(database_url=postgres.url, database_timeout_s=60.0)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        # More than a fast machine generates while the database stops: each needs an extension then.
        starts = [start(max_output_tokens=1500) for _ in range(4)]
        await stream.send(*starts)
        for frame in starts:
            await stream.received(frame.request_id, 5)

        await asyncio.to_thread(postgres.stop)
        for frame in starts:
            await stream.received(frame.request_id, 128)
        await until(lambda: log_events(service.log, "hold_operation_delayed"), "an extension")
        await asyncio.to_thread(restart, postgres)

        for frame in starts:
            assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 1500
    assert service.database.holds(tenant) == {"settled": 4}
    check_invariants(postgres.url, all_ended=True)


async def test_a_stop_without_database_recovers(launch: Start, postgres: EmbeddedPostgres) -> None:
    """It cannot settle, so it leaves that to the next start instead of waiting forever."""
    service = launch(database_url=postgres.url, drain_s=0.5)
    tenant = await service.tenant(LIMITS)
    async with lossless_stream(service, tenant.secret) as stream:
        request_ids = [await stream.begin(max_output_tokens=3000) for _ in range(3)]
        for request_id in request_ids:
            await stream.received(request_id, 5)
        crash_postgres(postgres)
        service.terminate()
        assert await asyncio.to_thread(service.wait_ended) == 0, service.log[-5000:]
        await stream.closed()

    await asyncio.to_thread(restart, postgres)
    service.start()

    assert service.database.holds(tenant) == {"settled": 3}
    check_charged(service, tenant, [Received.of(stream, each) for each in request_ids])
    check_invariants(postgres.url, all_ended=True)


async def test_a_crash_of_both_is_recovered(launch: Start, postgres: EmbeddedPostgres) -> None:
    service = launch(database_url=postgres.url, lease_slice_tokens=16)
    tenant = await service.tenant(LIMITS)
    async with lossless_stream(service, tenant.secret) as stream:
        request_ids = [await stream.begin(max_output_tokens=3000) for _ in range(4)]
        for request_id in request_ids:
            await stream.received(request_id, 40)
        crash_postgres(postgres)
        service.kill()
        await stream.closed()

    await asyncio.to_thread(restart, postgres)
    service.start()

    assert service.database.holds(tenant) == {"settled": 4}
    check_charged(service, tenant, [Received.of(stream, each) for each in request_ids])
    check_invariants(postgres.url, all_ended=True)


async def test_a_short_outage_is_not_noticed(launch: Start, postgres: EmbeddedPostgres) -> None:
    """Old connections are dead; a request that gets one from the pool must get a new one."""
    service = launch(database_url=postgres.url)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin())
        await asyncio.to_thread(postgres.stop)
        await asyncio.to_thread(restart, postgres)

        assert (await stream.end(await stream.begin())).WhichOneof("kind") in ("finished", "failed")
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20
    async with service.client(tenant.secret) as client:
        assert [model.name for model in await client.list_models()] == ["tiny"]


async def test_a_server_waits_for_its_database(launch: Start, postgres: EmbeddedPostgres) -> None:
    postgres.stop()
    service = launch(serving=False, database_url=postgres.url)
    async with service.client("wk_abcdefgh_" + "x" * 43) as client:
        with pytest.raises(Unavailable, match="The database does not answer"):
            await client.list_models()
    await until(lambda: service.serving("engine/tiny"), "the engine")
    assert not any(
        map(service.serving, ("", "weir.v1.InferenceService", "weir.v1.AdminService", "database"))
    )
    await asyncio.to_thread(restart, postgres)
    await asyncio.to_thread(service.wait_serving)
    assert service.serving("database")
    tenant = await service.tenant(LIMITS)

    async with service.stream(tenant.secret) as stream:
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_server_frozen_past_expiry_doubles_nothing(launch: Start, moment: str) -> None:
    """Its holds expire while it is suspended; afterwards its clock keeps it from sending more."""
    service = launch(hold_expiry_s=1.0, lease_slice_tokens=400)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        request_ids = [await stream.begin(max_output_tokens=3000) for _ in range(4)]
        for request_id in request_ids:
            await stream.received(request_id, 420 if moment == "after" else 1)
        os.kill(service.pid, signal.SIGSTOP)
        await until_swept(service.database_url, 4)
        assert service.database.holds(tenant) == {"expired": 4}
        # Tokens in flight have arrived.
        before = {request_id: len(stream.token_ids(request_id)) for request_id in request_ids}

        os.kill(service.pid, signal.SIGCONT)

        for request_id in request_ids:
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.ABORTED, "HOLD_ENDED")
            received = len(stream.token_ids(request_id))
            assert service.database.delivered(tenant)[request_id] == received
            assert refusal.frame is not None
            assert refusal.frame.usage.delivered_token_count == received
            # Tokens handed to the transport before the suspension still arrive.
            assert received - before[request_id] < ON_THE_WAY
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20
    assert service.database.holds(tenant) == {"expired": 4, "settled": 1}
    check_invariants(service.database_url, all_ended=True)


async def until_swept(database_url: str, count: int) -> None:
    """Run the sweeper until it has expired `count` holds; a frozen server may lock rows 30 s."""
    swept = 0
    async with asyncio.timeout(PATIENCE_S):
        while swept < count:
            with contextlib.suppress(DatabaseUnavailable):
                swept += await sweep_expired_holds(database_url)


async def test_a_disk_that_is_full_stops_streams_before_their_tokens_leave(launch: Start) -> None:
    """Tokens that cannot be journalled are not sent, nor billed; others on the stream go on.

    New requests are refused until there is room again.
    """
    service = launch()
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        running = await stream.begin(max_output_tokens=3900)
        await stream.received(running, 30)
        limit_file_size(service.pid, journal_size(service.settings.journal_directory) + 100)

        ended = await stream.failed(running)
        refusal = await stream.failed(await stream.begin())
        await until(lambda: not service.serving(), "the health check to report it")
        assert (ended.code, ended.reason) == (StatusCode.ABORTED, "INTERRUPTED")
        assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
        received = len(stream.token_ids(running))
        assert ended.frame is not None
        assert ended.frame.usage.delivered_token_count == received
        await service.no_hold_left(tenant)
        assert service.database.event(tenant, running)["delivered_token_count"] == received

        limit_file_size(service.pid, -1)
        await asyncio.to_thread(service.wait_serving)
        await stream.finished(await stream.begin())
    async with lossless_stream(service, tenant.secret) as stream:
        running = await stream.begin(max_output_tokens=3900)
        await stream.received(running, 30)
        service.kill()
        await stream.closed()
    service.start()
    check_charged(service, tenant, [Received.of(stream, running)])
    check_invariants(service.database_url, all_ended=True)


def journal_size(directory: Path) -> int:
    """Return the size in bytes of the running server's journal."""
    return wait_for(
        lambda: max(
            (path.stat().st_size for path in directory.glob(f"*{FORMAT.suffix}")), default=None
        ),
        "a journal",
    )


def limit_file_size(pid: int, size: int) -> None:
    """Limit file sizes of a process, which acts like a full disk; -1 for no limit."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def test_an_unwritable_home_is_reported_at_start(launch: Start, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "journal").write_text("in the way")

    with pytest.raises(AssertionError, match=r"(?s)the api process ended.*journal"):
        launch(home=home)


@pytest.mark.parametrize("suffix", FORMATS)
async def test_a_stray_journal_file_is_ignored(launch: Start, tmp_path: Path, suffix: str) -> None:
    directory = tmp_path / "home" / "journal"
    directory.mkdir(parents=True)
    (directory / f"notes{suffix}").write_text("not ours")
    (directory / f"11111111-1111-4111-8111-111111111111.1{suffix}").write_bytes(b"torn")

    service = launch()

    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20
    assert (directory / f"notes{suffix}").read_text() == "not ours"
