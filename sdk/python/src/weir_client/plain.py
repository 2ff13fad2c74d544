"""Values as plain data, for JSON and logs."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar

REPR_CHARACTERS_MAX = 120  # of any value: one line of a notebook or a debugger
TEXT_CHARACTERS_MAX = 60  # of one text in it


class Value:
    """Base class of the objects that the client returns.

    Their `repr` is one short line, without secrets; `to_dict` and `to_json` are complete.
    """

    __slots__ = ()

    _repr_first: ClassVar[tuple[str, ...]] = ()  # fields that `repr` shows before the others

    def __init_subclass__(cls) -> None:
        """Keep the `repr` of this class: `dataclass` replaces those that are only inherited."""
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for `json.dumps`: times to ISO 8601, bytes to base64."""
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Convert to JSON text with the members of `to_dict`.

        Args:
            indent: Number of spaces of each level; by default all is on one line.
        """
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def __repr__(self) -> str:
        """Format the class and its first fields that have a value, on one line."""
        fields = {each.name: each for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        line = f"{type(self).__name__}("
        shown = 0
        for name in dict.fromkeys((*self._repr_first, *fields)):
            value = getattr(self, name)
            if not fields[name].repr or value in (None, "", (), {}, fields[name].default):
                continue
            part = f"{', ' if shown else ''}{name}={_brief(value)}"
            if len(line) + len(part) > REPR_CHARACTERS_MAX - len(", …)"):
                return f"{line}{', ' if shown else ''}…)"
            line += part
            shown += 1
        return f"{line})"


class TokenSums(Value):
    """Base of the values that count tokens of every kind."""

    __slots__ = ()

    @property
    def token_count(self) -> int:
        """Sum of the tokens of all kinds."""
        kinds = ("input", "cached_input", "output", "reasoning", "embedding")
        return sum(getattr(self, f"{kind}_token_count") for kind in kinds)


class LimitName(Value):
    """Base of the values that describe one quota; their text names it."""

    __slots__ = ()

    def __str__(self) -> str:
        """Name the quota: "requests per minute of the API key"."""
        words = [
            str(getattr(self, name)).replace("-", " ").replace("api key", "API key")
            for name in ("dimension", "subject")
        ]
        if minutes := getattr(self, "window_minutes", 0):
            words[0] += f" of {minutes:,} minute{'s' if minutes > 1 else ''}"
        model = getattr(self, "model", "")
        name = getattr(self, "subject_name", "")
        if name and words[1] in ("end user", "label"):
            words[1] += f" {name}"
        return f"{' of the '.join(words)}{f' for {model}' if model else ''}"


def plain(value: Any) -> Any:
    """Convert a value, and all values in it, to types that JSON has."""
    match value:
        case Value():
            return value.to_dict()
        case Enum():
            return value.value
        case Mapping():
            return {str(plain(key)): plain(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(each) for each in value]
        case datetime() | date():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal():
            return str(value)
        case float() if not math.isfinite(value):  # JSON has no such numbers
            return None
        case _:
            return value


def _brief(value: Any) -> str:
    """Format a value of a field in some 60 characters."""
    match value:
        case Enum():
            return str(value.value)
        case str() if len(value) > TEXT_CHARACTERS_MAX:
            return repr(value[:TEXT_CHARACTERS_MAX])[:-1] + "…'"
        case datetime():
            return value.isoformat(timespec="seconds")
        case bytes():
            return f"<{len(value)} bytes>"
        case Mapping() | list() | tuple():
            return f"<{len(value)} {'item' if len(value) == 1 else 'items'}>"
        case Value():
            text = repr(value)
            short = len(text) <= TEXT_CHARACTERS_MAX
            return text if short else f"{type(value).__name__}(…)"
        case _:
            return repr(value)
