"""Several statements to PostgreSQL and all their answers in one round trip, for the path that every request takes.

psycopg's own pipelines send each statement by itself and look for its answer by itself, and its cursors adapt each value: together
ten times the work. Here a caller writes its values as text (the arrays below), each statement is prepared when a connection first
sees it, all go out at once, and one wait ends with the last answer.
"""

from __future__ import annotations

import itertools
import re
import struct
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.waiting import Ready, Wait

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

Row = tuple[Any, ...]


class Packed(bytes):
    """A value in the server's own binary form, which it need not parse."""


Value = str | int | float | Packed | None

Statement = tuple[str, Sequence[Value]]  # SQL with %s for each value, and the values


UUID_OID, BYTEA_OID, TIMESTAMPTZ_OID, BIGINT_OID = 2950, 17, 1184, 20  # of the server's types: the same in all versions

_HEAD = struct.Struct(">iiiii")  # dimensions, whether there is a NULL, type, length, lower bound

_TIME = struct.Struct(">iq")

_LENGTH_16 = 16 << 128  # before an id's number

_SIZE_16 = (16).to_bytes(4, "big")

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

_MICROSECOND = timedelta(microseconds=1)

_PLACEHOLDER = re.compile(r"%[s%]")

_numbers = itertools.count(1)

# By statement the name that it was prepared under, per connection.
_prepared: weakref.WeakKeyDictionary[Connection, dict[bytes, bytes]] = weakref.WeakKeyDictionary()


async def exchange(connection: Connection, statements: Sequence[Statement]) -> list[list[Row]]:
    """Run the statements in order; the rows of each.

    Statements that neither begin nor commit are one transaction by themselves, committed when this returns.

    connection: in autocommit mode and used by nobody else meanwhile. Raises ValueError for text with a NUL, and then nothing was
    sent; else what the first statement that failed raises, and no later one was run: nothing is committed then, and a transaction
    that was begun has to be rolled back. After a cancellation the connection is of no more use.
    """
    encoded = [(_query(sql), [_encoded(value) for value in values]) for sql, values in statements]
    pgconn = connection.pgconn
    prepared = _prepared.setdefault(connection, {})
    new: dict[bytes, bytes] = {}
    pgconn.enter_pipeline_mode()
    for query, values in encoded:
        name = prepared.get(query) or new.get(query)
        if name is None:
            # Whether a preparation was done is not known before its answer, so a name is never used for a second one.
            name = new[query] = f"weir_{next(_numbers)}".encode()
            pgconn.send_prepare(name, query)
        formats = [pq.Format.BINARY if type(value) is Packed else pq.Format.TEXT for value in values]
        pgconn.send_query_prepared(name, values, formats, result_format=pq.Format.BINARY)
    pgconn.pipeline_sync()
    results = await connection.wait(_answers(pgconn, prepared, iter(new.items())))
    load: Any = Transformer(connection)  # a class of psycopg's that it gives no type
    return [_rows(load, result) for result in results]


def _answers(
    pgconn: pq.abc.PGconn, prepared: dict[bytes, bytes], new: Iterator[tuple[bytes, bytes]]
) -> Generator[Wait, Ready | int, list[pq.abc.PGresult]]:
    """Send what is to be sent and collect one result per executed statement, up to the end of the pipeline.

    new: what is being prepared, in order. It goes to `prepared` as the server answers, also before an error: else a batch that
    fails again and again would leave statements there that nobody uses.
    """
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    results: list[pq.abc.PGresult] = []
    error: psycopg.Error | None = None
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:  # the end of one statement's answer
            continue
        match result.status:
            case pq.ExecStatus.PIPELINE_SYNC:
                break
            case pq.ExecStatus.TUPLES_OK:
                results.append(result)
            case pq.ExecStatus.COMMAND_OK:
                if result.command_status:
                    results.append(result)
                else:  # the answer to a preparation
                    query, name = next(new)
                    prepared[query] = name
            case pq.ExecStatus.FATAL_ERROR:
                error = error or error_from_result(result)
            case _:
                pass  # what comes after an error is told to have been left out
    pgconn.exit_pipeline_mode()
    if error is not None:
        raise error
    return results


def _rows(load: Any, result: pq.abc.PGresult) -> list[Row]:
    rows: list[Row] = []
    if result.ntuples:
        load.set_pgresult(result)
        rows = load.load_rows(0, result.ntuples, tuple)
    return rows


@lru_cache(maxsize=256)  # statements are constants
def _query(sql: str) -> bytes:
    """The text of a statement as the server takes it."""
    numbers = itertools.count(1)
    return _PLACEHOLDER.sub(lambda found: "%" if found[0] == "%%" else f"${next(numbers)}", sql).encode()


def _encoded(value: Value) -> bytes | None:
    if value is None or type(value) is Packed:
        return value
    encoded = str(value).encode()
    if b"\0" in encoded:  # the protocol would end the value there
        raise ValueError("text for the database must not contain NUL")
    return encoded


def array(values: Iterable[int | bool | datetime | str]) -> str:
    """An array literal. Only for values whose text needs no quoting."""
    return "{" + ",".join(map(str, values)) + "}"


def bigint_array(values: Sequence[int]) -> Packed:
    """An array of numbers of 64 bits. Raises: ValueError for one that needs more."""
    sized = [8] * (2 * len(values))
    sized[1::2] = values
    try:
        return Packed(_head(BIGINT_OID, len(values)) + _bigint_packer(len(values))(*sized))
    except struct.error as error:
        raise ValueError(f"not for a bigint[]: {error}") from error


@lru_cache(maxsize=4096)  # a batch has at most some hundred rows, and some thousand counters
def _bigint_packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(">" + "iq" * count).pack


def id_array(ids: Iterable[uuid.UUID]) -> Packed:
    """An array of ids. In text the server would take longer to read them than to do anything else with them."""
    return id_number_array([each.int for each in ids])


def id_number_array(numbers: Sequence[int]) -> Packed:
    """The same of the ids' numbers."""
    return packed_array(UUID_OID, [(_LENGTH_16 | number).to_bytes(20, "big") for number in numbers])


def id_bytes_array(ids: Iterable[bytes]) -> Packed:
    """The same of their 16 bytes."""
    return packed_array(UUID_OID, [_SIZE_16 + each for each in ids])


def time_array(times: Iterable[datetime]) -> Packed:
    """An array of times."""
    return packed_array(TIMESTAMPTZ_OID, [packed_time(at) for at in times])


def packed_id(number: int) -> bytes:
    """An element of `packed_array`: its length and itself."""
    return (_LENGTH_16 | number).to_bytes(20, "big")


@lru_cache(maxsize=256)  # the windows of now
def packed_time(at: datetime) -> bytes:
    """The same of a time: microseconds since 2000."""
    return _TIME.pack(8, (at - _POSTGRES_EPOCH) // _MICROSECOND)


def packed_array(oid: int, elements: Sequence[bytes]) -> Packed:
    """One dimension from 1 on, without NULL; each element is its length and itself."""
    return Packed(_head(oid, len(elements)) + b"".join(elements))


@lru_cache(maxsize=4096)
def _head(oid: int, count: int) -> bytes:
    return _HEAD.pack(1 if count else 0, 0, oid, count, 1)[: None if count else 12]


def text_array(texts: Iterable[str | None]) -> str:
    """An array literal of any texts."""
    return "{" + ",".join(["NULL" if text is None else _quoted(text) for text in texts]) + "}"


def bytes_array(values: Iterable[bytes]) -> Packed:
    """An array of bytea."""
    return packed_array(BYTEA_OID, [len(value).to_bytes(4, "big") + value for value in values])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
