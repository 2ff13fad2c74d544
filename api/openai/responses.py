"""OpenAI's Responses API: parameters of a request, its input items, and its answer, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.conversation import MESSAGE_COUNT_MAX
from api.openai.answers import Bill, Call, Output, TokenTexts, event
from api.openai.parameters import (
    COMMON_NAMES,
    NO_EFFORT,
    NO_RETENTION,
    NO_VERBOSITY,
    ROLES,
    Asked,
    ChatTemplateKwargs,
    Choice,
    ContentPart,
    Format,
    Int32,
    Int64,
    SharedParameters,
    ToolParameter,
    Turns,
    Unserved,
    as_given,
    check_shared,
    choice_as_given,
    fill_shared,
    fill_thinking,
    fill_tools,
    refuse_given,
    refuse_unless,
    response_format,
    text_of,
    tier_name,
    tools_as_given,
    unserved,
)
from api.openai.refusals import Refusal, check_count, wrong_parameter

MESSAGE, CALL, RESULT = "message", "function_call", "function_call_output"
KINDS = (MESSAGE, CALL, RESULT)

# The fields of each kind; `id` and `status` are those with which an answer's items come back.
FIELDS = {
    MESSAGE: frozenset({"type", "id", "status", "role", "content", "phase"}),
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
}

NAMES = COMMON_NAMES | {
    "prompt": "input",
    "tools[].parameters_json_schema": "tools[].parameters",
    "tool_choice.single": "parallel_tool_calls",
    "response_format.json_schema": "text.format.schema",
}

LOGPROBS = "message.output_text.logprobs"
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # those that OpenAI's clients know; the rest is the server's


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


class Text(Struct, forbid_unknown_fields=True):
    """How the text of the answer is to be."""

    format: Format | None = None
    verbosity: Any = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """`reasoning` of a response. Thinking is part of the answer's text, so no field can be set apart from effort `none`."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ResponseParameters(SharedParameters, forbid_unknown_fields=True, kw_only=True):
    """What `client.responses.create` may send."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    truncation: str | None = None
    reasoning: Reasoning | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None  # not OpenAI's: as vLLM has it
    access_programs: Unserved = None
    background: Unserved = None
    context_management: Unserved = None
    conversation: Unserved = None
    image: Unserved = None
    max_tool_calls: Unserved = None
    moderation: Unserved = None
    prompt: Unserved = None
    prompt_cache_options: Unserved = None
    # Of these one value asks for what happens.
    previous_response_id: Any = None
    prompt_cache_retention: Any = None


def response_asked(given: ResponseParameters) -> Asked:
    """What a response asks for. Raises: InvalidRequest."""
    check_shared(given)
    check_unserved(given)
    items = [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    turns = conversation_of(items, given.instructions)
    start = pb.StartFrame(conversation=turns.conversation)
    fill_shared(start, given)
    fill_thinking(start, given.chat_template_kwargs)
    fill_tools(start, given.tools, given.tool_choice, given.parallel_tool_calls, wrapped=False)
    if given.max_output_tokens is not None:
        start.max_output_tokens = given.max_output_tokens
    if wants_logprobs(given):
        if given.tools:
            raise wrong_parameter("tools", "cannot be combined with log-probabilities: a call has no place for its own")
        start.top_logprobs = given.top_logprobs or 0
    if (wanted := response_format(None if given.text is None else given.text.format, "text.format")) is not None:
        start.response_format.CopyFrom(wanted)
    names = NAMES | turns.names
    return Asked((start,), given.model, streams=bool(given.stream), includes_usage=True, names=names, given=given)


def check_unserved(given: ResponseParameters) -> None:
    """Refuse what asks for something that does not happen here. Raises: InvalidRequest."""
    if given.previous_response_id is not None:
        raise wrong_parameter("previous_response_id", "responses are not stored: send the conversation so far as input")
    refuse_given(given, *unserved(ResponseParameters))
    refuse_unless(given.prompt_cache_retention, "prompt_cache_retention", *NO_RETENTION)
    if given.text is not None:
        refuse_unless(given.text.verbosity, "text.verbosity", *NO_VERBOSITY)
    if given.reasoning is not None:
        refuse_unless(given.reasoning.effort, "reasoning.effort", *NO_EFFORT)
        for name in ("summary", "generate_summary", "context", "mode"):
            if getattr(given.reasoning, name) is not None:
                raise wrong_parameter(f"reasoning.{name}", f"is not supported: {NO_EFFORT[1]}; leave it out")
    if given.truncation not in (None, "disabled"):
        raise wrong_parameter("truncation", "must be disabled: an input that does not fit is refused, not cut")
    for index, each in enumerate(given.include or ()):
        if each != LOGPROBS:
            raise wrong_parameter(f"include[{index}]", f"only {LOGPROBS} is supported")


def wants_logprobs(given: ResponseParameters) -> bool:
    """Whether the answer carries log-probabilities: they are asked for in either of two ways."""
    return LOGPROBS in (given.include or ()) or given.top_logprobs is not None


class ResponseAnswer:
    """One response: a message of one text and any number of calls, each an item in the order in which they have begun."""

    streams_done = False
    tells_all_again = True

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        self._asked = asked
        self._given: ResponseParameters = asked.given
        self._texts = texts
        self._answer_id = answer_id
        self._created = created
        self._wants_logprobs = wants_logprobs(self._given)
        self._event_count = 0
        self._open: list[int | None] = []  # the items that events have begun, as `Output.places`
        self._done_count = 0  # of calls that events have ended

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """See `Answer`. Without tools it is known which items there will be."""
        response = self._response("in_progress")
        begun = self._event("response.created", response=response) + self._event("response.in_progress", response=response)
        return begun if self._asked.starts[0].tools else begun + self._begin_text()

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        events = []
        if new.text or new.logprobs:
            if None not in self._open:
                events.append(self._begin_text())
            told = self._texts.content(new.logprobs)
            events.append(self._event("response.output_text.delta", delta=new.text, logprobs=told, **self._part))
        for piece in new.tool_calls:
            if piece.id:
                events += [self._end_calls(output, piece.index), self._begin_call(output.calls[piece.index], piece.index)]
            if piece.arguments_json:
                place = self._place(piece.index)
                events.append(self._event("response.function_call_arguments.delta", delta=piece.arguments_json, **place))
        return b"".join(events)

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        [output] = outputs
        body = self.body(outputs)
        missing = b"" if self._open else self._begin_text()
        events = [missing, self._end_text(output, body) if None in self._open else b"", self._end_calls(output, len(output.calls))]
        return b"".join((*events, self._event(f"response.{body['status']}", response=body | self.tail(outputs, bill))))

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        code = FAILURE_CODES.get(refusal.http_status, "server_error")
        error = {"code": code, "message": refusal.message}
        response = self._response("failed") | {"error": error, "weir": dict(refusal.facts)}
        return self._event("response.failed", response=response)

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        [output] = outputs
        cut = INCOMPLETE.get(output.finish_reason)
        status = "completed" if cut is None else "incomplete"
        told = {"incomplete_details": None if cut is None else {"reason": cut}}
        return self._response(status) | told | {"output": self._items(output, status)}

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        usage = {
            "input_tokens": bill.input_token_count,
            "input_tokens_details": {"cached_tokens": bill.cached_input_token_count, "cache_write_tokens": 0},
            "output_tokens": bill.output_token_count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": bill.input_token_count + bill.output_token_count,
        }
        return {"usage": usage, "weir": bill.extension(outputs)}

    def _items(self, output: Output, status: str) -> list[dict[str, Any]]:
        """What the answer consists of. Where it was cut, the last item is what is not whole."""
        places = output.places or [None]
        statuses = ["completed"] * (len(places) - 1) + [status]
        return [
            self._message(each, [self._text(output.text, output.logprobs)]) if place is None else self._call(place, output, each)
            for place, each in zip(places, statuses, strict=True)
        ]

    # Events of the text.

    @property
    def _item_id(self) -> str:
        return f"msg_{self._answer_id}"

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": self._open.index(None), "content_index": 0}

    def _begin_text(self) -> bytes:
        self._open.append(None)
        item = self._message("in_progress", [])
        begun = self._event("response.output_item.added", item=item, output_index=self._open.index(None))
        return begun + self._event("response.content_part.added", part=self._text("", ()), **self._part)

    def _end_text(self, output: Output, body: dict[str, Any]) -> bytes:
        place = self._open.index(None)
        text = self._text(output.text, output.logprobs)
        told = self._texts.content(output.logprobs)
        return b"".join(
            (
                self._event("response.output_text.done", text=output.text, logprobs=told, **self._part),
                self._event("response.content_part.done", part=text, **self._part),
                self._event("response.output_item.done", item=body["output"][place], output_index=place),
            )
        )

    # Events of calls.

    def _call_id(self, number: int) -> str:
        return f"fc_{self._answer_id}_{number}"

    def _place(self, number: int) -> dict[str, Any]:
        return {"item_id": self._call_id(number), "output_index": self._open.index(number)}

    def _begin_call(self, call: Call, number: int) -> bytes:
        self._open.append(number)
        item = self._call_item(number, Call(call.id, call.name), "in_progress")
        return self._event("response.output_item.added", item=item, output_index=self._open.index(number))

    def _end_calls(self, output: Output, count: int) -> bytes:
        """Events of the ends of all calls before this number that have not been told yet."""
        events = []
        status = "incomplete" if output.finish_reason in INCOMPLETE and self._open and self._open[-1] is not None else "completed"
        for number in range(self._done_count, count):
            call, place = output.calls[number], self._place(number)
            events.append(self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **place))
            item = self._call_item(number, call, status if number == self._open[-1] else "completed")
            events.append(self._event("response.output_item.done", item=item, output_index=place["output_index"]))
        self._done_count = max(self._done_count, count)
        return b"".join(events)

    def _call(self, number: int, output: Output, status: str) -> dict[str, Any]:
        return self._call_item(number, output.calls[number], status)

    def _call_item(self, number: int, call: Call, status: str) -> dict[str, Any]:
        return {
            "id": self._call_id(number),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._event_count
        self._event_count += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _text(self, text: str, logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        told = self._texts.content(logprobs) if self._wants_logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}

    def _response(self, status: str) -> dict[str, Any]:
        """The object without output and usage, and with what was asked for."""
        given = self._given
        return {
            "id": f"resp_{self._answer_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": given.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if given.reasoning is None else given.reasoning.effort, "summary": None},
            "service_tier": tier_name(self._asked.starts[0]),
            "store": False,
            "background": False,
            "temperature": given.temperature,
            "text": {"format": as_given(None if given.text is None else given.text.format)},
            "tool_choice": choice_as_given(given.tool_choice),
            "tools": tools_as_given(given.tools),
            "top_logprobs": given.top_logprobs or 0,
            "top_p": given.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": given.user,
            "safety_identifier": given.safety_identifier,
            "prompt_cache_key": given.prompt_cache_key,
        }
