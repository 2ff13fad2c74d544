"""Drain of a server: running requests finish, new ones are refused, late ones end settled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2
from weir.v1 import types_pb2
from weir_client import AsyncClient, Result

from common.processes import alive
from metering.core.models import QuotaDimension
from tests.e2e.openai_clients import connect
from tests.faults.conftest import Start
from tests.metering.invariants import check_invariants
from tests.probing import probe
from tests.service import MODEL, PLAIN_IDS, Refusal, Stream, health_check, log_events, start, until

pytestmark = pytest.mark.faults

NOTICE_S = 2.0
LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}


async def test_running_requests_finish_and_new_ones_are_sent_away(launch: Start) -> None:
    service = launch(drain_notice_s=8)  # keeps the connection open until the test has used it
    tenant = await service.tenant(LIMITS)
    worker_pid = service.worker_pid
    assert worker_pid is not None
    async with service.channel() as channel, service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=500) for _ in range(6)]
        await stream.send(*starts)
        for frame in starts:
            await stream.received(frame.request_id, 1)

        service.terminate()

        await until(lambda: log_events(service.log, "draining"), "the drain to begin")
        refusal = await draining_refusal(stream)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert refusal.retry_after_s is not None
        health = await health_check(channel)(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with (
            connect(service, tenant.secret) as client,
            pytest.raises(openai.InternalServerError) as refused,
        ):
            client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        assert refused.value.response.headers["connection"] == "close"
        for frame in starts:
            finished = await stream.finished(frame.request_id)
            assert finished.reason == types_pb2.FINISH_REASON_LENGTH
            assert len(stream.token_ids(frame.request_id)) == 500
        assert await asyncio.to_thread(service.wait_ended) == 0
    assert not alive(worker_pid)
    assert service.database.holds(tenant) == {"settled": 6}
    assert {event["outcome"] for event in service.database.events(tenant)} == {"length"}
    assert list(service.settings.journal_directory.iterdir()) == [], "nothing is left to recover"
    check_invariants(service.database_url, all_ended=True)


async def draining_refusal(stream: Stream) -> Refusal:
    """Return the answer to a start after the drain has closed the listener."""
    while True:
        end = await stream.end(await stream.begin(max_output_tokens=1))
        if end.WhichOneof("kind") == "failed":
            return Refusal(end.failed.status)


async def test_requests_unfinished_in_time_are_settled_and_get_the_reason(launch: Start) -> None:
    service = launch(drain_s=0.5)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=3900) for _ in range(40)]
        await stream.send(*starts)
        for frame in starts:
            await stream.received(frame.request_id, 1)

        service.terminate()

        for frame in starts:
            refusal = await stream.failed(frame.request_id)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "INTERRUPTED")
            assert refusal.info.metadata["cause"] == "DRAINING"
            assert refusal.retry_after_s is None, "its id would only return its usage"
            assert refusal.frame is not None
            received = len(stream.token_ids(frame.request_id))
            assert refusal.frame.usage.delivered_token_count == received
            event = service.database.event(tenant, frame.request_id)
            assert event["delivered_token_count"] == received
        assert await asyncio.to_thread(service.wait_ended) == 0
    assert service.database.holds(tenant) == {"settled": 40}
    check_invariants(service.database_url, all_ended=True)


async def test_requests_queued_at_the_end_of_the_drain_are_refused(launch: Start) -> None:
    service = launch(drain_s=0.5)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=3900) for _ in range(110)]
        await stream.send(*starts)
        for frame in starts:
            await stream.first(frame.request_id, "admitted")
        await stream.received(starts[0].request_id, 1)

        service.terminate()

        for frame in starts:
            refusal = await stream.failed(frame.request_id)
            received = bool(stream.token_ids(frame.request_id))
            assert refusal.reason == ("INTERRUPTED" if received else "DRAINING")
            assert (refusal.retry_after_s is None) == received
        assert await asyncio.to_thread(service.wait_ended) == 0
    holds = service.database.holds(tenant)
    assert holds["voided"] >= 110 - 64, "no more than 64 run at once"
    assert holds["voided"] + holds.get("settled", 0) == 110
    check_invariants(service.database_url, all_ended=True)


async def test_a_client_that_does_not_read_does_not_hold_up_the_drain(launch: Start) -> None:
    service = launch(drain_s=0.5)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret, reading=False) as deaf:
        await deaf.send(*(start(max_output_tokens=3000) for _ in range(20)))
        await until(lambda: service.database.holds(tenant) == {"held": 20}, "all to be admitted")

        service.terminate()

        assert await asyncio.to_thread(service.wait_ended) == 0
    assert "held" not in service.database.holds(tenant)
    check_invariants(service.database_url, all_ended=True)


async def test_a_server_without_requests_drains_for_the_notice(launch: Start) -> None:
    """Otherwise a balancer that checks once a second sends requests on connections that close."""
    service = launch(drain_notice_s=NOTICE_S)
    tenant = await service.tenant(LIMITS)
    with connect(service, tenant.secret) as client:
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        began = time.monotonic()

        service.terminate()

        await until(lambda: log_events(service.log, "draining"), "the drain to begin")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        assert refused.value.response.headers["weir-reason"] == "DRAINING"
        assert await asyncio.to_thread(service.wait_ended) == 0
    assert time.monotonic() - began >= NOTICE_S


async def test_new_connections_go_elsewhere_while_old_streams_finish(launch: Start) -> None:
    service = launch(drain_notice_s=0.01)
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=1500)
        await stream.received(request_id, 1)

        service.terminate()
        await until(lambda: not service.serving(), "the door to be shut")
        draining = {"status": "not ready", "reasons": ["draining"]}
        assert await asyncio.to_thread(probe, service.metrics_url, "/readyz") == (503, draining)
        assert await asyncio.to_thread(probe, service.metrics_url, "/livez") == (
            200,
            {"status": "live"},
        )

        assert (await stream.finished(request_id)).usage.delivered_token_count == 1500
        assert await asyncio.to_thread(service.wait_ended) == 0
    check_invariants(service.database_url, all_ended=True)


async def test_a_rolling_restart_on_one_port_loses_nothing(launch: Start, tmp_path: Path) -> None:
    first = launch(share_port=True, home=tmp_path / "first")
    first.settings = first.settings.having(listen=first.address)
    second = launch(share_port=True, home=tmp_path / "second", serving=False, listen=first.address)
    tenant = await first.tenant(LIMITS)
    restarted = asyncio.Event()
    results: list[Result] = []

    async def load(client: AsyncClient) -> None:
        while not restarted.is_set():
            results.append(
                await client.complete(
                    MODEL, token_ids=PLAIN_IDS[:10], max_output_tokens=60, ignore_eos=True
                )
            )

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            client = await stack.enter_async_context(
                AsyncClient(first.address, tenant.secret, max_retries=20)
            )
            for _ in range(4):
                tasks.create_task(load(client))
        for service in (first, second):
            before = len(results)
            await until(lambda before=before: len(results) > before + 16, "requests to flow")  # type: ignore[misc]
            assert await asyncio.to_thread(service.stop) == 0
            await asyncio.to_thread(service.start)
        before = len(results)
        await until(lambda: len(results) > before + 16, "requests to flow")
        restarted.set()

    assert {result.usage.delivered_token_count for result in results} == {60}
    assert first.database.delivered(tenant) == {result.request_id: 60 for result in results}
    assert first.database.holds(tenant)["settled"] == len(results)
    check_invariants(first.database_url, all_ended=True)
