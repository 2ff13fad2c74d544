"""The sockets of the door: HTTP/1.1 by aiohttp's parser, and what is bounded for the sake of everybody else.

A connection has one request at a time; what a client sends ahead waits in aiohttp's bounded queue. TLS is that of gRPC.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import structlog
from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from api.access.auth import BEARER
from api.access.tls import Tls
from api.core.endpoint import bound_socket
from api.core.errors import Unauthenticated
from api.core.pace import VISIT, FramePace, Visit, measured
from api.core.settings import Settings
from api.openai import answers
from api.openai.refusals import INVALID_HTTP, HttpFault, Refusal, no_http

Handle = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]
BODY_WAIT_S = 30.0  # seconds: a body of 4 MiB comes through the slowest of lines; who sends it byte by byte is not waited for

# What a stalled client may leave unread here and in the kernel, whose buffer is as large again: some thousand tokens as events.
WRITE_BUFFER_BYTES = 16_384
SEND_BUFFER_BYTES = 65_536
HEADER_COUNT_MAX = 100
BACKLOG = 1024  # connections that wait to be taken, as a burst of agents opens them
SHUTDOWN_S = 1.0  # for connections whose answer is written

log = structlog.get_logger(__name__)


def peer_of(request: web.BaseRequest) -> str:
    """Who has connected, as gRPC names it."""
    return cast(Connection, request.protocol).peer


def secret_of(request: web.BaseRequest) -> str:
    """The API key of a request. Raises: Unauthenticated saying how to send it."""
    keys = request.headers.getall("authorization", [])
    if len(keys) > 1:
        raise Unauthenticated("several API keys: send one header `Authorization: Bearer <API key>`")
    given = keys[0] if keys else ""
    if given.lower().startswith(BEARER):
        return given[len(BEARER) :].strip()
    raise Unauthenticated("no API key: send the header `Authorization: Bearer <API key>`")


async def read_body(request: web.BaseRequest, most: int) -> bytes:
    """The body of at most so many bytes, as it was sent. Raises: HttpFault, ConnectionError."""
    for encoding in request.headers.getall("content-encoding", ()):
        if encoding.strip().lower() != "identity":
            raise HttpFault(415, "send the body as it is, without content-encoding", "unsupported_encoding")
    if request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise HttpFault(400, no_http("transfer-encoding can only be chunked"), INVALID_HTTP, closing=True)
    if (request.content_length or 0) > most:
        raise too_large(most)
    if (expected := request.headers.get("expect")) is not None:
        if expected.lower() != "100-continue":
            raise HttpFault(417, "the header Expect can only be 100-continue", "expectation_failed", closing=True)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not the response
    try:
        if request.content.is_eof():  # as a short one mostly is: it came with the head
            content = request.content.read_nowait()
        else:
            async with asyncio.timeout(BODY_WAIT_S):
                content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(most) from None
    except TimeoutError:
        raise HttpFault(408, f"the body did not come within {BODY_WAIT_S:.0f} s", "request_timeout", closing=True) from None
    except HttpProcessingError as error:
        raise HttpFault(400, no_http(error.message), INVALID_HTTP, closing=True) from None
    if len(content) > most:
        raise too_large(most)
    return content


def too_large(most: int) -> HttpFault:
    return HttpFault(413, f"the body is too large: at most {most} bytes are taken", "request_too_large", closing=True)


def visited(handle: Handle, pace: FramePace) -> Handle:
    """A handler whose HTTP requests are counted; one that has had no turn waits before its answer."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        visit = Visit(pace, peer_of(request))
        VISIT.set(visit)
        try:
            response = await measured(visit, handle(request))
            if not response.prepared:
                await visit.turn()
            return response
        finally:
            visit.over()

    return serve


class Connection(RequestHandler):
    """One connection. Its bounds differ from aiohttp's, and what is not HTTP is answered in the form of every other error.

    Whoever takes nothing of its answers for too long is hung up on, whatever they are: answers of errors cost no key.
    """

    __slots__ = ("_last_body", "_stall_max_s", "_stall_watch", "_writable", "peer")

    def __init__(self, manager: web.Server, *, stall_max_s: float, **options: Any) -> None:
        """stall_max_s: for so long a client may take next to nothing of what it is sent."""
        super().__init__(manager, **options)
        self._stall_max_s = stall_max_s
        self._stall_watch: asyncio.TimerHandle | None = None
        self._last_body: StreamReader | None = None  # of the request that came last: of all requests only it may not be whole yet
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._watch_no_more()
        self._writable.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A body that can never be whole is not waited for: its request is told what is wrong with it.

        aiohttp has no public place for that: it puts what it could not parse behind the requests that it could.
        """
        super().data_received(data)
        if not self._messages:
            return
        message, body = self._messages[-1]
        if isinstance(message, RawRequestMessage):
            self._last_body = body
        elif self._last_body is not None and not self._last_body.is_eof() and self._last_body.exception() is None:
            self._last_body.set_exception(HttpProcessingError(message=message.message))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()
        self._watch(self.unsent_bytes)

    def resume_writing(self) -> None:
        self._watch_no_more()
        self._writable.set()
        super().resume_writing()

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet of what was written."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Wait until more may be written. Raises: ConnectionError, TimeoutError if the client takes next to nothing."""
        while not self._writable.is_set():
            before = self.unsent_bytes
            try:
                async with asyncio.timeout(self._stall_max_s):
                    await self._writable.wait()
            except TimeoutError:
                if before - self.unsent_bytes < WRITE_BUFFER_BYTES:
                    raise
        if self.transport is None:
            raise ConnectionResetError("the client has hung up")

    def _watch(self, unsent_bytes: int) -> None:
        """Look again when `drained` has given up, if anybody waits there: who does says better why it ends."""
        self._stall_watch = asyncio.get_running_loop().call_later(self._stall_max_s + SHUTDOWN_S, self._look_again, unsent_bytes)

    def _watch_no_more(self) -> None:
        if self._stall_watch is not None:
            self._stall_watch.cancel()
            self._stall_watch = None

    def _look_again(self, before: int) -> None:
        now = self.unsent_bytes
        if before - now >= WRITE_BUFFER_BYTES:
            self._watch(now)
        elif self.transport is not None:
            log.info("http_client_stalled", unsent_bytes=now)
            self.transport.abort()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """See `RequestHandler`. What is wrong with the rest of a body whose request was answered before is nobody's concern."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """See `RequestHandler.handle_error`: 400 for what is not HTTP, 500 for a bug of the door."""
        if status >= 500:
            log.error("http_handler_failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response has been sent")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        what = "internal error" if status >= 500 else no_http(message)
        body = answers.encode(Refusal(status, what, kind, "server_error" if status >= 500 else INVALID_HTTP).body())
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


class HttpServer(web.Server):
    """aiohttp's server with connections of ours, bounded in number."""

    def __init__(self, handle: Handle, settings: Settings) -> None:
        super().__init__(handle, request_factory=self._bounded_request, handler_cancellation=True)
        self._settings = settings
        self._options: dict[str, Any] = {
            "keepalive_timeout": settings.http_idle_max_s,
            "max_line_size": settings.metadata_bytes_max,
            "max_field_size": settings.metadata_bytes_max,
            "max_headers": HEADER_COUNT_MAX,
            "lingering_time": SHUTDOWN_S,
            "access_log": None,
            "auto_decompress": False,
        }

    def __call__(self) -> RequestHandler:
        """The protocol of a new connection."""
        return Connection(self, stall_max_s=self._settings.client_stall_max_s, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """See `web.Server`. A connection too many is closed: it has no request yet that could be refused."""
        super().connection_made(handler, transport)
        if len(self.connections) > self._settings.http_connections_max:
            log.warning("http_connection_refused", connection_count=len(self.connections))
            transport.abort()

    def _bounded_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        size = self._settings.message_bytes_max
        return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=size)


class Listener:
    """The door's sockets from their opening to their end."""

    def __init__(self, handle: Handle, settings: Settings, tls: Tls | None) -> None:
        self._settings = settings
        self._tls = tls
        self._http = HttpServer(handle, settings)
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def connection_count(self) -> int:
        return len(self._http.connections)

    def bind(self, address: tuple[str, int]) -> int:
        """Take the address; the port, which is chosen if the given one is 0. Raises: OSError if it cannot be had."""
        options = {socket.SO_SNDBUF: SEND_BUFFER_BYTES} | ({socket.SO_REUSEPORT: 1} if self._settings.share_port else {})
        self._socket = bound_socket(address, "for OpenAI's clients", "WEIR_OPENAI_LISTEN", options=options)
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        if self._socket is None:
            return
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {"ssl": self._tls.ssl_context(("http/1.1",)), "ssl_handshake_timeout": self._settings.handshake_max_s}
        self._server = await asyncio.get_running_loop().create_server(self._http, sock=self._socket, backlog=BACKLOG, **secure)

    def send_away(self) -> None:
        """Take no more connections, and close those without a request. The others are closed after their answer."""
        if self._server is not None:
            self._server.close()
            self._http.pre_shutdown()

    async def stop(self) -> None:
        self.send_away()
        await self._http.shutdown(SHUTDOWN_S)
        if self._socket is not None:
            self._socket.close()
