"""The schema of a forced call allows what the tools' own schemas allow, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from inference.text.tools import CALL_COUNT_MAX, Tool, calls_schema

TREE = {
    "type": "object",
    "properties": {
        "children": {"type": "array", "items": {"$ref": "#"}},
        "$ref": {"type": "integer"},  # a property of that name is not a reference
        "leaf": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
        "what": {"const": {"$ref": "#/nowhere"}},  # and a constant is not a schema
    },
    "additionalProperties": {"$ref": "#/definitions/rest"},
    "$defs": {"leaf": {"enum": ["x", "y"]}},
    "definitions": {"rest": {"type": "boolean"}},
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [Tool("nothing", "", json.dumps(NOTHING)), Tool("tree", "", json.dumps(TREE))]
ARGUMENTS: list[Any] = [
    {},
    {"children": [{"children": [{"leaf": "x"}]}]},
    {"children": [{"children": [{"leaf": "z"}]}]},
    {"$ref": 1, "leaf": None, "more": True, "what": {"$ref": "#/nowhere"}},
    {"$ref": "#"},
    {"what": {"$ref": "#/$defs/tool_1/nowhere"}},
    {"more": 1},
    [],
]


def valid(instance: Any, schema: Any) -> bool:
    """Return whether the reference implementation accepts the instance."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(instance))


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("given", ARGUMENTS, ids=json.dumps)
def test_arguments_are_allowed_where_the_tools_schema_allows_them(given: Any, key: str) -> None:
    single = json.loads(calls_schema(TOOLS, single=True, arguments_key=key))
    several = json.loads(calls_schema(TOOLS, single=False, arguments_key=key))

    for name, own in (("nothing", NOTHING), ("tree", TREE), ("unknown", False)):
        call = {"name": name, key: given}
        assert (
            valid(call, single)
            == valid([call], several)
            == valid([call, call], several)
            == valid(given, own)
        ), name
        assert not valid({**call, "more": 1}, single)
        assert not valid({"name": name}, single)
    assert not valid([], several)
    assert not valid([{"name": "nothing", key: {}}] * (CALL_COUNT_MAX + 1), several)
