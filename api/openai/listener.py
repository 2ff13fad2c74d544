"""HTTP listener: connections parsed by aiohttp, with limits that protect other clients.

A connection serves one request at a time; pipelined requests wait in aiohttp's bounded queue. TLS
is configured as for gRPC. Without TLS, a client that has sent its requests may close its half of
the connection and still gets its responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import sys
import termios
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any, cast

import structlog
from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from api.access.auth import BEARER
from api.access.tls import Tls
from api.core.endpoint import bound_socket
from api.core.errors import Unauthenticated
from api.core.rate_limiter import CALL, Call, RateLimiter, measured
from api.core.settings import Settings
from api.core.statuses import internal_status
from api.openai import answers
from api.openai.error_responses import (
    INVALID_HTTP,
    HttpFault,
    error_response,
    http_refusal,
    invalid_http_message,
)

Handle = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]
# Seconds. Enough for 4 MiB over a slow line, too short for a body sent byte by byte.
BODY_WAIT_S = 30.0

# Bytes of output that a stalled client may leave unread, some hundred tokens as events; the
# kernel's buffer doubles the size that is set.
SEND_BUFFER_BYTES, TLS_BUFFER_BYTES = 65_536, 16_384
EVENT_BYTES = 200  # of one token in a stream: turns the least rate into bytes
HEADER_COUNT_MAX = 100
BACKLOG = 1024  # connections not accepted yet: agents open them in bursts
SHUTDOWN_S = 1.0  # grace period of connections that are writing a response
RESET_POLL_S = 0.5  # after a half-close the event loop no longer reports a reset
# Headers by which clients and proxies trace requests. They come back as they were sent, and mean
# nothing else: the proxies of one service copy them to several requests.
TRACING = {
    *("x-request-id", "x-correlation-id", "x-client-request-id", "x-trace-id"),
    *("traceparent", "tracestate", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid"),
    *("x-amzn-trace-id", "x-cloud-trace-context", "x-datadog-trace-id", "uber-trace-id"),
}
TRACING_VALUE = re.compile(r"[\x20-\x7e]{1,256}")
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # would end a header

# Headers that a page of another server may read, if it may read the response
EXPOSED = "weir-request-id, x-request-id, retry-after"

log = structlog.get_logger(__name__)


def peer_of(request: web.BaseRequest) -> str:
    """Return the client's address in gRPC's notation."""
    connection: Any = request.protocol  # a `Connection`
    peer: str = connection.peer
    return peer


def secret_of(request: web.BaseRequest) -> str:
    """Read the API key of a request: a bearer token, or else `x-api-key`.

    Empty tokens and basic authentication, as for proxies, are ignored; the same key may be
    repeated. Raises Unauthenticated if there is not exactly one key.
    """
    headers = [header.strip() for header in request.headers.getall("authorization", [])]
    keys = {
        header[len(BEARER) :].strip() for header in headers if header.lower().startswith(BEARER)
    } - {""}
    keys = keys or {key.strip() for key in request.headers.getall("x-api-key", [])} - {""}
    if len(keys) > 1:
        raise Unauthenticated(
            "You sent several API keys. Send one header `Authorization: Bearer <API key>`."
        )
    for key in keys:
        return key
    raise Unauthenticated(
        "Your request has no API key. Send the header `Authorization: Bearer <API key>`."
    )


async def read_body(request: web.BaseRequest, bytes_max: int) -> bytes:
    """Read the body, of at most `bytes_max` bytes. Raises: HttpFault, ConnectionError."""
    for encoding in request.headers.getall("content-encoding", ()):
        if encoding.strip().lower() != "identity":
            raise HttpFault(
                415, "Send the body as it is, without content-encoding.", "unsupported_encoding"
            )
    if request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise HttpFault(
            400,
            invalid_http_message("transfer-encoding must be chunked"),
            INVALID_HTTP,
            closing=True,
        )
    if (request.content_length or 0) > bytes_max:
        raise too_large(bytes_max)
    if (expected := request.headers.get("expect")) is not None:
        if expected.lower() != "100-continue":
            raise HttpFault(
                417,
                "The header Expect must be 100-continue or absent.",
                "expectation_failed",
                closing=True,
            )
        # A client of HTTP/1.0 does not know it, and one whose body is there does not wait for it.
        if request.version >= HttpVersion11 and not request.content.is_eof():
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response has not begun
    try:
        if request.content.is_eof():  # short bodies usually arrive with the headers
            content = request.content.read_nowait()
        else:
            async with asyncio.timeout(BODY_WAIT_S):
                content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(bytes_max) from None
    except TimeoutError:
        raise HttpFault(
            408,
            f"Your body was not received within {BODY_WAIT_S:.0f} s. Send it whole, and at once.",
            "request_timeout",
            closing=True,
        ) from None
    except HttpProcessingError as error:
        raise HttpFault(
            400, invalid_http_message(error.message), INVALID_HTTP, closing=True
        ) from None
    if len(content) > bytes_max:
        raise too_large(bytes_max)
    return content


def too_large(bytes_max: int) -> HttpFault:
    return HttpFault(
        413,
        f"Your body must have at most {bytes_max:,} bytes. Send a smaller one.",
        "request_too_large",
        closing=True,
    )


def paced(handle: Handle, pace: RateLimiter) -> Handle:
    """Wrap a handler so that its cost is charged; a refusal waits before its response."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        call = Call(pace, peer_of(request), request.path)
        CALL.set(call)
        try:
            response = await measured(call, handle(request))
            if not response.prepared:
                await call.wait_for_share()
            return response
        finally:
            call.over()

    return serve


class Connection(RequestHandler):
    """HTTP connection with its own limits, and with error responses to input that is not HTTP.

    Clients that do not read their responses are disconnected, even without a valid API key.
    """

    __slots__ = (
        "_bytes_min",
        "_last_body",
        "_on_half_close",
        "_reset_watch",
        "_server",
        "_stall_max_s",
        "_stall_watch",
        "_writable",
        "is_half_closed",
        "peer",
    )

    def __init__(
        self,
        manager: HttpServer,
        *,
        stall_max_s: float,
        tokens_per_s_min: float = 1.0,
        **options: Any,
    ) -> None:
        """A client must read its response at `tokens_per_s_min` or faster while the kernel's buffer
        is full, measured over `stall_max_s` seconds.
        """
        super().__init__(manager, **options)
        self._server = manager
        self._stall_max_s = stall_max_s
        self._bytes_min = max(int(stall_max_s * tokens_per_s_min * EVENT_BYTES), 1)
        self._stall_watch: asyncio.TimerHandle | None = None
        # Body of the latest request; only this one may be incomplete.
        self._last_body: StreamReader | None = None
        self.is_half_closed = False  # the client sends no more, but may read
        self._on_half_close: Callable[[], None] | None = None
        self._reset_watch: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        # A write that returns without a pause has reached the kernel: its tokens are delivered.
        # TLS has buffers of its own, and would pause at a limit of 0 with nothing to send.
        has_tls = transport.get_extra_info("sslcontext") is not None
        high = TLS_BUFFER_BYTES if has_tls else 0
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=high)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_stall_check()
        self._writable.set()
        if self._reset_watch is not None:
            self._reset_watch.cancel()
        self._on_half_close = None
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open if the client is still waiting for responses.

        With TLS it closes: asyncio does not support half-closed TLS connections.
        """
        is_incomplete = self._last_body is not None and not self._last_body.is_eof()
        if is_incomplete or self._is_idle or self.ssl_context is not None:
            return None
        if not self.is_half_closed:
            self.is_half_closed = True
            self._poll_for_reset()
            if self._on_half_close is not None:
                self._on_half_close()
        return True

    @property
    def _is_idle(self) -> bool:
        """True while aiohttp is waiting for the next request."""
        return self._waiter is not None and not self._waiter.done()

    def watch_half_close(self, on_half_close: Callable[[], None] | None) -> None:
        """Call `on_half_close` when the client half-closes, at once if it has already."""
        self._on_half_close = on_half_close
        if self.is_half_closed and on_half_close is not None:
            on_half_close()

    def open_transport(self) -> asyncio.Transport:
        """Return the transport; abort a half-closed connection whose client has gone.

        Raises: ConnectionResetError if the client has gone.
        """
        if (transport := self.transport) is not None and self.is_half_closed:
            connection = transport.get_extra_info("socket")
            if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                transport.abort()
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        return transport

    def _poll_for_reset(self) -> None:
        if self._is_idle:  # the last response ended just before
            self.close()
            return
        with contextlib.suppress(OSError):
            self.open_transport()
            self._reset_watch = asyncio.get_running_loop().call_later(
                RESET_POLL_S, self._poll_for_reset
            )

    def end_incomplete(self) -> None:
        """Close the connection after the data written so far, without ending the response."""
        if self.transport is not None:
            self.transport.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Close a half-closed connection after the response to its last request."""
        finished = await super().finish_response(request, resp, start_time)
        if self.is_half_closed and not self._messages:
            self.close()
        return finished

    @property
    def is_closing(self) -> bool:
        """True if the connection will close after the current response."""
        return self._close or self._force_close or self._server.is_draining()

    def data_received(self, data: bytes) -> None:
        """Fail a request whose body cannot be completed, with the message of the parser.

        aiohttp has no public hook for this: it queues the parse error after the parsed requests.
        """
        super().data_received(data)
        if not self._messages:
            return
        message, body = self._messages[-1]
        if isinstance(message, RawRequestMessage):
            self._last_body = body
        elif (
            self._last_body is not None
            and not self._last_body.is_eof()
            and self._last_body.exception() is None
        ):
            self._last_body.set_exception(HttpProcessingError(message=message.message))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()
        self._schedule_stall_check(self.unsent_bytes)

    def resume_writing(self) -> None:
        self._cancel_stall_check()
        self._writable.set()
        super().resume_writing()

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes written that the client's system has not acknowledged.

        Bytes in the kernel count: the kernel asks for more only when a third of its buffer is free,
        and a slow reader may take minutes for that much.
        """
        if self.transport is None:
            return 0
        count = bytearray(4)
        if (connection := self.transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
        return self.transport.get_write_buffer_size() + int.from_bytes(count, sys.byteorder)

    async def drained(self) -> None:
        """Wait until the kernel has accepted all data.

        Raises: ConnectionError, TimeoutError if the client stalls.
        """
        while not self._writable.is_set():
            before = self.unsent_bytes
            try:
                async with asyncio.timeout(self._stall_max_s):
                    await self._writable.wait()
            except TimeoutError:
                if before - self.unsent_bytes < self._bytes_min:
                    raise
        if self.transport is None:
            raise ConnectionResetError("the client disconnected")

    def _schedule_stall_check(self, unsent_bytes: int) -> None:
        """Schedule a stall check after that of `drained`, whose error is more specific."""
        self._stall_watch = asyncio.get_running_loop().call_later(
            self._stall_max_s + SHUTDOWN_S, self._check_stall, unsent_bytes
        )

    def _cancel_stall_check(self) -> None:
        if self._stall_watch is not None:
            self._stall_watch.cancel()
            self._stall_watch = None

    def _check_stall(self, before: int) -> None:
        now = self.unsent_bytes
        if before - now >= self._bytes_min:
            self._schedule_stall_check(now)
        elif self.transport is not None:
            log.info("http_client_stalled", unsent_bytes=now)
            self.transport.abort()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception, unless it is a parse error that follows the response."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Build the error response: 400 for invalid HTTP, 500 for an exception of the handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response has been sent")
        refusal = (
            error_response(internal_status(exc or RuntimeError("a handler failed")))
            if status >= 500
            else http_refusal(status, invalid_http_message(message), INVALID_HTTP)
        )
        body = answers.encode(refusal.body())
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


class TracedRequest(web.BaseRequest):
    """HTTP request whose response repeats tracing headers, and announces a closing connection.

    It closes after the response if the server is draining or the client has half-closed it.
    """

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        # aiohttp calls this for every response, just before it writes the head.
        self.complete(response, response.headers)

    def complete(self, response: web.StreamResponse, headers: MutableMapping[str, str]) -> None:
        """Add the headers of this request's connection, and the tracing headers, to a response."""
        connection: Any = self.protocol  # a `Connection`
        if not TRACING.isdisjoint(map(str.lower, self.headers)):
            for name in map(str.lower, self.headers):
                if name in TRACING and TRACING_VALUE.fullmatch(value := self.headers[name]):
                    headers[name] = value
        if (origin := self.get("access-control-allow-origin")) is not None:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = EXPOSED
            headers["vary"] = "origin"
        is_last = connection.is_half_closed and not connection._messages
        if is_last or connection.is_closing:
            response.force_close()
            headers["connection"] = "close"
        elif response.keep_alive:
            headers["keep-alive"] = f"timeout={connection.keepalive_timeout:.0f}"


class WholeResponse(web.StreamResponse):
    """Response with the status 200 to a `TracedRequest`, whose head and body are written in one
    step; `web.Response` takes several, and copies the headers.
    """

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        """`headers` has lower-case names. The length of the body and the date are added."""
        super().__init__()
        self._content = body
        self._fields = headers

    async def prepare(self, request: Any) -> Any:
        """Write the response to a `TracedRequest`. Raises: ConnectionError."""
        if self.prepared:
            return None
        fields, is_latest = self._fields, request.version >= HttpVersion11
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        fields |= {"Content-Length": str(len(self._content)), "Date": rfc822_formatted_time()}
        request.complete(self, fields)
        if "connection" not in fields and self._keep_alive != is_latest:
            fields["Connection"] = "keep-alive" if self._keep_alive else "close"
        version = request.version
        if CONTROL_CHARACTER.search("".join((*fields, *fields.values()))) is not None:
            raise ValueError("a header contains a control character")
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        head = f"HTTP/{version[0]}.{version[1]} 200 OK\r\n{''.join(lines)}\r\n"
        self._eof_sent = True
        writer = request.writer
        await writer.write(head.encode() + self._content, drain=False)
        await writer.drain()
        return writer


class HttpServer(web.Server):
    """aiohttp server that uses `Connection` and limits the number of connections."""

    def __init__(self, handle: Handle, settings: Settings, is_draining: Callable[[], bool]) -> None:
        super().__init__(handle, request_factory=self._bounded_request, handler_cancellation=True)
        self.is_draining = is_draining
        self._settings = settings
        self._options: dict[str, Any] = {
            "keepalive_timeout": settings.http.idle_max_s,
            "max_line_size": settings.connections.metadata_bytes_max,
            "max_field_size": settings.connections.metadata_bytes_max,
            "max_headers": HEADER_COUNT_MAX,
            "lingering_time": SHUTDOWN_S,
            "access_log": None,
            "auto_decompress": False,
        }

    def __call__(self) -> RequestHandler:
        """Create the protocol of a new connection."""
        return Connection(
            self,
            stall_max_s=self._settings.delivery.stall_max_s,
            tokens_per_s_min=self._settings.delivery.tokens_per_s_min,
            loop=asyncio.get_running_loop(),
            **self._options,
        )

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Implement `web.Server.connection_made`; close connections beyond the maximum."""
        super().connection_made(handler, transport)
        if len(self.connections) > self._settings.http.connections_max:
            log.warning("http_connection_refused", connection_count=len(self.connections))
            transport.abort()

    def _bounded_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        size = self._settings.messages.bytes_max
        return TracedRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=size,
        )


class Listener:
    """Listening socket of the HTTP API."""

    def __init__(
        self,
        handle: Handle,
        settings: Settings,
        tls: Tls | None,
        is_draining: Callable[[], bool] = bool,
    ) -> None:
        """While `is_draining` returns True, connections close after their next response."""
        self._settings = settings
        self._tls = tls
        self._http = HttpServer(handle, settings, is_draining)
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def connection_count(self) -> int:
        return len(self._http.connections)

    def bind(self, address: tuple[str, int]) -> int:
        """Bind the address and return the port; port 0 lets the system choose. Raises: OSError."""
        options = {socket.SO_SNDBUF: SEND_BUFFER_BYTES} | (
            {socket.SO_REUSEPORT: 1} if self._settings.listen.share_port else {}
        )
        self._socket = bound_socket(
            address, "for OpenAI's clients", "WEIR_OPENAI_LISTEN", options=options
        )
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        if self._socket is None:
            return
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {
                "ssl": self._tls.ssl_context(("http/1.1",)),
                "ssl_handshake_timeout": self._settings.connections.handshake_max_s,
            }
        self._server = await asyncio.get_running_loop().create_server(
            self._http, sock=self._socket, backlog=BACKLOG, **secure
        )

    def stop_accepting(self) -> None:
        """Accept no more connections, and close idle ones. Busy ones close after their response."""
        if self._server is not None:
            self._server.close()
            self._http.pre_shutdown()

    async def stop(self) -> None:
        self.stop_accepting()
        await self._http.shutdown(SHUTDOWN_S)
        if self._socket is not None:
            self._socket.close()
