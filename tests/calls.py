"""Unary calls of the gRPC API with one key, by the names that the contract gives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from weir.v1 import (
    admin_service_pb2,
    billing_service_pb2,
    inference_service_pb2,
    receipt_service_pb2,
)

from tests.service import PATIENCE_S, Refusal, Service, bearer, refused

METHODS = {
    method.name: method
    for module in (
        admin_service_pb2,
        billing_service_pb2,
        inference_service_pb2,
        receipt_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Calls:
    """Calls with one key on one connection."""

    def __init__(
        self, channel: grpc.aio.Channel, secret: str | None, *metadata: tuple[str, str]
    ) -> None:
        self._channel = channel
        self.secret = secret or ""
        self._metadata = (*bearer(secret), *metadata)

    async def __call__(self, name: str, request: Any = None, /, **fields: Any) -> Any:
        """Make a call with a request, or with one of these fields; return the response."""
        method = METHODS[name]
        kind: Any = GetMessageClass(method.input_type)
        call: Any = self._channel.unary_unary(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=kind.SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        message = kind(**fields) if request is None else request
        return await call(message, metadata=self._metadata, timeout=PATIENCE_S)

    async def refused(self, name: str, request: Any = None, /, **fields: Any) -> Refusal:
        """Make a call that must be refused; return the refusal."""
        return await refused(self(name, request, **fields))


@asynccontextmanager
async def calls(
    service: Service, secret: str | None, *metadata: tuple[str, str]
) -> AsyncIterator[Calls]:
    """Yield calls with a key on a new connection."""
    async with service.channel() as channel:
        yield Calls(channel, secret, *metadata)
