"""Many streams opened at once: each is served, or refused with a reason and a retry-after."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from metering.core.models import QuotaDimension
from tests.e2e.conftest import Serve
from tests.service import Refusal, Service, Tenant, bearer, credit, start

STREAM_COUNT = int(os.environ.get("WEIR_TEST_STREAMS", "400"))
STREAMS_MAX = STREAM_COUNT // 4
REQUESTS_MAX = 5  # on one stream


@pytest.fixture(scope="module")
def small(serve: Serve, model: Path) -> Service:
    """Return a service with few streams per connection and few requests per stream."""
    few = {"streams_per_connection_max": STREAMS_MAX, "requests_per_stream_max": REQUESTS_MAX}
    return serve(model, **few)


async def one_request(channel: grpc.aio.Channel, tenant: Tenant, **fields: Any) -> str | Refusal:
    """Open a stream with one request; return the end of the request or the refusal."""
    call = pb_grpc.InferenceServiceStub(channel).Generate(metadata=bearer(tenant.secret))
    kinds: list[str] = []
    try:
        await call.write(pb.GenerateRequest(frames=[start(**{"max_output_tokens": 1} | fields)]))
        await call.done_writing()
        while isinstance(message := await call.read(), pb.GenerateResponse):
            kinds += [frame.WhichOneof("kind") or "" for frame in message.frames]
    # The client of gRPC says the latter of a stream that has ended.
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as ended:
        print(ended)
    if (code := await call.code()) is StatusCode.OK:
        return kinds[-1]
    return Refusal.of(
        grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata())
    )


async def test_too_many_streams_of_a_connection_are_refused(small: Service) -> None:
    tenant = await small.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})
    async with grpc.aio.insecure_channel(small.address) as channel:
        ends = await asyncio.gather(*(one_request(channel, tenant) for _ in range(STREAM_COUNT)))
        # None if all are served before the next ones come.
        refused = [end for end in ends if isinstance(end, Refusal)]
        served = [end for end in ends if not isinstance(end, Refusal)]
        again = await one_request(channel, tenant)

    assert {(each.code, each.reason) for each in refused} <= {
        (StatusCode.UNAVAILABLE, "OVERLOADED")
    }
    assert all(each.retry_after_s for each in refused)
    assert served == ["finished"] * len(served)
    assert len(served) >= STREAMS_MAX
    assert again == "finished"
    await small.no_hold_left(tenant)


async def test_a_refused_stream_that_sends_nothing_gets_the_reason(small: Service) -> None:
    """The refusal waits for the first message, whose write would fail, but not endlessly."""
    tenant = await small.tenant()
    async with grpc.aio.insecure_channel(small.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        silent = [stub.Generate(metadata=bearer(tenant.secret)) for _ in range(STREAMS_MAX + 3)]
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(call.code()) for call in silent],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert {task.result() for task in done} == {StatusCode.UNAVAILABLE}
        for call in silent:
            call.cancel()


async def test_more_requests_than_a_stream_may_have_are_refused_one_by_one(small: Service) -> None:
    tenant = await small.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})
    # None ends without credit.
    frames = [start(max_output_tokens=1, initial_credit_tokens=0) for _ in range(REQUESTS_MAX + 2)]
    async with small.stream(tenant.secret) as stream:
        await stream.send(*frames)
        refused = [await stream.failed(frame.request_id) for frame in frames[REQUESTS_MAX:]]
        await stream.send(*(credit(frame.request_id, 1) for frame in frames[:REQUESTS_MAX]))
        for frame in frames[:REQUESTS_MAX]:
            await stream.finished(frame.request_id)
        await stream.finished(await stream.begin(max_output_tokens=1))

    assert {(each.code, each.reason) for each in refused} == {
        (StatusCode.UNAVAILABLE, "OVERLOADED")
    }
    assert all(each.retry_after_s for each in refused)
    await small.no_hold_left(tenant)


async def test_large_first_messages_of_one_key_do_not_pile_up_in_memory(service: Service) -> None:
    """Each stream would hold one until its turn to be parsed."""
    tenant = await service.tenant()
    ids = [0] * 2_000_000  # two megabytes, and more than the window
    async with service.channel() as channel:
        ends = await asyncio.gather(*(one_request(channel, tenant, prompt=ids) for _ in range(40)))

    refused = [end for end in ends if isinstance(end, Refusal)]
    assert {each.reason for each in refused} == {"PREPARATION_LIMIT"}
    assert all(each.retry_after_s for each in refused)
    assert [end for end in ends if not isinstance(end, Refusal)] == ["failed"] * (40 - len(refused))
    assert len(refused) < 40
