"""Checks of arguments that no request message can hold, before anything is sent."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weir_client.errors import ErrorDetails, FieldViolation, InvalidRequest
from weir_client.generated_values import UsageGrouping
from weir_client.values import LABEL_PREFIX

_Message = TypeVar("_Message", bound=Message)

SHOWN_MAX = 80  # characters of a wrong value
LISTED_MAX = 20  # known options that an error lists
# Of the whole numbers that a field holds.
BITS = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
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


def check_known(
    given: Iterable[str],
    known: Iterable[str],
    where: str = "",
    hints: Mapping[str, str] | None = None,
) -> None:
    """Check the names of options. The error shows each name after the prefix `where`.

    Raises: InvalidRequest for an unknown option, with its entry in `hints` or the closest known
    one.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        hint = (hints or {}).get(name)
        if hint is None and (near := difflib.get_close_matches(name, known, 1, 0.5)):
            hint = f"did you mean {near[0]}?"
        if hint is None and len(known) <= LISTED_MAX:
            hint = f"there are {', '.join(known)}"
        kind = "key" if where else "option"
        raise invalid(f"{where}{name}", f"no such {kind}{'; ' if hint else ''}{hint or ''}")


def check_model(model: object) -> None:
    """Check that `model` is a name. Raises: InvalidRequest."""
    if not isinstance(model, str) or not model:
        raise invalid(
            "model", f"must be the name of a model, not {model!r:.80}; list_models() lists them"
        )


def check_retries(max_retries: object) -> None:
    """Check a number of retries, or None. Raises: InvalidRequest."""
    if max_retries is not None and (
        isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0
    ):
        raise invalid("max_retries", f"must be a whole number of at least 0, not {max_retries!r}")


def check_end_user(end_user: object) -> None:
    """Check that an end user is a text, or None. Raises: InvalidRequest."""
    if not isinstance(end_user, str | None):
        raise invalid(
            "end_user", f"must be a text, such as your user's id, not a {type(end_user).__name__}"
        )


def check_labels(labels: object) -> None:
    """Check that labels map texts to texts. Raises: InvalidRequest."""
    if not isinstance(labels, Mapping):
        raise invalid("labels", f"must map names to texts, not be a {type(labels).__name__}")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise invalid(
                "labels", f"must map names to texts, such as str({value!r:.40}), got {name!r:.40}"
            )


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
                shown = type(value).__name__ if field in PROMPTS else repr(value)[:SHOWN_MAX]
                proto, why = kind.DESCRIPTOR.fields_by_name[field], f"does not fit: {wrong}"
                if isinstance(wrong, TypeError):
                    why = f"must be {_expected(kind, field)}, not {shown}"
                elif bits := BITS.get(proto.cpp_type):
                    most = 2 ** (bits - 1) - 1
                    why = f"must be between {-most - 1:,} and {most:,}, got {shown}"
                raise invalid((names or {}).get(field, field), why) from wrong
        raise invalid("request", str(error)) from error


def usage_groups(by: str | Sequence[str], name: str) -> tuple[list[str], str]:
    """Convert groupings of usage to those of the contract, and the key of `label:KEY`.

    Raises: InvalidRequest naming the argument `name`.
    """
    found: list[str] = []
    label_key = ""
    for each in [by] if isinstance(by, str) else by:
        group = str(each)
        if group.startswith(LABEL_PREFIX):
            if label_key:
                raise invalid(name, "must have at most one label: ask once for each of them")
            group, label_key = UsageGrouping.LABEL, group.removeprefix(LABEL_PREFIX)
        if group not in list(UsageGrouping) or (group == UsageGrouping.LABEL and not label_key):
            known = ", ".join(each for each in UsageGrouping if each is not UsageGrouping.LABEL)
            raise invalid(name, f"must be of {known}, {LABEL_PREFIX}KEY, got {each!r:.100}")
        found.append(f"USAGE_GROUPING_{group.upper()}")
    return found, label_key


def _expected(kind: type[_Message], field: str) -> str:
    """Describe the values that a field of a message takes."""
    proto = kind.DESCRIPTOR.fields_by_name[field]
    words = {
        proto.CPPTYPE_STRING: ("a string", "strings"),
        proto.CPPTYPE_BOOL: ("True or False", "True or False"),
        proto.CPPTYPE_DOUBLE: ("a number", "numbers"),
        proto.CPPTYPE_FLOAT: ("a number", "numbers"),
    }
    if proto.message_type is not None and proto.message_type.GetOptions().map_entry:
        key, value = (proto.message_type.fields_by_name[each] for each in ("key", "value"))
        one, many = words.get(key.cpp_type, ("", "whole numbers")), words[value.cpp_type]
        return f"a mapping from {one[1]} to {many[1]}"
    one = words.get(proto.cpp_type, ("a whole number", "whole numbers"))
    return f"a list of {one[1]}" if proto.is_repeated else one[0]
