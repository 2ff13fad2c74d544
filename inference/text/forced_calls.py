"""The JSON schema of an answer that is nothing but calls: what a model is held to where it must call a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.text.tools import Tool

CALL_COUNT_MAX = 16  # in one answer: a model that may go on would otherwise have no reason to end
# Keywords whose values hold schemas: by themselves, in a list, and by names that are the caller's.
_SCHEMA = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedProperties"}
)
_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def calls_schema(tools: Sequence[Tool], *, single: bool, arguments_key: str) -> str:
    """Of one call of these tools as an object, or if several are allowed of a list of them; JSON text.

    Each tool's schema stands under `$defs`, and its references are led there.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {
        f"tool_{index}": _moved(json.loads(tool.parameters), f"#/$defs/tool_{index}") for index, tool in enumerate(tools)
    }
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if single:
        return json.dumps({**one, "$defs": definitions}, ensure_ascii=False)
    return json.dumps(
        {"type": "array", "items": one, "minItems": 1, "maxItems": CALL_COUNT_MAX, "$defs": definitions}, ensure_ascii=False
    )


def _moved(schema: Any, place: str) -> Any:
    """The same schema with its references to itself led to another place."""
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            moved[key] = [_moved(each, place) for each in value]
        else:
            moved[key] = _moved(value, place) if key in _SCHEMA else value
    return moved
