"""Peer process played by a test: its certificate is published, so peer ports accept it."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import psycopg
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.generation.request.peers import Identity, Peer
from metering.store.db import psycopg_conninfo
from tests.service import PATIENCE_S, Service

PUBLISH = """
INSERT INTO live_reports (process_id, process_name, peer_certificate, reported_at, requests)
VALUES (%s, 'test:1', %s, now(), '[]')
"""


def peer_of(service: Service) -> Peer:
    """Return the address and certificate by which other processes reach this service."""
    pattern = f"%:{service.pid}"
    [row] = service.database.rows(
        "SELECT peer_address, peer_certificate FROM live_reports WHERE process_name LIKE %s",
        pattern,
    )
    return Peer(row["peer_address"], row["peer_certificate"])


async def publish(service: Service, identity: Identity) -> None:
    """Publish a certificate as processes do; return when this service accepts it."""
    with psycopg.connect(psycopg_conninfo(service.database_url), autocommit=True) as connection:
        connection.execute(PUBLISH, (identity.process_id, identity.certificate.decode()))
        connection.execute("NOTIFY weir_control, 'peers'")
    peer = peer_of(service)

    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with peer.channel(identity) as channel:
                if await code_of(channel) is grpc.StatusCode.UNAUTHENTICATED:
                    return


async def code_of(channel: grpc.aio.Channel, secret: str | None = None) -> grpc.StatusCode:
    """Return the status of a `Generate` call that sends nothing."""
    metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
    call = pb_grpc.InferenceServiceStub(channel).Generate(metadata=metadata)
    with contextlib.suppress(Exception):  # a refused handshake fails the write with an error
        await call.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()
    return await call.code()
