"""Strict parsing of JSON that clients send as text."""

from __future__ import annotations

import json
from typing import Any

# Nesting depth: above that of real schemas and calls, well below a template's stack limit.
LEVELS_MAX = 64


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. Returns None if invalid, not an object, or nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not valid Unicode
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _level_count(value) <= LEVELS_MAX else None


def shown_texts(source: str) -> list[str]:
    """List the texts of a JSON document that a model may see: the unescaped JSON, and its strings.

    A chat template encodes the document again, or inserts its strings, both without escapes.
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
    raise ValueError(f"{name} is not a JSON number")


def _level_count(value: Any) -> int:
    count, level = 0, [value]
    while level:
        count += 1
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in inner if isinstance(each, dict | list)]
    return count
