"""Input items of the responses API and their conversion to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.conversation import MESSAGE_COUNT_MAX
from api.openai.chat_messages import ROLES, ContentPart, pair_results, text_of
from api.openai.history import CALL, MESSAGE, REASONING, RESULT
from api.openai.refusals import check_count, invalid_parameter
from api.openai.tools import name_in

# Fields of each kind of item; responses carry `id` and `status`.
FIELDS = {
    MESSAGE: frozenset({"type", "id", "status", "role", "content", "phase", "name"}),
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments", "namespace"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
    REASONING: frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
}


class Item(Struct, forbid_unknown_fields=True, kw_only=True):
    """Input item of any kind. `history.py` converts items of other kinds, or refuses them."""

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
    """Return the conversation for a start frame, and the parameters by field of its messages.

    Calls belong to the preceding assistant message, thoughts to the following one. Raises:
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
    """Return the kind of an item that has no field of another kind. Raises: InvalidRequest."""
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
    """Return the text of an earlier thought; empty if it is encrypted."""
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
