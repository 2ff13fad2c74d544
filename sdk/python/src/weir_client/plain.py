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
    """Base of everything that a client returns."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as `json.dumps` takes them: enumerations by value, times in ISO 8601,
        bytes as base64.
        """
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
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
