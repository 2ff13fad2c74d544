"""The input of the responses API: messages, calls of functions and what came of those are items, and one conversation here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.conversation import MESSAGE_COUNT_MAX
from api.openai.messages import ROLES, ContentPart, Turns, text_of
from api.openai.parameters import check_count
from api.openai.refusals import wrong_parameter

MESSAGE, CALL, RESULT = "message", "function_call", "function_call_output"
KINDS = (MESSAGE, CALL, RESULT)
# The fields of each kind; `id` and `status` are those with which an answer's items come back.
FIELDS = {
    MESSAGE: frozenset({"type", "id", "status", "role", "content", "phase"}),
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
}


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of any kind."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    # What others have beside: refused by name.
    caller: Any = None
    namespace: Any = None
    refusal: Any = None
    summary: Any = None
    encrypted_content: Any = None


def conversation_of(items: Sequence[Item], instructions: str | None) -> Turns:
    """The conversation for a start frame. Calls belong to the assistant's turn that they follow. Raises: InvalidRequest."""
    if not items:
        raise wrong_parameter("input", "must hold at least one item")
    check_count(items, "input", MESSAGE_COUNT_MAX)
    turns: list[pb.Message] = []
    names: dict[str, str] = {}
    if instructions:
        turns.append(pb.Message(role=pb.ROLE_SYSTEM, content=instructions))
        names["conversation.messages[0]"] = "instructions"
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = _kind(item, field)
        if kind == CALL:
            if not (turns and turns[-1].role == pb.ROLE_ASSISTANT):
                turns.append(pb.Message(role=pb.ROLE_ASSISTANT))
            turns[-1].tool_calls.append(_call(item, field))
            call = f"conversation.messages[{len(turns) - 1}].tool_calls[{len(turns[-1].tool_calls) - 1}]"
            names |= {f"{call}.id": f"{field}.call_id", f"{call}.arguments_json": f"{field}.arguments", call: field}
            continue
        turns.append(_message(item, field) if kind == MESSAGE else _result(item, field))
        turn = f"conversation.messages[{len(turns) - 1}]"
        names |= {f"{turn}.tool_call_id": f"{field}.call_id", turn: field}
    return Turns(pb.Conversation(messages=turns), names | {"conversation.messages": "input"})


def _kind(item: Item, field: str) -> str:
    """Which of the kinds it is, and nothing of another one. Raises: InvalidRequest."""
    kind = item.type or MESSAGE
    if kind not in KINDS:
        raise wrong_parameter(f"{field}.type", f"must be one of {', '.join(KINDS)}: other items are not supported")
    for name in Item.__struct_fields__:
        if name not in FIELDS[kind] and getattr(item, name) is not None:
            raise wrong_parameter(f"{field}.{name}", f"is not supported in an item of the type {kind}: leave it out")
    return kind


def _message(item: Item, field: str) -> pb.Message:
    role = item.role or ""
    if role not in ROLES or role == "tool":
        known = ", ".join(role for role in ROLES if role != "tool")
        raise wrong_parameter(f"{field}.role", f"must be one of {known}; what came of a call is an item {RESULT}")
    if item.content is None:
        raise wrong_parameter(f"{field}.content", "must be text")
    return pb.Message(role=ROLES[role], content=text_of(item.content, f"{field}.content"))


def _call(item: Item, field: str) -> pb.ToolCall:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise wrong_parameter(f"{field}.{name}", "is required")
    return pb.ToolCall(id=item.call_id or "", name=item.name or "", arguments_json=item.arguments or "")


def _result(item: Item, field: str) -> pb.Message:
    for name in ("call_id", "output"):
        if getattr(item, name) is None:
            raise wrong_parameter(f"{field}.{name}", "is required")
    return pb.Message(role=pb.ROLE_TOOL, tool_call_id=item.call_id or "", content=text_of(item.output or "", f"{field}.output"))
