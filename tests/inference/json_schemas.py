"""JSON schemas for tests: a collection by keyword, and a random strategy."""

from __future__ import annotations

import random
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
    {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}],
        "items": False,
    },
    {
        "type": "array",
        "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        "maxItems": 3,
    },
    {"type": "object", "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
    },
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 4}, "b": {}},
        "required": ["b"],
    },
    {"type": "object", "required": ["undeclared"], "additionalProperties": {"type": "null"}},
    {
        "anyOf": [
            {"type": "integer"},
            {"type": "string", "maxLength": 5},
            {"type": "array", "maxItems": 0},
        ]
    },
    {
        "anyOf": [
            {
                "required": ["a"],
                "type": "object",
                "properties": {"a": {"type": "null"}},
                "additionalProperties": False,
            },
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
            "amenities": {
                "type": "array",
                "items": {"enum": ["pool", "sauna", "parking"]},
                "maxItems": 3,
            },
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
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-50, 50),
    st.sampled_from(["", "a", "ä🙂", 'say "hi"', "\\n"]),
)


def _bounded_integers() -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )


def _strings() -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 6))
    return st.one_of(
        lengths.map(
            lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
        ),
        st.sampled_from(["^[a-c]{1,3}$", "^é+$", "^\\d{2}:\\d{2}$", "^(?:x|yz){0,3}$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
    )


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(parts: tuple[Schema, int, int]) -> Schema:
        return {
            "type": "array",
            "items": parts[0],
            "minItems": parts[1],
            "maxItems": parts[1] + parts[2],
        }

    return st.tuples(items, st.integers(0, 2), st.integers(0, 2)).map(build)


def _objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(parts: tuple[dict[str, Schema], list[bool], Schema | bool]) -> Schema:
        properties, required, additional = parts
        names = [name for name, wanted in zip(properties, required, strict=False) if wanted]
        return {
            "type": "object",
            "properties": properties,
            "required": names,
            "additionalProperties": additional,
        }

    additional = st.one_of(st.just(False), values)
    return st.tuples(
        st.dictionaries(_NAMES, values, max_size=3), st.lists(st.booleans(), max_size=3), additional
    ).map(build)


def random_schemas() -> st.SearchStrategy[Schema]:
    """Return schemas nested up to a few levels."""
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


def random_schema(rng: random.Random) -> Schema:
    """Return a schema that uses any of the keywords above, of any size."""
    again = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 1 + rng.randrange(2)}
    return {**_random_schema(rng, 3), "$defs": {"part": {"anyOf": [_random_leaf(rng), again]}}}


def _random_schema(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.25:
        return _random_leaf(rng)
    match rng.choice(("object", "object", "array", "tuple", "any", "ref")):
        case "object":
            names = rng.sample(
                ["a", "b", "name", "größe", "x y", 'q"', "🙂", "id_7"], rng.randrange(4)
            )
            return {
                "type": "object",
                "properties": {name: _random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": rng.choice(
                    [False, False, {"type": "integer", "minimum": 0, "maximum": 9}]
                ),
            }
        case "array":
            least = rng.randrange(3)
            return {
                "type": "array",
                "items": _random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": least + rng.randrange(3),
            }
        case "tuple":
            parts = [_random_schema(rng, depth - 1) for _ in range(1 + rng.randrange(3))]
            return {
                "type": "array",
                "prefixItems": parts,
                "items": False,
                "minItems": rng.randrange(len(parts) + 1),
            }
        case "any":
            return {"anyOf": [_random_schema(rng, depth - 1) for _ in range(1 + rng.randrange(3))]}
        case _:
            return {"$ref": "#/$defs/part"}


def _random_leaf(rng: random.Random) -> Schema:
    match rng.randrange(7):
        case 0:
            return {
                "type": rng.choice(["null", "boolean", "integer", "number", ["integer", "null"]])
            }
        case 1:
            least = rng.randrange(-500, 500)
            return {
                "type": "integer",
                rng.choice(["minimum", "exclusiveMinimum"]): least,
                "maximum": least + 1 + rng.randrange(900),
            }
        case 2:
            low = rng.randrange(-90, 90) / 4
            return {
                "type": "number",
                "minimum": low,
                rng.choice(["maximum", "exclusiveMaximum"]): low + 0.5 + rng.randrange(99),
            }
        case 3:
            least = rng.randrange(6)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(9)}
        case 4:
            patterns = [
                r"^[a-c]{1,3}$",
                r"^é+$",
                r"^\d{2}:\d{2}$",
                r"^(?:x|yz){0,3}$",
                r"^[A-Z][a-z]*( [A-Z][a-z]*)?$",
                r"^.{2,4}$",
            ]
            return {"type": "string", "pattern": rng.choice(patterns)}
        case 5:
            return {
                "const": rng.choice(
                    [None, True, 0, -7, 2.5, "", "ä🙂", 'say "hi"', [1, [2]], {"k": None}]
                )
            }
        case _:
            return {
                "enum": rng.sample(
                    [None, False, 3, 44, "red", "grün", "\\n", "🙂", 1.5, [], {"a": 1}],
                    1 + rng.randrange(4),
                )
            }
