"""Responses: a `response` object in one piece, or the numbered events of its making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai import formats
from api.openai.answers import Bill, Call, Output, event
from api.openai.parameters import Asked, tier_name
from api.openai.refusals import Refusal
from api.openai.response_parameters import ResponseParameters, wants_logprobs
from api.openai.token_texts import TokenTexts
from api.openai.tools import choice_as_given, tools_as_given

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # those that OpenAI's clients know; the rest is the server's


class ResponseAnswer:
    """One response: a message of one text and any number of calls, each an item in the order in which they have begun."""

    streams_done = False
    tells_all_again = True

    def __init__(self, asked: Asked, given: ResponseParameters, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        self._asked = asked
        self._given = given
        self._texts = texts
        self._answer_id = answer_id
        self._created = created
        self._wants_logprobs = wants_logprobs(given)
        self._event_count = 0
        self._open: list[int | None] = []  # the items that events have begun, as `Output.places`
        self._done_count = 0  # of calls that events have ended

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """See `Answer`. Without tools it is known which items there will be."""
        response = self._response("in_progress")
        begun = self._event("response.created", response=response) + self._event("response.in_progress", response=response)
        return begun if self._asked.starts[0].tools else begun + self._begin_text()

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        """See `Answer`."""
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
        """See `Answer`."""
        [output] = outputs
        body = self.body(outputs)
        missing = b"" if self._open else self._begin_text()
        events = [missing, self._end_text(output, body) if None in self._open else b"", self._end_calls(output, len(output.calls))]
        return b"".join((*events, self._event(f"response.{body['status']}", response=body | self.tail(outputs, bill))))

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        code = FAILURE_CODES.get(refusal.http_status, "server_error")
        error = {"code": code, "message": refusal.message}
        response = self._response("failed") | {"error": error, "weir": dict(refusal.facts)}
        return self._event("response.failed", response=response)

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """See `Answer`."""
        [output] = outputs
        cut = INCOMPLETE.get(output.finish_reason)
        status = "completed" if cut is None else "incomplete"
        told = {"incomplete_details": None if cut is None else {"reason": cut}}
        return self._response(status) | told | {"output": self._items(output, status)}

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """See `Answer`."""
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
            "text": {"format": formats.as_given(None if given.text is None else given.text.format)},
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
