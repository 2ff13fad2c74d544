"""Connections to an HTTP server: framing of answers, bounds, and use for more than one request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from aiohttp.http import HttpProcessingError
from hypothesis import given
from hypothesis import strategies as st

from inference.adapters import remote_http_connection as module
from inference.adapters.remote_http_connection import Connection, Connections, Server

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def opened() -> tuple[Connections, Connection]:
    """Return a pool, and a connection of it whose request was sent."""
    pool = Connections(Server("", 0, 1.0))
    connection, transport = Connection(pool), Mock()
    transport.get_extra_info.return_value = None
    transport.abort = lambda: connection.connection_lost(None)
    connection.connection_made(transport)
    connection.send(b"")
    return pool, connection


async def answer(connection: Connection, pieces: Sequence[bytes], *, is_cut: bool = False) -> bytes:
    """Receive pieces, one by one, and return the body."""

    async def receive() -> None:
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        if is_cut:
            connection.connection_lost(None)

    task, body = asyncio.create_task(receive()), []
    try:
        await connection.head()
        while part := await connection.read():
            body.append(part)
        return b"".join(body)
    finally:
        await task


def chunked(parts: Sequence[bytes], *, trailer: bytes = b"", extension: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in parts if each)
    return CHUNKED + chunks + b"0\r\n" + trailer + b"\r\n"


@given(
    parts=st.lists(st.binary(max_size=40), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=20),
    trailer=st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"]),
    extension=st.sampled_from([b"", b" ", b";a=b"]),
    framing=st.sampled_from(["chunks", "length", "end"]),
    piece_bytes=st.sampled_from([1, 7, 1 << 14]),
)
def test_a_body_is_the_same_however_it_arrives(
    parts: list[bytes],
    cuts: list[int],
    trailer: bytes,
    extension: bytes,
    framing: str,
    piece_bytes: int,
) -> None:
    body = b"".join(parts)
    data = chunked(parts, trailer=trailer, extension=extension)
    if framing == "length":
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "end":
        data = b"HTTP/1.1 200 OK\r\n\r\n" + body
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(ends)]

    async def run() -> tuple[bytes, bool]:
        pool, connection = opened()
        found = await answer(connection, pieces, is_cut=framing == "end")
        connection.release()
        kept = pool.idle()
        pool.close()
        return found, kept is connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        assert asyncio.run(run()) == (body, framing != "end")


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + b"x\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x1\r\na\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"1\r\nab\r\n",
        CHUNKED + b"1\r\na\n\n",
        CHUNKED + b"10000000\r\n",
        CHUNKED + b"1" * 300,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 2000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        b"nothing of HTTP\r\n\r\n",
    ],
    ids=lambda data: data[-20:],
)
async def test_invalid_framing_is_refused(data: bytes) -> None:
    _, connection = opened()

    with pytest.raises(HttpProcessingError):
        await answer(connection, [data])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        CHUNKED[:-2],
        CHUNKED,
        CHUNKED + b"2\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na",
    ],
    ids=lambda data: data[-20:],
)
async def test_an_answer_that_breaks_off_is_not_complete(data: bytes) -> None:
    _, connection = opened()

    with pytest.raises(ConnectionError):
        await answer(connection, [data], is_cut=True)


@pytest.mark.parametrize("case", ["closing", "more", "unread", "old", "late data"])
async def test_only_sound_connections_are_kept(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, connection = opened()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n"
    closing = b"Connection: close\r\n" if case == "closing" else b""
    more = b"more" if case == "more" else b""

    connection.data_received(head + closing + b"\r\na" + more)
    await connection.head()
    if case != "unread":
        assert await connection.read() == b"a"
    connection.release()
    if case == "old":
        connection.idle_since_s -= module.KEEPALIVE_S
    if case == "late data":
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")

    assert pool.idle() is None
    pool.close()


async def test_a_server_waits_while_nobody_reads() -> None:
    _, connection = opened()
    transport = connection._transport
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * module.WAITING_BYTES_MAX)
    assert transport.pause_reading.called

    await connection.head()
    for _ in range(4):
        await connection.read()
    reading = asyncio.ensure_future(connection.read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert transport.resume_reading.called
    connection.release()
    with pytest.raises(ConnectionError):
        await reading


async def test_requests_share_a_connection_one_after_the_other() -> None:
    count, is_closed = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        with contextlib.suppress(ConnectionError):
            while await reader.readline():
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.transport.abort()
        is_closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool = Connections(Server("127.0.0.1", server.sockets[0].getsockname()[1], 5.0))
        for _ in range(3):
            connection = pool.idle() or await pool.connect()
            connection.send(b"GET\r\n")
            await connection.head()
            assert await connection.read() == b"ok"
            connection.release()
        assert (count, connection.was_used) == (1, True)
        pool.close()
        await is_closed.wait()
