"""Port for other api processes: accepted clients, available calls, and bounds."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import admin_service_pb2_grpc as admin_pb_grpc
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.generation.request.peers import Peer, make_identity
from tests.conftest import new_database
from tests.peers import code_of, peer_of, publish
from tests.service import MODEL, PATIENCE_S, Refusal, Service, bearer, health_check, running, start

CONNECTIONS_MAX, HANDSHAKE_MAX_S = 5, 3.0


@pytest.fixture(scope="module")
def bounded(
    tmp_path_factory: pytest.TempPathFactory,
    model: object,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a process with few connections."""
    with new_database(postgres_server, template=template_database) as url:
        home = tmp_path_factory.mktemp("bounded")
        service = Service(
            home,
            url,
            model,  # type: ignore[arg-type]
            connections_max=CONNECTIONS_MAX,
            handshake_max_s=HANDSHAKE_MAX_S,
        )
        with running(service):
            yield service
            assert service.stop() == 0


async def plain(peer: Peer, secret: str) -> StatusCode:
    """Return the status for a client with an API key and without a certificate."""
    credentials = grpc.ssl_channel_credentials(peer.certificate.encode())
    name = (("grpc.ssl_target_name_override", "weir-peer"),)
    async with grpc.aio.secure_channel(peer.address, credentials, options=name) as channel:
        return await code_of(channel, secret)


async def test_only_certificates_of_running_processes_are_accepted(bounded: Service) -> None:
    tenant, peer = await bounded.tenant(), peer_of(bounded)
    stranger, known = make_identity(uuid.uuid4()), make_identity(uuid.uuid4())
    await publish(bounded, known)
    async with peer.channel(stranger) as foreign, peer.channel() as none:
        codes = [
            await code_of(foreign, tenant.secret),
            await code_of(none, tenant.secret),
            await plain(peer, tenant.secret),
        ]
    async with peer.channel(known) as channel:
        accepted = await code_of(channel, tenant.secret)

    assert codes == [StatusCode.UNAVAILABLE] * 3
    assert accepted is StatusCode.OK


async def test_peers_may_attach_and_call_nothing_else(bounded: Service) -> None:
    tenant, admin = await bounded.tenant(), await bounded.tenant(scopes=("admin",))
    known = make_identity(uuid.uuid4())
    await publish(bounded, known)
    async with peer_of(bounded).channel(known) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        who = bearer(tenant.secret)
        calls: tuple[Any, ...] = (
            stub.ListModels(pb.ListModelsRequest(), metadata=who),
            stub.CountTokens(pb.CountTokensRequest(model=MODEL, text="a"), metadata=who),
            stub.GetQuota(pb.GetQuotaRequest(), metadata=who),
            stub.Embed(pb.EmbedRequest(model=MODEL), metadata=who),
            admin_pb_grpc.AdminServiceStub(channel).ListApiKeys(
                admin_pb.ListApiKeysRequest(), metadata=bearer(admin.secret)
            ),
            health_check(channel)(health_pb2.HealthCheckRequest()),
        )
        codes = []
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            codes.append(refused.value.code())
        stream = stub.Generate(metadata=who)
        attach = pb.ClientFrame(request_id=str(uuid.uuid4()), attach=pb.AttachFrame())
        await stream.write(pb.GenerateRequest(frames=[start(), attach]))
        await stream.done_writing()
        frames: list[pb.ServerFrame] = []
        while isinstance(message := await stream.read(), pb.GenerateResponse):
            frames += message.frames

    assert codes == [StatusCode.UNIMPLEMENTED] * len(calls)
    begun, attached = (Refusal(frame.failed.status) for frame in frames)
    assert (begun.reason, attached.reason) == ("PERMISSION_DENIED", "REQUEST_UNKNOWN")
    assert bounded.database.holds(tenant) == {}


async def test_silent_connections_are_bounded_in_number_and_time(bounded: Service) -> None:
    host, _, port = peer_of(bounded).address.rpartition(":")

    async def hold_connection() -> None:
        """Hold a connection until the server closes it."""
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        finally:
            writer.close()

    open_now = {asyncio.create_task(hold_connection()) for _ in range(60)}
    async with asyncio.timeout(PATIENCE_S):
        _, open_now = await asyncio.wait(open_now, timeout=HANDSHAKE_MAX_S / 3)
        assert len(open_now) <= CONNECTIONS_MAX
        if open_now:
            await asyncio.wait(open_now)
