"""Answers of OpenAI's chat, completion and response requests, whole or as events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate
from typing import Any

import msgspec
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.openai.parameters import (
    Asked,
    ResponseParameters,
    as_given,
    choice_as_given,
    tier_name,
    tools_as_given,
    wants_logprobs,
)
from api.openai.refusals import Refusal
from inference.text.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0  # OpenAI's number for what cannot happen; JSON has none for it
DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"  # a comment: whoever reads events skips it, and whatever stands between sees that the connection lives

# Why an output ended, in OpenAI's words. A quota or a limit of cost that ran out cuts it like a limit of length.
FINISH_REASONS: Mapping[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_STOP_SEQUENCE: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_QUOTA_EXHAUSTED: "length",
    types_pb2.FINISH_REASON_COST_LIMIT: "length",
    types_pb2.FINISH_REASON_FILTERED: "content_filter",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

# By their names in the contract, without its prefix.
REASON_NAMES: Mapping[int, str] = {number: name.removeprefix("FINISH_REASON_") for name, number in types_pb2.FinishReason.items()}

# What clients split lines at although it is no line end of an event stream; JSON may escape any of it.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # those that OpenAI's clients know; the rest is the server's
CONTENT = b'"content":'  # what the text of a chat stands behind in most of its events


class TokenTexts:
    """The tokens of one model as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """A token's text; what is only a part of a character is written as replacement characters."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def one(self, token: pb.TokenLogprob) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token.token_id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": max(token.logprob, LOGPROB_MIN)}

    def content(self, logprobs: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any]]:
        return [self.one(each.chosen) | {"top_logprobs": [self.one(token) for token in each.top]} for each in logprobs]

    def columns(self, logprobs: Sequence[pb.TokenLogprobs], first_offset: int) -> dict[str, Any]:
        """As plain completions have it. first_offset: characters of the output before these tokens."""
        texts = [self.text(each.chosen.token_id) for each in logprobs]
        offsets = list(accumulate(map(len, texts), initial=first_offset))
        return {
            "tokens": texts,
            "token_logprobs": [max(each.chosen.logprob, LOGPROB_MIN) for each in logprobs],
            "top_logprobs": [self._likeliest(each.top) for each in logprobs],
            "text_offset": offsets[:-1],
        }

    def _likeliest(self, tokens: Sequence[pb.TokenLogprob]) -> dict[str, float]:
        return {self.text(token.token_id): max(token.logprob, LOGPROB_MIN) for token in tokens}


@dataclass(slots=True)
class Call:
    """One call of a tool, as far as it was told."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Output:
    """One choice of one prompt so far. index: among all choices of the answer. places: of its parts, as they have begun.

    A part is a call, by its number, or all of the text.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, delta: pb.DeltaFrame) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.text and None not in self.places:
            self.places.append(None)
        for piece in delta.tool_calls:
            if piece.id:
                self.places.append(len(self.calls))
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].pieces.append(piece.arguments_json)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS.get(self.reason, "stop")


@dataclass(slots=True)
class Bill:
    """What an answer comes to, over all of its requests: exactly what their usage events say. Amounts in picos."""

    input_token_count: int = 0
    cached_input_token_count: int = 0
    output_token_count: int = 0
    cost_picos: int = 0
    currency_code: str = ""
    price_version: int = 0
    request_ids: list[str] = field(default_factory=list)  # in the order of the prompts

    def add(self, usage: types_pb2.Usage, cost: types_pb2.Money) -> None:
        """Count a request that has ended."""
        self.input_token_count += usage.input_token_count
        self.cached_input_token_count += usage.cached_input_token_count
        self.output_token_count += usage.billed_token_count
        self.cost_picos += wire.picos_of(cost)
        self.currency_code = cost.currency_code

    def completion_usage(self) -> dict[str, Any]:
        """Usage as chat and plain completions tell it."""
        return {
            "prompt_tokens": self.input_token_count,
            "completion_tokens": self.output_token_count,
            "total_tokens": self.input_token_count + self.output_token_count,
            "prompt_tokens_details": {"cached_tokens": self.cached_input_token_count},
            "completion_tokens_details": {"reasoning_tokens": 0},  # thinking is text of the answer
        }

    def extension(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """What OpenAI has no field for: the exact cost, the price it comes from, and how each output really ended."""
        return {
            "cost": cost_facts(self.currency_code, self.cost_picos),
            "price_version": self.price_version,
            "request_ids": self.request_ids,
            "finish_reasons": [REASON_NAMES[output.reason] for output in outputs],
        }


def cost_facts(currency_code: str, picos: int) -> dict[str, Any]:
    """An exact amount, for people and for programs."""
    return {"currency_code": currency_code, "amount": f"{Decimal(picos).scaleb(-12).normalize():f}", "picos": picos}


def encode(value: Any) -> bytes:
    """JSON that every reader of lines leaves whole."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode(value) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


class Answer:
    """One API's way of saying what an exchange brings: as events, or as one body.

    Chat and plain completions have in common that each choice ends with its reason, and that the last event tells the bill.
    """

    streams_done = True
    tells_all_again = False  # whether the end of a stream repeats all of its output
    chunk_kind = ""

    def __init__(self, asked: Asked, texts: TokenTexts, common: dict[str, Any]) -> None:
        """common: what every event and the body say."""
        self._asked = asked
        self._texts = texts
        self._wants_logprobs = asked.starts[0].HasField("top_logprobs")
        self._common = common
        self._chunk_head = b"data: " + encode({"object": self.chunk_kind, **common})[:-1] if asked.streams else b""
        self._chunk_tail = b',"usage":null}\n\n' if asked.includes_usage else b"}\n\n"

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """Events before the first output."""
        return b""

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        """Events of new output, which `output` has already."""
        raise NotImplementedError

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        extension = {"weir": bill.extension(outputs)}
        last = [self._last_choice(output) for output in outputs]
        if not self._asked.includes_usage:
            return self._chunk(last, extension)
        return self._chunk(last) + self._chunk([], {"usage": bill.completion_usage()} | extension)

    def _last_choice(self, output: Output) -> dict[str, Any]:
        raise NotImplementedError

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """Events of an answer that broke after it had begun."""
        return event(refusal.body())

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer in one piece, without what `tail` says."""
        raise NotImplementedError

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """What is known only when everything is settled."""
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def _chunk(self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        """One event. more: fields beside those of every event, and instead of a usage of null."""
        if more is None:
            return b"".join((self._chunk_head, b',"choices":', encode(choices), self._chunk_tail))
        return b"".join((self._chunk_head, b",", encode({"choices": choices, **more})[1:], b"\n\n"))


class ChatAnswer(Answer):
    """One chat completion."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        common = {"id": f"chatcmpl-{answer_id}", "created": created, "model": asked.model}
        super().__init__(asked, texts, common | {"service_tier": tier_name(asked.starts[0]), "system_fingerprint": None})
        self._plain_chunks: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, outputs: Sequence[Output]) -> bytes:
        events: list[bytes] = []
        for output in outputs:
            before, after = self._plain_chunk(output.index)
            events += (before.removesuffix(CONTENT), b'"role":"assistant","content":"","refusal":null', after)
        return b"".join(events)

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        if not new.logprobs and not new.tool_calls:
            before, after = self._plain_chunk(output.index)
            return b"".join((before, encode(new.text), after))
        told = self._logprobs(new.logprobs) if new.logprobs else None
        said: dict[str, Any] = {"content": new.text} if new.text or not new.tool_calls else {}
        if new.tool_calls:
            said["tool_calls"] = [_call_delta(piece) for piece in new.tool_calls]
        return self._chunk([_chat_choice(output.index, said, logprobs=told)])

    def _plain_chunk(self, index: int) -> tuple[bytes, bytes]:
        """The event of a piece of text, up to the text and after it: all but that is the same for every token of a choice."""
        if (found := self._plain_chunks.get(index)) is None:
            before = b'%b,"choices":[{"index":%d,"delta":{%b' % (self._chunk_head, index, CONTENT)
            after = b'},"logprobs":null,"finish_reason":null}]' + self._chunk_tail
            found = self._plain_chunks[index] = before, after
        return found

    def _last_choice(self, output: Output) -> dict[str, Any]:
        return _chat_choice(output.index, {}, finish_reason=output.finish_reason)

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": output.index,
                "message": _message(output),
                "logprobs": self._logprobs(output.logprobs) if self._wants_logprobs else None,
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]
        return {"object": "chat.completion", **self._common, "choices": choices}

    def _logprobs(self, logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        return {"content": self._texts.content(logprobs), "refusal": None}


def _chat_choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _message(output: Output) -> dict[str, Any]:
    """A whole turn. One that is nothing but calls has no text, not an empty one."""
    content = None if output.calls and not output.text else output.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if output.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.calls
        ]
    return message


def _call_delta(piece: pb.ToolCallDelta) -> dict[str, Any]:
    """More of one call: what it is with its first piece, and later nothing but arguments."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments_json}}
    function = {"name": piece.name, "arguments": piece.arguments_json}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class CompletionAnswer(Answer):
    """One plain completion of one or more prompts."""

    chunk_kind = "text_completion"

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        common = {"id": f"cmpl-{answer_id}", "created": created, "model": asked.model, "system_fingerprint": None}
        super().__init__(asked, texts, common)
        self._offsets: Counter[int] = Counter()  # characters of the tokens so far, by choice

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        told = None
        if new.logprobs:
            told = self._texts.columns(new.logprobs, self._offsets[output.index])
            self._offsets[output.index] += sum(map(len, told["tokens"]))
        return self._chunk([_completion_choice(output.index, new.text, told, None)])

    def _last_choice(self, output: Output) -> dict[str, Any]:
        return _completion_choice(output.index, "", None, output.finish_reason)

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = [
            _completion_choice(
                output.index,
                output.text,
                self._texts.columns(output.logprobs, 0) if self._wants_logprobs else None,
                output.finish_reason,
            )
            for output in outputs
        ]
        return {"object": self.chunk_kind, **self._common, "choices": choices}


def _completion_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ResponseAnswer(Answer):
    """One response: a message of one text and any number of calls, each an item in the order in which they have begun."""

    streams_done = False
    tells_all_again = True

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        super().__init__(asked, texts, {})
        self._given: ResponseParameters = asked.given
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
