"""Values as plain data, for JSON and logs."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any


class Value:
    """Base class of the objects that the client returns."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for `json.dumps`: times to ISO 8601, bytes to base64."""
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }


class TokenSums(Value):
    """Base of the values that count tokens of every kind."""

    __slots__ = ()

    @property
    def token_count(self) -> int:
        """Sum of the tokens of all kinds."""
        kinds = ("input", "cached_input", "output", "reasoning", "embedding")
        return sum(getattr(self, f"{kind}_token_count") for kind in kinds)


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
        case _:
            return value
