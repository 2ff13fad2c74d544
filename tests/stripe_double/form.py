"""Requests in the form of Stripe's API, checked against its schema."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import jsonschema
from jsonschema.exceptions import best_match

SCHEMA = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
OPERATIONS: dict[str, dict[str, Any]] = SCHEMA["operations"]
PART = re.compile(r"[^\[\]]+|\[\]")


class Refused(Exception):
    """Request that Stripe would refuse: status and error object of the answer."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", **more: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"type": kind, "message": message, **more}


def operation_of(method: str, path: str) -> tuple[str, list[str]]:
    """Return the operation of a call, and the values in its path. Raises: Refused."""
    for name in sorted(OPERATIONS, key=lambda each: each.count("{")):
        verb, template = name.split(" ")
        pattern = re.sub(r"\{\w+\}", "([^/]+)", template)
        if verb == method and (found := re.fullmatch(pattern, path)):
            return name, list(found.groups())
    raise Refused(404, f"Unrecognized request URL ({method}: {path}).")


def parsed(operation: str, form: str) -> dict[str, Any]:
    """Return the parameters as typed values. Raises: Refused by the schema."""
    tree: dict[str, Any] = {}
    for field, value in parse_qsl(form, keep_blank_values=True):
        index = tree
        *outer, last = PART.findall(field)
        for name in outer:
            index = index.setdefault(name, {})
        index[str(len(index)) if last == "[]" else last] = value
    values = typed(tree, OPERATIONS[operation])
    if (error := best_match(validator_of(operation).iter_errors(values))) is not None:
        raise Refused(
            400, f"Invalid request: {error.message}", param=".".join(map(str, error.path))
        ) from error
    assert isinstance(values, dict)
    return values


@functools.cache
def validator_of(operation: str) -> jsonschema.Draft202012Validator:
    """Return the validator of an operation's parameters; checking its schema takes milliseconds."""
    jsonschema.Draft202012Validator.check_schema(OPERATIONS[operation])
    return jsonschema.Draft202012Validator(OPERATIONS[operation])


def typed(value: Any, schema: dict[str, Any]) -> Any:
    """Convert a form value to the type of its schema, if possible."""
    for choice in schema.get("anyOf", ()):
        if choice.get("type") == ("object" if isinstance(value, dict) else choice.get("type")):
            candidate = typed(value, choice)
            if jsonschema.Draft202012Validator(choice).is_valid(candidate):
                return candidate
    kind = schema.get("type")
    if isinstance(value, dict):
        if kind == "array":
            return [typed(value[key], schema["items"]) for key in sorted(value, key=int)]
        known, other = schema.get("properties", {}), schema.get("additionalProperties") or {}
        return {name: typed(each, known.get(name, other)) for name, each in value.items()}
    if kind == "integer" and re.fullmatch(r"-?\d+", value):
        return int(value)
    if kind == "boolean" and value in ("true", "false"):
        return value == "true"
    return value
