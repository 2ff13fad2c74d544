"""Responses of OpenAI's responses API, as one body or as events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from api.generation.delivery.delta import Delta
from api.openai.answers import Answer, Bill, Call, Output, ServedModel, event, is_call
from api.openai.error_responses import ErrorResponse
from api.openai.formats import echoed_format
from api.openai.history import REASONING_TEXT
from api.openai.parameters import ParsedRequest, ResponseParameters, tier_name, wants_logprobs
from api.openai.token_texts import TokenLogprobs
from api.openai.tools import Namespaces, echoed_tool_choice, echoed_tools
from inference import engine

SUMMARIES = frozenset({"auto", "concise", "detailed"})  # of reasoning, as responses repeat them
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Codes that OpenAI's clients know; all others become `server_error`.
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
UNDECIDED_TOKENS_MAX = 64  # whose text is held back; some 100 kB with all alternatives


class ResponseAnswer(Answer):
    """Responses of the responses API: thoughts, message and calls, as items in their order."""

    streams_done = False
    repeats_output = True

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """`answer_id` is hexadecimal. `created` is in seconds since 1970."""
        super().__init__(parsed, model)
        self._parameters: ResponseParameters = parsed.parameters
        self._answer_id = answer_id
        self._created = created
        self._sampling = model.sampling
        self._members = Namespaces.of(self._parameters.tools).members
        self._wants_logprobs = wants_logprobs(self._parameters)
        # Log-probabilities of the newest tokens, whose text may be held back as a possible call
        self._undecided: list[engine.TokenLogprobs] = []
        self._event_count = 0
        self._open: list[int | None] = []  # items begun by events, as `Output.parts`
        self._done_count = 0  # calls ended by events
        self._open_thought: int | None = None  # begun by events and not ended, as `Output.parts`

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """Encode the events before the first output."""
        response = self._response("in_progress") | {"error": None, "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def kept(self, new: Delta) -> Delta:
        """Implement `Answer.kept`: log-probabilities are those of the text; calls have none."""
        if not (new.logprobs or self._undecided) or not self._parameters.tools:
            return new
        tokens = [*self._undecided, *new.logprobs]
        begin = end = 0
        if new.text:
            # Calls that begin in a delta follow its text; otherwise the text may follow a call.
            follows = not any(piece.id for piece in new.calls)
            begin, end = self._texts.span_of(new.text, tokens, is_last=follows)
        new.logprobs = tokens[begin:end]
        self._undecided = tokens[end:][-UNDECIDED_TOKENS_MAX:]
        return new

    def delta(self, output: Output, new: Delta) -> bytes:
        events = []
        if new.reasoning:
            part = -len(output.thoughts)
            if part not in self._open:
                events.append(self._begin_thought(part))
            events.append(
                self._event(
                    "response.reasoning_text.delta",
                    delta=new.reasoning,
                    **self._thought_position(part),
                )
            )
        if new.text or new.logprobs or new.calls:
            events.append(self._end_thought(output, "completed"))
        if new.text or new.logprobs:
            if None not in self._open:
                events.append(self._begin_text())
            logprobs = self._texts.content(new.logprobs)
            events.append(
                self._event(
                    "response.output_text.delta", delta=new.text, logprobs=logprobs, **self._part
                )
            )
        for piece in new.calls:
            if piece.id:
                events += [
                    self._end_calls(output, piece.index),
                    self._begin_call(output.calls[piece.index], piece.index),
                ]
            if piece.arguments:
                position = self._position(piece.index)
                events.append(
                    self._event(
                        "response.function_call_arguments.delta",
                        delta=piece.arguments,
                        **position,
                    )
                )
        return b"".join(events)

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        [output] = outputs
        body = self.body(outputs)
        missing = b"" if self._open else self._begin_text()
        events = [
            missing,
            self._end_thought(output, body["status"]),
            self._end_text(output, body) if None in self._open else b"",
            self._end_calls(output, len(output.calls)),
        ]
        return b"".join(
            (
                *events,
                self._event(f"response.{body['status']}", response=body | self.tail(outputs, bill)),
            )
        )

    def failure(self, refusal: ErrorResponse, outputs: Sequence[Output]) -> bytes:
        response = self._response("failed") | self.failed_tail(outputs, refusal)
        return self._event("response.failed", response=response)

    def failed_tail(self, outputs: Sequence[Output], refusal: ErrorResponse) -> dict[str, Any]:
        code = FAILURE_CODES.get(refusal.http_status, "server_error")
        error = {"code": code, "message": refusal.message}
        return {"error": error, "usage": None, "weir": dict(refusal.facts)}

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        [output] = outputs
        cut = INCOMPLETE.get(output.finish_reason)
        status = "completed" if cut is None else "incomplete"
        details = {"incomplete_details": None if cut is None else {"reason": cut}}
        completed_at = int(time.time()) if cut is None else None
        return (
            self._response(status)
            | {"completed_at": completed_at, "output": self._items(output, status)}
            | details
        )

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        usage = {
            "input_tokens": bill.input_token_count,
            "input_tokens_details": {
                "cached_tokens": bill.cached_input_token_count,
                "cache_write_tokens": 0,
            },
            "output_tokens": bill.output_token_count,
            "output_tokens_details": {"reasoning_tokens": bill.reasoning_token_count},
            "total_tokens": bill.input_token_count + bill.output_token_count,
        }
        return {"error": None, "usage": usage, "weir": bill.extension(outputs)}

    def _items(self, output: Output, status: str) -> list[dict[str, Any]]:
        """Build the items of a response. `status` is the last item's; others are completed."""
        parts = output.parts or [None]
        statuses = ["completed"] * (len(parts) - 1) + [status]
        return [
            self._message(each, [self._text(output.text, output.logprobs)])
            if position is None
            else self._thought_item(position, output.thought(position), each)
            if position < 0
            else self._call(position, output, each)
            for position, each in zip(parts, statuses, strict=True)
        ]

    # Events of thoughts.

    def _thought_position(self, part: int) -> dict[str, Any]:
        item_id = f"rs_{self._answer_id}_{-part}"
        return {"item_id": item_id, "output_index": self._open.index(part), "content_index": 0}

    def _begin_thought(self, part: int) -> bytes:
        self._open.append(part)
        self._open_thought = part
        position = self._open.index(part)
        item = self._thought_item(part, None, "in_progress")
        begun = self._event("response.output_item.added", item=item, output_index=position)
        empty = {"type": REASONING_TEXT, "text": ""}
        return begun + self._event(
            "response.content_part.added", part=empty, **self._thought_position(part)
        )

    def _end_thought(self, output: Output, status: str) -> bytes:
        """Encode the end of the open thought as events; empty if no thought is open."""
        part, self._open_thought = self._open_thought, None
        if part is None:
            return b""
        text, position = output.thought(part), self._thought_position(part)
        whole = {"type": REASONING_TEXT, "text": text}
        item = self._thought_item(part, text, status)
        return b"".join(
            (
                self._event("response.reasoning_text.done", text=text, **position),
                self._event("response.content_part.done", part=whole, **position),
                self._event(
                    "response.output_item.done", item=item, output_index=position["output_index"]
                ),
            )
        )

    def _thought_item(self, part: int, text: str | None, status: str) -> dict[str, Any]:
        """Build a reasoning item. `text` is None before the thought has any text."""
        return {
            "id": f"rs_{self._answer_id}_{-part}",
            "type": "reasoning",
            "summary": [],
            "content": [] if text is None else [{"type": REASONING_TEXT, "text": text}],
            "status": status,
        }

    # Events of the text.

    @property
    def _item_id(self) -> str:
        return f"msg_{self._answer_id}"

    @property
    def _part(self) -> dict[str, Any]:
        return {
            "item_id": self._item_id,
            "output_index": self._open.index(None),
            "content_index": 0,
        }

    def _begin_text(self) -> bytes:
        self._open.append(None)
        item = self._message("in_progress", [])
        begun = self._event(
            "response.output_item.added", item=item, output_index=self._open.index(None)
        )
        return begun + self._event(
            "response.content_part.added", part=self._text("", ()), **self._part
        )

    def _end_text(self, output: Output, body: dict[str, Any]) -> bytes:
        position = self._open.index(None)
        text = self._text(output.text, output.logprobs)
        logprobs = self._texts.content(output.logprobs)
        return b"".join(
            (
                self._event(
                    "response.output_text.done", text=output.text, logprobs=logprobs, **self._part
                ),
                self._event("response.content_part.done", part=text, **self._part),
                self._event(
                    "response.output_item.done",
                    item=body["output"][position],
                    output_index=position,
                ),
            )
        )

    # Events of tool calls.

    def _call_id(self, number: int) -> str:
        return f"fc_{self._answer_id}_{number}"

    def _position(self, number: int) -> dict[str, Any]:
        return {"item_id": self._call_id(number), "output_index": self._open.index(number)}

    def _begin_call(self, call: Call, number: int) -> bytes:
        self._open.append(number)
        item = self._call_item(number, Call(call.id, call.name), "in_progress")
        return self._event(
            "response.output_item.added", item=item, output_index=self._open.index(number)
        )

    def _end_calls(self, output: Output, count: int) -> bytes:
        """Encode the end of the first `count` calls as events, except those sent before."""
        events = []
        status = (
            "incomplete"
            if output.finish_reason in INCOMPLETE and self._open and is_call(self._open[-1])
            else "completed"
        )
        for number in range(self._done_count, count):
            call, position = output.calls[number], self._position(number)
            events.append(
                self._event(
                    "response.function_call_arguments.done",
                    name=self._members.get(call.name, ("", call.name))[1],
                    arguments=call.arguments,
                    **position,
                )
            )
            item = self._call_item(
                number, call, status if number == self._open[-1] else "completed"
            )
            events.append(
                self._event(
                    "response.output_item.done", item=item, output_index=position["output_index"]
                )
            )
        self._done_count = max(self._done_count, count)
        return b"".join(events)

    def _call(self, number: int, output: Output, status: str) -> dict[str, Any]:
        return self._call_item(number, output.calls[number], status)

    def _call_item(self, number: int, call: Call, status: str) -> dict[str, Any]:
        space, name = self._members.get(call.name, ("", call.name))
        item = {
            "id": self._call_id(number),
            "type": "function_call",
            "call_id": call.id,
            "name": name,
            "arguments": call.arguments,
            "status": status,
        }
        return item | ({"namespace": space} if space else {})

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._event_count
        self._event_count += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _text(self, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entries = self._texts.content(logprobs) if self._wants_logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}

    def _response(self, status: str) -> dict[str, Any]:
        """Build the response object with the requested parameters.

        Error and usage are left out; in a complete response, `tail` has them.
        """
        requested, sampling = self._parameters, self._sampling
        effort = summary = None
        if requested.reasoning is not None:
            effort = requested.reasoning.effort
            if str(requested.reasoning.summary) in SUMMARIES:
                summary = requested.reasoning.summary
        return {
            "id": f"resp_{self._answer_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "model": requested.model,
            "output": [],
            "incomplete_details": None,
            "instructions": requested.instructions,
            "max_output_tokens": requested.max_output_tokens,
            "max_tool_calls": requested.max_tool_calls,
            "metadata": requested.metadata or {},
            "parallel_tool_calls": requested.parallel_tool_calls is not False,
            "previous_response_id": None,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "reasoning": {"effort": effort, "summary": summary},
            "service_tier": tier_name(self._parsed.starts[0]),
            "store": False,
            "background": False,
            "temperature": (
                sampling.temperature if requested.temperature is None else requested.temperature
            ),
            "text": {
                "format": echoed_format(None if requested.text is None else requested.text.format),
                "verbosity": "medium",
            },
            "tool_choice": echoed_tool_choice(requested.tool_choice),
            "tools": echoed_tools(requested.tools),
            "top_logprobs": requested.top_logprobs or 0,
            "top_p": sampling.top_p if requested.top_p is None else requested.top_p,
            "truncation": requested.truncation or "disabled",
            "user": requested.user,
            "safety_identifier": requested.safety_identifier,
            "prompt_cache_key": requested.prompt_cache_key,
        }
