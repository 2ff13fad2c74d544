"""Guards of gRPC handlers, which convert every error to a status instead of UNKNOWN."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import status_pb2

from api.core.errors import (
    CallMissing,
    FieldViolation,
    InvalidRequest,
    MessageTooLarge,
    MessageUnreadable,
)
from api.core.rate_limiter import CALL, Call, RateLimiter, measured, start_work, work_s
from api.core.statuses import STATUS_DETAILS_KEY, status_of
from api.core.texts import check_texts
from common.loop_watch import CURRENT
from metering.store.refusals import repeated

GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = grpc.aio.ServicerContext[Any, Any]

# Messages other than prompts, texts and configurations are small. They are parsed on the event
# loop, before the key is known.
MESSAGE_BYTES_MAX = 64 * 2**10
# Larger ones are parsed in a thread, and smaller ones whose fields take as long: up to 8 us each
# with their checks.
SHORT_BYTES_MAX, SHORT_FIELD_COUNT_MAX = 3 * 2**10, 1500
LARGE_MESSAGES = frozenset(
    {
        "/weir.v1.InferenceService/Generate",
        "/weir.v1.InferenceService/CountTokens",
        "/weir.v1.InferenceService/Quote",
        "/weir.v1.InferenceService/Embed",
        "/weir.v1.AdminService/ApplyConfiguration",
    }
)

# Fields of a message at any depth, which are walked before a long message is parsed: the library
# keeps the interpreter while it parses, for 90 ns per field. The longest conversation with its
# calls has half of them.
FIELD_COUNT_MAX = 131_072
# Numbers in packed fields, 15 ns each: the longest message filled with token ids above 127
PACKED_COUNT_MAX = 2**21
CONTINUED = bytes(range(0x80, 0x100))  # bytes of a number that another byte follows

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
IS_COSTLY: ContextVar[bool] = ContextVar("is_costly", default=False)  # that message


async def abort(context: Context, status: status_pb2.Status) -> None:
    """Abort the call with a status and its details.

    The context keeps the error that aborts it. With its traceback, that error would keep the frames
    it passed through, and so the context itself: a reference cycle of fifty objects per refused
    call. Collecting those blocks the event loop for 30 ms, so the traceback is removed.
    """
    try:
        await context.abort(
            GRPC_CODES[status.code],
            status.message,
            ((STATUS_DETAILS_KEY, status.SerializeToString()),),
        )
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
        raise
    finally:
        del context


Failed = Callable[[str, BaseException], None]


def ignore_failure(method: str, error: BaseException) -> None:
    """Do nothing: default callback for failed calls."""


class Walked(NamedTuple):
    """Field whose content is walked: a message of this type, or packed numbers if it is None."""

    name: str
    message_type: Descriptor | None


Parse = Callable[[bytes], Any]
# Runs the parsing of a large message outside the event loop: from its size and the call.
ReadLarge = Callable[[int, Callable[[], Any]], Awaitable[Any]]
Wrap = Callable[[str, Any], Any]  # from path and `grpc.RpcMethodHandler` of a call to a new handler


class GuardedServices:
    """Facade of a gRPC server for generated code that registers handlers. Wraps each one.

    A gRPC interceptor would do so at every call, and leave a reference cycle each time.
    """

    def __init__(self, server: grpc.aio.Server, *wraps: Wrap) -> None:
        """`wraps` are applied to each handler in order: the first becomes the innermost."""
        self._server = server
        self._wraps = wraps

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: `add_registered_method_handlers` registers the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the wrapped handlers of a service. Called by generated code."""
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
    """Wrapper for unary and streaming handlers that converts errors to statuses.

    Aborts and cancellations pass through unchanged.
    """

    def __init__(self, failed: Failed = ignore_failure, pace: RateLimiter | None = None) -> None:
        """`failed` is called with the path and the error of each failed call.

        `pace` limits the rate of calls; with None, calls are not counted.
        """
        self._failed = failed
        self._pace = pace

    def __call__(self, method: str, handler: Any) -> Any:
        """Implement `Wrap`."""
        byte_count_max = None if method in LARGE_MESSAGES else MESSAGE_BYTES_MAX
        read = tolerant(handler.request_deserializer, byte_count_max)
        kind = getattr(handler.request_deserializer, "__self__", None)
        write = handler.response_serializer
        if handler.unary_unary is not None:
            handle = self._guarded(handler.unary_unary, method, repeats=True)
            return grpc.unary_unary_rpc_method_handler(handle, read, write)
        if handler.unary_stream is not None:
            handle = self._guarded(writing(handler.unary_stream), method)
            return grpc.unary_stream_rpc_method_handler(handle, read, write)
        if handler.stream_stream is not None:
            handle = self._guarded(writing(handler.stream_stream), method, read, kind)
            return grpc.stream_stream_rpc_method_handler(
                handle, None, None if method in SERIALIZED else write
            )
        return handler

    def _guarded(
        self,
        handle: Callable[..., Any],
        method: str,
        parse: Parse | None = None,
        kind: type[Message] | None = None,
        *,
        repeats: bool = False,
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        guard = guarded(handle, method, self._failed, parse, kind, repeats=repeats)
        return guard if self._pace is None else visiting(guard, self._pace, method)


def visiting(
    guard: Callable[[Any, Any], Coroutine[Any, Any, Any]], pace: RateLimiter, method: str
) -> Callable[[Any, Any], Awaitable[Any]]:
    """Wrap a guarded handler so that its processor time is charged to the payer of the call."""

    async def call(request: Any, context: Context) -> Any:
        one = Call(pace, context.peer(), method)
        CALL.set(one)
        try:
            answer = guard(request, context)
            del request, context  # see `abort`
            return await measured(one, answer)
        finally:
            one.over()

    return call


def writing(handle: Callable[..., Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Turn a handler that yields responses into one that writes them; others stay unchanged."""
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
    kind: type[Message] | None = None,
    *,
    repeats: bool = False,
) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
    """Wrap a handler so that its errors become statuses; a refusal waits for its turn first.

    `method` is the path of the call. `parse` parses the messages of a stream, of type `kind`; None
    if the transport parses them. With `repeats`, the call is handled again if its transaction met a
    conflict, which leaves nothing changed.
    """

    async def guard(request: Any, context: Context) -> Any:
        METHOD.set(method)
        error: BaseException
        try:
            # gRPC's own iterator is part of a reference cycle that keeps the last message.
            request = (
                ReceivedMessages(context, parse, kind)
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
        if (call := CALL.get()) is not None and method != PROBE:
            await call.wait_for_share()
        refusal = abort(context, status)
        del context  # see `abort`
        return await refusal

    return guard


def tolerant(
    deserialize: Callable[[bytes], Any] | None, byte_count_max: int | None = None
) -> Callable[[bytes], Any] | None:
    """Wrap a deserializer so that it returns its error instead of raising: gRPC would send UNKNOWN.

    `byte_count_max` limits the size of a message; with None, only the transport's limit applies.
    """
    if deserialize is None:
        return None

    def attempt(data: bytes) -> Any:
        if byte_count_max is not None and len(data) > byte_count_max:
            return MessageTooLarge(len(data), byte_count_max)
        started = start_work()
        try:
            if len(data) > MESSAGE_BYTES_MAX:
                kind: Any = getattr(deserialize, "__self__", None)
                check_fields(data, kind.DESCRIPTOR)
            return deserialize(data)
        except InvalidRequest as error:
            return error
        except Exception:
            return MessageUnreadable(
                "Your message is not of this call's request type. Generate your client from the"
                " API's files."
            )
        finally:
            READ_S.set(work_s(started))
            READ_BYTES.set(len(data))

    return attempt


def is_costly(data: bytes, kind: Any) -> bool:
    """Return whether parsing and checking a serialized message takes too long for the event loop.

    `kind` is the class of the message. If it is None, only the size decides.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        return True
    try:
        if kind is not None:
            check_fields(data, kind.DESCRIPTOR, SHORT_FIELD_COUNT_MAX)
    except InvalidRequest:
        return True
    except (IndexError, ValueError):
        return False  # not a message, as parsing it will find
    return False


def check_fields(data: bytes, kind: Descriptor, count_max: int = FIELD_COUNT_MAX) -> None:
    """Limit the number of fields and packed numbers in a serialized message, at any depth.

    Raises InvalidRequest above the limit; IndexError or ValueError if it is not a message.
    """
    count, packed_count, position, end, known = 0, 0, 0, len(data), walked(kind)
    inside = [(end, known, "")]  # end, fields and name of the messages around the position
    while inside:
        if position >= end:
            inside.pop()
            if inside:
                end, known, _ = inside[-1]
            continue
        if (count := count + 1) > count_max:
            path = ".".join(name for _, _, name in inside[1:])
            excess = f"the message has more than {count_max:,} fields; send less in one"
            raise InvalidRequest([FieldViolation(path, excess)])
        # Most tags and sizes have one byte.
        if (tag := data[position]) < 0x80:
            position += 1
        else:
            tag, position = varint_at(data, position)
        match tag & 7:
            case 2:
                if (size := data[position]) < 0x80:
                    position += 1
                else:
                    size, position = varint_at(data, position)
                if (field := known.get(tag >> 3)) is not None and field.message_type is not None:
                    end, known = position + size, walked(field.message_type)
                    inside.append((end, known, field.name))
                    continue
                if field is not None:
                    numbers = data[position : position + size].translate(None, CONTINUED)
                    if (packed_count := packed_count + len(numbers)) > PACKED_COUNT_MAX:
                        path = ".".join([*(name for _, _, name in inside[1:]), field.name])
                        excess = f"the message has more than {PACKED_COUNT_MAX:,} numbers"
                        raise InvalidRequest([FieldViolation(path, f"{excess}; send fewer")])
                position += size
            case 0:
                _, position = varint_at(data, position)
            case 1:
                position += 8
            case 5:
                position += 4
            case _:
                raise ValueError("a group, which no message of the contract has")


@cache
def walked(kind: Descriptor) -> Mapping[int, Walked]:
    """Return the fields of a message type that are messages or packed numbers, by number."""
    return {
        each.number: Walked(each.name, each.message_type)
        for each in kind.fields
        if each.message_type is not None or each.is_packed
    }


def varint_at(data: bytes, position: int) -> tuple[int, int]:
    """Decode the varint at a position; return it and the position after it. Raises: IndexError."""
    if (byte := data[position]) < 0x80:
        return byte, position + 1
    value, shift = byte & 0x7F, 7
    while (byte := data[position := position + 1]) >= 0x80 and shift < 63:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | (byte & 0x7F) << shift, position + 1


def checked(request: Any) -> Any:
    """Check the result of `tolerant`: raise the error, or check the short texts of the message.

    Raises: MessageUnreadable, MessageTooLarge, InvalidRequest.
    """
    if isinstance(request, Exception):
        raise request
    if isinstance(request, Message):
        check_texts(request)
    return request


class ReceivedMessages(AsyncIterator[Any]):
    """Checked messages of a stream, up to the first invalid one. Keeps none between reads."""

    def __init__(
        self,
        context: Context,
        parse: Parse | None = None,
        kind: type[Message] | None = None,
    ) -> None:
        """`parse` parses each message; None if the transport does. `kind` is their class."""
        self._context = context
        self._parse = parse
        self._kind = kind
        self.check: Callable[[Any], Any] | None = None  # of a parsed message; raises
        self.read_large: ReadLarge | None = None
        self._was_costly = False

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        costly = (
            self._parse is not None
            and (size := len(message)) > SHORT_BYTES_MAX
            and is_costly(message, self._kind)
        )
        if costly is not self._was_costly:  # setting it for each message is a call on the hot path
            IS_COSTLY.set(costly)
            self._was_costly = costly
        if not costly or self.read_large is None:
            CURRENT.work, CURRENT.stage = CALL.get() or METHOD.get(""), "parse"
            try:
                return self._read(message)
            finally:
                CURRENT.work, CURRENT.stage = None, ""
        message = await self.read_large(size, partial(self._read, message))
        READ_S.set(0.0)  # counted where it was parsed
        READ_BYTES.set(size)
        return message

    def _read(self, message: Any) -> Any:
        """Parse and check a message. Raises: MessageUnreadable, MessageTooLarge, InvalidRequest."""
        if self._parse is not None:
            message = self._parse(message)
        if isinstance(message, Exception):
            raise message
        return message if self.check is None else self.check(message)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error inside nested exception groups; task groups wrap even a single one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
