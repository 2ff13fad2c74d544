"""Policies for an unavailable or frozen PostgreSQL: refuse at once, or use pre-authorized holds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb

from chaos.rounds import crash_postgres
from metering.core.errors import DatabaseUnavailable
from metering.core.models import QuotaDimension
from metering.holds.recovery import sweep_expired_holds
from metering.store.embedded_postgres import EmbeddedPostgres
from tests.faults.billed import Received, check_charged, lossless_stream
from tests.faults.conftest import Start
from tests.faults.servers import frozen, restart
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.invariants import check_invariants
from tests.probing import probe
from tests.service import (
    PATIENCE_S,
    POLL_S,
    Database,
    Refusal,
    Service,
    Stream,
    Tenant,
    log_events,
    start,
    until,
)

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
GRACE = {"database_unavailable_policy": "grace", "grace_holds_per_key": 3, "grace_input_tokens": 64}
ADMITTED_WHILE_AWAY = 3

CLIENTS = int(os.environ.get("WEIR_TEST_STORM_CLIENTS", "1000"))
POOL = 3
CONNECTIONS_MAX = POOL + 3  # one each for holds, for orders and for recovery
PAUSES = int(os.environ.get("WEIR_TEST_PAUSES", "4"))


async def set_aside(service: Service, tenant: Tenant) -> None:
    """Use the tenant's key once, and wait until its pre-authorized holds are in the database."""
    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin())
    await until(
        lambda: service.database.holds(tenant).get("held") == ADMITTED_WHILE_AWAY,
        "holds to be set aside",
    )


async def refusal_of_a_new_request(service: Service, secret: str) -> Refusal:
    """Return the refusal on a new stream; retry if grpcio loses the status (grpc/grpc#36066)."""
    while True:
        async with service.stream(secret) as stream:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the reader gets it too
                await stream.send(start())
            await until(lambda: stream.over, "the stream to be refused")
            assert isinstance(stream.error, grpc.aio.AioRpcError)
            if stream.error.details() != "Internal error from Core":
                return Refusal.of(stream.error)


async def test_the_log_of_a_healthy_start_is_json_without_a_warning(
    launch: Start, postgres: EmbeddedPostgres
) -> None:
    service = launch(database_url=postgres.url)

    await until(lambda: log_events(service.log, "part_ready"), "the engine to be ready")

    lines = [json.loads(line) for line in service.log.splitlines()]
    parts = [line for line in lines if line["event"].startswith("part_")]
    assert {line["level"] for line in parts} == {"info"}
    assert log_events(service.log, "part_recovered") == []
    assert any("logger" in line for line in lines), "the worker's are among them"


async def test_closed_health_reports_an_outage(launch: Start, postgres: EmbeddedPostgres) -> None:
    service = launch(database_url=postgres.url, database_unready_after_s=0.3)
    assert all(
        map(
            service.serving,
            ("", "weir.v1.InferenceService", "weir.v1.BillingService", "database", "engine/tiny"),
        )
    )

    assert probe(service.metrics_url, "/readyz") == (200, {"status": "ready"})

    crash_postgres(postgres)

    await until(lambda: not service.serving(), "health to say so, though nobody asked for anything")
    away = {"status": "not ready", "reasons": ["the database does not answer"]}
    await until(lambda: probe(service.metrics_url, "/readyz") == (503, away), "the probe")
    assert probe(service.openai_url, "/health") == (503, away)
    assert probe(service.metrics_url, "/livez") == (200, {"status": "live"})
    assert not any(
        map(service.serving, ("weir.v1.InferenceService", "weir.v1.AdminService", "database"))
    )
    assert service.serving("engine/tiny"), "which tells it from an engine that is not ready"
    [failed] = log_events(service.log, "part_failed")
    assert (failed["part"], failed["serving"]) == ("database", False)
    await asyncio.to_thread(restart, postgres)
    await until(service.serving, "health to say that it is back")
    [recovered] = log_events(service.log, "part_recovered")
    assert (recovered["part"], recovered["level"]) == ("database", "info")


async def test_preauthorized_holds_survive_a_kill(
    launch: Start, postgres: EmbeddedPostgres
) -> None:
    service = launch(database_url=postgres.url, database_unready_after_s=0.3, **GRACE)
    tenant = await service.tenant(LIMITS)
    await set_aside(service, tenant)
    crash_postgres(postgres)
    await until(lambda: not service.serving("database"), "the outage to be noticed")
    assert service.serving(), "requests can be let in"
    assert probe(service.metrics_url, "/readyz") == (200, {"status": "ready"})

    async with lossless_stream(service, tenant.secret) as stream:  # the key is remembered
        frames = [
            start(max_output_tokens=120, labels={"team": "search"})
            for _ in range(ADMITTED_WHILE_AWAY)
        ]
        await stream.send(*frames)
        for frame in frames:
            await stream.received(frame.request_id, 20)
        refusal = await stream.failed(await stream.begin())
        assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
        assert refusal.retry_after_s is not None
        await until(lambda: not service.serving(), "health to report that no hold is left")
        assert (
            await refusal_of_a_new_request(service, "wk_abcdefgh_" + "x" * 43)
        ).reason == "DATABASE_UNAVAILABLE"
        service.kill()
        await stream.closed()
    await asyncio.to_thread(restart, postgres)
    service.start()

    check_charged(service, tenant, [Received.of(stream, each.request_id) for each in frames])
    for frame in frames:
        assert len(stream.token_ids(frame.request_id)) >= 20
        event = service.database.event(tenant, frame.request_id)
        assert (event["labels"], event["recovered"]) == ({"team": "search"}, True)
        assert event["billed_token_count"] == event["delivered_token_count"] <= 120
    assert service.database.holds(tenant) == {"settled": 1 + ADMITTED_WHILE_AWAY}
    assert list(files(service.settings.journal_directory, "*.bindings")) == []
    check_invariants(postgres.url, all_ended=True)


def files(directory: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern."""
    return list(directory.glob(pattern))


async def test_grace_ends_when_the_database_is_back(
    launch: Start, postgres: EmbeddedPostgres
) -> None:
    service = launch(database_url=postgres.url, **GRACE)
    tenant = await service.tenant(LIMITS)
    await set_aside(service, tenant)
    async with service.stream(tenant.secret) as stream:
        crash_postgres(postgres)
        frames = [start(max_output_tokens=count) for count in (30, 300)]
        await stream.send(*frames)
        for frame in frames:
            await stream.received(frame.request_id, 30)
        again = start(frames[0].request_id, max_output_tokens=30)
        await asyncio.to_thread(restart, postgres)

        for frame, count in zip(frames, (30, 300), strict=True):
            assert (await stream.finished(frame.request_id)).usage.billed_token_count == count
    async with service.stream(tenant.secret) as stream:
        await stream.send(again)
        assert (await stream.failed(again.request_id)).reason == "REQUEST_SETTLED"
    assert await asyncio.to_thread(service.stop) == 0
    assert "held" not in service.database.holds(tenant), "what was set aside is given back"
    check_invariants(postgres.url, all_ended=True)


@pytest.mark.parametrize("policy", ["closed", "grace"])
async def test_a_frozen_database_blocks_no_caller(
    launch: Start, postgres: EmbeddedPostgres, policy: str
) -> None:
    """Waiting requests are refused after the configured time, later ones at once."""
    service = launch(
        database_url=postgres.url,
        **GRACE | {"database_unavailable_policy": policy},
        database_timeout_s=0.5,
    )
    tenant = await service.tenant(LIMITS)
    if policy == "grace":
        await set_aside(service, tenant)
    async with service.stream(tenant.secret) as stream:
        running = await stream.begin(max_output_tokens=100)
        await stream.received(running, 1)

        with frozen(postgres):
            first = await stream.begin(max_output_tokens=30)
            await stream.received(running, 100)
            if policy == "grace":
                await stream.received(first, 30)
            else:
                assert (await stream.failed(first)).reason == "DATABASE_UNAVAILABLE"
            await until(
                lambda: log_events(service.log, "database_away"),
                "the batch under way to be given up",
            )
            assert (
                await refusal_of_a_new_request(service, "wk_abcdefgh_" + "x" * 43)
            ).reason == "DATABASE_UNAVAILABLE"

        assert (await stream.finished(running)).usage.billed_token_count == 100
        if policy == "grace":
            assert (await stream.finished(first)).usage.billed_token_count == 30
    await until(lambda: service.serving("database"), "health to say that it is back")
    assert await asyncio.to_thread(service.stop) == 0
    check_invariants(postgres.url, all_ended=True)


async def test_an_outage_opens_no_more_connections(launch: Start, database_url: str) -> None:
    async with CuttingProxy(database_url).listening() as proxy:
        service = await asyncio.to_thread(launch, database_url=proxy.url, database_connections=POOL)
        # This loop runs the proxy, which counts connections.
        service.database, service.database_url = Database(database_url), database_url
        tenant = await service.tenant(LIMITS)
        async with service.stream(tenant.secret) as stream, service.stream(tenant.secret) as other:
            await stream.finished(await stream.begin(max_output_tokens=1))
            await other.finished(await other.begin(max_output_tokens=1))
            proxy.refusing = True
            proxy.cut_now()
            attempts = proxy.attempt_count

            request_ids = [await stream.begin(max_output_tokens=1) for _ in range(CLIENTS // 2)]
            refused = await asyncio.gather(
                *(refusal_of_a_new_request(service, tenant.secret) for _ in range(CLIENTS // 20))
            )
            request_ids += [await other.begin(max_output_tokens=1) for _ in range(CLIENTS // 2)]
            for request_id in request_ids[: CLIENTS // 2]:
                assert (await stream.failed(request_id)).reason == "DATABASE_UNAVAILABLE"
            for request_id in request_ids[CLIENTS // 2 :]:
                assert (await other.failed(request_id)).reason == "DATABASE_UNAVAILABLE"

            assert {refusal.reason for refusal in refused} == {"DATABASE_UNAVAILABLE"}
            assert proxy.attempt_count - attempts < 60, "a few per second, whoever comes"
            proxy.refusing = False
            # Health may never have reported so short an outage.
            async with asyncio.timeout(PATIENCE_S):
                while not (  # noqa: ASYNC110
                    await stream.end(await stream.begin(max_output_tokens=1))
                ).HasField("finished"):
                    await asyncio.sleep(POLL_S)
            back = [await stream.begin(max_output_tokens=1) for _ in range(CLIENTS // 2)]
            peak = 0
            for request_id in back:
                peak = max(peak, connection_count(service))
                await stream.end(request_id)
        assert 0 < peak <= CONNECTIONS_MAX
        assert proxy.connection_count_peak <= CONNECTIONS_MAX
        await service.no_hold_left(tenant)
        check_invariants(database_url, all_ended=True)


def connection_count(service: Service) -> int:
    """Return the number of the service's connections as PostgreSQL counts them."""
    [row] = service.database.rows(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
        " pg_backend_pid() AND backend_type = 'client backend' AND application_name ~ '^weir'"
    )
    return int(row["n"])


async def test_a_process_paused_at_random_bills_each_token_once(launch: Start) -> None:
    """In any phase, with concurrent sweeps: after the pause it sends nothing under lost holds."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    service = launch(hold_expiry_s=1.0, lease_slice_tokens=32)
    tenant = await service.tenant(LIMITS)
    expired = 0
    async with service.stream(tenant.secret) as stream:
        for _ in range(PAUSES):
            frames = [
                start(max_output_tokens=rng.choice((1, 20, 200)))
                for _ in range(rng.randrange(1, 12))
            ]
            await stream.send(*frames)
            wanted = rng.choice((0, 0, 1, 10, 60))
            await stream.wait(
                lambda frames=frames, wanted=wanted: tokens_or_ends(stream, frames, wanted)  # type: ignore[misc]
            )
            os.kill(service.pid, signal.SIGSTOP)
            await until_swept(service)
            os.kill(service.pid, signal.SIGCONT)
            for frame in frames:
                await stream.end(frame.request_id)
            expired += service.database.holds(tenant).get("expired", 0)
    await service.no_hold_left(tenant)
    delivered = service.database.delivered(tenant)
    received = {request_id: len(stream.token_ids(request_id)) for request_id in stream.frames}
    assert {request_id: count for request_id, count in received.items() if count} == {
        k: v for k, v in delivered.items() if v
    }
    print(f"{sum(received.values())} tokens in {len(received)} requests, {expired} holds expired")
    check_invariants(service.database_url, all_ended=True)


def tokens_or_ends(stream: Stream, frames: Sequence[pb.ClientFrame], wanted: int) -> bool:
    """Return whether this many tokens have arrived in total, or all requests have ended."""
    got = sum(len(stream.token_ids(frame.request_id)) for frame in frames)
    return got >= wanted or all(stream.ends(frame.request_id) for frame in frames)


async def until_swept(service: Service) -> None:
    """Sweep until the paused process has no hold. It may keep rows locked for two seconds."""
    async with asyncio.timeout(PATIENCE_S):
        while service.database.held_hold_count():
            with contextlib.suppress(DatabaseUnavailable):
                await sweep_expired_holds(service.database_url)
