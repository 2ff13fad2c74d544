"""Killed processes: no hold remains, and what the transport had taken is billed once.

At most one message of each request is free: it was sent, and not marked when its process died.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from common.processes import alive
from metering.core.models import QuotaDimension
from tests.faults.billed import Received, check_charged, check_ledger, lossless_stream, rate
from tests.faults.conftest import Start
from tests.metering.invariants import check_invariants
from tests.service import MODEL, PATIENCE_S, Service, Stream, Tenant, start, until

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
ROUNDS, LANES = 8, 2  # rounds of kills, processes at a time; each lives a second or two
EXPIRY_S = 5.0  # ends holds whose first token was not recorded yet


async def under_load(stream: Stream, count: int, token_count: int) -> list[str]:
    """Start long requests, wait until each has this many tokens, and return their ids."""
    starts = [start(max_output_tokens=3500) for _ in range(count)]
    await stream.send(*starts)
    for frame in starts:
        await stream.received(frame.request_id, token_count)
    return [frame.request_id for frame in starts]


@pytest.mark.parametrize("with_engine", [False, True], ids=["api", "api and engine"])
async def test_a_killed_server_bills_what_it_had_handed_over_and_keeps_no_hold(
    launch: Start, with_engine: bool
) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    host_pid = service.host_pid
    assert host_pid is not None
    async with lossless_stream(service, tenant.secret) as stream:
        request_ids = await under_load(stream, 12, 40)

        if with_engine:
            os.kill(host_pid, signal.SIGKILL)
        service.kill()

        assert await stream.closed() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: not alive(host_pid), "the engine host to follow its parent")
    assert service.books.holds(tenant) == {"held": 12}, "nobody is there to end them yet"

    service.start()

    assert service.books.holds(tenant) == {"settled": 12}, (
        "all are ended before the server takes requests"
    )
    assert all(held == 0 for _, held in service.books.counters(tenant).values())
    check_charged(service, tenant, [Received.of(stream, each) for each in request_ids])
    assert {(event["outcome"], event["recovered"]) for event in service.books.events(tenant)} == {
        ("failed", True)
    }
    check_invariants(service.database_url, all_ended=True)
    assert list(service.settings.journal_directory.glob("*.refused")) == []
    async with service.stream(tenant.secret) as again:
        assert (await again.finished(await again.begin())).usage.delivered_token_count == 20


async def test_a_request_that_died_with_its_server_is_not_run_again_under_its_id(
    launch: Start,
) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    frame = start(max_output_tokens=3500)
    async with lossless_stream(service, tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 30)
        service.kill()
        await stream.closed()
    service.start()

    async with service.stream(tenant.secret) as again:
        await again.send(frame)
        refusal = await again.failed(frame.request_id)

    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
    assert refusal.frame is not None
    [event] = service.books.events(tenant)
    assert refusal.frame.usage.delivered_token_count == event["delivered_token_count"]
    check_charged(service, tenant, [Received.of(stream, frame.request_id)])


async def test_a_killed_engine_ends_its_requests_settled_and_comes_back(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    host_pid = service.host_pid
    assert host_pid is not None
    async with service.stream(tenant.secret) as stream:
        request_ids = await under_load(stream, 12, 20)

        os.kill(host_pid, signal.SIGKILL)

        for request_id in request_ids:
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.ABORTED,
                "ENGINE_FAILED_MIDWAY",
            )
            assert refusal.info.metadata["retry_with"] == "new_request_id"
            assert refusal.info.metadata["delivered_token_count"] == str(
                len(stream.token_ids(request_id))
            )
            assert refusal.frame is not None
            assert refusal.frame.usage.delivered_token_count == len(stream.token_ids(request_id))
            event = service.books.event(tenant, request_id)
            assert (event["outcome"], event["delivered_token_count"]) == (
                "failed",
                len(stream.token_ids(request_id)),
            )
        assert service.books.holds(tenant) == {"settled": 12}

        # The next request waits for the engine and gets a progress frame that says so.
        waiting = await stream.begin()
        assert (await stream.finished(waiting)).reason == types_pb2.FINISH_REASON_LENGTH
        assert pb.ProgressFrame.STAGE_ENGINE_LOADING in {
            progress.stage for progress in stream.of(waiting, "progress")
        }
    assert service.host_pid not in (None, host_pid)
    check_invariants(service.database_url, all_ended=True)


async def test_an_engine_that_dies_before_the_first_token_bills_nothing_and_allows_a_retry(
    launch: Start,
) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        host_pid = service.host_pid
        assert host_pid is not None
        os.kill(host_pid, signal.SIGSTOP)
        started = [start() for _ in range(5)]
        await stream.send(*started)
        for frame in started:
            await stream.first(frame.request_id, "admitted")

        os.kill(host_pid, signal.SIGKILL)

        for frame in started:
            refusal = await stream.failed(frame.request_id)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
            assert refusal.info.metadata["retry_with"] == "same_request_id"
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0
    assert service.books.holds(tenant) == {"voided": 5}
    assert service.books.events(tenant) == []
    async with service.stream(tenant.secret) as again:
        await again.send(*started)
        for frame in started:
            await again.finished(frame.request_id)
    assert len(service.books.events(tenant)) == 5
    check_invariants(service.database_url, all_ended=True)


async def test_the_client_library_tries_again_where_an_engine_died_before_the_first_token(
    launch: Start,
) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    host_pid = service.host_pid
    assert host_pid is not None
    os.kill(host_pid, signal.SIGSTOP)
    async with (
        service.client(tenant.secret) as client,
        client.generate(
            MODEL, token_ids=[9] * 20, max_output_tokens=5, max_retries=2
        ) as generation,
    ):

        async def read() -> int:
            return sum([len(delta.token_ids) async for delta in generation])

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            await until(lambda: service.books.holds(tenant) == {"held": 1}, "its hold")
            os.kill(host_pid, signal.SIGKILL)

    assert reading.result() >= 1
    assert service.books.holds(tenant) == {"settled": 1, "voided": 1}
    check_invariants(service.database_url, all_ended=True)


async def test_a_server_that_starts_settles_for_one_that_died_elsewhere_on_the_machine(
    launch: Start,
) -> None:
    """Any server that shares the home recovers a dead one's journal, also while running."""
    first = launch()
    second = launch()
    tenant = await first.tenant(LIMITS)
    async with lossless_stream(first, tenant.secret) as stream:
        request_ids = await under_load(stream, 3, 10)
        first.kill()
        await stream.closed()

    await until(lambda: first.books.holds(tenant) == {"settled": 3}, "the other server to settle")

    check_charged(second, tenant, [Received.of(stream, each) for each in request_ids])


async def test_random_kills_under_load_lose_nothing_and_bill_nothing_unreceived(
    launch: Start, tmp_path: Path
) -> None:
    """Servers and engines die at random moments, even while they start or recover."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    homes = [tmp_path / f"home{lane}" for lane in range(LANES)]
    services = [launch(home=home, lease_slice_tokens=16, hold_expiry_s=EXPIRY_S) for home in homes]
    tenant = await services[0].tenant(LIMITS)
    received: list[Received] = []

    async with asyncio.TaskGroup() as tasks:
        for index, service in enumerate(services):
            tasks.create_task(
                kill_again_and_again(service, tenant, received, random.Random(seed + index))
            )

    service = services[0]
    await until(lambda: "held" not in service.books.holds(tenant), "every hold to end")
    received_count = sum(one.token_count for one in received)
    delivered_count = sum(service.books.delivered(tenant).values())
    print(f"{received_count} tokens received, {delivered_count} billed, {len(received)} requests")
    assert received_count > 0
    check_charged(service, tenant, received)
    check_invariants(service.database_url, all_ended=True)
    await rate(service)
    check_ledger(service)


async def kill_again_and_again(
    service: Service, tenant: Tenant, received: list[Received], rng: random.Random
) -> None:
    """Run rounds of load that each end with a kill; note the tokens that the client received."""
    for _ in range(ROUNDS):
        async with lossless_stream(service, tenant.secret) as stream:
            starts = [
                start(max_output_tokens=rng.choice((5, 50, 500)))
                for _ in range(rng.randrange(1, 12))
            ]
            await stream.send(*starts)
            wanted = rng.choice((0, 1, 5, 20, 100))
            await enough(stream, starts, wanted)
            if rng.random() < 0.4 and service.host_pid is not None:
                os.kill(service.host_pid, signal.SIGKILL)
                await enough(stream, starts, wanted + rng.randrange(3))
            service.kill()
            await stream.closed()
        received += [Received.of(stream, frame.request_id) for frame in starts]
        await asyncio.to_thread(service.start)


async def enough(stream: Stream, starts: Sequence[pb.ClientFrame], token_count: int) -> None:
    """Wait for this many tokens in total, or for the end of all requests."""

    def arrived() -> bool:
        got = sum(len(stream.token_ids(frame.request_id)) for frame in starts)
        return got >= token_count or all(stream.ends(frame.request_id) for frame in starts)

    async with asyncio.timeout(PATIENCE_S):
        await stream.wait(arrived)
