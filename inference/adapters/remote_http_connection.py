"""HTTP/1.1 connections to one server, kept open between requests.

A request costs one write, and an answer one wake-up of its reader for each piece that arrives.
Servers are not trusted: heads are parsed and bounded by aiohttp's parser, and bodies are decoded in
small pieces, when their reader asks for them. While it does not ask, the server has to wait.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

from aiohttp.http import HttpProcessingError
from aiohttp.http_parser import HttpResponseParser, RawResponseMessage

# Shorter than the idle time of servers (uvicorn: 5 s), which would close a reused connection.
KEEPALIVE_S = 2.0
RECEIVE_BYTES = 16 << 10  # of the kernel's buffer, which bounds data before it is read
PIECE_BYTES = 16 << 10  # decoded at once: 6 bytes may be one chunk, and 16 KiB of them take 2 ms
WAITING_BYTES_MAX = 64 << 10  # received and not decoded; above it, the server has to wait
HEADERS_MAX, LINE_BYTES_MAX, HEAD_BYTES_MAX = 64, 8190, 64 << 10
INTERIM_MAX = 4  # responses with a status below 200 before the final one
CLOSED_HERE = "the connection was closed here"
_NO_BODY = frozenset((204, 304))
# Start of a chunk; extensions are ignored. Its length has at most 31 bits.
_CHUNK = re.compile(rb"(0{0,16}[0-9A-Fa-f]{1,7})[ \t]*(?:;[^\r\n]*)?\r?\n")
CHUNK_LINE_BYTES_MAX = 256
TRAILER_BYTES_MAX = 8190


@dataclass(frozen=True, slots=True)
class Server:
    """Address of a server. `context` is for TLS; `name` is the one in its certificate, None for
    the host. New connections must be made within `connect_timeout_s` seconds.
    """

    host: str
    port: int
    connect_timeout_s: float
    context: ssl.SSLContext | None = None
    name: str | None = None


class Connections:
    """Connections to one server. Use on one event loop."""

    def __init__(self, server: Server) -> None:
        """Create the pool without connecting."""
        self._server = server
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # the last one was used last
        self._sweep: asyncio.TimerHandle | None = None  # while there are idle ones

    def idle(self) -> Connection | None:
        """Return an idle connection, which its user must release; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since_s < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """Open a connection, which its user must release. Raises OSError or TimeoutError."""
        server, loop = self._server, asyncio.get_running_loop()
        name = None if server.context is None else server.name or server.host
        connection = Connection(self)
        try:
            async with asyncio.timeout(server.connect_timeout_s):
                await loop.create_connection(
                    lambda: connection,
                    server.host,
                    server.port,
                    ssl=server.context,
                    server_hostname=name,
                )
        except BaseException:
            connection.close()
            raise
        self._open.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        """Keep a connection for the next request, for a short time."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep_later()

    def lost(self, connection: Connection) -> None:
        """Forget a connection that has closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep, now_s = None, time.monotonic()
        for connection in tuple(self._idle):
            if now_s - connection.idle_since_s >= KEEPALIVE_S:
                connection.close()
        if self._idle:
            self._sweep_later()


class Connection(asyncio.Protocol):
    """Connection that carries one request at a time: `send`, `head`, `read` to the end, `release`.

    `has_ended` tells whether the last response was read to its end, and `was_used` whether it has
    carried a request before, so that the server may close it.
    """

    def __init__(self, pool: Connections) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._is_lost = self._is_closed = self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None  # while a reader waits for data
        self._data = b""  # received and not decoded
        self.idle_since_s = -math.inf
        # Of the current response. `_left` counts bytes of the chunk or the body that are missing;
        # None if the body ends with the connection.
        self._left: int | None = 0
        self._is_chunked = self._is_reusable = False
        self._in_trailer = self._is_behind = False
        self.has_ended = True
        self.was_used = False
        self._heads: Any = HttpResponseParser(  # parses one head after the other
            self,  # type: ignore[arg-type]
            self._loop,
            PIECE_BYTES,
            max_line_size=LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            max_field_size=LINE_BYTES_MAX,
            response_with_body=False,
            auto_decompress=False,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement `asyncio.Protocol`."""
        self._transport = transport
        if self._is_closed:
            self._transport.abort()
            return
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def data_received(self, data: bytes) -> None:
        """Implement `asyncio.Protocol`."""
        if self.has_ended:  # nothing was asked for
            self.close()
            return
        self._data = self._data + data if self._data else data
        if len(self._data) > WAITING_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._waiter is not None:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Implement `asyncio.Protocol`."""
        self._is_lost = True
        self._pool.lost(self)
        self._wake()

    def close(self) -> None:
        """Close the connection at once; its reader gets a ConnectionError. Idempotent."""
        self._is_closed = True
        if self._transport is not None and not self._is_lost:
            self._transport.abort()
        self._pool.lost(self)
        self._wake()

    def send(self, request: bytes) -> None:
        """Send the head and the body of a request. The connection must be idle."""
        self.has_ended = False
        self._transport.write(request)

    async def head(self) -> RawResponseMessage:
        """Return the head of the response. Raises OSError or HttpProcessingError."""
        for _ in range(INTERIM_MAX + 1):
            message = await self._next_head()
            if message.code >= 200:
                break
        else:
            raise HttpProcessingError(code=502, message="too many interim responses")
        self._is_chunked, self._is_reusable = message.chunked, not message.should_close
        self._in_trailer, self._left = False, 0
        if message.code in _NO_BODY:
            self.has_ended = True
        elif not message.chunked:
            length = message.headers.get("Content-Length")
            if length is None:
                self._left, self._is_reusable = None, False
            elif length.isascii() and length.isdigit() and len(length) < 16:
                self._left = int(length)
                self.has_ended = not self._left
            else:
                raise HttpProcessingError(code=502, message="invalid Content-Length")
        return message

    async def _next_head(self) -> RawResponseMessage:
        searched = 0
        while (end := self._data.find(b"\r\n\r\n", searched)) < 0:
            if len(self._data) > HEAD_BYTES_MAX:
                raise HttpProcessingError(code=502, message="the head of the answer is too long")
            searched = max(len(self._data) - 3, 0)
            if self._is_closed:
                raise ConnectionAbortedError(CLOSED_HERE)
            if self._is_lost:
                raise ConnectionResetError("the server closed the connection without an answer")
            await self._arrival()
        end += 4
        messages, *_ = self._heads.feed_data(self._data[:end])
        if len(messages) != 1:
            raise HttpProcessingError(code=502, message="the head of the answer is invalid")
        self._data = self._data[end:]
        message: RawResponseMessage = messages[0][0]
        return message

    async def read(self) -> bytes:
        """Return the next part of the body, of at most `PIECE_BYTES` with its framing; empty at
        its end.

        Other tasks run between two parts. Raises OSError or HttpProcessingError.
        """
        if self._is_behind:
            await asyncio.sleep(0)
        while not self.has_ended:
            if self._is_closed:
                raise ConnectionAbortedError(CLOSED_HERE)
            if count := len(self._data):
                part = self._unchunked() if self._is_chunked else self._plain()
                self._is_behind = bool(self._data)
                if part:
                    return part
                if len(self._data) < count:
                    continue
            if self._is_lost:
                if self._left is not None:
                    raise ConnectionResetError("the stream ended before its last message")
                self.has_ended = True
            else:
                await self._arrival()
        return b""

    def _arrival(self) -> asyncio.Future[None]:
        """Return a future for the next data or the end of the open connection."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def release(self) -> None:
        """Keep the connection for the next request if the response was read to its end; otherwise
        close it.
        """
        if (
            self._is_reusable
            and self.has_ended
            and not (self._data or self._is_lost or self._is_closed)
        ):
            self.was_used, self.idle_since_s = True, time.monotonic()
            self._pool.keep(self)
        else:
            self.close()

    def _plain(self) -> bytes:
        """Take a part of a body without chunks."""
        data, left = self._data, self._left
        size = PIECE_BYTES if left is None else min(left, PIECE_BYTES)
        part, self._data = data[:size], data[size:]
        if left is not None:
            self._left = left - len(part)
            self.has_ended = not self._left
        return part

    def _unchunked(self) -> bytes:
        """Decode a part of a body of chunks; empty if a part of the framing is missing.

        Raises HttpProcessingError.
        """
        data, left = self._data, self._left or 0
        whole = None if left or self._in_trailer else _CHUNK.match(data)
        if whole is not None and (size := int(whole[1], 16)) and len(data) <= PIECE_BYTES:
            begin, end = whole.end(), len(data) - 2
            if begin + size == end and data.endswith(b"\r\n"):  # most events arrive so
                self._data = b""
                return data[begin:end]
        parts, at, limit = [], 0, min(len(data), PIECE_BYTES)
        while at < limit and not self._in_trailer:
            if not left:
                found = _CHUNK.match(data, at)
                if found is None:
                    if b"\n" in data[at : at + CHUNK_LINE_BYTES_MAX] or (
                        len(data) - at > CHUNK_LINE_BYTES_MAX
                    ):
                        raise HttpProcessingError(code=502, message="invalid chunk of the answer")
                    break
                at, size = found.end(), int(found[1], 16)
                if not size:
                    self._in_trailer = True
                    break
                left = size + 2  # with the line end that follows
            if left > 2:
                part = data[at : min(at + left - 2, limit)]
                parts.append(part)
                at += len(part)
                left -= len(part)
            if left <= 2:
                ending = data[at : at + left]
                if not b"\r\n"[2 - left :].startswith(ending):
                    raise HttpProcessingError(code=502, message="a chunk ends without a line end")
                at += len(ending)
                left -= len(ending)
        self._left, self._data = left, data[at:]
        if self._in_trailer:
            self._read_trailer()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_trailer(self) -> None:
        """Skip the lines after the last chunk; end the response at the empty one."""
        data = self._data
        if data.startswith(b"\r\n"):
            self._data, self.has_ended = data[2:], True
        elif (end := data.find(b"\r\n\r\n")) >= 0:
            self._data, self.has_ended = data[end + 4 :], True
        elif len(data) > TRAILER_BYTES_MAX:
            raise HttpProcessingError(code=502, message="the trailer of the answer is too long")
