"""Validation and parsing of prompts: conversations, text and token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weir.v1 import inference_service_pb2 as pb

from api.core.texts import Violations
from api.generation.parsing.json_text import json_object
from inference.text.tokenizer import EFFORTS, NOT_THINKING, ChatMessage, Thinking
from inference.text.tools import ToolCall

Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]

ROLES: Mapping[int, str] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
PLAIN_ROLES = frozenset(ROLES) - {pb.ROLE_TOOL}  # turns with text only
CALLLESS_ROLES = frozenset((pb.ROLE_SYSTEM, pb.ROLE_USER))
# Some servers put the model's encrypted thinking into the id of a call.
CALL_ID_CHARS_MAX = 65_536
# Checking this many takes some ms, during which no other stream runs: a template holds the GIL.
MESSAGE_COUNT_MAX = 4096
CALL_COUNT_MAX = 4096  # of all messages together, for the same reason


def check_prompt(message: pb.StartFrame | pb.CountTokensRequest, wrong: Violations) -> None:
    """Check that a message has a valid prompt that is not empty."""
    match message.WhichOneof("prompt"):
        case None:
            wrong.check(False, "prompt", "one of conversation, text and token_ids must be set")
        case "conversation":
            check_messages(message.conversation.messages, wrong)
            if effort := message.conversation.reasoning_effort:
                _check_effort(effort, message.conversation, wrong)
            if message.conversation.continues_last_message:
                _check_continued(message.conversation, wrong)
        case "text":
            if not message.text:
                wrong.check(False, "text", "must not be empty")
        case "token_ids" if isinstance(message, pb.StartFrame):
            wrong.check(
                bool(message.token_ids.ids), "token_ids.ids", "must hold at least one token id"
            )
        case _:
            pass


def _check_effort(effort: str, conversation: pb.Conversation, wrong: Violations) -> None:
    name = "conversation.reasoning_effort"
    wrong.check(effort in EFFORTS, name, f"must be one of {', '.join(EFFORTS)}")
    both = conversation.HasField("thinking")
    wrong.check(not both, name, "cannot be combined with thinking: leave one of them out")


def _check_continued(conversation: pb.Conversation, wrong: Violations) -> None:
    """Check that the last message can be continued, and that no thinking is requested with it."""
    last = conversation.messages[-1] if conversation.messages else pb.Message()
    wrong.check(
        last.role == pb.ROLE_ASSISTANT and bool(last.content.strip()) and not last.tool_calls,
        "conversation.continues_last_message",
        "requires a last message of the assistant with text and without calls; leave it out to"
        " begin a new message",
    )
    for name in ("thinking", "reasoning_effort"):
        value = getattr(conversation, name)
        wrong.check(
            not value or value in NOT_THINKING,
            f"conversation.{name}",
            "cannot be combined with an answer that has begun, before which the model would think:"
            " leave one of them out",
        )


def check_messages(messages: Sequence[pb.Message], wrong: Violations) -> None:
    """Check every message of a conversation, and that tool results follow their calls."""
    wrong.check(bool(messages), "conversation.messages", "must hold at least one message")
    if not wrong.check_count(len(messages), MESSAGE_COUNT_MAX, "conversation.messages"):
        return
    call_counts = [len(message.tool_calls) for message in messages]
    call_count = sum(call_counts)
    right = call_count <= CALL_COUNT_MAX
    wrong.check(
        right,
        "conversation.messages",
        f"may have {CALL_COUNT_MAX} tool calls in total, got {call_count}",
    )
    if not right:
        return
    call_ids: set[str] = set()
    for index, (message, count) in enumerate(zip(messages, call_counts, strict=True)):
        role = message.role
        if role in PLAIN_ROLES and not (count or message.tool_call_id or message.reasoning):
            continue  # most turns
        field = f"conversation.messages[{index}]"
        wrong.check(
            role in ROLES,
            f"{field}.role",
            "must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL",
        )
        if role == pb.ROLE_TOOL:
            wrong.check(
                message.tool_call_id in call_ids,
                f"{field}.tool_call_id",
                "must be the id of a call in an earlier message",
            )
        elif message.tool_call_id:
            wrong.check(
                False, f"{field}.tool_call_id", "is allowed for ROLE_TOOL only; leave it out"
            )
        if message.reasoning:
            wrong.check(
                role == pb.ROLE_ASSISTANT,
                f"{field}.reasoning",
                "is allowed for ROLE_ASSISTANT only; leave it out",
            )
        if message.tool_calls:
            wrong.check(
                message.role == pb.ROLE_ASSISTANT,
                f"{field}.tool_calls",
                "are allowed for ROLE_ASSISTANT only; leave them out",
            )
            check_calls(message.tool_calls, f"{field}.tool_calls", wrong)
            call_ids.update(call.id for call in message.tool_calls)


def check_calls(calls: Sequence[pb.ToolCall], field: str, wrong: Violations) -> None:
    """Check the tool calls of one message."""
    seen: set[str] = set()
    for index, call in enumerate(calls):
        right = 1 <= len(call.id) <= CALL_ID_CHARS_MAX and call.id not in seen
        wrong.check(
            right,
            f"{field}[{index}].id",
            f"must have 1 to {CALL_ID_CHARS_MAX} characters and be unique in its message",
        )
        seen.add(call.id)
        wrong.check(bool(call.name), f"{field}[{index}].name", "must name a tool")


def parse_prompt(message: pb.StartFrame | pb.CountTokensRequest) -> Prompt:
    """Convert the prompt of a message that passed `check_prompt`."""
    match message.WhichOneof("prompt"):
        case "conversation":
            messages = _messages(message.conversation.messages)
            if message.conversation.continues_last_message:
                messages = (*messages[:-1], replace(messages[-1], is_unfinished=True))
            return messages
        case "text":
            return message.text
        case _:
            assert isinstance(message, pb.StartFrame)
            return tuple(message.token_ids.ids)


def shown_arguments(text: str) -> str:
    """Return the arguments of an earlier tool call as a JSON object; if invalid, as a JSON string.

    Models write calls that are cut off or malformed, and agents send them back. Chat templates then
    show the text unchanged.
    """
    if not text.strip():
        return "{}"
    return text if json_object(text) is not None else json.dumps(text, ensure_ascii=False)


def thinking_of(message: pb.StartFrame | pb.CountTokensRequest) -> Thinking:
    """Return whether, or how much, the model should think. None: the chat template decides."""
    conversation = message.conversation
    if message.HasField("conversation") and conversation.reasoning_effort:
        return conversation.reasoning_effort
    return (
        conversation.thinking
        if message.HasField("conversation") and conversation.HasField("thinking")
        else None
    )


def _messages(turns: Sequence[pb.Message]) -> tuple[ChatMessage, ...]:
    messages: list[ChatMessage] = []
    calls: dict[str, ToolCall] = {}  # the latest of each id
    for turn in turns:
        if (role := turn.role) in CALLLESS_ROLES:
            messages.append(ChatMessage(ROLES[role], turn.content))
            continue
        called = tuple(
            ToolCall(call.id, call.name, shown_arguments(call.arguments_json))
            for call in turn.tool_calls
        )
        calls |= {call.id: call for call in called}
        result_of = calls[turn.tool_call_id] if turn.role == pb.ROLE_TOOL else None
        message = ChatMessage(ROLES[turn.role], turn.content, called, result_of, turn.reasoning)
        messages.append(message)
    return tuple(messages)
