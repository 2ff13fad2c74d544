"""Messages of a conversation as OpenAI's APIs write them: text, and nothing but text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.openai.refusals import wrong_parameter

ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,  # the younger name of the same
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
}
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message. What replies carry beside the text may come back with it."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: Any = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """One message. The fields beside role and content are those with which a reply comes back, all of them empty."""

    role: str
    content: str | list[ContentPart] | None = None
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


def conversation(messages: Sequence[Message], field: str) -> pb.Conversation:
    """The conversation for a start frame. field: the parameter that they stand in. Raises: InvalidRequest."""
    if not messages:
        raise wrong_parameter(field, "must hold at least one message")
    turns = [_turn(message, f"{field}[{index}]") for index, message in enumerate(messages)]
    return pb.Conversation(messages=turns)


def _turn(message: Message, field: str) -> pb.Message:
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise wrong_parameter(field, "tools and functions are not supported: send their results as text of the user")
    if message.role not in ROLES:
        raise wrong_parameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.type not in (None, "message"):
        raise wrong_parameter(f"{field}.type", "must be message: other items are not supported")
    for name in ("name", "audio", "refusal"):
        if getattr(message, name):
            raise wrong_parameter(f"{field}.{name}", "is not supported: the model sees role and text alone")
    if message.content is None:
        raise wrong_parameter(f"{field}.content", "must be text")
    return pb.Message(role=ROLES[message.role], content=_text(message.content, f"{field}.content"))


def _text(content: str | Sequence[ContentPart], field: str) -> str:
    """All text parts, one after the other, with nothing between them."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise wrong_parameter(f"{field}[{index}]", f"parts of the type {part.type[:40]!r} are not supported: only text is")
        if part.text is None:
            raise wrong_parameter(f"{field}[{index}].text", "is required")
    return "".join(part.text or "" for part in content)
