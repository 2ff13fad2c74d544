"""Answers of lists: pages that are bounded by rows, by bytes, and by time on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from metering.core.errors import InvalidValue
from metering.core.pages import PAGE_SIZE_MAX, check_page_size

# Bytes of an encoded answer. As JSON for the console it is five times as large, and takes a thread
# 0.25 s; clients of gRPC refuse messages of more than 4 MiB.
ANSWER_BYTES_MAX = 2**20
RECORD_BYTES_MAX = ANSWER_BYTES_MAX - 4096  # the rest is for the token of the next page
# Records that are read and converted at once: some 5 ms of the event loop.
CHUNK_ROWS = 100
WHOLE = 0  # page size

Query = Callable[..., Awaitable[tuple[Sequence[Any], str]]]

M = TypeVar("M", bound=Message)


async def read_page(
    query: Query,
    message: Callable[[Any], M],
    *,
    page_size: int,
    page_token: str,
    bytes_max: int = RECORD_BYTES_MAX,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[list[M], str]:
    """Read a page in chunks. Returns its messages, and the token of the next page.

    `query` takes `page_size` and `page_token`, and returns records and the token of the next ones.
    The page ends before the record with which it would exceed `bytes_max`, but has at least one.
    A `page_size` of 0 means all records. Raises InvalidValue if they exceed `bytes_max`.
    """
    if page_size:
        check_page_size(page_size)
    found: list[M] = []
    size, unread, chunk = 0, page_size, chunk_rows
    while True:
        requested = min(chunk, unread) if page_size else chunk
        records, following = await query(page_size=requested, page_token=page_token)
        messages = [message(each) for each in records]
        fitting, fitting_size = fitting_in(messages, bytes_max - size)
        if not found and page_size and messages and not fitting:
            fitting, fitting_size = 1, messages[0].ByteSize()
        if fitting < len(messages):
            if not page_size:
                raise InvalidValue(
                    "page_size",
                    f"is required, because this list exceeds {bytes_max:,} bytes: set 1 to"
                    f" {PAGE_SIZE_MAX}, and `page_token` to `next_page_token` for the next page",
                )
            if not fitting:
                return found, page_token
            chunk = fitting  # read them again, for the token after the last one that fits
            continue
        found += messages
        size += fitting_size
        unread -= requested
        if not following or (page_size and not unread):
            return found, following
        page_token = following
        await asyncio.sleep(0)  # to the streams of this process


def fitting_in(messages: Iterable[Message], bytes_max: int) -> tuple[int, int]:
    """Count the first messages that fit into an answer, and their bytes."""
    count = size = 0
    for each in messages:
        field = each.ByteSize()
        field += 1 + (field.bit_length() + 6) // 7  # its tag and its length
        if size + field > bytes_max:
            break
        count, size = count + 1, size + field
    return count, size


def as_it_is(message: M) -> M:
    """Return a message, for queries that return messages instead of records."""
    return message
