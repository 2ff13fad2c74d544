"""Page tokens: the last row of a page by its sort key, as text. The next page begins after that row."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from metering.core.errors import InvalidValue

ROW_ID_MAX = 2**63 - 1


def page_token(*values: object) -> str:
    """The token of a row, from the values that rows are sorted by."""
    return base64.urlsafe_b64encode(json.dumps([str(value) for value in values]).encode()).decode()


def page_values(token: str, *readers: Callable[[str], object]) -> list[Any]:
    """The values in a token, one of each reader. Raises: InvalidValue unless `page_token` made it of such values."""
    try:
        texts = json.loads(base64.urlsafe_b64decode(token.encode()))
        values = [read(text) for read, text in zip(readers, texts, strict=True)]
        is_ours = page_token(*values) == token
    # A reader refuses with ValueError, or InvalidValue; OverflowError: a time that is outside the calendar in UTC.
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidValue):
        is_ours = False
    if not is_ours:
        raise InvalidValue("page_token", "give `next_page_token` of the page before, with everything else as it was")
    return values


def utc_time(text: str) -> datetime:
    """A time with its offset, in UTC. Raises: ValueError, OverflowError."""
    return datetime.fromisoformat(text).astimezone(UTC)


def row_id(text: str) -> int:
    """The id of a row. Raises: ValueError for what no column holds."""
    value = int(text)
    if not 0 <= value <= ROW_ID_MAX:
        raise ValueError(f"{text[:64]!r} is not a row id")
    return value
