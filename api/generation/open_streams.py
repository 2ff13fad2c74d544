"""Bounds on calls that are open, by connection and in all. One too many is refused with a reason and a time to come again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import grpc

from api.core.errors import ApiError, MessageMissing, Overloaded, TooManyStreams
from api.core.interceptor import LARGE_MESSAGES, Context, checked, writing
from api.core.pace import CALL_COST_S, VISIT

# Streams that need no key: of health checks and of reflection. A client has one of each, some have one for each service.
KEYLESS_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    }
)
KEYLESS_PER_CONNECTION_MAX = 8
KEYLESS_MAX = 2048  # of the process: some 50 MiB
MESSAGE_WAIT_S = 10.0  # for the one message of a call: it comes with the call, unless the client sends none
UNREAD_PER_CONNECTION_MAX = 1000  # calls whose message has not come; a client may begin hundreds in one moment
UNREAD_MAX = 4096  # of the process: some 90 MiB
# Messages of one API key that may be large and are received at once, by calls that take one: the transport keeps three times their
# size. Others wait for them, on the client's side.
LARGE_READS_MAX = 4


class OpenStreams:
    """Counts of one process, by connection."""

    def __init__(self, per_connection_max: int, *, count_max: int | None = None, error: type[ApiError] = Overloaded) -> None:
        """count_max: of all connections; None: no bound. error: what one too many is refused with."""
        self._per_connection_max = per_connection_max
        self._count_max = count_max
        self._error = error
        self._counts: Counter[str] = Counter()
        self.open_count = 0  # of all connections

    def take(self, peer: str) -> contextlib.ExitStack:
        """Count a stream until the stack is left. peer: the connection, as gRPC names it. Raises the error of the bound."""
        if self._counts.get(peer, 0) >= self._per_connection_max:
            raise self._error(
                f"this connection has {self._per_connection_max} streams open, as many as it may: "
                "close some, or send several requests over one stream"
            )
        if self._count_max is not None and self.open_count >= self._count_max:
            raise self._error(f"this server has {self._count_max} streams of this kind open, as many as it may: try again later")
        self._counts[peer] += 1
        self.open_count += 1
        taken = contextlib.ExitStack()
        taken.callback(self._give_back, peer)
        return taken

    def _give_back(self, peer: str) -> None:
        self._counts[peer] -= 1
        self.open_count -= 1
        if not self._counts[peer]:
            del self._counts[peer]


@dataclass(slots=True, eq=False)
class Readers:
    """Calls of one reader that read a message which may be large, or wait for a place to do so."""

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_READS_MAX))
    count: int = 0


class BoundedCalls:
    """Bounds what a client without a key can hold open: streams that need none, and calls whose message never comes.

    gRPC waits without end for the message of a call that takes one, before any handler runs. So each of them is served as a stream
    of which the first message is awaited here; on the wire the two are the same.
    """

    def __init__(self, turn_to_read: Callable[[Context], Awaitable[Hashable]]) -> None:
        """turn_to_read: waits until the message of a call may be read, and tells whose it is."""
        self._turn_to_read = turn_to_read
        self._readers: dict[Hashable, Readers] = {}
        self._keyless = OpenStreams(KEYLESS_PER_CONNECTION_MAX, count_max=KEYLESS_MAX, error=TooManyStreams)
        self._unread = OpenStreams(UNREAD_PER_CONNECTION_MAX, count_max=UNREAD_MAX, error=TooManyStreams)

    def __call__(self, method: str, handler: Any) -> Any:
        """See `api.core.interceptor.Wrap`."""
        serve: Callable[[Any, Context], Awaitable[Any]]
        if handler.unary_unary is not None:
            serve = self._reading_one(handler.unary_unary, answers_once=True, is_large=method in LARGE_MESSAGES)
        elif handler.unary_stream is not None:
            serve = self._reading_one(writing(handler.unary_stream), answers_once=False, is_large=method in LARGE_MESSAGES)
        elif method in KEYLESS_METHODS:
            serve = writing(handler.stream_stream)
        else:
            return handler
        if method in KEYLESS_METHODS:
            serve = self._counted(serve)
        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    def _reading_one(
        self, handle: Callable[[Any, Context], Awaitable[Any]], *, answers_once: bool, is_large: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            with self._unread.take(context.peer()):
                reader = await self._turn_to_read(context) if is_large else None
                try:
                    async with asyncio.timeout(MESSAGE_WAIT_S), self._reading(reader):
                        request = checked(await anext(aiter(requests)))
                except (TimeoutError, StopAsyncIteration):
                    raise MessageMissing(MESSAGE_WAIT_S) from None
            response = await handle(request, context)
            if answers_once:
                await context.write(response)

        return serve

    @contextlib.asynccontextmanager
    async def _reading(self, reader: Hashable | None) -> AsyncIterator[None]:
        """A block that reads a message. reader: of one that may be large, of which few are read at once; else None."""
        if reader is None:
            yield
            return
        readers = self._readers.setdefault(reader, Readers())
        readers.count += 1
        try:
            async with readers.places:
                yield
        finally:
            readers.count -= 1
            if not readers.count:
                del self._readers[reader]

    def _counted(self, handle: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def serve(requests: Any, context: Context) -> Any:
            if (visit := VISIT.get()) is not None:
                visit.count(CALL_COST_S)
                await visit.turn()
            with self._keyless.take(context.peer()):
                return await handle(requests, context)

        return serve
