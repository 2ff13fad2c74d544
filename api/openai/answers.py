"""Answers of OpenAI's chat and completion requests, whole or as events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate
from typing import Any, Protocol

import msgspec
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.openai.parameters import Asked, tier_name
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

# What clients split lines at although it is no line end of an event stream; JSON may escape any of it.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
MARK = "text"  # stands where the text will; after it comes nothing that a client has a say in


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
            "cost": cost_facts(wire.money(self.currency_code, self.cost_picos)),
            "price_version": self.price_version,
            "request_ids": self.request_ids,
            "finish_reasons": [reason_name(output.reason) for output in outputs],
        }


class Answer(Protocol):
    """One API's way of saying what an exchange brings: as events, or as one body."""

    streams_done: bool
    tells_all_again: bool  # whether the end of a stream repeats all of its output

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """Events before the first output."""
        ...

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        """Events of new output, which `output` has already."""
        ...

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes: ...

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """Events of an answer that broke after it had begun."""
        ...

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer in one piece, without what `tail` says."""
        ...

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """What is known only when everything is settled."""
        ...


def cost_facts(cost: types_pb2.Money) -> dict[str, Any]:
    """An exact amount, for people and for programs."""
    picos = wire.picos_of(cost)
    return {"currency_code": cost.currency_code, "amount": f"{Decimal(picos).scaleb(-12).normalize():f}", "picos": picos}


def encode(value: Any) -> bytes:
    """JSON that every reader of lines leaves whole."""
    data = msgspec.json.encode(value)
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode(value) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def reason_name(reason: types_pb2.FinishReason.ValueType) -> str:
    """A reason by its name in the contract, without its prefix."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")


class _Completion:
    """What chat and plain completions have in common: each choice ends with its reason, and the last event tells the bill."""

    streams_done = True
    tells_all_again = False
    chunk_kind: str

    def __init__(self, asked: Asked, texts: TokenTexts, common: dict[str, Any]) -> None:
        """common: what every event and the body say."""
        self._asked = asked
        self._texts = texts
        self._wants_logprobs = asked.starts[0].HasField("top_logprobs")
        self._common = common

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        extension = {"weir": bill.extension(outputs)}
        last = [self._last_choice(output) for output in outputs]
        if not self._asked.includes_usage:
            return self._chunk(last, extension)
        return self._chunk(last) + self._chunk([], {"usage": bill.completion_usage()} | extension)

    def _last_choice(self, output: Output) -> dict[str, Any]:
        raise NotImplementedError

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        return event(refusal.body())

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def _chunk(self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self._asked.includes_usage else {}
        return event({"object": self.chunk_kind, **self._common, "choices": choices, **usage, **(more or {})})


class ChatAnswer(_Completion):
    """One chat completion."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        common = {"id": f"chatcmpl-{answer_id}", "created": created, "model": asked.model}
        super().__init__(asked, texts, common | {"service_tier": tier_name(asked.starts[0]), "system_fingerprint": None})
        self._plain_chunks: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, outputs: Sequence[Output]) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk([_chat_choice(output.index, first)]) for output in outputs)

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
            before, _, after = self._chunk([_chat_choice(index, {"content": MARK})]).rpartition(encode(MARK))
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


class CompletionAnswer(_Completion):
    """One plain completion of one or more prompts."""

    chunk_kind = "text_completion"

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        common = {"id": f"cmpl-{answer_id}", "created": created, "model": asked.model, "system_fingerprint": None}
        super().__init__(asked, texts, common)
        self._offsets: Counter[int] = Counter()  # characters of the tokens so far, by choice

    def opening(self, outputs: Sequence[Output]) -> bytes:
        return b""

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
