"""Generic clients that know only the address: contract by reflection, standard health service."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_requests.aio import AsyncClient  # type: ignore[import-untyped]

from api.core.endpoint import NOT_STARTED
from tests.service import MODEL, Service, Tenant, bearer, health_check

SERVICES = ("weir.v1.InferenceService", "weir.v1.AdminService", "weir.v1.BillingService")


async def test_a_client_from_a_registry_learns_the_contract_and_generates(service: Service) -> None:
    """`grpc-requests` takes dictionaries and builds messages from the server's reflection."""
    tenant = await service.tenant()
    metadata = bearer(tenant.secret)
    client = AsyncClient(service.address, descriptor_pool=DescriptorPool())
    try:
        names = set(await client.service_names())
        counted = await client.request(
            SERVICES[0],
            "CountTokens",
            {
                "model": MODEL,
                "conversation": {
                    "messages": [{"role": "ROLE_USER", "content": "Is breakfast included?"}]
                },
            },
            metadata=metadata,
        )
        request_id = str(uuid.uuid4())
        start = {"model": MODEL, "text": "Which hotel", "max_output_tokens": 12, "ignore_eos": True}
        frames = await generate(
            client, {"frames": [{"request_id": request_id, "start": start}]}, metadata
        )
    finally:
        await client.channel.close()

    reflection = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
    assert {*SERVICES, "grpc.health.v1.Health", *reflection} <= names
    assert int(counted["input_token_count"]) > 5
    token_ids = [
        token_id for frame in frames for token_id in frame.get("delta", {}).get("token_ids", [])
    ]
    usage = frames[-1]["finished"]["usage"]
    assert frames[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert int(usage["delivered_token_count"]) == 12
    assert len(token_ids) == 12
    assert service.database.event(tenant, request_id)["delivered_token_count"] == 12


async def generate(client: Any, message: dict[str, Any], metadata: object) -> list[dict[str, Any]]:
    """Return all frames of one stream that sends one message."""

    async def messages() -> Any:
        yield message

    answers = await client.request(SERVICES[0], "Generate", messages(), metadata=metadata)
    return [frame async for answer in answers for frame in answer["frames"]]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_clients_of_either_version(service: Service, version: str) -> None:
    """`buf curl --reflect-protocol grpc-v1` asks only v1; the messages are the same."""
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0])

    async with service.channel() as channel:
        call: Any = channel.stream_stream(
            method,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter([request]))
        answer = await call.read()

    [file] = answer.file_descriptor_response.file_descriptor_proto[:1]
    assert b"weir/v1/inference_service.proto" in file


async def test_it_is_refused_like_any_other(service: Service) -> None:
    client = AsyncClient(service.address, descriptor_pool=DescriptorPool())
    try:
        await client.request(SERVICES[0], "ListModels", {})
    except grpc.aio.AioRpcError as error:
        code = error.code()
    finally:
        await client.channel.close()

    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_health_reports_each_service_to_its_watchers(service: Service) -> None:
    """Needs no key, for load balancers."""
    async with service.channel() as channel:
        for name in ("", *SERVICES):
            answer = await health_check(channel)(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch: Any = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        call = watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        call.cancel()


async def test_health_stays_good_under_load(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream, service.channel() as channel:
        ids = [await stream.begin(max_output_tokens=300) for _ in range(30)]
        answers = [
            await health_check(channel)(health_pb2.HealthCheckRequest(), timeout=5)
            for _ in range(20)
        ]
        async with asyncio.TaskGroup() as tasks:
            for request_id in ids:
                tasks.create_task(stream.finished(request_id))

    assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}


def test_a_taken_address_is_reported_in_one_line(
    service: Service, model: Path, tmp_path: Path
) -> None:
    second = Service(tmp_path, service.database_url, model, listen=service.address)

    second.spawn()

    assert second.wait_ended() == NOT_STARTED
    assert f"cannot listen on {service.address}" in second.log.splitlines()[-1]
    assert "Traceback" not in second.log
