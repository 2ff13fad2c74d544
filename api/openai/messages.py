"""Messages of a conversation as OpenAI's APIs write them: text, calls of functions, and what came of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple
from weir.v1 import inference_service_pb2 as pb

from api.generation.conversation import MESSAGE_COUNT_MAX
from api.openai.refusals import check_count, wrong_parameter
from api.openai.tools import CallParameter, call_messages

ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,  # the younger name of the same
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
# Of a call in an earlier answer.
NAMES = {
    "conversation.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
    "conversation.messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
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
    """One message. The fields beside role and content are those with which a reply comes back, most of them empty."""

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
    tool_calls: list[CallParameter] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


NO_TEXT = ContentPart.__struct_fields__[ContentPart.__struct_fields__.index("refusal") :]  # what parts of other types have


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation, and how errors call the fields of its turns."""

    conversation: pb.Conversation
    names: dict[str, str]


def conversation(messages: Sequence[Message], field: str) -> Turns:
    """The conversation for a start frame. field: the parameter that they stand in. Raises: InvalidRequest."""
    if not messages:
        raise wrong_parameter(field, "must hold at least one message")
    check_count(messages, field, MESSAGE_COUNT_MAX)
    turns = [_plain_turn(message) or _turn(message, f"{field}[{index}]") for index, message in enumerate(messages)]
    return Turns(pb.Conversation(messages=turns), NAMES | {"conversation.messages": field})


def _plain_turn(message: Message) -> pb.Message | None:
    """The turn of a message with nothing but a role and a text, as most have; looking at all that there may be takes five times."""
    role, content = ROLES.get(message.role), message.content
    if role is None or role == pb.ROLE_TOOL or not isinstance(content, str) or message.type not in (None, "message"):
        return None
    if message.tool_calls or message.tool_call_id or message.function_call or message.name or message.audio or message.refusal:
        return None
    return pb.Message(role=role, content=content)


def _turn(message: Message, field: str) -> pb.Message:
    if message.role == "function" or message.function_call:
        raise wrong_parameter(field, "functions have become tools: send tool_calls, and the role tool for what came of them")
    if message.role not in ROLES:
        raise wrong_parameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.type not in (None, "message"):
        raise wrong_parameter(f"{field}.type", "must be message: other items are not supported")
    for name in ("name", "audio", "refusal"):
        if getattr(message, name):
            raise wrong_parameter(f"{field}.{name}", "is not supported: the model sees role and text alone")
    calls = call_messages(message.tool_calls or (), f"{field}.tool_calls")
    if message.content is None and not calls:
        raise wrong_parameter(f"{field}.content", "must be text")
    content = text_of(message.content or "", f"{field}.content")
    return pb.Message(role=ROLES[message.role], content=content, tool_calls=calls, tool_call_id=message.tool_call_id or "")


def text_of(content: str | Sequence[ContentPart], field: str) -> str:
    """All text parts, one after the other, with nothing between them. Raises: InvalidRequest."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise wrong_parameter(f"{field}[{index}]", f"parts of the type {part.type[:40]!r} are not supported: only text is")
        if part.text is None:
            raise wrong_parameter(f"{field}[{index}].text", "is required")
        if any(beside := astuple(part)[-len(NO_TEXT) :]):
            name = next(name for name, value in zip(NO_TEXT, beside, strict=True) if value)
            raise wrong_parameter(f"{field}[{index}].{name}", "is not supported in a part that is text: leave it out")
    return "".join(part.text or "" for part in content)
