"""Limits of one stream and one message: values at each bound pass, values just beyond it fail."""

from __future__ import annotations

import uuid
from typing import Any

import grpc
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from tests.calls import Calls
from tests.service import Refusal, Service, bearer, cancel, refused


async def test_a_message_may_have_the_bound_and_not_a_byte_more(service: Service) -> None:
    tenant, most = await service.tenant(), service.settings.messages.bytes_max
    request = pb.CountTokensRequest(model="nobody-has-this", text="x")
    # A length of millions takes three bytes more than one of 1.
    request.text = "x" * (most - (request.ByteSize() - 1) - 3)
    assert request.ByteSize() == most

    async with service.channel(("grpc.max_send_message_length", -1)) as channel:
        call = Calls(channel, tenant.secret)
        within = await call.refused("CountTokens", request)
        request.text += "x"
        beyond = await call.refused("CountTokens", request)

    assert (within.code, within.reason) == (StatusCode.NOT_FOUND, "MODEL_UNKNOWN"), "it was read"
    assert beyond.code is StatusCode.RESOURCE_EXHAUSTED
    assert str(most) in beyond.status.message


async def test_a_small_message_that_unpacks_to_a_large_one_is_refused(service: Service) -> None:
    tenant = await service.tenant()
    bomb = pb.CountTokensRequest(
        model="nobody-has-this", text="x" * 4 * service.settings.messages.bytes_max
    )

    async with service.channel(("grpc.max_send_message_length", -1)) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)
        refusal = await refused(
            stub.CountTokens(
                bomb, metadata=bearer(tenant.secret), compression=grpc.Compression.Gzip
            )
        )

    assert refusal.code is StatusCode.RESOURCE_EXHAUSTED
    assert service.serving()


async def test_the_number_of_frames_in_a_message_is_limited(service: Service) -> None:
    tenant, most = await service.tenant(), service.settings.messages.frames_max
    frames = [cancel(str(uuid.uuid4())) for _ in range(most + 1)]

    async with service.stream(tenant.secret) as stream:
        await stream.send(*frames[:most])
        await stream.half_close()
        assert await stream.closed() is StatusCode.OK
    async with service.stream(tenant.secret) as full:
        await full.send(*frames)
        await full.closed()

    assert sum(len(answers) for answers in stream.frames.values()) == most, "each was answered"
    assert full.error is not None
    refusal = Refusal.of(full.error)
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["frames"])
    assert f"{most} frames, got {most + 1}" in refusal.status.message
