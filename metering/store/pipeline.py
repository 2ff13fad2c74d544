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
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

Row = tuple[Any, ...]

_HEAD = struct.Struct(">iiiii")  # dimensions, NULL flag, type, length, lower bound
_TIME = struct.Struct(">iq")
_LENGTH_16 = 16 << 128  # length prefix of an id as a number
_BIG: Literal["big"] = "big"
_SIZE = struct.Struct(">i")
_SIZE_16 = _SIZE.pack(16)
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
PIPELINE_SYNC, TUPLES_OK = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK


Value = str | int | float | bytes | None  # bytes are a value in PostgreSQL's binary format

Statement = tuple[str, Sequence[Value]]  # SQL with %s for each value, and the values


class _Session:
    """Prepared statements of one connection, by name, and its loader of result values."""

    __slots__ = ("load", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[bytes, bytes] = {}
        self.load: Any = Transformer()  # untyped in psycopg; texts are UTF-8, and times UTC


# Not a WeakKeyDictionary, whose methods are in Python.
_sessions: dict[weakref.ref[Connection], _Session] = {}


async def run_pipeline(connection: Connection, statements: Sequence[Statement]) -> list[list[Row]]:
    """Execute the statements in order, in one pipeline, and return the rows of each.

    Without BEGIN and COMMIT they form one implicit transaction. The connection must be in
    autocommit mode and not used concurrently; no timeout applies. Raises: ValueError for text with
    NUL (nothing is sent), or the error of the first failing statement: the rest is skipped, nothing
    is committed, and an open transaction must be rolled back. If the call is cancelled, the
    connection is unusable.
    """
    encoded: list[tuple[bytes, list[Any], list[int]]] = []
    for sql, values in statements:
        query, formats, texts = _form(sql, tuple(map(type, values)))
        parameters = list[Any](values)
        for index in texts:
            text = parameters[index] = str(parameters[index]).encode()
            if b"\0" in text:  # the protocol would truncate the value there
                raise ValueError("text for the database must not contain NUL")
        encoded.append((query, parameters, formats))
    session = _sessions.get(weakref.ref(connection))
    if session is None:
        session = _sessions[weakref.ref(connection, _sessions.pop)] = _Session()
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
        pgconn.send_query_prepared(name, parameters, formats, BINARY)
    pgconn.pipeline_sync()
    exchange = _Exchange(pgconn, prepared, new)
    try:
        if pgconn.flush():
            exchange.write_later()
        await exchange.answered
    except BaseException as error:
        exchange.stop()
        if isinstance(error, asyncio.CancelledError):
            with contextlib.suppress(psycopg.Error):
                await connection.cancel_safe(timeout=CANCEL_TIMEOUT_S)
        raise
    rows: list[list[Row]] = []
    for result in exchange.results:
        row_count = result.ntuples
        if row_count:
            session.load.set_pgresult(result)
        rows.append(session.load.load_rows(0, row_count, tuple) if row_count else [])
    return rows


class _Exchange:
    """Registration of a socket with the event loop until the answer is complete.

    It ends in the callback that reads the answer or the end of the connection: libpq then closes
    the socket, and a new socket with the same number must keep its own registration.
    """

    def __init__(
        self, pgconn: pq.abc.PGconn, prepared: dict[bytes, bytes], new: dict[bytes, bytes]
    ) -> None:
        """Watch the connection's socket.

        `new` are statements being prepared, in order. Each is moved to `prepared` when the server
        answers, even before an error: otherwise a batch that keeps failing would leave unused
        statements on the server.
        """
        self._pgconn = pgconn
        self._prepared = prepared
        self._new = new
        self._loop = loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.results: list[pq.abc.PGresult] = []  # one per executed statement
        self._socket: int | None = pgconn.socket
        self._is_writing = False
        self._timer = loop.call_later(POLL_INTERVAL_S, self._poll)
        loop.add_reader(pgconn.socket, self.read)

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._poll)
        self.read()

    def stop(self) -> None:
        """Stop watching the socket. Idempotent."""
        if self._socket is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._socket)
            if self._is_writing:
                self._loop.remove_writer(self._socket)
            self._socket = None

    def read(self) -> None:
        """Process input; at the end answer, with the first error if there is any."""
        if self.answered.done():
            return
        try:
            pgconn, results = self._pgconn, self.results
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:  # end of one statement's answer
                    if pgconn.status == BAD:
                        raise psycopg.OperationalError(pgconn.get_error_message())
                    continue
                status = result.status
                if status == TUPLES_OK:
                    results.append(result)
                elif status == PIPELINE_SYNC:
                    pgconn.exit_pipeline_mode()
                    for each in results:
                        if each.status == FATAL_ERROR:
                            raise error_from_result(each)
                    self.stop()
                    self.answered.set_result(None)
                    return
                # Answer to a preparation.
                elif self._new and status == COMMAND_OK and not result.command_status:
                    query = next(iter(self._new))
                    self._prepared[query] = self._new.pop(query)
                # Statements after an error, which were skipped.
                elif status != PIPELINE_ABORTED:
                    results.append(result)
        except Exception as error:  # of any kind: the waiting caller gets it
            self._fail(error)

    def write_later(self) -> None:
        """Send the rest of the output when the socket accepts it."""
        self._is_writing = True
        self._loop.add_writer(self._pgconn.socket, self._write)

    def _write(self) -> None:
        try:
            if not self._pgconn.flush() and self._socket is not None:
                self._is_writing = False
                self._loop.remove_writer(self._socket)
        except Exception as error:  # of any kind: the waiting caller gets it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.stop()
        if not self.answered.done():
            self.answered.set_exception(error)


@lru_cache(maxsize=1024)  # statements are constants
def _form(sql: str, kinds: tuple[type, ...]) -> tuple[bytes, list[int], tuple[int, ...]]:
    """Return a statement with numbered placeholders, as the server expects; the format of each
    parameter, from the types of the values; and the indexes of those sent as text.
    """
    is_binary = [issubclass(kind, bytes | None) for kind in kinds]
    formats: list[int] = [BINARY if each else TEXT for each in is_binary]
    return _query(sql), formats, tuple(i for i, each in enumerate(is_binary) if not each)


@lru_cache(maxsize=256)  # statements are constants
def _query(sql: str) -> bytes:
    """Convert a statement to numbered placeholders, as the server expects."""
    numbers = itertools.count(1)
    return _PLACEHOLDER.sub(
        lambda found: "%" if found[0] == "%%" else f"${next(numbers)}", sql
    ).encode()


@lru_cache(maxsize=4096)  # a batch has at most some hundred rows and some thousand counters
def _number_packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(">" + "iq" * count).pack


def array(values: Iterable[int | bool | datetime | str]) -> str:
    """Format an array literal of values whose text needs no quoting."""
    return "{" + ",".join(map(str, values)) + "}"


def number_array(numbers: Sequence[int]) -> bytes:
    """Pack numbers of 64 bits. Raises: ValueError for a number that needs more."""
    count = len(numbers)
    sized = [8] * (2 * count)
    sized[1::2] = numbers
    try:
        return _head(BIGINT_OID, count) + _number_packer(count)(*sized)
    except struct.error as error:
        raise ValueError(f"a number does not fit bigint: {error}") from error


def id_array(ids: Iterable[uuid.UUID]) -> bytes:
    """Pack ids as a binary array, which the server reads much faster than text."""
    return id_number_array([each.int for each in ids])


def id_number_array(numbers: Sequence[int]) -> bytes:
    """Pack ids, given as integers, as a binary array."""
    sized = map(_LENGTH_16.__or__, numbers)
    packed = map(int.to_bytes, sized, itertools.repeat(20), itertools.repeat(_BIG))
    return _head(UUID_OID, len(numbers)) + b"".join(packed)


def id_bytes_array(ids: Collection[bytes]) -> bytes:
    """Pack ids, given as 16 bytes each, as a binary array."""
    return _head(UUID_OID, len(ids)) + b"".join(map(_SIZE_16.__add__, ids))


def time_array(times: Collection[datetime]) -> bytes:
    """Pack times as a binary array."""
    return _head(TIMESTAMPTZ_OID, len(times)) + b"".join(map(packed_time, times))


def packed_id(number: int) -> bytes:
    """Pack an id as an element of `packed_array`: length and value."""
    return (_LENGTH_16 | number).to_bytes(20, "big")


@lru_cache(maxsize=256)  # the current windows
def packed_time(at: datetime) -> bytes:
    """Pack a time as an element of `packed_array`: length and microseconds since 2000."""
    return _TIME.pack(8, (at - _POSTGRES_EPOCH) // _MICROSECOND)


def packed_array(oid: int, elements: Sequence[bytes]) -> bytes:
    """Pack elements, each its length and value, as a one-dimensional array without NULL."""
    return _head(oid, len(elements)) + b"".join(elements)


@lru_cache(maxsize=4096)
def _head(oid: int, count: int) -> bytes:
    return _HEAD.pack(1 if count else 0, 0, oid, count, 1)[: None if count else 12]


def text_array(texts: Iterable[str | None]) -> str:
    """Format an array literal of any texts, escaping them; None becomes NULL."""
    escaped = [
        "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for text in texts
    ]
    return "{" + ",".join(escaped) + "}"


def bytes_array(values: Collection[bytes]) -> bytes:
    """Pack values as an array of bytea."""
    sizes = map(_SIZE.pack, map(len, values))
    items = itertools.chain.from_iterable(zip(sizes, values, strict=True))
    return _head(BYTEA_OID, len(values)) + b"".join(items)
