"""JSON that clients send as text: read once, and only what can be written again."""

from __future__ import annotations

import json
from typing import Any

LEVELS_MAX = 64  # of nesting: beyond what any schema or call has, and far from where a template would run out of stack


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is; None if it is none, has numbers that JSON has not, no Unicode, or too many levels."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _level_count(value) <= LEVELS_MAX else None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _level_count(value: Any) -> int:
    count, level = 0, [value]
    while level:
        count += 1
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return count
