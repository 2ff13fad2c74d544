"""Calls without a key or with an unknown one: limits per connection, and their cost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from api.rpc.open_streams import KEYLESS_PER_CONNECTION_MAX as WATCHES_MAX
from api.rpc.open_streams import UNREAD_PER_CONNECTION_MAX
from tests.service import PATIENCE_S, POLL_S, Refusal, Service, until

COUNT = 2000
GROWN_MIB_MAX = 48


def resident_mib(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


async def ended(calls: list[Any]) -> list[Refusal]:
    """Return the refusals of ended calls.

    gRPC itself cancels or resets some calls if many wait; these are skipped.
    """
    refusals = []
    for call in calls:
        if call.done() and await call.code() not in (StatusCode.CANCELLED, StatusCode.UNAVAILABLE):
            metadata = await call.trailing_metadata()
            refusals.append(
                Refusal.of(
                    grpc.aio.AioRpcError(
                        await call.code(), grpc.aio.Metadata(), metadata, await call.details()
                    )
                )
            )
    return refusals


async def is_let_in(watch: Any) -> bool:
    """Return whether a watch gets a message; end the watch."""
    try:
        return bool(await watch.read() is not grpc.aio.EOF)
    except grpc.aio.AioRpcError:
        return False
    finally:
        watch.cancel()


async def open_many(service: Service, method: str, *, open_max: int) -> tuple[list[Refusal], int]:
    """Open silent calls on one connection; return the refusals and the used memory in MiB."""
    async with service.channel() as channel:
        await channel.channel_ready()
        before = resident_mib(service.pid)
        call: Any = channel.unary_stream if method.endswith("Watch") else channel.stream_stream
        calls: list[Any] = []
        for index in range(COUNT):
            calls.append(call(method)(b"") if method.endswith("Watch") else call(method)())
            if index % 100 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: sum(each.done() for each in calls) >= COUNT - open_max, "refusals")
        refusals, grown = await ended(calls), resident_mib(service.pid) - before
        for each in calls:
            each.cancel()
    print(f"\n{method}: {COUNT} opened, {len(refusals)} refused, {grown} MiB more")
    return refusals, grown


async def test_a_client_that_watches_health_gets_changes_and_frees_its_stream_at_its_end(
    service: Service,
) -> None:
    """First, before calls that are refused make this address wait for the answers of others."""
    async with service.channel() as channel:
        watching: Any = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for _ in range(3):
            watches = [watching(health_pb2.HealthCheckRequest()) for _ in range(WATCHES_MAX)]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (
                await watching(health_pb2.HealthCheckRequest()).code()
                is StatusCode.RESOURCE_EXHAUSTED
            )
            for watch in watches:
                watch.cancel()
            # The server learns of it slightly later.
            request = health_pb2.HealthCheckRequest()
            async with asyncio.timeout(PATIENCE_S):
                while not await is_let_in(watching(request)):  # noqa: ASYNC110  # no notification
                    await asyncio.sleep(POLL_S)


async def test_health_watches_are_bounded_by_connection(service: Service) -> None:
    refusals, grown = await open_many(service, "/grpc.health.v1.Health/Watch", open_max=WATCHES_MAX)

    assert len(refusals) > COUNT / 2
    assert {each.code for each in refusals} == {StatusCode.RESOURCE_EXHAUSTED}
    assert {each.reason for each in refusals} == {"TOO_MANY_STREAMS"}
    assert "8" in refusals[0].status.message
    assert grown < GROWN_MIB_MAX


async def test_reflection_streams_are_bounded_by_connection(service: Service) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    refusals, grown = await open_many(service, method, open_max=WATCHES_MAX)

    assert len(refusals) > COUNT / 2
    assert {each.code for each in refusals} == {StatusCode.RESOURCE_EXHAUSTED}
    assert {each.reason for each in refusals} == {"TOO_MANY_STREAMS"}
    assert grown < GROWN_MIB_MAX


async def test_calls_without_a_message_are_bounded(service: Service) -> None:
    method = "/weir.v1.InferenceService/GetQuota"
    refusals, grown = await open_many(service, method, open_max=0)

    reported = {(each.code, each.reason) for each in refusals}
    assert len(refusals) > COUNT / 2
    assert reported == {
        (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS"),
        (StatusCode.INVALID_ARGUMENT, "MESSAGE_MISSING"),
    }
    assert sum(each.reason == "MESSAGE_MISSING" for each in refusals) <= UNREAD_PER_CONNECTION_MAX
    assert grown < GROWN_MIB_MAX
