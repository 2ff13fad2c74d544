"""Collects what is wrong with a message, so that a client is told all of it at once, up to as much as anybody reads.

A message may have a million wrong elements: whoever has sent that must not hold up the streams of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from api.core.errors import FieldViolation, InvalidRequest

VIOLATION_COUNT_MAX = 100  # told at once
TEXT_CHARS_MAX = 256  # of a name, an id, a label or a filter: the longest that the database takes has 200
# Fields that may be longer. Some of them have a smaller bound of their own, which their handler checks.
CHARS_MAX: Mapping[str, int] = {"reason": 1000, "raise_reason": 1000, "url": 2000, "page_token": 2000}
# Text for a model, which may hold anything. Its size is bounded by the message and by the parsers of these types.
FREE_TEXT = frozenset(
    {
        "weir.v1.Conversation",
        "weir.v1.CountTokensRequest.text",
        "weir.v1.EmbedInput",
        "weir.v1.StartFrame.conversation",
        "weir.v1.StartFrame.response_format",
        "weir.v1.StartFrame.stop_sequences",
        "weir.v1.StartFrame.text",
        "weir.v1.Tool",
    }
)
ELEMENT_COUNT_MAX = 2000  # of one message: looking at as many takes a millisecond, on the event loop and before its key is known
CONFIGURATION_ELEMENT_COUNT_MAX = 100_000  # of a whole configuration, which an administrator sends
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
CONTROL_IN_PROSE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a reason may have lines and tabs
PROSE = frozenset({"reason", "raise_reason"})


class Violations:
    """Collects what is wrong with a message."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def check(self, right: bool, field: str, description: str) -> None:
        """Note a violation unless `right`. Raises: InvalidRequest once there are as many as are told at once."""
        if right:
            return
        if len(self._found) + 1 == VIOLATION_COUNT_MAX:
            description += "; what stands behind it was not looked at"
        self._found.append(FieldViolation(field, description))
        if len(self._found) == VIOLATION_COUNT_MAX:
            self.raise_if_any()

    def check_count(self, count: int, most: int, field: str) -> bool:
        """Note a violation if there are more elements than allowed; whether each of them is to be looked at."""
        self.check(count <= most, field, f"at most {most} are allowed, not {count}")
        return count <= most

    def check_text(self, text: str, field: str, name: str = "") -> None:
        """Note a violation if a name, an id, a label or a filter is too long or has control characters.

        name: of the field, where `field` is a path.
        """
        most = CHARS_MAX.get(name or field, TEXT_CHARS_MAX)
        if len(text) > most:
            self.check(False, field, f"must have at most {most} characters, not {len(text)}")
        elif not text.isprintable() and (CONTROL_IN_PROSE if name in PROSE else CONTROL).search(text) is not None:
            self.check(False, field, "must not contain control characters")

    def raise_if_any(self) -> None:
        """Raises: InvalidRequest with all of them."""
        if self._found:
            raise InvalidRequest(self._found)


def check_texts(message: Message) -> None:
    """Check every short text of a message, however deep it stands. Text for a model is not looked at. Raises: InvalidRequest."""
    wrong = Violations()
    is_configuration = message.DESCRIPTOR.full_name == "weir.v1.ApplyConfigurationRequest"
    most = CONFIGURATION_ELEMENT_COUNT_MAX if is_configuration else ELEMENT_COUNT_MAX
    for count, (text, field, name) in enumerate(_texts(message, ""), 1):
        if count > most:
            raise InvalidRequest([FieldViolation(field, f"the message has more than {most:,} elements: send fewer")])
        wrong.check_text(text, field, name)
    wrong.raise_if_any()


def _texts(message: Message, path: str) -> Iterator[tuple[str, str, str]]:
    """Texts of a message with their field, as a path and by name. An element that is a message counts as an empty text."""
    for name, is_repeated, is_map, is_text in _fields_with_text(message.DESCRIPTOR):
        value = getattr(message, name)
        field = f"{path}{name}"
        if is_map:
            for key, each in value.items():
                place = f"{field}[{key[:64]!r}]"
                yield key, place, name
                yield each, place, name
        elif is_repeated:
            for index, each in enumerate(value):
                yield (each if is_text else ""), f"{field}[{index}]", name
                if not is_text:
                    yield from _texts(each, f"{field}[{index}].")
        elif is_text:
            yield value, field, name
        elif message.HasField(name):
            yield from _texts(value, f"{field}.")


@cache
def _fields_with_text(kind: Descriptor) -> tuple[tuple[str, bool, bool, bool], ...]:
    """Fields of a message type that hold short texts: name, whether repeated, whether a map of texts, whether a text."""
    return tuple(
        (field.name, field.is_repeated, _is_text_map(field), field.type == FieldDescriptor.TYPE_STRING)
        for field in kind.fields
        if _holds_text(field, ())
    )


def _holds_text(field: FieldDescriptor, above: tuple[Descriptor, ...]) -> bool:
    kind = field.message_type
    if field.full_name in FREE_TEXT or (kind is not None and (kind.full_name in FREE_TEXT or kind in above)):
        return False
    if kind is None:
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    return any(_holds_text(each, (*above, kind)) for each in kind.fields)


def _is_text_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or not kind.GetOptions().map_entry:
        return False
    return all(each.type == FieldDescriptor.TYPE_STRING for each in kind.fields)
