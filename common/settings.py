"""Declaration of settings: fields of dataclasses that are read from the environment.

The owner of a part declares a dataclass of its settings, with `setting` for each field. A field
whose default is such a dataclass groups the settings of one owner. The comment above a field is its
documentation, from which `infra/reference.py` writes the page of settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
Record = TypeVar("Record", bound="DataclassInstance")

PREFIX = "WEIR_"


class SettingInvalid(ValueError):
    """Invalid environment variable. The message names it and the values that are allowed."""


class Unshown(ValueError):
    """Invalid value that must not appear in messages, because it may contain a secret."""


def setting(variable: str, default: Any, parse: Callable[[str], Any]) -> Any:
    """Declare a field that `read` parses from an environment variable.

    `default` is a value, or a function that returns it. `parse` raises ValueError for other values
    than the allowed ones, with a text that says which these are.
    """
    metadata = {"variable": variable, "parse": parse}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def settings_of(kind: type[DataclassInstance]) -> Iterator[tuple[type, Field[Any]]]:
    """Yield each setting of a dataclass and of those that it groups, with its own dataclass."""
    for spec in fields(kind):
        if spec.metadata:
            yield kind, spec
        else:
            yield from settings_of(group_of(spec))


def group_of(spec: Field[Any]) -> type[Any]:
    """Return the dataclass that a field groups."""
    assert isinstance(spec.default_factory, type), f"{spec.name} is neither a setting nor a group"
    return spec.default_factory


def read(kind: type[Record], environment: Mapping[str, str]) -> Record:
    """Read a dataclass of settings. Raises SettingInvalid naming the variable."""
    values: dict[str, Any] = {}
    for spec in fields(kind):
        if not spec.metadata:
            values[spec.name] = read(group_of(spec), environment)
            continue
        variable, parse = spec.metadata["variable"], spec.metadata["parse"]
        if text := environment.get(variable, ""):
            try:
                values[spec.name] = parse(text)
            except Unshown as error:
                raise SettingInvalid(f"{variable} {error}") from None
            except ValueError as error:
                raise SettingInvalid(f"{variable}={text!r}: {error}") from error
    return kind(**values)


def written(record: DataclassInstance) -> dict[str, str]:
    """Convert settings to environment variables, which `read` reads back."""
    environment: dict[str, str] = {}
    for spec in fields(record):
        value = getattr(record, spec.name)
        if not spec.metadata:
            environment |= written(value)
            continue
        if isinstance(value, Mapping):
            value = ",".join(f"{name}={each}" for name, each in value.items())
        environment[spec.metadata["variable"]] = str(value)
    return environment


def changed(record: Record, values: Mapping[str, Any]) -> Record:
    """Return settings with other values, named by variables in lower case without `WEIR_`.

    Raises TypeError for a name that no setting has.
    """
    names = {short(spec) for _, spec in settings_of(type(record))}
    if unknown := sorted(values.keys() - names):
        raise TypeError(f"no setting is named {', '.join(unknown)}")
    return _changed(record, values)


def short(spec: Field[Any]) -> str:
    """Return the variable of a setting in lower case, without `WEIR_`."""
    return str(spec.metadata["variable"]).removeprefix(PREFIX).lower()


def _changed(record: Record, values: Mapping[str, Any]) -> Record:
    changes: dict[str, Any] = {}
    for spec in fields(record):
        if not spec.metadata:
            changes[spec.name] = _changed(getattr(record, spec.name), values)
        elif (name := short(spec)) in values:
            changes[spec.name] = values[name]
    return replace(record, **changes)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Create a parser of integers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Create a parser of numbers from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}")
        return value

    return parse


def positive(most: float) -> Callable[[str], float]:
    """Create a parser of numbers above 0 and up to `most`."""

    def parse(text: str) -> float:
        try:
            return number(math.nextafter(0, 1), most)(text)
        except ValueError:
            raise ValueError(f"must be a number above 0 and at most {most:g}") from None

    return parse


def pairs(what: str, parse: Callable[[str], Value]) -> Callable[[str], dict[str, Value]]:
    """Create a parser of comma-separated `name=value` pairs, each name once.

    `what` describes the pairs in error messages.
    """

    def parse_all(text: str) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            try:
                if not name or not value:
                    raise ValueError
                parsed = parse(value)
            except ValueError:
                raise ValueError(f"must be {what}, separated by commas") from None
            if name in found:
                raise ValueError(
                    f"names {name} twice; a file named by WEIR_FLEET gives a model several engines"
                )
            found[name] = parsed
        return found

    return parse_all


def one_of(*choices: str) -> Callable[[str], str]:
    """Create a parser that accepts only these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true")
