"""Exact limits under concurrency: fitting requests are admitted, others refused without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from metering.core.models import QuotaDimension
from tests.service import INPUT_PICOS, OUTPUT_PICOS, Refusal, Service, Stream, Tenant, start

ARRIVING, FITTING = 200, 50
OUTPUT_TOKENS = 60
TOKENS = 10 + OUTPUT_TOKENS  # of one request
PICOS = 10 * INPUT_PICOS + OUTPUT_TOKENS * OUTPUT_PICOS

EXACT = [
    (QuotaDimension.CONCURRENT_REQUESTS, 1),
    (QuotaDimension.TOKENS_PER_MONTH, TOKENS),
    (QuotaDimension.TOKENS_PER_DAY, TOKENS),
    (QuotaDimension.COST_PICOS_PER_MONTH, PICOS),
]


@pytest.mark.parametrize(("dimension", "each"), EXACT, ids=lambda value: str(value))
async def test_of_two_hundred_requests_fifty_fit(
    service: Service, dimension: QuotaDimension, each: int
) -> None:
    """All are decided before any ends: each is 60 tokens long and they run 50 at a time."""
    tenant = await service.tenant({dimension: FITTING * each})
    connections = 4

    async with asyncio.TaskGroup() as tasks:
        runs = [
            tasks.create_task(arrive(service, tenant, ARRIVING // connections))
            for _ in range(connections)
        ]

    admitted = [frame for run in runs for frame in run.result()[0]]
    refusals = [refusal for run in runs for refusal in run.result()[1]]
    if dimension is QuotaDimension.CONCURRENT_REQUESTS:
        assert len(admitted) >= FITTING  # requests may use room that frees up while others arrive
        assert peak(admitted) <= FITTING
    else:
        assert (len(admitted), len(refusals)) == (FITTING, ARRIVING - FITTING)
        assert service.database.counters(tenant) == {str(dimension): (FITTING * each, 0)}
    for refusal in refusals:
        check_refusal(refusal, tenant, dimension, FITTING * each)
    assert service.database.holds(tenant) == {"settled": len(admitted)}, "no trace"
    assert len(service.database.events(tenant)) == len(admitted)


async def arrive(
    service: Service, tenant: Tenant, count: int
) -> tuple[list[pb.AdmittedFrame], list[Refusal]]:
    """Send requests in one message on a new connection; return their ends."""
    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=OUTPUT_TOKENS) for _ in range(count)]
        await stream.send(*starts)
        ends = [await stream.end(frame.request_id) for frame in starts]
    admitted = [
        frame.admitted
        for frames in stream.frames.values()
        for frame in frames
        if frame.HasField("admitted")
    ]
    refusals = [Refusal(end.failed.status) for end in ends if end.HasField("failed")]
    return admitted, refusals


def peak(admitted: Sequence[pb.AdmittedFrame]) -> int:
    """Return the maximum number of requests at any admission, including itself."""
    return max(quota.held_value for frame in admitted for quota in frame.quotas)


def check_refusal(refusal: Refusal, tenant: Tenant, dimension: QuotaDimension, limit: int) -> None:
    """Check that it reports the limit, its state, and a remedy."""
    facts = refusal.info.metadata
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.reason == "QUOTA_EXCEEDED"
    assert (facts["dimension"], facts["limit"]) == (dimension.spelling, str(limit))
    assert facts["subject"] == "organization"
    assert facts["subject_id"] == str(tenant.organization_id)
    assert int(facts["used"]) + int(facts["held"]) + int(facts["remaining"]) == limit
    assert int(facts["remaining"]) < int(facts["requested"])
    assert facts["retry_helps"] == "true"
    failure = refusal.detail(error_details_pb2.QuotaFailure)
    assert failure is not None
    assert failure.violations[0].subject == f"organization:{tenant.organization_id}"
    assert refusal.retry_after_s is not None
    if dimension is QuotaDimension.CONCURRENT_REQUESTS:
        assert "reset_time" not in facts
        assert 0 < refusal.retry_after_s <= 60
    else:
        resets_at = datetime.fromisoformat(facts["reset_time"])
        assert timedelta(0) < resets_at - datetime.now(UTC) < timedelta(days=32)
        assert abs((resets_at - datetime.now(UTC)).total_seconds() - refusal.retry_after_s) < 60


async def test_a_request_above_the_limit_gets_no_retry_after(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 12})

    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin())

    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.info.metadata["retry_helps"] == "false"
    assert refusal.retry_after_s is None


async def test_a_refused_request_uses_nothing_of_its_other_limits(service: Service) -> None:
    """A request that one limit refuses must not count against another, as it does in LiteLLM."""
    limits = {
        QuotaDimension.CONCURRENT_REQUESTS: 0,
        QuotaDimension.TOKENS_PER_MONTH: 1000,
        QuotaDimension.TOKENS_PER_DAY: 1000,
    }
    tenant = await service.tenant(limits)

    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin())

    assert refusal.info.metadata["dimension"] == "concurrent-requests"
    assert all(counts == (0, 0) for counts in service.database.counters(tenant).values())
    assert service.database.holds(tenant) == {}


async def test_a_refused_request_may_come_again_under_its_id(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 5})
    frame = start()

    async with service.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.failed(frame.request_id)
        await service.set_limit(tenant, QuotaDimension.TOKENS_PER_MONTH, 100)
        stream.frames.clear()
        await stream.send(frame)

        assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 20


async def test_a_stream_ends_exactly_at_its_limit(service: Service) -> None:
    """All tokens up to the limit are delivered, reported and settled, and none beyond it."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10 + 333})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=2000)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert len(stream.token_ids(request_id)) == finished.usage.delivered_token_count == 333
    [quota] = finished.exhausted_quotas
    assert quota.dimension == types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH
    assert quota.limit_value == 343
    assert quota.HasField("reset_time")
    assert service.database.counters(tenant) == {"tokens_per_month": (343, 0)}
    event = service.database.event(tenant, request_id)
    assert (event["outcome"], event["delivered_token_count"]) == ("quota_exhausted", 333)


async def test_money_ends_a_stream_before_the_first_token_beyond_it(service: Service) -> None:
    budget = 10 * INPUT_PICOS + 200 * OUTPUT_PICOS + OUTPUT_PICOS - 1
    tenant = await service.tenant({QuotaDimension.COST_PICOS_PER_MONTH: budget})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=2000)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
    assert finished.usage.delivered_token_count == 200
    used = budget - OUTPUT_PICOS + 1
    assert service.database.counters(tenant) == {"cost_picos_per_month": (used, 0)}


async def test_streams_that_share_a_limit_use_it_up_together(service: Service) -> None:
    limit = 4000
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: limit})

    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=2000) for _ in range(6)]
        await stream.send(*starts)
        ends = [await stream.end(frame.request_id) for frame in starts]

    received = sum(len(stream.token_ids(frame.request_id)) for frame in starts)
    used, held = service.database.counters(tenant)["tokens_per_month"]
    assert held == 0
    assert used == received + 10 * sum(end.HasField("finished") for end in ends) <= limit
    assert limit - used < 6 * 16, "less than the least slice of each is left"


async def test_a_raised_limit_counts_at_once(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 0})

    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin())
        await service.set_limit(tenant, QuotaDimension.CONCURRENT_REQUESTS, 1)
        finished = await stream.finished(await stream.begin())

    assert refusal.info.metadata["limit"] == "0"
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_stream_continues_after_its_limit_is_raised(service: Service) -> None:
    """The lower limit would end it at 1,500 tokens. The engine pauses until the increase."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10 + 1500})
    worker_pid = service.worker_pid
    assert worker_pid is not None

    async with service.stream(tenant.secret) as stream:
        await spend(stream, 20)  # the engine is running
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            request_id = await stream.begin(max_output_tokens=2500)
            await stream.first(request_id, "admitted")
            await service.set_limit(tenant, QuotaDimension.TOKENS_PER_MONTH, 100_000)
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage.delivered_token_count == 2500


async def test_the_permit_of_an_ended_request_is_free(service: Service) -> None:
    """A hundred times in turn: a leaked slot would block the second request."""
    tenant = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 1})

    async with service.stream(tenant.secret) as stream:
        for index in range(30):
            request_id = await stream.begin(max_output_tokens=3 if index % 3 else 1000)
            if index % 3 == 0:
                await stream.received(request_id, 1)
                await stream.cancel(request_id)
            await stream.finished(request_id)

    assert service.database.counters(tenant) == {"concurrent_requests": (0, 0)}


async def test_two_keys_draw_on_the_limit_of_their_organization(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 1000})
    _, second = await service.new_key(tenant)

    async with service.stream(tenant.secret) as one, service.stream(second) as other:
        ends = []
        for stream in (one, other, one, other):
            ends.append(await spend(stream, 240))

    assert ends == ["finished"] * 4
    assert service.database.counters(tenant) == {"tokens_per_month": (1000, 0)}
    async with service.stream(second) as other:
        assert await spend(other, 240) == "failed", "both keys draw on the organization"


async def spend(stream: Stream, output_tokens: int) -> str | None:
    """Return the kind of the end of a request with this many tokens."""
    end = await stream.end(await stream.begin(max_output_tokens=output_tokens))
    return end.WhichOneof("kind")


async def test_a_thousand_requests_at_once_are_served_or_retried(service: Service) -> None:
    tenant = await service.tenant()

    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=1) for _ in range(1001)]
        await stream.send(*starts)
        ends = [await stream.end(frame.request_id) for frame in starts]

    refused = [
        Refusal(end.failed.status, end.failed) for end in ends if end.WhichOneof("kind") == "failed"
    ]
    assert len(refused) < len(starts)
    assert {(each.code, each.reason) for each in refused} <= {
        (grpc.StatusCode.UNAVAILABLE, "OVERLOADED"),
        (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL"),
    }
    assert all(each.retry_after_s for each in refused)
    await service.no_hold_left(tenant)
