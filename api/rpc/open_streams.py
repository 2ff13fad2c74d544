"""Limits on open calls, per connection and in total.

Excess calls are refused with a retry-after.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from api.core.errors import ApiError, MessageMissing, Overloaded, TooManyStreams
from api.core.interceptor import LARGE_MESSAGES, Context, ReceivedMessages, checked, writing
from api.core.rate_limiter import CALL, CALL_COST_S, Payer

# Streams that need no key: health checks and reflection. A client opens one of each, or one per
# service.
KEYLESS_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    }
)
KEYLESS_PER_CONNECTION_MAX = 8
KEYLESS_MAX = 2048  # per process: some 50 MiB
MESSAGE_WAIT_S = 10.0  # for the message of a unary call, which clients send together with the call
# Calls whose message has not arrived; a client may start hundreds at once.
UNREAD_PER_CONNECTION_MAX = 1000
UNREAD_MAX = 4096  # per process: some 90 MiB
# Large messages of one API key that are received at once by unary calls: the transport holds three
# times their size. Further messages wait on the client's side.
LARGE_READS_MAX = 4


class OpenStreams:
    """Counter and limit of open streams, per connection and in total."""

    def __init__(
        self,
        per_connection_max: int,
        *,
        count_max: int | None = None,
        error: type[ApiError] = Overloaded,
    ) -> None:
        """`count_max` limits the streams of all connections together; None: no limit.

        `error` is raised for a stream above a limit.
        """
        self._per_connection_max = per_connection_max
        self._count_max = count_max
        self._error = error
        self._counts: Counter[str] = Counter()
        self.open_count = 0  # over all connections

    def take(self, peer: str) -> contextlib.ExitStack:
        """Count a stream until the returned stack is closed. Raises `error` above a limit.

        `peer` identifies the connection, in gRPC's notation.
        """
        if self._counts.get(peer, 0) >= self._per_connection_max:
            raise self._error(
                f"This connection has {self._per_connection_max} open streams, which is its limit."
                " Close some, or send several requests on one stream."
            )
        if self._count_max is not None and self.open_count >= self._count_max:
            raise self._error(
                f"This server has {self._count_max} open streams of this kind, which is its limit."
                " Send an API key with each call, and its message at once."
            )
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


ShareToRead = Callable[[Context], Awaitable[Payer]]
ReadLargeOf = Callable[[Payer, int, Callable[[], Any]], Awaitable[Any]]


@dataclass(slots=True, eq=False)
class Readers:
    """Calls of one payer that are reading a large message, or waiting to read one."""

    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_READS_MAX))
    count: int = 0


class BoundedCalls:
    """Limits on clients without an API key: open streams, and calls without their message.

    gRPC waits without limit for the message of a unary call before it calls any handler. Such calls
    are therefore served as streams, whose first message is awaited here; on the wire, both are the
    same.
    """

    def __init__(self, share_to_read: ShareToRead, read_large: ReadLargeOf | None = None) -> None:
        """`share_to_read` waits until the message of a call may be parsed, and returns its payer.

        `read_large` parses a large message outside the event loop; with None, it is parsed inside.
        """
        self._share_to_read = share_to_read
        self._read_large = read_large
        self._readers: dict[Hashable, Readers] = {}
        self._keyless = OpenStreams(
            KEYLESS_PER_CONNECTION_MAX, count_max=KEYLESS_MAX, error=TooManyStreams
        )
        self._unread = OpenStreams(
            UNREAD_PER_CONNECTION_MAX, count_max=UNREAD_MAX, error=TooManyStreams
        )

    def __call__(self, method: str, handler: Any) -> Any:
        """Implement `api.core.interceptor.Wrap`."""
        serve: Callable[[Any, Context], Awaitable[Any]]
        if handler.unary_unary is not None:
            serve = self._reading_one(
                handler.unary_unary, answers_once=True, is_large=method in LARGE_MESSAGES
            )
        elif handler.unary_stream is not None:
            serve = self._reading_one(
                writing(handler.unary_stream), answers_once=False, is_large=method in LARGE_MESSAGES
            )
        elif method in KEYLESS_METHODS:
            serve = writing(handler.stream_stream)
        else:
            return handler
        if method in KEYLESS_METHODS:
            serve = self._counted(serve)
        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )

    def _reading_one(
        self,
        handle: Callable[[Any, Context], Awaitable[Any]],
        *,
        answers_once: bool,
        is_large: bool,
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            with self._unread.take(context.peer()):
                reader = await self._share_to_read(context) if is_large else None
                try:
                    async with asyncio.timeout(MESSAGE_WAIT_S) as wait, self._reading(reader):
                        if isinstance(requests, ReceivedMessages):
                            requests.check = checked
                            if reader is not None and self._read_large is not None:
                                requests.read_large = partial(self._received, reader, wait)
                        request = await anext(aiter(requests))
                except (TimeoutError, StopAsyncIteration):
                    raise MessageMissing(MESSAGE_WAIT_S) from None
            response = await handle(request, context)
            if answers_once:
                await context.write(response)

        return serve

    async def _received(
        self, payer: Payer, wait: asyncio.Timeout, size: int, read: Callable[[], Any]
    ) -> Any:
        """Parse a large message that has arrived, without a limit on the client's time."""
        assert self._read_large is not None
        wait.reschedule(None)
        return await self._read_large(payer, size, read)

    @contextlib.asynccontextmanager
    async def _reading(self, payer: Payer | None) -> AsyncIterator[None]:
        """Take one of the payer's few permits to read a large message; None for a small one."""
        if payer is None:
            yield
            return
        reader = payer if isinstance(payer, str) else payer.api_key_id
        readers = self._readers.setdefault(reader, Readers())
        readers.count += 1
        try:
            async with readers.permits:
                yield
        finally:
            readers.count -= 1
            if not readers.count:
                del self._readers[reader]

    def _counted(
        self, handle: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def serve(requests: Any, context: Context) -> Any:
            if (call := CALL.get()) is not None:
                call.count(CALL_COST_S)
                await call.wait_for_share()
            with self._keyless.take(context.peer()):
                return await handle(requests, context)

        return serve
