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


def shown_texts(source: str) -> list[str]:
    """What a model may be shown of a document that `json_object` has read: all of it without escapes, and texts that need some.

    A chat template writes it anew, or texts of it as they are, so what somebody has escaped stands there in the clear.
    """
    document = json.loads(source)
    texts, values = [json.dumps(document, ensure_ascii=False)], [document]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += (*value, *value.values())
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and json.dumps(value, ensure_ascii=False) != f'"{value}"':
            texts.append(value)
    return texts


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _level_count(value: Any) -> int:
    count, level = 0, [value]
    while level:
        count += 1
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return count
