"""Checks of arguments that no request message can hold, before anything is sent."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from weir_client.errors import ErrorDetails, FieldViolation, InvalidRequest

_Message = TypeVar("_Message", bound=Message)

SHOWN_MAX = 80  # characters of a wrong value
PROMPTS = (
    "text",
    "ids",
    "conversation",
    "content",
    "reasoning",
)  # fields whose values are never shown


def invalid(field: str, description: str) -> InvalidRequest:
    """Build the error for an argument that cannot be encoded."""
    details = ErrorDetails(
        reason="FIELD_INVALID", field_violations=(FieldViolation(field, description),)
    )
    return InvalidRequest(f"{field}: {description}", details=details)


def check_known(given: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Check the names of options. The error shows each name after the prefix `where`.

    Raises: InvalidRequest for an unknown option, with the closest known one.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise invalid(f"{where}{name}", f"no such option; {hint}")


def check_seconds(field: str, value: object) -> None:
    """Check that `value` is a number of seconds or None. Raises: InvalidRequest."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value)
    ):
        raise invalid(field, f"must be a number of seconds, not {value!r}"[:SHOWN_MAX])


def written(
    kind: type[_Message], values: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> _Message:
    """Build a message from field values. `names` maps fields to the option names to report.

    Raises: InvalidRequest naming the first value that does not fit.
    """
    try:
        return kind(**values)
    except (TypeError, ValueError, AttributeError) as error:
        for field, value in values.items():
            try:
                kind(**{field: value})
            except (TypeError, ValueError, AttributeError) as wrong:
                shown = f"a {type(value).__name__}" if field in PROMPTS else repr(value)[:SHOWN_MAX]
                raise invalid(
                    (names or {}).get(field, field), f"{shown} does not fit: {wrong}"
                ) from wrong
        raise invalid("request", str(error)) from error
