"""Page tokens: the last row of a page by its sort key, as text; the next page follows it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from metering.core.errors import InvalidValue

ROW_ID_MAX = 2**63 - 1
PAGE_SIZE_MAX = 1000  # rows; a page must fit a message


def check_page_size(page_size: int, maximum: int = PAGE_SIZE_MAX) -> None:
    """Check the number of rows of a page. Raises: InvalidValue."""
    if not 1 <= page_size <= maximum:
        raise InvalidValue("page_size", f"must be between 1 and {maximum}")


def page_token(*values: object) -> str:
    """Encode a row's sort values as a page token."""
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
