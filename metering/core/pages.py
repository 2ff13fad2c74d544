"""Pages of lists: the rows that follow a token, which is the last row of the page before by its
sort key.

A page is found by its sort key and not by counting rows, so that rows inserted or deleted meanwhile
neither repeat nor hide others, and the last page costs as much as the first.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, literal, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue

ROW_ID_MAX = 2**63 - 1
PAGE_SIZE_MAX = 1000  # rows; a page must fit a message
PAGE_SIZE = 100  # rows, of lists that are always read in pages
# No row has these ids: a range from the first to the last one has all rows, and a page after the
# first one is the first page, without another condition than that of an index.
FIRST_ID, LAST_ID = uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)


class SortKey(NamedTuple):
    """Column by which a list is sorted, and the reader of its values in page tokens."""

    column: Any
    read: Callable[[str], object] = str


async def page_of(
    session: AsyncSession,
    query: Select[*tuple[Any, ...]],
    *keys: SortKey,
    page_size: int,
    page_token: str,
    latest_first: bool = False,
) -> tuple[list[Any], str]:
    """Read a page of rows, and the token of the next page, which is empty on the last one.

    Together, the sort keys are unique. `latest_first` sorts all of them in descending order.
    Raises: InvalidValue.
    """
    check_page_size(page_size)
    columns: list[ColumnElement[Any]] = [each.column for each in keys]
    if page_token:
        values = page_values(page_token, *(each.read for each in keys))
        last = tuple_(*(literal(value, of.type) for value, of in zip(values, columns, strict=True)))
        position = tuple_(*columns)
        query = query.where(position < last if latest_first else position > last)
    order = [each.desc() if latest_first else each.asc() for each in columns]
    limited = query.add_columns(*columns).order_by(*order).limit(page_size + 1)
    rows = (await session.execute(limited)).all()
    following = _encoded(rows[page_size - 1][-len(keys) :]) if len(rows) > page_size else ""
    return [row[: -len(keys)] for row in rows[:page_size]], following


def check_page_size(page_size: int, maximum: int = PAGE_SIZE_MAX) -> None:
    """Check the number of rows of a page. Raises: InvalidValue."""
    if not 1 <= page_size <= maximum:
        raise InvalidValue("page_size", f"must be between 1 and {maximum}")


def page_token(*values: object) -> str:
    """Encode a row's sort values as a page token."""
    return _encoded(values)


def _encoded(values: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps([str(value) for value in values]).encode()).decode()


def page_values(token: str, *readers: Callable[[str], object]) -> list[Any]:
    """Decode a page token with one reader per value. Raises: InvalidValue for a forged token."""
    try:
        texts = json.loads(base64.urlsafe_b64decode(token.encode()))
        values = [read(text) for read, text in zip(readers, texts, strict=True)]
        is_ours = page_token(*values) == token
    # Readers raise ValueError or InvalidValue; OverflowError: a time outside the calendar in UTC.
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidValue):
        is_ours = False
    if not is_ours:
        raise InvalidValue(
            "page_token",
            "must be `next_page_token` of the previous page, with all other arguments unchanged",
        )
    return values


def utc_time(text: str) -> datetime:
    """Parse an ISO 8601 time with offset as UTC. Raises: ValueError, OverflowError."""
    return datetime.fromisoformat(text).astimezone(UTC)


def row_id(text: str) -> int:
    """Parse a row id. Raises: ValueError if it is negative or too large for the column."""
    value = int(text)
    if not 0 <= value <= ROW_ID_MAX:
        raise ValueError(f"{text[:64]!r} is not a row id")
    return value
