"""Short texts of requests: bounded and without control characters, at every depth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import configuration_pb2
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import InvalidRequest
from api.core.health import SERVICES
from api.core.texts import (
    CHARS_MAX,
    CONFIGURATION_ELEMENT_COUNT_MAX,
    ELEMENT_COUNT_MAX,
    FREE_TEXT,
    TEXT_CHARS_MAX,
    check_texts,
)
from metering.tenants.key_terms import GROUP_MAX_CHARS

# Text for a model, and documents, as a path from the request; every other string is a short text.
FREE_PATHS = {
    "document",
    "text",
    "start.text",
    "start.stop_sequences",
    "embed.inputs.text",
    "inputs.text",
    *(
        f"{above}conversation.messages.{name}"
        for above in ("", "start.")
        for name in ("content", "reasoning", "tool_call_id")
    ),
    *(f"{above}conversation.reasoning_effort" for above in ("", "start.")),  # one of some words
    *(
        f"{above}conversation.messages.tool_calls.{name}"
        for above in ("", "start.")
        for name in ("id", "name", "arguments_json")
    ),
    *(
        f"{above}tools.{name}"
        for above in ("", "start.")
        for name in ("name", "description", "parameters_json_schema")
    ),
    *(f"start.response_format.{name}" for name in ("json_schema", "regex", "lark")),
}

Path = tuple[FieldDescriptor, ...]


def texts_of(kind: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Yield every string field below a message type."""
    for field in kind.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (*above, field)
        elif field.message_type is not None and all(
            field.message_type is not each.message_type for each in above
        ):
            yield from texts_of(field.message_type, (*above, field))


def name_of(path: Path) -> str:
    """Return the name of a field as in an error, without indexes."""
    return ".".join(field.name for field in path)


def unary_paths() -> Iterator[tuple[str, Descriptor, Path]]:
    """Return every string field of every unary request."""
    for service in SERVICES:
        for method in Default().FindServiceByName(service).methods:
            if not method.client_streaming:
                for path in texts_of(method.input_type):
                    yield f"{method.name}.{name_of(path)}", method.input_type, path


def message_with(kind: Descriptor, path: Path, text: str) -> Message:
    """Return a request with this text in one field."""
    message = GetMessageClass(kind)()
    here: Any = message
    for field in path[:-1]:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(here, field.name)[text] = text
            return message
        here = getattr(here, field.name).add() if field.is_repeated else getattr(here, field.name)
    if path[-1].is_repeated:
        getattr(here, path[-1].name).append(text)
    else:
        setattr(here, path[-1].name, text)
    return message


PATHS = {name: (kind, path) for name, kind, path in unary_paths()}
SHORT = {name: each for name, each in PATHS.items() if name.partition(".")[2] not in FREE_PATHS}


def test_every_free_text_is_listed_here() -> None:
    free = {
        name.partition(".")[2]
        for name, (kind, path) in PATHS.items()
        if passes(message_with(kind, path, "a\0b"))
    }
    assert free == FREE_PATHS
    assert len(SHORT) > 100


def passes(message: Message) -> bool:
    """Return whether its texts are valid."""
    try:
        check_texts(message)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("text", ["a\0b", "\x1b[2J", "a\x7f", "a\x85b"], ids=ascii)
def test_control_characters_are_refused_in_every_short_text_of_every_call(text: str) -> None:
    for name, (kind, path) in SHORT.items():
        with pytest.raises(InvalidRequest) as refusal:
            check_texts(message_with(kind, path, text))
        [violation, *_] = refusal.value.violations
        assert violation.field.startswith(path[0].name), name
        assert violation.description == "must not contain control characters"


def test_no_short_text_of_any_call_is_longer_than_its_bound() -> None:
    for name, (kind, path) in SHORT.items():
        # Keys and values of a map have the bound of its field.
        owner = path[-1].containing_type
        assert owner is not None
        named = path[-2 if owner.GetOptions().map_entry else -1]
        most = CHARS_MAX.get(named.name, TEXT_CHARS_MAX)
        check_texts(message_with(kind, path, "é" * most))
        with pytest.raises(InvalidRequest) as refusal:
            check_texts(message_with(kind, path, "é" * (most + 1)))
        description = refusal.value.violations[0].description
        assert f"at most {most} characters, got {most + 1}" in description, name


def test_every_group_of_keys_can_have_a_limit() -> None:
    check_texts(admin_pb.SetQuotaRequest(for_each="key:" + "g" * GROUP_MAX_CHARS))


def test_a_field_is_named_with_its_location() -> None:
    message = configuration_pb2.ApplyConfigurationRequest()
    for _ in range(3):
        message.configuration.organizations.add()
    message.configuration.organizations[2].projects.add().keys.add().models.extend(
        ["right", "wr\nong"]
    )

    with pytest.raises(InvalidRequest) as refusal:
        check_texts(message)

    [violation] = refusal.value.violations
    assert violation.field == "configuration.organizations[2].projects[0].keys[0].models[1]"


def test_a_reason_may_have_lines_and_nothing_else_may() -> None:
    check_texts(admin_pb.OverrideQuotaRequest(quota_id="q", reason="a launch\n\tof theirs"))
    with pytest.raises(InvalidRequest):
        check_texts(admin_pb.OverrideQuotaRequest(quota_id="q\n", reason="a launch"))


def test_text_for_a_model_is_neither_read_nor_bounded() -> None:
    quote = pb.QuoteRequest()
    quote.start.text = "\0" * 3_000_000
    for _ in range(10_000):
        quote.start.conversation.messages.add(content="\0")
    began_at = time.thread_time()

    check_texts(quote)

    assert time.thread_time() - began_at < 0.1


def test_a_message_of_very_many_elements_is_refused_before_all_are_read() -> None:
    message = configuration_pb2.ApplyConfigurationRequest()
    message.configuration.MergeFromString(b"\n\0" * (CONFIGURATION_ELEMENT_COUNT_MAX + 1))
    labelled = pb.EmbedRequest(labels={str(number): "" for number in range(ELEMENT_COUNT_MAX)})

    for each in (message, labelled):
        with pytest.raises(InvalidRequest, match="elements"):
            check_texts(each)


def test_free_text_names_types_and_fields_that_exist() -> None:
    pool = Default()
    for name in FREE_TEXT:
        try:
            pool.FindFieldByName(name)
        except KeyError:
            pool.FindMessageTypeByName(name)
