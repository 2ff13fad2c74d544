"""Pipelined statements: several statements to PostgreSQL and all answers in one round trip, for the
request path.

psycopg's own pipelines send each statement and wait for its answer separately, and its cursors
adapt each value, which is ten times the work. Here a caller passes its values as text (the arrays
below), each statement is prepared on its first use in a connection, all are sent at once, and the
caller is woken once, by the last answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import struct
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

Row = tuple[Any, ...]

_HEAD = struct.Struct(">iiiii")  # dimensions, NULL flag, type, length, lower bound
_TIME = struct.Struct(">iq")
_LENGTH_16 = 16 << 128  # length prefix of an id as a number
_SIZE_16 = (16).to_bytes(4, "big")
_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_PLACEHOLDER = re.compile(r"%[s%]")
# libuv reports a socket reset by its peer only once and then stops watching it, although buffered
# input and the end of the connection may still have to be read. So a waiting pipeline polls from
# time to time.
POLL_INTERVAL_S = 0.1
CANCEL_TIMEOUT_S = 5.0  # for the server to process the cancellation
# Type ids, equal in all server versions.
UUID_OID, BYTEA_OID, TIMESTAMPTZ_OID, BIGINT_OID = 2950, 17, 1184, 20

_numbers = itertools.count(1)
BINARY, TEXT = pq.Format.BINARY, pq.Format.TEXT
# Members of an enum are looked up by a descriptor, which takes 0.1 µs each time.
BAD, COMMAND_OK = pq.ConnStatus.BAD, pq.ExecStatus.COMMAND_OK
FATAL_ERROR, PIPELINE_ABORTED = pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED
PIPELINE_SYNC = pq.ExecStatus.PIPELINE_SYNC


class Packed(bytes):
    """Parameter value in PostgreSQL's binary format, which the server need not parse."""


Value = str | int | float | Packed | None

Statement = tuple[str, Sequence[Value]]  # SQL with %s for each value, and the values


class _Session:
    """Prepared statements of one connection, by name, and its loader of result values."""

    __slots__ = ("load", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[bytes, bytes] = {}
        self.load: Any = Transformer()  # untyped in psycopg; texts are UTF-8, and times UTC


_sessions: weakref.WeakKeyDictionary[Connection, _Session] = weakref.WeakKeyDictionary()


async def run_pipeline(connection: Connection, statements: Sequence[Statement]) -> list[list[Row]]:
    """Execute the statements in order, in one pipeline, and return the rows of each.

    Without BEGIN and COMMIT they form one implicit transaction. The connection must be in
    autocommit mode and not used concurrently; no timeout applies. Raises: ValueError for text with
    NUL (nothing is sent), or the error of the first failing statement: the rest is skipped, nothing
    is committed, and an open transaction must be rolled back. If the call is cancelled, the
    connection is unusable.
    """
    encoded: list[tuple[bytes, list[bytes | None], list[int]]] = []
    for sql, values in statements:
        parameters: list[bytes | None] = []
        formats: list[int] = []
        for value in values:
            if value is None or isinstance(value, Packed):
                parameters.append(value)
                formats.append(BINARY)
                continue
            text = str(value).encode()
            if b"\0" in text:  # the protocol would truncate the value there
                raise ValueError("text for the database must not contain NUL")
            parameters.append(text)
            formats.append(TEXT)
        encoded.append((_query(sql), parameters, formats))
    session = _sessions.get(connection)
    if session is None:
        session = _sessions[connection] = _Session()
    pgconn, prepared = connection.pgconn, session.prepared
    new: dict[bytes, bytes] = {}
    pgconn.enter_pipeline_mode()
    for query, parameters, formats in encoded:
        name = prepared.get(query) or new.get(query)
        if name is None:
            # A preparation may fail, which is known only from its answer, so a name is never reused
            # for another one.
            name = new[query] = f"weir_{next(_numbers)}".encode()
            pgconn.send_prepare(name, query)
        pgconn.send_query_prepared(name, parameters, formats, result_format=BINARY)
    pgconn.pipeline_sync()
    loop, socket = asyncio.get_running_loop(), pgconn.socket
    answered: asyncio.Future[None] = loop.create_future()
    results: list[pq.abc.PGresult] = []
    watch = _Watch(
        loop,
        socket,
        partial(
            _read,
            pgconn=pgconn,
            prepared=prepared,
            new=iter(new.items()),
            results=results,
            answered=answered,
        ),
    )
    try:
        if pgconn.flush():
            loop.add_writer(socket, _write, watch, pgconn, answered)
        await answered
    except asyncio.CancelledError:
        watch.stop()
        with contextlib.suppress(psycopg.Error):
            await connection.cancel_safe(timeout=CANCEL_TIMEOUT_S)
        raise
    finally:
        watch.stop()
    rows: list[list[Row]] = []
    for result in results:
        row_count = result.ntuples
        if row_count:
            session.load.set_pgresult(result)
        rows.append(session.load.load_rows(0, row_count, tuple) if row_count else [])
    return rows


class _Watch:
    """Registration of a socket with the event loop until the answer is complete.

    It ends in the callback that reads the answer or the end of the connection: libpq then closes
    the socket, and a new socket with the same number must keep its own registration.
    """

    __slots__ = ("_loop", "_read", "_socket", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: int, read: Callable[[_Watch], None]
    ) -> None:
        """Watch the socket. `read` is called when input has arrived, and at intervals."""
        self._loop = loop
        self._read = read
        self._socket: int | None = socket
        self._timer = loop.call_later(POLL_INTERVAL_S, self._poll)
        loop.add_reader(socket, read, self)

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._poll)
        self._read(self)

    def stop(self) -> None:
        """Stop watching the socket. Idempotent."""
        if self._socket is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket = None

    def stop_writing(self) -> None:
        """Stop watching for writability, because everything is sent."""
        if self._socket is not None:
            self._loop.remove_writer(self._socket)


def _read(
    watch: _Watch,
    pgconn: pq.abc.PGconn,
    prepared: dict[bytes, bytes],
    new: Iterator[tuple[bytes, bytes]],
    results: list[pq.abc.PGresult],
    answered: asyncio.Future[None],
) -> None:
    """Process input, one result per executed statement; at the end raise the first error, if any.

    `new` are statements being prepared, in order. Each is moved to `prepared` when the server
    answers, even before an error: otherwise a batch that keeps failing would leave unused
    statements on the server.
    """
    try:
        pgconn.consume_input()
        while not (pgconn.is_busy() or answered.done()):
            result = pgconn.get_result()
            if result is None:  # end of one statement's answer
                if pgconn.status == BAD:
                    raise psycopg.OperationalError(pgconn.get_error_message())
                continue
            status = result.status
            if status == PIPELINE_SYNC:
                pgconn.exit_pipeline_mode()
                for each in results:
                    if each.status == FATAL_ERROR:
                        raise error_from_result(each)
                watch.stop()
                answered.set_result(None)
            # Answer to a preparation.
            elif status == COMMAND_OK and not result.command_status:
                query, name = next(new)
                prepared[query] = name
            # Statements after an error, which were skipped.
            elif status != PIPELINE_ABORTED:
                results.append(result)
    except Exception as error:  # of any kind: the waiting caller gets it
        watch.stop()
        if not answered.done():
            answered.set_exception(error)


def _write(watch: _Watch, pgconn: pq.abc.PGconn, answered: asyncio.Future[None]) -> None:
    """Send more of the output when the socket accepts it."""
    try:
        if not pgconn.flush():
            watch.stop_writing()
    except Exception as error:  # of any kind: the waiting caller gets it
        watch.stop()
        if not answered.done():
            answered.set_exception(error)


@lru_cache(maxsize=256)  # statements are constants
def _query(sql: str) -> bytes:
    """Convert a statement to numbered placeholders, as the server expects."""
    numbers = itertools.count(1)
    return _PLACEHOLDER.sub(
        lambda found: "%" if found[0] == "%%" else f"${next(numbers)}", sql
    ).encode()


def columns(layout: str, rows: Sequence[Sequence[Any]]) -> list[Value]:
    """Convert rows to one array parameter per column.

    `layout` has a letter for each column: u, ids of 16 bytes; n, numbers of 64 bits; b, bytes; t,
    times; s, texts or None; v, values whose text needs no quoting. Raises: ValueError for a number
    that needs more than 64 bits.
    """
    count, packed = len(rows), list[Value]()
    for kind, values in zip(
        layout, zip(*rows, strict=True) if rows else [()] * len(layout), strict=True
    ):
        if kind in "nu":
            oid, size, item = (BIGINT_OID, 8, "iq") if kind == "n" else (UUID_OID, 16, "i16s")
            sized = [size] * (2 * count)
            sized[1::2] = values
            try:
                packed.append(Packed(_head(oid, count) + _packer(item, count)(*sized)))
            except struct.error as error:
                raise ValueError(f"a value does not fit bigint[] or uuid[]: {error}") from error
        elif kind == "b":
            packed.append(bytes_array(values))
        elif kind == "t":
            packed.append(packed_array(TIMESTAMPTZ_OID, map(packed_time, values)))
        else:
            packed.append(text_array(values) if kind == "s" else array(values))
    return packed


@lru_cache(maxsize=4096)  # a batch has at most some hundred rows and some thousand counters
def _packer(item: str, count: int) -> Callable[..., bytes]:
    return struct.Struct(">" + item * count).pack


def array(values: Iterable[int | bool | datetime | str]) -> str:
    """Format an array literal of values whose text needs no quoting."""
    return "{" + ",".join(map(str, values)) + "}"


def id_array(ids: Iterable[uuid.UUID]) -> Packed:
    """Pack ids as a binary array, which the server reads much faster than text."""
    return id_number_array([each.int for each in ids])


def id_number_array(numbers: Sequence[int]) -> Packed:
    """Pack ids, given as integers, as a binary array."""
    return packed_array(UUID_OID, [(_LENGTH_16 | number).to_bytes(20, "big") for number in numbers])


def id_bytes_array(ids: Iterable[bytes]) -> Packed:
    """Pack ids, given as 16 bytes each, as a binary array."""
    return packed_array(UUID_OID, [_SIZE_16 + each for each in ids])


def time_array(times: Iterable[datetime]) -> Packed:
    """Pack times as a binary array."""
    return packed_array(TIMESTAMPTZ_OID, [packed_time(at) for at in times])


def packed_id(number: int) -> bytes:
    """Pack an id as an element of `packed_array`: length and value."""
    return (_LENGTH_16 | number).to_bytes(20, "big")


@lru_cache(maxsize=256)  # the current windows
def packed_time(at: datetime) -> bytes:
    """Pack a time as an element of `packed_array`: length and microseconds since 2000."""
    return _TIME.pack(8, (at - _POSTGRES_EPOCH) // _MICROSECOND)


def packed_array(oid: int, elements: Iterable[bytes]) -> Packed:
    """Pack elements, each its length and value, as a one-dimensional array without NULL."""
    body = list(elements)
    return Packed(_head(oid, len(body)) + b"".join(body))


@lru_cache(maxsize=4096)
def _head(oid: int, count: int) -> bytes:
    return _HEAD.pack(1 if count else 0, 0, oid, count, 1)[: None if count else 12]


def text_array(texts: Iterable[str | None]) -> str:
    """Format an array literal of any texts, escaping them; None becomes NULL."""
    escaped = [
        None if text is None else text.replace("\\", "\\\\").replace('"', '\\"') for text in texts
    ]
    return "{" + ",".join(["NULL" if text is None else f'"{text}"' for text in escaped]) + "}"


def bytes_array(values: Iterable[bytes]) -> Packed:
    """Pack values as an array of bytea."""
    return packed_array(BYTEA_OID, [len(value).to_bytes(4, "big") + value for value in values])
