"""Server with the product's transport and only a health service, for tests of the transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from api.access.tls import Tls
from api.core.settings import Settings
from api.server import options
from tests.service import health_check

TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def bare_server(settings: Settings, tls: Tls | None = None) -> AsyncIterator[str]:
    """Yield its address."""
    server = grpc.aio.server(options=options(settings))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    address = "127.0.0.1:0"
    port = (
        server.add_insecure_port(address)
        if tls is None
        else server.add_secure_port(address, tls.grpc_credentials())
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def connection(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    channel_options: Sequence[tuple[str, Any]] = (),
) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a new connection."""
    alone = [("grpc.use_local_subchannel_pool", 1), *channel_options]
    if credentials is None:
        opened = grpc.aio.insecure_channel(address, options=alone)
    else:
        opened = grpc.aio.secure_channel(address, credentials, options=alone)
    async with opened as channel:
        yield channel


async def check(
    channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()
) -> grpc.StatusCode:
    """Return the status of a health check.

    The timeout is this client's: gRPC's would be sent as metadata of varying length.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await health_check(channel)(health_pb2.HealthCheckRequest(), metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
