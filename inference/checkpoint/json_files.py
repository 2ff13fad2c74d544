"""JSON files of a checkpoint, and the counts in them. Nesting is bounded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inference.errors import CheckpointInvalid

LEVELS_MAX = 64  # of nesting in a file; parsers in the standard library are recursive
TOO_DEEP = "nested too deeply: write fewer levels"


def read_count(raw: Mapping[str, Any], entry: str, path: Path) -> int:
    """Read an entry that is a count. Raises CheckpointInvalid for any other value."""
    value = raw.get(entry)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(path, f"entry {entry} = {value!r} is not a count of at least 1")
    return value


@contextlib.contextmanager
def entries_of(path: Path) -> Iterator[None]:
    """Convert errors of missing entries and wrong types to CheckpointInvalid."""
    try:
        yield
    except KeyError as error:
        raise CheckpointInvalid(path, f"entry {error.args[0]} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointInvalid(path, f"an entry has a wrong type: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointInvalid if missing or not an object."""
    value = _read_json_value(path)
    if not isinstance(value, dict):
        raise CheckpointInvalid(path, "the file does not hold a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects from a file. Raises CheckpointInvalid if missing or invalid."""
    value = _read_json_value(path)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise CheckpointInvalid(path, "the file does not hold a list of JSON objects")
    return value


def deep_line(text: str) -> int:
    """Find the line, counted from 1, where a JSON or TOML text is nested too deeply."""
    level = 0
    for number, line in enumerate(text.splitlines(), 1):
        level += line.count("[") + line.count("{") - line.count("]") - line.count("}")
        if level > LEVELS_MAX or line.count("[") + line.count("{") > LEVELS_MAX:
            return number
    return 1


def _read_json_value(path: Path) -> object:
    text = ""
    try:
        return json.loads(text := path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointInvalid(path, "the file is missing") from error
    except RecursionError:
        raise CheckpointInvalid(path, f"line {deep_line(text)}: {TOO_DEEP}") from None
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(path, f"the file cannot be read as JSON: {error}") from error
