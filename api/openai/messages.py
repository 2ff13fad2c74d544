"""Anthropic's Messages API: parameters and their conversion, responses, events and errors.

The texts of a message's blocks are joined by newlines, and so are consecutive messages of a role.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.generation.delivery.delta import Delta
from api.generation.parsing.conversation import MESSAGE_COUNT_MAX
from api.generation.parsing.decoding import STOP_SEQUENCE_COUNT_MAX
from api.openai.answers import Answer, Bill, Call, Output, ServedModel, event
from api.openai.conversations import pair_results
from api.openai.error_responses import ErrorResponse, check_count, invalid_parameter
from api.openai.formats import ABSENT, Format, fill_format
from api.openai.parameters import (
    COMMON_NAMES,
    Idle,
    Int32,
    Int64,
    ParsedRequest,
    Unsupported,
    check_model_name,
    fill_copied,
    fill_limit,
    names_annotated,
    refuse_unsupported,
    tolerate,
)
from api.openai.tolerance import EMPTY, Notes, check_kept
from api.openai.tools import FUNCTION, Choice, NamedChoice, ToolParameter, fill_tools
from inference.text.call_parser import CallPiece

ROLES: Mapping[str, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
}
TEXT, CALL, RESULT, THOUGHT = "text", "tool_use", "tool_result", "thinking"
REDACTED = "redacted_thinking"
CUSTOM = "custom"  # type of the tools that the client runs
THINKING: Mapping[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None}
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
NAMES = COMMON_NAMES | {
    "prompt": "messages",
    "conversation.messages": "messages",
    "conversation.thinking": "thinking.type",
    "end_user": "metadata.user_id",
    "max_output_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format.schema",
    "tools[].parameters_json_schema": "tools[].input_schema",
    "tool_choice.single": "tool_choice.disable_parallel_tool_use",
}
# An exhausted quota or cost limit counts as a length limit.
STOP_REASONS: Mapping[int, str] = {
    types_pb2.FINISH_REASON_STOP: "end_turn",
    types_pb2.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
    types_pb2.FINISH_REASON_LENGTH: "max_tokens",
    types_pb2.FINISH_REASON_QUOTA_EXHAUSTED: "max_tokens",
    types_pb2.FINISH_REASON_COST_LIMIT: "max_tokens",
    types_pb2.FINISH_REASON_FILTERED: "refusal",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
# Members that published answers have, null for features that are not served.
UNUSED: dict[str, Any] = {"stop_details": None, "container": None}
USAGE_OF_MESSAGE = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
CALLER = {"type": "direct"}  # of a call: the model, not code that it runs on the server
NUMBER = re.compile(r"[0-9]{1,4}")
PAGE_MODELS, PAGE_MODELS_MAX = 20, 1000  # Anthropic's own: by default, and at most
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TextBlock(Struct, forbid_unknown_fields=True, kw_only=True):
    """Text block of a system prompt or of a tool result. `history.py` converts other types."""

    type: Literal["text"]
    text: str | None = None
    citations: Any = None


class Block(TextBlock, forbid_unknown_fields=True, kw_only=True):
    """Content block of a message. `redacted_thinking` is left out: nothing here can decrypt it."""

    type: Literal[  # type: ignore[assignment]
        "text", "tool_use", "tool_result", "thinking", "redacted_thinking"
    ]
    id: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    caller: Any = None  # of an earlier answer


class Message(Struct, forbid_unknown_fields=True):
    """Message of a conversation."""

    role: str
    content: str | list[Block]


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tool that the client runs. `tolerate_message` removes tools of other types."""

    name: str | None = None  # a set of tools that a server runs has none
    type: str | None = None
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: bool | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """Choice of the tools that may or must be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """Setting that turns the model's thinking on or off."""

    type: str
    budget_tokens: Idle = None
    display: Idle = None


class OutputConfig(Struct, forbid_unknown_fields=True):
    """Format of the answer, and the effort, which is ignored."""

    effort: Idle = None
    format: Format | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Metadata of a request."""

    user_id: str | None = None


class MessageParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `client.messages.create` and, without `max_tokens`, of `count_tokens`."""

    api: ClassVar[str] = "messages"

    model: str
    messages: list[Message]
    max_tokens: Int64 | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    system: str | list[TextBlock] | None = None
    temperature: float | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    cache_control: Idle = None
    diagnostics: Idle = None
    speed: Idle = None  # each model has one
    user_profile_id: Idle = None
    workspace_id: Idle = None
    # Values that change nothing are accepted.
    context_management: Any = None
    inference_geo: Any = None
    container: Unsupported = None
    mcp_servers: Unsupported = None


def tolerate_message(requested: MessageParameters, notes: Notes) -> None:
    """Remove tools that the server would run, and encrypted thinking; note what is ignored."""
    tolerate(requested, notes)
    parts = {"thinking": requested.thinking, "output_config": requested.output_config}
    for name, part in parts.items():
        for each in () if part is None else names_annotated(type(part), "Idle"):
            if getattr(part, each) not in EMPTY:
                notes.add(f"{name}.{each}")
    for tool in requested.tools or ():
        if tool.type not in (None, CUSTOM):
            notes.add(f"tools[].{tool.type}")
    requested.tools = [tool for tool in requested.tools or () if tool.type in (None, CUSTOM)]
    for message in requested.messages:
        if isinstance(message.content, str):
            continue
        for block in message.content:
            if block.type == REDACTED:
                notes.add(f"messages[].content[].{block.type}")
            elif block.is_error:
                notes.add("messages[].content[].is_error")
        message.content = [block for block in message.content if block.type != REDACTED]


def parse_message(requested: MessageParameters) -> ParsedRequest:
    """Convert the parameters of a message. Raises: InvalidRequest."""
    if requested.max_tokens is None:
        raise invalid_parameter("max_tokens", "is required")
    return parse_counted_message(requested)


def parse_counted_message(requested: MessageParameters) -> ParsedRequest:
    """Convert the parameters of a message; `max_tokens` is optional. Raises: InvalidRequest."""
    if requested.context_management is not None:
        check_kept(requested.context_management, "context_management")
    refuse_unsupported(
        requested, "inference_geo", *names_annotated(MessageParameters, "Unsupported")
    )
    if requested.service_tier not in (None, "auto", "standard_only"):
        raise invalid_parameter("service_tier", "must be auto or standard_only")
    check_model_name(requested.model)
    conversation, names = conversation_of(requested)
    start = pb.StartFrame(model=requested.model, conversation=conversation)
    fill_copied(start, requested)
    fill_limit(start, requested.max_tokens, "max_tokens")
    if requested.stop_sequences:
        check_count(requested.stop_sequences, "stop_sequences", STOP_SEQUENCE_COUNT_MAX)
        start.stop_sequences.extend(requested.stop_sequences)
    if requested.metadata is not None and requested.metadata.user_id:
        start.end_user = requested.metadata.user_id
    if requested.thinking is not None:
        if (kind := requested.thinking.type) not in THINKING:
            raise invalid_parameter("thinking.type", f"must be one of {', '.join(THINKING)}")
        if (thinks := THINKING[kind]) is not None:
            start.conversation.thinking = thinks
    fill_message_tools(start, requested)
    if requested.output_config is not None:
        wanted = requested.output_config.format
        if wanted is not None and wanted.type == "text":
            raise invalid_parameter("output_config.format", "must have a schema, or be left out")
        names |= fill_format(start, requested.output_config.format, "output_config.format")
    return ParsedRequest(
        (start,),
        requested.model,
        streams=bool(requested.stream),
        includes_usage=True,
        names=NAMES | names,
    )


def fill_message_tools(start: pb.StartFrame, requested: MessageParameters) -> None:
    """Set the tools and the tool choice in a start frame. Raises: InvalidRequest."""
    tools = []
    for index, tool in enumerate(requested.tools or ()):
        if tool.type not in (None, CUSTOM):
            raise invalid_parameter(f"tools[{index}].type", f"must be {CUSTOM} or left out")
        if tool.name is None:
            raise invalid_parameter(f"tools[{index}].name", "is required")
        tools.append(
            ToolParameter(
                FUNCTION,
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
        )
    wanted = requested.tool_choice or ToolChoice("auto")
    choice: Choice | None = CHOICES.get(wanted.type)
    if wanted.type == "tool" and wanted.name:
        choice = NamedChoice(FUNCTION, name=wanted.name)
    if choice is None:
        raise invalid_parameter(
            "tool_choice.type", f"must be one of {', '.join(CHOICES)}, or tool with a name"
        )
    parallel = not wanted.disable_parallel_tool_use
    fill_tools(start, tools, choice, parallel, wrapped=False)


def conversation_of(requested: MessageParameters) -> tuple[pb.Conversation, dict[str, str]]:
    """Convert the messages to a conversation; return it with the parameter of each field.

    Tool results become separate messages. Raises: InvalidRequest.
    """
    if not requested.messages:
        raise invalid_parameter("messages", "must hold at least one message")
    check_count(requested.messages, "messages", MESSAGE_COUNT_MAX)
    runs: list[list[pb.Message]] = []  # of consecutive messages of one role
    names: dict[str, str] = {}
    if requested.system:
        runs.append([pb.Message(role=pb.ROLE_SYSTEM, content=text_of(requested.system, "system"))])
        names["conversation.messages[0]"] = "system"
    for index, message in enumerate(requested.messages):
        field = f"messages[{index}]"
        if message.role not in ROLES:
            raise invalid_parameter(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        new = (
            [pb.Message(role=ROLES[message.role], content=message.content)]
            if isinstance(message.content, str)
            else messages_of(message.role, message.content, f"{field}.content")
        )
        for each in new:
            if runs and runs[-1][0].role == each.role != pb.ROLE_TOOL:
                runs[-1].append(each)
            else:
                names[f"conversation.messages[{len(runs)}]"] = field
                runs.append([each])
    turns = [merged(run) for run in runs]
    pair_results(turns)
    conversation = pb.Conversation(messages=turns)
    last = conversation.messages[-1]
    conversation.continues_last_message = last.role == pb.ROLE_ASSISTANT
    if conversation.continues_last_message:
        field = f"messages[{len(requested.messages) - 1}]"
        names["conversation.continues_last_message"] = field
        if last.content != last.content.rstrip():
            raise invalid_parameter(
                f"{field}.content",
                "must not end with blanks, since the answer continues it: leave them out",
            )
    return conversation, names


def merged(run: Sequence[pb.Message]) -> pb.Message:
    """Merge consecutive messages of one role; their texts are joined only once."""
    first, *others = run
    if others:
        first.content = "\n".join(filter(None, [each.content for each in run]))
        first.reasoning = "\n".join(filter(None, [each.reasoning for each in run]))
        for each in others:
            first.tool_calls.extend(each.tool_calls)
    return first


def messages_of(role: str, blocks: Sequence[Block], field: str) -> list[pb.Message]:
    """Convert the blocks of a message. Tool results become messages, which come first.

    Raises: InvalidRequest.
    """
    results: list[pb.Message] = []
    calls: list[pb.ToolCall] = []
    texts: list[Block] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        location = f"{field}[{index}]"
        if block.type == CALL and role == "assistant":
            if not block.name:
                raise invalid_parameter(location, "must have id, name and input")
            arguments = "" if bytes(block.input) == bytes(ABSENT) else bytes(block.input).decode()
            calls.append(pb.ToolCall(id=block.id or "", name=block.name, arguments_json=arguments))
        elif block.type == RESULT and role == "user":
            content = text_of(block.content or "", f"{location}.content")
            results.append(
                pb.Message(role=pb.ROLE_TOOL, content=content, tool_call_id=block.tool_use_id or "")
            )
        elif block.type == THOUGHT and role == "assistant":
            if block.thinking is None:
                raise invalid_parameter(f"{location}.thinking", "is required")
            thoughts.append(block.thinking)
        else:
            check_text(block, location)
            texts.append(block)
    if texts or calls or thoughts or not results:
        message = pb.Message(role=ROLES[role], tool_calls=calls, reasoning="\n".join(thoughts))
        message.content = "\n".join(block.text or "" for block in texts)
        results.append(message)
    return results


def text_of(content: str | Sequence[TextBlock], field: str) -> str:
    """Join the text of blocks. Raises: InvalidRequest."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        check_text(block, f"{field}[{index}]")
    return "\n".join(block.text or "" for block in content)


def check_text(block: TextBlock, field: str) -> None:
    """Check that a block is text. Raises: InvalidRequest."""
    if block.type != TEXT:
        raise invalid_parameter(
            field, f"blocks of the type {block.type[:40]!r} are not supported here: send text"
        )
    if block.text is None:
        raise invalid_parameter(f"{field}.text", "is required")


def error_body(refusal: ErrorResponse, request_id: str) -> dict[str, Any]:
    """Build an error in Anthropic's format, with the error's metadata in `weir`."""
    fallback = "api_error" if refusal.http_status >= 500 else "invalid_request_error"
    # Agents shorten the conversation when they find this text of Anthropic's API.
    too_long = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
    error: dict[str, Any] = {
        "type": ERROR_TYPES.get(refusal.http_status, fallback),
        "message": too_long + refusal.message,
        "details": {"error_code": refusal.code},
    }
    error["doc_url"] = refusal.doc_url
    error["weir"] = dict(refusal.facts)
    return {"type": "error", "error": error, "request_id": request_id}


def page_of(models: Mapping[str, dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Select a page of the models, which are given by id. Raises: InvalidRequest."""
    ids = [*models]
    text = query.get("limit", str(PAGE_MODELS))
    limit = int(text) if NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= PAGE_MODELS_MAX:
        raise invalid_parameter("limit", f"must be from 1 to {PAGE_MODELS_MAX}, got {text[:40]!r}")
    for name in ("after_id", "before_id"):
        if query.get(name, ids[0] if ids else "") not in models:
            raise invalid_parameter(name, "must be the id of a model of the list")
    if "after_id" in query and "before_id" in query:
        raise invalid_parameter("before_id", "cannot be combined with after_id: leave one out")
    if "before_id" in query:
        before = ids[: ids.index(query["before_id"])]
        page, has_more = before[-limit:], len(before) > limit
    else:
        after = ids[ids.index(query["after_id"]) + 1 :] if "after_id" in query else ids
        page, has_more = after[:limit], len(after) > limit
    return {
        "data": [models[each] for each in page],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": has_more,
    }


class MessageAnswer(Answer):
    """Responses of the Messages API: blocks of text, thinking and calls, one after the other."""

    streams_done = False
    ping = event({"type": "ping"}, "ping")

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """`answer_id` is hexadecimal. `created` is in seconds since 1970."""
        super().__init__(parsed, model)
        self._answer_id = answer_id
        self._block_count = 0
        self._open: str | None = None  # type of the block that events began last

    def opening(self, outputs: Sequence[Output]) -> bytes:
        [output] = outputs
        usage = usage_of(output.input_token_count, 0, 0, 0) | USAGE_OF_MESSAGE
        message = self._message(None, []) | {"usage": usage}
        return _event("message_start", message=message)

    def delta(self, output: Output, new: Delta) -> bytes:
        events, pieces = [], list(new.calls)
        # Increments may be merged: text follows the rest of the open call.
        while pieces and not pieces[0].id:
            events.append(self._grow_call(pieces.pop(0)))
        if new.reasoning:
            if self._open != THOUGHT:
                events.append(self._begin(thought_block("")))
            events.append(self._grow({"type": "thinking_delta", "thinking": new.reasoning}))
        if new.text:
            if self._open != TEXT:
                events.append(self._begin(text_block("")))
            events.append(self._grow({"type": "text_delta", "text": new.text}))
        for piece in pieces:
            if piece.id:
                events.append(self._begin(call_block(Call(piece.id, piece.name))))
            events.append(self._grow_call(piece))
        return b"".join(events)

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        [output] = outputs
        end = {"stop_reason": stop_reason(output), "stop_sequence": stop_sequence(output)}
        tail = {"usage": usage_in(bill), "weir": bill.extension(outputs)}
        return b"".join(
            (
                self._end(),
                _event("message_delta", delta=end | UNUSED, **tail),
                _event("message_stop"),
            )
        )

    def failure(self, refusal: ErrorResponse, outputs: Sequence[Output]) -> bytes:
        request_id = str(uuid.UUID(self._answer_id))
        return event(error_body(refusal, request_id), "error")

    def error_body(self, refusal: ErrorResponse, request_id: str = "") -> dict[str, Any]:
        return error_body(refusal, request_id)

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        [output] = outputs
        content = [
            text_block(output.text)
            if location is None
            else thought_block(output.thought(location))
            if location < 0
            else call_block(output.calls[location])
            for location in output.parts
        ]
        end = {"stop_sequence": stop_sequence(output)}
        return self._message(stop_reason(output), content) | end

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        return {"usage": usage_in(bill) | USAGE_OF_MESSAGE, "weir": bill.extension(outputs)}

    def failed_tail(self, outputs: Sequence[Output], refusal: ErrorResponse) -> dict[str, Any]:
        """Implement `Answer.failed_tail`: clients need the usage, here of the sent output."""
        [output] = outputs
        usage = usage_of(output.input_token_count, 0, output.token_count, 0) | USAGE_OF_MESSAGE
        return {"usage": usage, "error": error_body(refusal, "")["error"]}

    def _begin(self, block: dict[str, Any]) -> bytes:
        before, self._open = self._end(), block["type"]
        self._block_count += 1
        return before + _event(
            "content_block_start", index=self._block_count - 1, content_block=block
        )

    def _grow(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block_count - 1, delta=delta)

    def _grow_call(self, piece: CallPiece) -> bytes:
        if not piece.arguments:
            return b""
        return self._grow({"type": "input_json_delta", "partial_json": piece.arguments})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._block_count - 1)

    def _message(self, reason: str | None, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._parsed.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            **UNUSED,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def stop_reason(output: Output) -> str:
    return STOP_REASONS.get(output.reason, "end_turn")


def text_block(text: str) -> dict[str, Any]:
    return {"type": TEXT, "text": text, "citations": None}


def stop_sequence(output: Output) -> str | None:
    """Return the stop sequence that ended the output; None if another reason did."""
    stop = output.stopped_by
    return stop if isinstance(stop, str) and stop_reason(output) == "stop_sequence" else None


def thought_block(text: str) -> dict[str, Any]:
    """Build a thinking block. Its signature is empty: clients may send any thinking back."""
    return {"type": THOUGHT, "thinking": text, "signature": ""}


def call_block(call: Call) -> dict[str, Any]:
    """Build a tool-use block. Arguments that are cut off or malformed become an empty object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = {}
    known = arguments if isinstance(arguments, dict) else {}
    return {"type": CALL, "id": call.id, "name": call.name, "input": known, "caller": CALLER}


def usage_in(bill: Bill) -> dict[str, Any]:
    """Convert a bill to a usage object."""
    return usage_of(
        bill.input_token_count,
        bill.cached_input_token_count,
        bill.output_token_count,
        bill.reasoning_token_count,
    )


def usage_of(
    input_count: int, cached_count: int, output_count: int, thinking_count: int
) -> dict[str, Any]:
    """Build a usage object. `input_tokens` does not include cached tokens."""
    return {
        "input_tokens": input_count - cached_count,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_count,
        "output_tokens": output_count,
        "output_tokens_details": {"thinking_tokens": thinking_count},
        "server_tool_use": None,
    }
