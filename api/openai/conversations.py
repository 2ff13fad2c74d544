"""Conversion of chat messages, and of the input items of the responses API, to a conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import astuple
from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.conversation import MESSAGE_COUNT_MAX
from api.openai.error_responses import check_count, invalid_parameter
from api.openai.history import CALL, MESSAGE, REASONING, RESULT
from api.openai.tools import CallParameter, call_messages, name_in

ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,  # OpenAI's newer name of the system role
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
    "function": pb.ROLE_TOOL,  # its name before there were tools
}
MAY_BE_EMPTY = frozenset({pb.ROLE_ASSISTANT, pb.ROLE_TOOL})  # null instead of text
# Fields of each kind of item; responses carry `id` and `status`.
FIELDS = {
    MESSAGE: frozenset({"type", "id", "status", "role", "content", "phase", "name"}),
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments", "namespace"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
    REASONING: frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
}


class ContentPart(Struct, forbid_unknown_fields=True):
    """Part of a message. Accepts the fields of responses, so that clients can send them back.

    `history.py` converts parts of other types, or refuses them.
    """

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
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
    """Chat message. Accepts the fields that responses have, so that clients can send them back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[CallParameter] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None  # of Mistral and DeepSeek: the beginning of the answer


# Fields of parts of other types.
NON_TEXT_FIELDS = ContentPart.__struct_fields__[ContentPart.__struct_fields__.index("refusal") :]


def conversation(messages: Sequence[Message]) -> pb.Conversation:
    """Convert messages to the conversation of a start frame. Raises: InvalidRequest."""
    if not messages:
        raise invalid_parameter("messages", "must hold at least one message")
    check_count(messages, "messages", MESSAGE_COUNT_MAX)
    turns = [
        _plain_turn(message) or _turn(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]
    pair_results(turns, [message.name or "" for message in messages])
    return pb.Conversation(messages=turns)


class OpenCalls:
    """Tool calls of one message that have no result yet, by id, by name and in order."""

    def __init__(self, calls: Sequence[pb.ToolCall]) -> None:
        self._open: set[str] = set()
        self._by: dict[str, deque[str]] = {}  # "" has all of them
        self._equal: dict[str, deque[str]] = {}  # new ids by the one that several calls had
        for number, call in enumerate(calls):
            sent, call.id = call.id, call.id or f"call_{number}"
            while call.id in self._open:
                call.id = f"{call.id}_{number}"
            self._open.add(call.id)
            self._equal.setdefault(sent, deque()).append(call.id)
            for key in ("", call.name):
                self._by.setdefault(key, deque()).append(call.id)

    def answer(self, result: pb.Message, name: str) -> None:
        """Match a result with its call, and give it the id of that call if it has none."""
        sent = result.tool_call_id
        if sent and (equal := self._equal.get(sent)):
            result.tool_call_id = equal.popleft() if len(equal) > 1 else equal[0]
        elif not sent:
            waiting = self._by.get(name) or self._by.get("") or deque()
            while waiting and waiting[0] not in self._open:
                waiting.popleft()
            result.tool_call_id = waiting[0] if waiting else ""
        self._open.discard(result.tool_call_id)


def pair_results(turns: Sequence[pb.Message], names: Sequence[str] = ()) -> None:
    """Give each call an id that is unique in its message, and each result the id of its call.

    Some servers send calls without ids or with equal ones, and legacy results have only a name.
    `names` has the function that each result is of, by turn. The ids are the same in every request,
    so that the prefix cache keeps the turns.
    """
    calls = OpenCalls(())
    for index, turn in enumerate(turns):
        if turn.tool_calls:
            calls = OpenCalls(turn.tool_calls)
        elif turn.role == pb.ROLE_TOOL:
            calls.answer(turn, names[index] if names else "")


def _plain_turn(message: Message) -> pb.Message | None:
    """Convert a message with only role and text, five times as fast as `_turn`; None for others."""
    role, content = ROLES.get(message.role), message.content
    if (
        role is None
        or role == pb.ROLE_TOOL
        or not isinstance(content, str)
        or message.type not in (None, "message")
    ):
        return None
    if (
        message.tool_calls
        or message.tool_call_id
        or message.audio
        or message.refusal
        or message.reasoning_content
        or message.reasoning
    ):
        return None
    return pb.Message(role=role, content=content)


def _turn(message: Message, field: str) -> pb.Message:
    if message.role not in ROLES:
        raise invalid_parameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.type not in (None, "message"):
        raise invalid_parameter(f"{field}.type", "must be message: other items are not supported")
    if message.audio:
        raise invalid_parameter(
            f"{field}.audio", "is not supported: the model receives only role and text"
        )
    calls = call_messages(message.tool_calls or (), f"{field}.tool_calls")
    if message.content is None and not calls and ROLES[message.role] not in MAY_BE_EMPTY:
        raise invalid_parameter(f"{field}.content", "must be text")
    content = text_of(message.content or message.refusal or "", f"{field}.content")
    return pb.Message(
        role=ROLES[message.role],
        content=content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def text_of(content: str | Sequence[ContentPart], field: str) -> str:
    """Concatenate the text parts of a message. Raises: InvalidRequest."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.text is None:
            raise invalid_parameter(f"{field}[{index}].text", "is required")
        if any(unsupported := astuple(part)[-len(NON_TEXT_FIELDS) :]):
            name = next(
                name for name, value in zip(NON_TEXT_FIELDS, unsupported, strict=True) if value
            )
            raise invalid_parameter(
                f"{field}[{index}].{name}", "is not supported in a text part: leave it out"
            )
    return "".join(part.text or "" for part in content)


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """Input item of any type. `history.py` converts items of other types, or refuses them."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    namespace: str | None = None
    # Fields that are refused by name in items of other kinds
    refusal: Any = None
    summary: Any = None
    encrypted_content: Any = None


def conversation_of(
    items: Sequence[Item], instructions: str | None
) -> tuple[pb.Conversation, dict[str, str]]:
    """Convert input items to a conversation; also return the parameter that each field came from.

    Calls join the assistant message before them, thoughts the one after them. Raises:
    InvalidRequest.
    """
    if all(item.type == REASONING for item in items):
        raise invalid_parameter("input", "must hold at least one message, call or result")
    check_count(items, "input", MESSAGE_COUNT_MAX)
    turns: list[pb.Message] = []
    thoughts: list[str] = []  # of the next turn, if it is the model's
    names: dict[str, str] = {}
    if instructions:
        turns.append(pb.Message(role=pb.ROLE_SYSTEM, content=instructions))
        names["conversation.messages[0]"] = "instructions"
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = _kind(item, field)
        if kind == REASONING:
            thoughts += filter(None, [_thought(item, field)])
            continue
        if kind == CALL:
            if thoughts or not (turns and turns[-1].role == pb.ROLE_ASSISTANT):
                turns.append(pb.Message(role=pb.ROLE_ASSISTANT, reasoning="\n".join(thoughts)))
                thoughts = []
            turns[-1].tool_calls.append(_call(item, field))
            number = len(turns[-1].tool_calls) - 1
            call = f"conversation.messages[{len(turns) - 1}].tool_calls[{number}]"
            names |= {
                f"{call}.id": f"{field}.call_id",
                f"{call}.arguments_json": f"{field}.arguments",
                call: field,
            }
            continue
        new = _message(item, field) if kind == MESSAGE else _result(item, field)
        reasoning, thoughts = "\n".join(thoughts), []
        if new.role == pb.ROLE_ASSISTANT:
            new.reasoning = reasoning
        elif reasoning:  # of an answer that was cut off before it began
            turns.append(pb.Message(role=pb.ROLE_ASSISTANT, reasoning=reasoning))
        turns.append(new)
        turn = f"conversation.messages[{len(turns) - 1}]"
        names |= {f"{turn}.tool_call_id": f"{field}.call_id", turn: field}
    pair_results(turns)
    return pb.Conversation(messages=turns), names | {"conversation.messages": "input"}


def _kind(item: Item, field: str) -> str:
    """Check that an item has only fields of its type; return the type. Raises: InvalidRequest."""
    kind = item.type or MESSAGE
    for name in Item.__struct_fields__:
        if name not in FIELDS[kind] and getattr(item, name) is not None:
            raise invalid_parameter(
                f"{field}.{name}", f"is not supported in an item of the type {kind}: leave it out"
            )
    return kind


def _message(item: Item, field: str) -> pb.Message:
    role = item.role or ""
    if ROLES.get(role, pb.ROLE_TOOL) == pb.ROLE_TOOL:
        known = ", ".join(name for name, each in ROLES.items() if each != pb.ROLE_TOOL)
        raise invalid_parameter(
            f"{field}.role", f"must be one of {known}; send results of calls as {RESULT} items"
        )
    if item.content is None and role != "assistant":
        raise invalid_parameter(f"{field}.content", "must be text")
    return pb.Message(role=ROLES[role], content=text_of(item.content or "", f"{field}.content"))


def _thought(item: Item, field: str) -> str:
    """Read the text of an earlier thought. Empty if the thought is encrypted."""
    parts = [] if isinstance(item.content, str) or item.content is None else item.content
    for index, part in enumerate(parts):
        if part.text is None:
            raise invalid_parameter(f"{field}.content[{index}].text", "is required")
    return "".join(part.text or "" for part in parts)


def _call(item: Item, field: str) -> pb.ToolCall:
    if item.name is None:
        raise invalid_parameter(f"{field}.name", "is required")
    name = name_in(item.namespace, item.name) if item.namespace else item.name
    return pb.ToolCall(id=item.call_id or "", name=name, arguments_json=item.arguments or "")


def _result(item: Item, field: str) -> pb.Message:
    return pb.Message(
        role=pb.ROLE_TOOL,
        tool_call_id=item.call_id or "",
        content=text_of(item.output or "", f"{field}.output"),
    )
