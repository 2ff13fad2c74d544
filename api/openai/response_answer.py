"""Responses: a `response` object in one piece, or the numbered events of its making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai import formats
from api.openai.answers import Bill, Output, event
from api.openai.parameters import Asked, tier_name
from api.openai.refusals import Refusal
from api.openai.response_parameters import ResponseParameters, wants_logprobs
from api.openai.token_texts import TokenTexts

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # those that OpenAI's clients know; the rest is the server's
PART = {"output_index": 0, "content_index": 0}  # there is one message, and in it one text


class ResponseAnswer:
    """One response, which is one message of one text."""

    streams_done = False

    def __init__(self, asked: Asked, given: ResponseParameters, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        self._asked = asked
        self._given = given
        self._texts = texts
        self._answer_id = answer_id
        self._created = created
        self._wants_logprobs = wants_logprobs(given)
        self._event_count = 0

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        response = self._response("in_progress")
        started = {"item": self._message("in_progress", []), "output_index": 0}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", **started),
                self._event("response.content_part.added", item_id=self._item_id, part=self._text("", ()), **PART),
            )
        )

    def delta(self, output: Output, text: str, logprobs: Sequence[pb.TokenLogprobs]) -> bytes:
        """See `Answer`."""
        told = self._texts.content(logprobs)
        return self._event("response.output_text.delta", item_id=self._item_id, delta=text, logprobs=told, **PART)

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """See `Answer`."""
        [output] = outputs
        text = self._text(output.text, output.logprobs)
        body = self.body(outputs)
        told = self._texts.content(output.logprobs)
        return b"".join(
            (
                self._event("response.output_text.done", item_id=self._item_id, text=output.text, logprobs=told, **PART),
                self._event("response.content_part.done", item_id=self._item_id, part=text, **PART),
                self._event("response.output_item.done", item=body["output"][0], output_index=0),
                self._event(f"response.{body['status']}", response=body | self.tail(outputs, bill)),
            )
        )

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
        message = self._message(status, [self._text(output.text, output.logprobs)])
        return self._response(status) | told | {"output": [message]}

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

    @property
    def _item_id(self) -> str:
        return f"msg_{self._answer_id}"

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._event_count
        self._event_count += 1
        return event({"type": name, "sequence_number": number, **fields}, name)

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
            "parallel_tool_calls": bool(given.parallel_tool_calls),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": tier_name(self._asked.starts[0]),
            "store": False,
            "background": False,
            "temperature": given.temperature,
            "text": {"format": formats.as_given(None if given.text is None else given.text.format)},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": given.top_logprobs or 0,
            "top_p": given.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": given.user,
            "safety_identifier": given.safety_identifier,
            "prompt_cache_key": given.prompt_cache_key,
        }
