"""JSON schemas for tests: a hand-made collection that goes through the keywords, and a strategy for random ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

OWN: list[Schema] = [
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"const": {"a": [1, 2.5, None, "ü"]}},
    {"enum": ["red", "green", 3, None, True]},
    {"enum": ["🙂", "北京", 'quo"te', "back\\slash", "line\nbreak"]},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 99.75},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(?:a|bc)*d?$", "maxLength": 12},
    {"type": "string", "enum": ["EUR", "USD", "SEK"]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}], "items": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 3},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}, "b": {}}, "required": ["b"]},
    {"type": "object", "required": ["undeclared"], "additionalProperties": {"type": "null"}},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}, {"type": "array", "maxItems": 0}]},
    {
        "anyOf": [
            {"required": ["a"], "type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
            {"type": "null"},
        ]
    },
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"type": "integer", "minimum": 1, "maximum": 3}}},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {
            "hotel": {"type": "string", "maxLength": 20},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
            "price": {
                "type": "object",
                "properties": {"amount": {"type": "number"}, "currency": {"enum": ["EUR", "USD"]}},
                "required": ["amount", "currency"],
                "additionalProperties": False,
            },
            "amenities": {"type": "array", "items": {"enum": ["pool", "sauna", "parking"]}, "maxItems": 3},
            "note": {"type": ["string", "null"], "maxLength": 10},
        },
        "required": ["hotel", "stars", "price"],
        "additionalProperties": False,
    },
]

UNSUPPORTED: list[tuple[Schema, str]] = [
    ({"type": "foo"}, "foo"),
    ({"not": {"type": "integer"}}, "not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"$ref": "https://example.test/schema.json"}, "example.test"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "nsatisfiable"),
    ({"enum": []}, "nsatisfiable"),
    ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "not"),
]

_NAMES = st.sampled_from(["a", "b", "name", "größe", "x y", 'q"', "🙂"])
_VALUES = st.one_of(st.none(), st.booleans(), st.integers(-50, 50), st.sampled_from(["", "a", "ä🙂", 'say "hi"', "\\n"]))


def _bounded_integers() -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )


def _strings() -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 6))
    return st.one_of(
        lengths.map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}),
        st.sampled_from(["^[a-c]{1,3}$", "^é+$", "^\\d{2}:\\d{2}$", "^(?:x|yz){0,3}$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
    )


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(parts: tuple[Schema, int, int]) -> Schema:
        return {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[1] + parts[2]}

    return st.tuples(items, st.integers(0, 2), st.integers(0, 2)).map(build)


def _objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(parts: tuple[dict[str, Schema], list[bool], Schema | bool]) -> Schema:
        properties, required, additional = parts
        names = [name for name, wanted in zip(properties, required, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": additional}

    additional = st.one_of(st.just(False), values)
    return st.tuples(st.dictionaries(_NAMES, values, max_size=3), st.lists(st.booleans(), max_size=3), additional).map(build)


def random_schemas() -> st.SearchStrategy[Schema]:
    """Schemas that describe something, nested up to a few levels."""
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
        _bounded_integers(),
        _strings(),
        _VALUES.map(lambda value: {"const": value}),
        st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _arrays(inner),
            _objects(inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        ),
        max_leaves=6,
    )
