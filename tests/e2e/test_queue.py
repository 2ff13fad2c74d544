"""Queue through the service: admission, progress frames of waiting requests, and no leaks.

The server runs in this process, so that tests can inspect it. Its engine runs four sequences at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_client import AsyncAdminClient

from api.queue.tier import ServiceRate
from metering.core.models import QuotaDimension
from tests.e2e.inside import inside_fixtures
from tests.service import MODEL, Inside, Service, Stream, Tenant, start, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNNING_MAX = 4
# Gives an organization at most 40 places: half of the four fifths that are for new tenants.
QUEUE_MAX = 100


inside, service, tenant = inside_fixtures(
    running_max=RUNNING_MAX, queue_requests_max=QUEUE_MAX, progress_interval_s=0.05
)


@contextlib.asynccontextmanager
async def crowded(
    service: Service, tenant: Tenant, waiting_count: int
) -> AsyncIterator[tuple[Stream, list[str]]]:
    """Fill the engine with a tenant's long requests and queue more; end all of them later."""
    async with service.stream(tenant.secret) as stream:
        running = [start(max_output_tokens=3000) for _ in range(RUNNING_MAX)]
        await stream.send(*running)
        for frame in running:
            await stream.received(frame.request_id, 1)
        waiting = [start(max_output_tokens=3000) for _ in range(waiting_count)]
        if waiting:
            await stream.send(*waiting)
        for frame in waiting:
            await stream.first(frame.request_id, "progress")
        yield stream, [frame.request_id for frame in waiting]
        await stream.cancel(*(frame.request_id for frame in (*running, *waiting)))
        for frame in (*running, *waiting):
            await stream.end(frame.request_id)


def answered(stream: Stream, request_id: str) -> bool:
    """Return whether a request was admitted or refused."""
    return bool(stream.of(request_id, "admitted") or stream.ends(request_id))


def timeout_of(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


async def test_waiting_requests_get_their_position(service: Service, tenant: Tenant) -> None:
    async with crowded(service, tenant, 20) as (stream, waiting):
        last = waiting[-1]

        def reported() -> pb.ProgressFrame | None:
            frames = [
                each for each in stream.of(last, "progress") if each.HasField("estimated_wait")
            ]
            return frames[-1] if frames else None

        progress = await stream.wait(reported, "a position with an estimate")

        assert progress.stage == pb.ProgressFrame.STAGE_QUEUED
        assert 1 <= progress.queue_position <= 20
        assert progress.estimated_wait.ToMilliseconds() > 0


async def test_a_full_queue_refuses(inside: Inside, service: Service, tenant: Tenant) -> None:
    other = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 10_000})
    async with crowded(service, tenant, 15) as (stream, _), service.stream(other.secret) as others:
        extra = [start(max_output_tokens=3000) for _ in range(80)]
        await stream.send(*extra)
        refused = []
        for frame in extra:
            await stream.wait(functools.partial(answered, stream, frame.request_id))
            refused += [frame.request_id for _ in stream.ends(frame.request_id)]

        assert 20 <= len(refused) <= 55, (
            "those for whom there is no place, and the engine has taken some of the others"
        )
        refusal = await stream.failed(refused[0])
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL")
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 0
        known = service.database.rows(
            "SELECT request_id FROM holds WHERE organization_id = %s", tenant.organization_id
        )
        assert not {str(row["request_id"]) for row in known} & set(refused)
        assert (await others.first(await others.begin(), "admitted")).input_token_count == 10
        await stream.cancel(*({frame.request_id for frame in extra} - set(refused)))
        for frame in extra:
            await stream.end(frame.request_id)


async def test_a_late_start_gets_the_expected_wait(service: Service, tenant: Tenant) -> None:
    async with crowded(service, tenant, 20) as (stream, waiting):
        last = waiting[-1]
        await stream.wait(
            lambda: any(each.HasField("estimated_wait") for each in stream.of(last, "progress"))
        )

        refusal = await stream.failed(await stream.begin(start_timeout=timeout_of(0.001)))

        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTS_TOO_LATE")
        assert float(refusal.info.metadata["estimated_wait_s"]) > 0.001
        assert refusal.retry_after_s is not None


async def test_a_late_request_is_free(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with crowded(service, tenant, 20) as (stream, _):
        for tier in inside.process.queues[MODEL].tiers.values():
            # As if nothing had been observed yet, so that it is admitted.
            tier.rate = ServiceRate()

        finished = await stream.finished(await stream.begin(start_timeout=timeout_of(0.3)))

        assert finished.reason == types_pb2.FINISH_REASON_DEADLINE
        assert finished.usage == types_pb2.Usage()


async def test_a_start_timeout_must_be_a_time(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(start_timeout=Duration()))
        unknown = await stream.failed(await stream.begin(tier=77))

    assert refusal.fields == ["start_timeout"]
    assert unknown.fields == ["tier"]


async def test_a_lost_client_leaves_the_queue(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    async with service.stream(tenant.secret) as stream:
        frames = [start(max_output_tokens=3000) for _ in range(15)]
        async with crowded(service, tenant, 0):
            await stream.send(*frames)
            for frame in frames:
                await stream.first(frame.request_id, "admitted")
            stream.call.cancel()
            await until(
                lambda: (
                    sum(
                        queue.waiting_count + queue.engine_pending_count
                        for queue in inside.queue_statistics()
                    )
                    == 0
                ),
                "the queue to be empty",
            )
    await service.no_hold_left(tenant)
    free = [event for event in service.database.events(tenant) if not event["input_token_count"]]
    assert len(free) >= 10, "all but those that the engine had begun with"
    assert all(event["cost_picos"] == 0 for event in free)


@pytest.mark.parametrize("seed", range(3))
async def test_cancels_at_any_moment_leave_no_entry_behind(
    inside: Inside, service: Service, tenant: Tenant, seed: int
) -> None:
    """Before the hold, in the queue, behind it, and in the engine. The fixture detects leaks."""
    async with service.stream(tenant.secret) as stream:
        frames = [
            start(max_output_tokens=30, tier=pb.SERVICE_TIER_BATCH if index % 3 else 0)
            for index in range(18)
        ]
        for turn, frame in enumerate(frames):
            await stream.send(frame)
            for _ in range((seed + turn) % 5 * 3):
                await asyncio.sleep(0)
            await stream.cancel(frame.request_id)
        for frame in frames:
            await stream.end(frame.request_id)


async def test_the_queue_wait_is_timed(service: Service, tenant: Tenant) -> None:
    async with crowded(service, tenant, 4) as (stream, waiting):
        batch = await stream.begin(tier=pb.SERVICE_TIER_BATCH)
        await stream.first(batch, "progress")
        interactive = await stream.begin()
        running = next(each for each in stream.frames if stream.token_ids(each))
        await stream.cancel(*waiting, running)
        finished = await stream.finished(interactive)

        assert not stream.of(batch, "delta") or stream.ends(interactive)
        assert finished.timings.queue_ms > 0
        assert (
            finished.timings.total_ms
            >= finished.timings.queue_ms + finished.timings.prefill_ms + finished.timings.decode_ms
        )
        await stream.cancel(batch)
        await stream.end(batch)


async def test_a_weight_applies_to_running_servers_and_to_waiting_requests(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    async with crowded(service, tenant, 3):
        _, admin_secret = await service.new_key(tenant, "admin")
        async with AsyncAdminClient(service.address, admin_secret) as admin:
            weighed = await admin.set_queue_weight(str(tenant.organization_id), 4000)
            listed = [each async for each in admin.list_organizations()]
        own = tenant.organization_id
        await until(lambda: inside.process.weights.get(own.int) == 4.0, "the weight")
        waiting = inside.process.queues[MODEL].interactive.line.find(own)

    assert waiting is not None
    assert waiting.weight == 4.0
    assert weighed.queue_weight_milli == 4000
    assert {each.queue_weight_milli for each in listed if each.name == weighed.name} == {4000}
