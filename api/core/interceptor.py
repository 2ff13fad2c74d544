"""Guards of gRPC handlers: every error becomes its status, instead of UNKNOWN with its text."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from api.core.errors import (
    STATUS_DETAILS_KEY,
    CallMissing,
    MessageTooLarge,
    MessageUnreadable,
    check_texts,
    status_of,
)
from api.core.pace import VISIT, FramePace, Visit, measured
from common.loop_watch import CURRENT
from metering.store.refusals import repeated

CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = grpc.aio.ServicerContext[Any, Any]

# Messages other than prompts, texts and configurations are small. They are parsed on the event
# loop, before the key is known.
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

# Path of the current call, which gRPC's context does not provide.
METHOD: ContextVar[str] = ContextVar("method")

# Calls whose answers are serialized by the handler.
SERIALIZED = frozenset({"/weir.v1.InferenceService/Generate"})

# Calls that charge: their holds repeat their own transactions.
NOT_REPEATED = frozenset({"/weir.v1.InferenceService/Embed"})

# Health checks are never delayed by other calls from their address.
PROBE = "/grpc.health.v1.Health/Check"

# Processor seconds that parsing this task's last message took on the event loop.
READ_S: ContextVar[float] = ContextVar("read_s", default=0.0)
READ_BYTES: ContextVar[int] = ContextVar("read_bytes", default=0)


async def abort(context: Context, status: status_pb2.Status) -> None:
    """End the call with a status and its details.

    The context keeps the error that aborts it, which would keep every frame it passes through, with
    the context in each: a cycle of fifty objects per refused call, whose collection blocks the
    event loop for 30 ms.
    """
    try:
        await context.abort(
            CODES[status.code], status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        )
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
        raise
    finally:
        del context


Failed = Callable[[str, BaseException], None]


def ignore_failure(method: str, error: BaseException) -> None:
    """Ignore failed calls."""


Parse = Callable[[bytes], Any]
Wrap = Callable[[str, Any], Any]  # from path and `grpc.RpcMethodHandler` of a call to a new handler


class GuardedServices:
    """Server facade on which generated code registers its handlers; registers them wrapped.

    An interceptor would do this at each call, and leave a reference cycle each time.
    """

    def __init__(self, server: grpc.aio.Server, *wraps: Wrap) -> None:
        """wraps: from the innermost to the outermost."""
        self._server = server
        self._wraps = wraps

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore these: the same handlers are registered with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Implement the method of `grpc.aio.Server`."""
        wrapped = {}
        for name, handler in handlers.items():
            for wrap in self._wraps:
                handler = wrap(f"/{service}/{name}", handler)
            wrapped[name] = handler
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, wrapped),)
        )
        self._server.add_registered_method_handlers(service, wrapped)


class Guard:
    """Wraps unary and streaming handlers. Aborts and cancellations pass through."""

    def __init__(self, failed: Failed = ignore_failure, pace: FramePace | None = None) -> None:
        """failed: called with path and error of each failed call.

        pace: counts calls; None: they are not counted.
        """
        self._failed = failed
        self._pace = pace

    def __call__(self, method: str, handler: Any) -> Any:
        """Implement `Wrap`."""
        byte_count_max = None if method in LARGE_MESSAGES else MESSAGE_BYTES_MAX
        read = tolerant(handler.request_deserializer, byte_count_max, method)
        write = handler.response_serializer
        if handler.unary_unary is not None:
            handle = self._guarded(handler.unary_unary, method, repeats=True)
            return grpc.unary_unary_rpc_method_handler(handle, read, write)
        if handler.unary_stream is not None:
            handle = self._guarded(writing(handler.unary_stream), method)
            return grpc.unary_stream_rpc_method_handler(handle, read, write)
        if handler.stream_stream is not None:
            handle = self._guarded(writing(handler.stream_stream), method, read)
            return grpc.stream_stream_rpc_method_handler(
                handle, None, None if method in SERIALIZED else write
            )
        return handler

    def _guarded(
        self,
        handle: Callable[..., Any],
        method: str,
        parse: Parse | None = None,
        *,
        repeats: bool = False,
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        guard = guarded(handle, method, self._failed, parse, repeats=repeats)
        return guard if self._pace is None else visiting(guard, self._pace, method)


def visiting(
    guard: Callable[[Any, Any], Coroutine[Any, Any, Any]], pace: FramePace, method: str
) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a handler whose calls are counted."""

    async def visit(request: Any, context: Context) -> Any:
        one = Visit(pace, context.peer(), method)
        VISIT.set(one)
        try:
            answer = guard(request, context)
            del request, context  # see `abort`
            return await measured(one, answer)
        finally:
            one.over()

    return visit


def writing(handle: Callable[..., Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Turn a handler that may yield its answers into one that writes them, which can be guarded."""
    if not inspect.isasyncgenfunction(handle):
        return handle

    async def write_all(request: Any, context: Context) -> None:
        async for response in handle(request, context):
            await context.write(response)

    return write_all


def guarded(
    handle: Callable[..., Any],
    method: str,
    failed: Failed = ignore_failure,
    parse: Parse | None = None,
    *,
    repeats: bool = False,
) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
    """Return a handler whose errors become statuses. A refusal waits for its turn.

    method: path of the call. parse: parses the messages of a stream if the transport does not.
    repeats: handle the call again if its transaction met a conflict; it has then changed nothing.
    """

    async def guard(request: Any, context: Context) -> Any:
        METHOD.set(method)
        error: BaseException
        try:
            # gRPC's own iterator is part of a reference cycle that keeps the last message.
            request = (
                ReceivedMessages(context, parse)
                if isinstance(request, AsyncIterable)
                else checked(request)
            )
            if repeats and method not in NOT_REPEATED:
                return await repeated(partial(handle, request, context))
            return await handle(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError) as ended:
            # Task groups keep the error in a frame that the error refers to.
            ended.__traceback__ = None
            raise
        except NotImplementedError as absent:
            # Raised by generated classes for unimplemented calls: neither a bug nor an incident.
            is_absent = context.code() in (
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.UNIMPLEMENTED.value[0],
            )
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


def tolerant(
    deserialize: Callable[[bytes], Any] | None,
    byte_count_max: int | None = None,
    method: str = "",
) -> Callable[[bytes], Any] | None:
    """Return a deserializer that returns its error as the message; gRPC would turn it into UNKNOWN.

    byte_count_max: of a message; None: the transport's limit. method: path of the call.
    """
    if deserialize is None:
        return None

    def attempt(data: bytes) -> Any:
        if byte_count_max is not None and len(data) > byte_count_max:
            return MessageTooLarge(len(data), byte_count_max)
        CURRENT.work, CURRENT.stage = VISIT.get() or method, "parse"
        began_at = time.thread_time()
        try:
            return deserialize(data)
        except Exception:
            return MessageUnreadable("the message cannot be parsed as this call's request type")
        finally:
            READ_S.set(time.thread_time() - began_at)
            READ_BYTES.set(len(data))
            CURRENT.work, CURRENT.stage = None, ""

    return attempt


def checked(request: Any) -> Any:
    """Return a request that was parsed and whose short texts are within their limits.

    Raises: MessageUnreadable, MessageTooLarge, InvalidRequest.
    """
    if isinstance(request, MessageUnreadable | MessageTooLarge):
        raise request
    if isinstance(request, Message):
        check_texts(request)
    return request


class ReceivedMessages(AsyncIterator[Any]):
    """Messages of a stream up to the first invalid one. Keeps no message between reads."""

    def __init__(self, context: Context, parse: Parse | None = None) -> None:
        """parse: None if the transport parses."""
        self._context = context
        self._parse = parse
        # Awaited before a large message is parsed, which takes several times its size.
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
    """Return the first plain error inside nested groups; a task group wraps even a single one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
