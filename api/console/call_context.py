"""What a handler of a gRPC call sees of it when the call came over HTTP: the same key, the same peer, the same way to refuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import grpc
from aiohttp import web
from google.protobuf.message import Message
from google.rpc import status_pb2

from api.core.addresses import FORWARDED_FOR
from api.core.statuses import STATUS_DETAILS_KEY
from api.openai.http_requests import peer_of

PASSED_ON = ("authorization", "traceparent", "tracestate", FORWARDED_FOR)  # headers that are metadata of the call
Write = Callable[[Message], Awaitable[None]]


class Refused(grpc.aio.AbortError):
    """A call was refused. Interceptor and handlers let it pass, as they do gRPC's own."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class CallContext:
    """The part of `grpc.aio.ServicerContext` that handlers of this service use."""

    def __init__(self, request: web.BaseRequest, write: Write | None = None) -> None:
        """write: takes the messages of a call that answers with a stream."""
        self._metadata = tuple((name, value) for name in PASSED_ON for value in request.headers.getall(name, ()))
        self._peer = peer_of(request)
        self._write = write

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """See `ServicerContext`."""
        return self._metadata

    def peer(self) -> str:
        """See `ServicerContext`."""
        return self._peer

    def code(self) -> None:
        """See `ServicerContext`: no handler has set one."""

    async def write(self, message: Message) -> None:
        """See `ServicerContext`."""
        assert self._write is not None, "the call answers once"
        await self._write(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, bytes]] = ()
    ) -> NoReturn:
        """See `ServicerContext`; the details travel as gRPC sends them. Raises: Refused."""
        packed = dict(trailing_metadata).get(STATUS_DETAILS_KEY)
        if packed is None:
            raise Refused(status_pb2.Status(code=code.value[0], message=details))
        raise Refused(status_pb2.Status.FromString(packed))
