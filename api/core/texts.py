"""Validation of texts in messages (length and control characters), and collection of violations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from api.core.errors import FieldViolation, InvalidRequest
from metering.tenants.key_terms import GROUP_MAX_CHARS

VIOLATION_COUNT_MAX = 100  # violations recorded at once
TEXT_CHARS_MAX = 256  # of names, ids, labels and filters; the longest database column has 200
# Longer fields. Handlers check lower limits of some.
CHARS_MAX: Mapping[str, int] = {
    "reason": 1000,
    "override_reason": 1000,
    "url": 2000,
    "page_token": 4000,
    "base_directory": 4096,
    "end_user": 512,
    "prefix": 512,
    "labels": 512,
    "label": 600,  # KEY=VALUE
    "group": GROUP_MAX_CHARS,
    "for_each": len("key:") + GROUP_MAX_CHARS,
}
# Text for a model, and documents, with any content. The message and its parser limit its size.
FREE_TEXT = frozenset(
    {
        "weir.v1.ApplyFleetRequest.document",
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
# Elements per message: checking takes a millisecond on the event loop, before the key is known.
ELEMENT_COUNT_MAX = 2000
CONFIGURATION_ELEMENT_COUNT_MAX = 100_000  # per configuration, which an administrator sends
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A reason may have line breaks and tabs.
CONTROL_IN_PROSE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PROSE = frozenset({"reason", "override_reason"})


class Violations:
    """Collector of the violations of a message, which are reported together."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def check(self, right: bool, field: str, description: str) -> None:
        """Record a violation unless `right`. Raises InvalidRequest once too many are recorded."""
        if right:
            return
        is_last = len(self._found) + 1 == VIOLATION_COUNT_MAX
        rest = "; further fields were not checked" if is_last else ""
        self._found.append(FieldViolation(field, description + rest))
        if is_last:
            self.raise_if_any()

    def check_count(self, count: int, count_max: int, field: str) -> bool:
        """Record a violation if there are more than `count_max` elements.

        Returns False then: the elements need not be checked one by one.
        """
        self.check(count <= count_max, field, f"at most {count_max} are allowed, got {count}")
        return count <= count_max

    def check_text(self, text: str, field: str, name: str = "", *, missing: str = "") -> None:
        """Record a violation if a name, id, label or filter is too long or has control characters.

        `name` is the name of the field if `field` is a path. `missing` describes the violation of
        an empty text; if it is empty, the text is optional.
        """
        chars_max = CHARS_MAX.get(name or field, TEXT_CHARS_MAX)
        if missing and not text:
            self.check(False, field, missing)
        elif len(text) > chars_max:
            self.check(False, field, f"must have at most {chars_max} characters, got {len(text)}")
        elif (
            not text.isprintable()
            and (CONTROL_IN_PROSE if name in PROSE else CONTROL).search(text) is not None
        ):
            self.check(False, field, "must not contain control characters")

    def raise_if_any(self) -> None:
        """Raise InvalidRequest with all violations if there are any."""
        if self._found:
            raise InvalidRequest(self._found)


def check_texts(message: Message) -> None:
    """Check all short texts of a message, at any depth, except prompts and other model input.

    Raises: InvalidRequest.
    """
    wrong = Violations()
    is_configuration = message.DESCRIPTOR.full_name == "weir.v1.ApplyConfigurationRequest"
    limit = CONFIGURATION_ELEMENT_COUNT_MAX if is_configuration else ELEMENT_COUNT_MAX
    for count, (text, field, name) in enumerate(_texts(message, ""), 1):
        if count > limit:
            excess = f"the message has more than {limit:,} elements; send fewer"
            raise InvalidRequest([FieldViolation(field, excess)])
        wrong.check_text(text, field, name)
    wrong.raise_if_any()


def _texts(message: Message, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield each text of a message with path and name of its field.

    A nested message in a repeated field yields an empty text, so that it is counted.
    """
    for name, is_repeated, is_map, is_text in _fields_with_text(message.DESCRIPTOR):
        value = getattr(message, name)
        field = f"{path}{name}"
        if is_map:
            for key, each in value.items():
                element = f"{field}[{key[:64]!r}]"
                yield key, element, name
                yield each, element, name
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
    """List the fields of a message type that hold short texts, as tuples of the name and three
    flags: whether the field is repeated, is a map of texts, and is itself a text.
    """
    return tuple(
        (
            field.name,
            field.is_repeated,
            _is_text_map(field),
            field.type == FieldDescriptor.TYPE_STRING,
        )
        for field in kind.fields
        if _holds_text(field, ())
    )


def _holds_text(field: FieldDescriptor, above: tuple[Descriptor, ...]) -> bool:
    kind = field.message_type
    if field.full_name in FREE_TEXT or (
        kind is not None and (kind.full_name in FREE_TEXT or kind in above)
    ):
        return False
    if kind is None:
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    return any(_holds_text(each, (*above, kind)) for each in kind.fields)


def _is_text_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or not kind.GetOptions().map_entry:
        return False
    return all(each.type == FieldDescriptor.TYPE_STRING for each in kind.fields)
