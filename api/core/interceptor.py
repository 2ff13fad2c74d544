"""Turns every error that leaves a handler into its status, so that none escapes as UNKNOWN with its class and text."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from api.core.errors import STATUS_DETAILS_KEY, CallMissing, MessageTooLarge, MessageUnreadable, check_texts, status_of
from api.core.pace import VISIT, FramePace, Visit, measured

CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = grpc.aio.ServicerContext[Any, Any]

# What is not a prompt, texts or a configuration needs some kilobytes. It is read on the event loop, before the key is known.
MESSAGE_BYTES_MAX = 64 * 2**10
LARGE_MESSAGES = frozenset(
    {
        "/weir.v1.InferenceService/Generate",
        "/weir.v1.InferenceService/CountTokens",
        "/weir.v1.InferenceService/Quote",
        "/weir.v1.InferenceService/Embed",
        "/weir.v1.AdminService/ApplyConfiguration",
    }
)

METHOD: ContextVar[str] = ContextVar("method")  # the path of the call that this task answers; gRPC's context does not tell

SERIALIZED = frozenset({"/weir.v1.InferenceService/Generate"})  # whose answers are written in the wire format

# Health checks are answered whoever else calls from their address.
PROBE = "/grpc.health.v1.Health/Check"

# Of this task's last message: seconds of processor time that it took to be parsed on the event loop, and its size.
READ_S: ContextVar[float] = ContextVar("read_s", default=0.0)
READ_BYTES: ContextVar[int] = ContextVar("read_bytes", default=0)


async def abort(context: Context, status: status_pb2.Status) -> None:
    """End the call with a status and its details.

    The context keeps the error that it aborts with, and that would keep every frame that it passes, with the context in each: a
    cycle of fifty objects for each refused call, freed by the thousand in one go that holds the event loop for 30 ms.
    """
    try:
        await context.abort(CODES[status.code], status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
        raise
    finally:
        del context


Failed = Callable[[str, BaseException], None]


def tell_nobody(method: str, error: BaseException) -> None:
    """For servers whose failed calls nobody counts."""


Parse = Callable[[bytes], Any]
Wrap = Callable[[str, Any], Any]  # of a call's path and its `grpc.RpcMethodHandler`: another one


class GuardedServices:
    """Takes the place of a server where generated code registers its handlers, and registers them wrapped.

    An interceptor does the same at each call, and leaves a reference cycle behind each time.
    """

    def __init__(self, server: grpc.aio.Server, *wraps: Wrap) -> None:
        """wraps: from the inside out."""
        self._server = server
        self._wraps = wraps

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers come with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.aio.Server`."""
        wrapped = {}
        for name, handler in handlers.items():
            for wrap in self._wraps:
                handler = wrap(f"/{service}/{name}", handler)
            wrapped[name] = handler
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
        self._server.add_registered_method_handlers(service, wrapped)


class Guard:
    """Wraps calls that answer once, with a stream, or talk both ways; passes on the abort itself and cancellation."""

    def __init__(self, failed: Failed = tell_nobody, pace: FramePace | None = None) -> None:
        """failed: told of the path of each call that ends with an error, and of that. pace: counts calls; None: nobody does."""
        self._failed = failed
        self._pace = pace

    def __call__(self, method: str, handler: Any) -> Any:
        """See `Wrap`."""
        most = None if method in LARGE_MESSAGES else MESSAGE_BYTES_MAX
        read, write = tolerant(handler.request_deserializer, most), handler.response_serializer
        if handler.unary_unary is not None:
            handle = self._guarded(handler.unary_unary, method)
            return grpc.unary_unary_rpc_method_handler(handle, read, write)
        if handler.unary_stream is not None:
            handle = self._guarded(writing(handler.unary_stream), method)
            return grpc.unary_stream_rpc_method_handler(handle, read, write)
        if handler.stream_stream is not None:
            handle = self._guarded(writing(handler.stream_stream), method, read)
            return grpc.stream_stream_rpc_method_handler(handle, None, None if method in SERIALIZED else write)
        return handler

    def _guarded(self, handle: Callable[..., Any], method: str, parse: Parse | None = None) -> Callable[[Any, Any], Awaitable[Any]]:
        guard = guarded(handle, method, self._failed, parse)
        return guard if self._pace is None else visiting(guard, self._pace)


def visiting(guard: Callable[[Any, Any], Coroutine[Any, Any, Any]], pace: FramePace) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler whose calls are counted."""

    async def visit(request: Any, context: Context) -> Any:
        one = Visit(pace, context.peer())
        VISIT.set(one)
        try:
            answer = guard(request, context)
            del request, context  # see `abort`
            return await measured(one, answer)
        finally:
            one.over()

    return visit


def writing(handle: Callable[..., Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler that writes its answers, made of one that may yield them: only such a one can be guarded."""
    if not inspect.isasyncgenfunction(handle):
        return handle

    async def write_all(request: Any, context: Context) -> None:
        async for response in handle(request, context):
            await context.write(response)

    return write_all


def guarded(
    handle: Callable[..., Any], method: str, failed: Failed = tell_nobody, parse: Parse | None = None
) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
    """A handler of the call at this path, whose errors become statuses. A refusal waits for its turn.

    parse: of the messages of a stream, where the transport hands them on as they came.
    """

    async def guard(request: Any, context: Context) -> Any:
        METHOD.set(method)
        error: BaseException
        try:
            # gRPC's own iterator is part of a reference cycle that keeps the last message.
            request = ReceivedMessages(context, parse) if isinstance(request, AsyncIterable) else checked(request)
            return await handle(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError) as ended:
            ended.__traceback__ = None  # task groups keep the error in a frame that it refers to
            raise
        except NotImplementedError as absent:
            # What the generated classes do for a call that nobody has written: not our bug, and no incident.
            is_absent = context.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])
            error = CallMissing(method) if is_absent else absent
        except BaseExceptionGroup as group:
            error = first_error(group)
        except Exception as plain:
            error = plain
        failed(method, error)
        status = status_of(error)
        del request, error
        if (visit := VISIT.get()) is not None and method != PROBE:
            await visit.turn()
        refusal = abort(context, status)
        del context  # see `abort`
        return await refusal

    return guard


def tolerant(deserialize: Callable[[bytes], Any] | None, byte_count_max: int | None = None) -> Callable[[bytes], Any] | None:
    """A deserializer that hands its error on as the message: raised where gRPC calls it, it would go out as UNKNOWN.

    byte_count_max: of a message; None if the transport's own limit will do.
    """
    if deserialize is None:
        return None

    def attempt(data: bytes) -> Any:
        if byte_count_max is not None and len(data) > byte_count_max:
            return MessageTooLarge(len(data), byte_count_max)
        began_at = time.thread_time()
        try:
            return deserialize(data)
        except Exception:
            return MessageUnreadable("the message cannot be read: it is not a message of this call's request type")
        finally:
            READ_S.set(time.thread_time() - began_at)
            READ_BYTES.set(len(data))

    return attempt


def checked(request: Any) -> Any:
    """A request that can be read, whose short texts are within their bounds.

    Raises: MessageUnreadable, MessageTooLarge, InvalidRequest.
    """
    if isinstance(request, MessageUnreadable | MessageTooLarge):
        raise request
    if isinstance(request, Message):
        check_texts(request)
    return request


class ReceivedMessages(AsyncIterator[Any]):
    """Messages of a stream, up to the first one that cannot be read. Keeps no message between two reads."""

    def __init__(self, context: Context, parse: Parse | None = None) -> None:
        """parse: None if the transport has parsed what it hands on."""
        self._context = context
        self._parse = parse
        # Waited for before a large message is parsed, which takes several times its size.
        self.before_large: Callable[[], Awaitable[object]] | None = None

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        if self._parse is not None:
            if self.before_large is not None and len(message) > MESSAGE_BYTES_MAX:
                await self.before_large()
            message = self._parse(message)
        if isinstance(message, MessageUnreadable | MessageTooLarge):
            raise message
        return message


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error inside nested groups: a task group wraps even a single one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
