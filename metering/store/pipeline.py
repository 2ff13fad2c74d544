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
import os
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


class _Channel:
    """Exchanges of pipelined statements over one connection, one at a time, on one event loop.

    Watches a duplicate of the connection's descriptor, and keeps watching it between exchanges,
    because registering it takes as long as sending. psycopg watches the original during statements
    of its own, and libpq closes it when the connection ends: a new socket with the same number must
    keep its own registration.

    `prepared` are the prepared statements, by query. `load` reads result values.
    """

    __slots__ = (
        "_answered",
        "_fd",
        "_loop",
        "_new",
        "_pgconn",
        "_results",
        "_timer",
        "load",
        "prepared",
    )

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self.prepared: dict[bytes, bytes] = {}
        self.load: Any = Transformer()  # untyped in psycopg; texts are UTF-8, and times UTC
        self._pgconn = pgconn
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None  # the duplicate while it is watched
        self._timer: asyncio.TimerHandle | None = None
        # Of the exchange under way:
        self._answered: asyncio.Future[list[pq.abc.PGresult]] | None = None
        self._results: list[pq.abc.PGresult] = []  # one per executed statement
        self._new: dict[bytes, bytes] = {}  # statements being prepared, in order

    def send(
        self, statements: Sequence[tuple[bytes, list[Any], list[int]]]
    ) -> asyncio.Future[list[pq.abc.PGresult]]:
        """Send statements, each with its parameters and their formats; return the future results.

        If this raises, the connection is unusable.
        """
        pgconn, prepared, new = self._pgconn, self.prepared, self._new
        fd = self._watch() if self._fd is None else self._fd
        new.clear()
        pgconn.enter_pipeline_mode()
        for query, parameters, formats in statements:
            name = prepared.get(query) or new.get(query)
            if name is None:
                # A preparation may fail, which is known only from its answer, so a name is never
                # reused for another one.
                name = new[query] = f"weir_{next(_numbers)}".encode()
                pgconn.send_prepare(name, query)
            pgconn.send_query_prepared(name, parameters, formats, BINARY)
        pgconn.pipeline_sync()
        if self._timer is None:
            self._timer = self._loop.call_later(POLL_INTERVAL_S, self._poll)
        if pgconn.flush():  # the rest, when the socket accepts it
            self._loop.add_writer(fd, self._write)
        self._results = []
        self._answered = self._loop.create_future()
        return self._answered

    def _watch(self) -> int:
        try:
            self._fd = fd = os.dup(self._pgconn.socket)
        except OSError as error:  # too many open files: as if the connection were lost
            raise psycopg.OperationalError(f"cannot watch the connection: {error}") from error
        self._loop.add_reader(fd, self.read)
        return fd

    def stop(self) -> None:
        """Stop watching the connection. The next exchange watches it again. Idempotent."""
        self._answered = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None

    def _poll(self) -> None:
        self._timer = None
        if self._answered is not None:
            self._timer = self._loop.call_later(POLL_INTERVAL_S, self._poll)
            self.read()

    def read(self) -> None:
        """Process input; at the end answer, with the first error if there is any."""
        if self._answered is None:  # a statement of psycopg's, or the end of an idle connection
            self.stop()
            return
        try:
            pgconn, results = self._pgconn, self._results
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
                    self._answer(results)
                    return
                # Answer to a preparation. Noted even before an error: otherwise a batch that keeps
                # failing would leave unused statements on the server.
                elif self._new and status == COMMAND_OK and not result.command_status:
                    query = next(iter(self._new))
                    self.prepared[query] = self._new.pop(query)
                # Statements after an error, which were skipped.
                elif status != PIPELINE_ABORTED:
                    results.append(result)
        except Exception as error:  # of any kind: the waiting caller gets it
            self._fail(error)

    def _answer(self, results: list[pq.abc.PGresult]) -> None:
        answered, self._answered = self._answered, None
        if answered is None or answered.done():
            return
        for each in results:
            if each.status == FATAL_ERROR:
                answered.set_exception(error_from_result(each))
                return
        answered.set_result(results)

    def _write(self) -> None:
        try:
            if not self._pgconn.flush() and self._fd is not None:
                self._loop.remove_writer(self._fd)
        except Exception as error:  # of any kind: the waiting caller gets it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        answered = self._answered
        self.stop()
        if answered is not None and not answered.done():
            answered.set_exception(error)


# Not a WeakKeyDictionary, whose methods are in Python.
_channels: dict[weakref.ref[Connection], _Channel] = {}


def _channel_of(connection: Connection) -> _Channel:
    """Return the connection's channel, which ends with it."""
    channel = _channels.get(weakref.ref(connection))
    if channel is None:
        channel = _Channel(connection.pgconn)
        _channels[weakref.ref(connection, lambda ended: _channels.pop(ended).stop())] = channel
    return channel


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
    channel = _channel_of(connection)
    try:
        results = await channel.send(encoded)
    except asyncio.CancelledError:
        channel.stop()
        with contextlib.suppress(psycopg.Error):
            await connection.cancel_safe(timeout=CANCEL_TIMEOUT_S)
        raise
    load, rows = channel.load, []
    for result in results:
        row_count = result.ntuples
        if row_count:
            load.set_pgresult(result)
        rows.append(load.load_rows(0, row_count, tuple) if row_count else [])
    return rows


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


def packed_array(oid: int, count: int, elements: Iterable[bytes]) -> bytes:
    """Pack elements, each its length and value, as a one-dimensional array without NULL.

    `elements` are `count` in all; one item may have several.
    """
    return _head(oid, count) + b"".join(elements)


@lru_cache(maxsize=4096)
def _head(oid: int, count: int) -> bytes:
    return _HEAD.pack(1 if count else 0, 0, oid, count, 1)[: None if count else 12]


def text_array(texts: Iterable[str | None]) -> str:
    """Format an array literal of any texts, escaping them; None becomes NULL."""
    escaped = (
        "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for text in texts
    )
    return "{" + ",".join(escaped) + "}"


def bytes_array(values: Collection[bytes]) -> bytes:
    """Pack values as an array of bytea."""
    sizes = map(_SIZE.pack, map(len, values))
    items = itertools.chain.from_iterable(zip(sizes, values, strict=True))
    return _head(BYTEA_OID, len(values)) + b"".join(items)
