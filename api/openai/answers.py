"""Responses of OpenAI's chat and completion APIs, as one body or as events; and the common base of
all APIs: the output so far, the bill, and the interface that an exchange uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Raw
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.generation.delivery.delta import Delta
from api.openai.error_responses import ErrorResponse
from api.openai.parameters import ParsedRequest, tier_name
from api.openai.token_texts import Columns, TokenLogprobs, TokenTexts, by_ids
from inference.engine import SamplingParams, StoppedBy
from inference.text.call_parser import CallPiece
from inference.text.tokenizer import TokenSpans

DONE = b"data: [DONE]\n\n"
# Event-stream comment, which clients skip and which keeps proxies from closing the connection.
PING = b": waiting\n\n"

# OpenAI's finish reasons. An exhausted quota or cost limit counts as a length limit.
FINISH_REASONS: Mapping[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_STOP_SEQUENCE: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_QUOTA_EXHAUSTED: "length",
    types_pb2.FINISH_REASON_COST_LIMIT: "length",
    types_pb2.FINISH_REASON_FILTERED: "content_filter",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

# Names of the gRPC API without their prefix.
REASON_NAMES: Mapping[int, str] = {
    number: name.removeprefix("FINISH_REASON_") for name, number in types_pb2.FinishReason.items()
}

# Characters that some clients take for line ends; JSON may escape them.
LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
# Of `weir.v1.Timings`: how fast the answer came, for each prompt.
PACE_FIELDS = (
    "ttft_ms",
    "tokens_per_second",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "client_stall_ms",
    "total_ms",
)
CHOICES = b',"choices":'  # precedes the choices in the events of a chat
CONTENT = b'"content":'  # precedes the text in most events of a chat


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of the model that answers.

    `fingerprint` identifies its weights and engine. `sampling` has its default parameters.
    """

    texts: TokenTexts
    fingerprint: str
    sampling: SamplingParams


@dataclass(slots=True)
class Call:
    """Tool call, as far as it has been generated."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Output:
    """Output of one choice so far. `index` counts the choices of all prompts of the response.

    `parts` lists the parts in the order in which they began: the number of a tool call, None for
    the text, or -1, -2 and so on for thoughts. `input_token_count` is the prompt's, `token_count`
    the number of tokens sent so far. `prompt_token_ids` and `token_ids` are set if the answer shows
    them. `stopped_by` is the stop sequence or token of the request that ended the output.
    """

    index: int
    input_token_count: int = 0
    token_count: int = 0
    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    thoughts: list[list[str]] = field(default_factory=list)
    parts: list[int | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_token_ids: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    timings: types_pb2.Timings | None = None  # of its prompt, with the first choice
    stopped_by: StoppedBy = None

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            if not (self.parts and is_thought(self.parts[-1])):
                self.thoughts.append([])
                self.parts.append(-len(self.thoughts))
            self.thoughts[-1].append(delta.reasoning)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        if delta.text and None not in self.parts:
            self.parts.append(None)
        for piece in delta.calls:
            if piece.id:
                self.parts.append(len(self.calls))
                self.calls.append(Call(piece.id, piece.name))
            self.calls[piece.index].pieces.append(piece.arguments)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """Text of all thoughts."""
        return "".join(piece for pieces in self.thoughts for piece in pieces)

    def thought(self, part: int) -> str:
        """Return the text of one thought, by its number in `parts`."""
        return "".join(self.thoughts[-part - 1])

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS.get(self.reason, "stop")


def is_call(part: int | None) -> bool:
    """Return whether an entry of `Output.parts` is a tool call."""
    return part is not None and part >= 0


def is_thought(part: int | None) -> bool:
    """Return whether an entry of `Output.parts` is a thought."""
    return part is not None and part < 0


@dataclass(slots=True)
class Bill:
    """Usage and cost of a response: the sums over its requests. Amounts are in picos."""

    input_token_count: int = 0
    cached_input_token_count: int = 0
    output_token_count: int = 0
    reasoning_token_count: int = 0  # part of the output
    cost_picos: int = 0
    currency_code: str = ""
    price_version: int = 0
    requested_model: str = ""  # if its fallback has taken the request
    request_ids: list[str] = field(default_factory=list)  # in the order of the prompts

    def add(self, usage: types_pb2.Usage, cost: types_pb2.Money) -> None:
        """Add the usage and the cost of a request that has ended."""
        self.input_token_count += usage.input_token_count
        self.cached_input_token_count += usage.cached_input_token_count
        self.output_token_count += usage.billed_token_count
        self.reasoning_token_count += usage.reasoning_token_count
        self.cost_picos += wire.picos_of(cost)
        self.currency_code = cost.currency_code

    def completion_usage(self) -> dict[str, Any]:
        """Build the usage object of chat and plain completions."""
        return {
            "prompt_tokens": self.input_token_count,
            "completion_tokens": self.output_token_count,
            "total_tokens": self.input_token_count + self.output_token_count,
            "prompt_tokens_details": {"cached_tokens": self.cached_input_token_count},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_token_count},
        }

    def extension(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Build the `weir` object: fields that OpenAI's API lacks, such as the exact cost."""
        requested = {"requested_model": self.requested_model} if self.requested_model else {}
        return requested | {
            "cost": cost_facts(self.currency_code, self.cost_picos),
            "price_version": self.price_version,
            "request_ids": self.request_ids,
            "finish_reasons": [REASON_NAMES[output.reason] for output in outputs],
            "stop_reasons": [output.stopped_by for output in outputs],
            "timings": [
                {name: round(getattr(each.timings, name), 3) for name in PACE_FIELDS}
                for each in outputs
                if each.timings is not None
            ],
        }


def cost_facts(currency_code: str, picos: int) -> dict[str, Any]:
    """Convert an amount to JSON: as exact decimal text and in picos."""
    return {
        "currency_code": currency_code,
        "amount": f"{Decimal(picos).scaleb(-12).normalize():f}",
        "picos": picos,
    }


def encode(value: Any) -> bytes:
    """Encode as JSON, escaping characters that some clients treat as line ends."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode(value) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


class Answer(ABC):
    """Converts the output of requests to the responses of one API, as events or as one body."""

    streams_done = True
    repeats_output = False  # whether the end of a stream repeats the entire output
    ping = PING  # event that keeps a silent stream alive

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        self._parsed = parsed
        self._texts = model.texts
        self._wants_logprobs = parsed.starts[0].HasField("top_logprobs")

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """Encode the events before the first output."""
        return b""

    def kept(self, new: Delta) -> Delta:
        """Remove output that the responses of this API cannot represent."""
        return new

    @abstractmethod
    def delta(self, output: Output, new: Delta) -> bytes:
        """Encode new output as events. `output` already includes it."""

    def token(self, output: Output, text: str) -> bytes:
        """Encode the text of one token as `delta` does. `output` already includes it."""
        return self.delta(output, Delta(text))

    def choice_ended(self, output: Output) -> bytes:
        """Encode the end of one of several choices as events. May be called again."""
        return b""

    @abstractmethod
    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """Encode the last events, with the usage."""

    def failure(self, refusal: ErrorResponse, outputs: Sequence[Output]) -> bytes:
        """Encode a failure after the response has begun as events."""
        return event(self.error_body(refusal))

    def error_body(self, refusal: ErrorResponse, request_id: str = "") -> dict[str, Any]:
        """Build the body of an error response."""
        return refusal.body(request_id)

    @abstractmethod
    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Build the body, without the fields of `tail`."""

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """Build the fields of the body that are known only after settlement."""
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def failed_tail(self, outputs: Sequence[Output], refusal: ErrorResponse) -> dict[str, Any]:
        """Build the fields of `tail` for output that is complete but could not be settled."""
        return {"usage": None, **refusal.body()}


class ChunkAnswer(Answer):
    """Base of chat and plain completions, each of whose events belongs to one choice.

    A choice ends with an event that has its finish reason; the last event has usage and cost.
    """

    chunk_kind = ""

    def __init__(self, parsed: ParsedRequest, model: ServedModel, common: dict[str, Any]) -> None:
        """`common` has the fields of every event and of the body."""
        super().__init__(parsed, model)
        self._common = common
        self._open_count = len(parsed.starts) * parsed.choice_count
        self._ended: set[int] = set()  # choices whose end was sent
        # Number of a prompt, and the members of a choice with its tokens
        self._shown_prompt: tuple[int, dict[str, Any]] = (-1, {})
        self._chunk_head = (
            b"data: " + encode({"object": self.chunk_kind, **common})[:-1]
            if parsed.streams
            else b""
        )
        self._chunk_tail = b',"usage":null}\n\n' if parsed.includes_usage else b"}\n\n"

    @abstractmethod
    def _last_choice(self, output: Output) -> dict[str, Any]:
        """Build the choice object that ends a choice."""

    def choice_ended(self, output: Output) -> bytes:
        """Implement `Answer.choice_ended`; the last choice ends with `closing`."""
        if output.index in self._ended or self._open_count == 1:
            return b""
        self._ended.add(output.index)
        self._open_count -= 1
        return self._new_chunk(output, self._last_choice(output))

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Build the field with the token ids of a choice, if the answer shows them."""
        return {"token_ids": list(token_ids)} if self._parsed.shows_token_ids else {}

    def _prompt_tokens(self, output: Output) -> dict[str, Any]:
        """Build the fields with the tokens of the prompt that the answer shows, as JSON.

        They are encoded once for all choices of a prompt.
        """
        index = output.index // self._parsed.choice_count
        if self._shown_prompt[0] != index:
            shown: dict[str, Any] = {}
            if self._parsed.prompt_logprobs is not None:
                shown["prompt_logprobs"] = self._texts.of_prompt(output.prompt_logprobs)
            if self._parsed.shows_token_ids:
                shown["prompt_token_ids"] = list(output.prompt_token_ids)
            as_json = {name: Raw(encode(value)) for name, value in shown.items()}
            self._shown_prompt = index, as_json
        return self._shown_prompt[1]

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        before = [self.choice_ended(output) for output in outputs]
        [last] = [output for output in outputs if output.index not in self._ended]
        extension = {"weir": bill.extension(outputs)}
        if not self._parsed.includes_usage:
            events = [self._chunk([self._last_choice(last)], extension)]
        else:
            usage = {"usage": bill.completion_usage()}
            events = [
                self._new_chunk(last, self._last_choice(last)),
                self._chunk([], usage | extension),
            ]
        return b"".join((*before, *events))

    def _end_of(self, output: Output, *, has_begun: bool = True) -> bytes:
        """Encode the end of an event, with usage if requested. `has_begun`: there is output."""
        if not self._parsed.repeats_usage:
            return self._chunk_tail
        count, new_count = output.input_token_count, output.token_count if has_begun else 0
        return b',"usage":%b}\n\n' % encode(
            {
                "prompt_tokens": count,
                "completion_tokens": new_count,
                "total_tokens": count + new_count,
            }
        )

    def _new_chunk(self, output: Output, choice: dict[str, Any]) -> bytes:
        """Encode one event with new output."""
        return b"".join(
            (self._chunk_head, b',"choices":[', encode(choice), b"]", self._end_of(output))
        )

    def _chunk(
        self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None
    ) -> bytes:
        """Encode one event. `more` adds fields and replaces `"usage": null`."""
        if more is None:
            return b"".join((self._chunk_head, b',"choices":', encode(choices), self._chunk_tail))
        return b"".join((self._chunk_head, b",", encode({"choices": choices, **more})[1:], b"\n\n"))


class ChatAnswer(ChunkAnswer):
    """Responses of chat completions."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """`answer_id` is hexadecimal. `created` is in seconds since 1970."""
        common = {
            "id": f"chatcmpl-{answer_id}",
            "created": created,
            "model": parsed.model,
            "service_tier": tier_name(parsed.starts[0]),
            "system_fingerprint": model.fingerprint,
        }
        super().__init__(parsed, model, common)
        self._plain_chunks: dict[int, tuple[bytes, bytes]] = {}
        # Text of the message that is continued, if the answer repeats it
        self._begun = parsed.starts[0].conversation.messages[-1].content if parsed.echoes else ""

    def opening(self, outputs: Sequence[Output]) -> bytes:
        events: list[bytes] = []
        for output in outputs:
            before, after = self._plain_chunk(output.index)
            before = before.removesuffix(CONTENT)
            if self._parsed.shows_token_ids:
                shown = encode(self._prompt_tokens(output))[1:-1]
                before = before.replace(CHOICES, b",%b%b" % (shown, CHOICES), 1)
            events += (
                before,
                b'"role":"assistant","content":%b,"refusal":null' % encode(self._begun),
                after,
                self._end_of(output, has_begun=False),
            )
        return b"".join(events)

    def delta(self, output: Output, new: Delta) -> bytes:
        if not (new.logprobs or new.calls or new.reasoning or new.token_ids):
            return self.token(output, new.text)
        logprobs = self._logprobs(new.logprobs) if new.logprobs else None
        delta: dict[str, Any] = {}
        if new.reasoning:
            delta |= _reasoning(new.reasoning)
        if new.text or not (new.calls or new.reasoning):
            delta["content"] = new.text
        # One call in each event: many clients read only the first one.
        first, *others = [{"tool_calls": [_call_delta(piece)]} for piece in new.calls] or [{}]
        choice = _chat_choice(output.index, delta | first, logprobs=logprobs)
        events = [choice | self._token_ids(new.token_ids)]
        events += [_chat_choice(output.index, each) for each in others]
        return b"".join(self._new_chunk(output, each) for each in events)

    def token(self, output: Output, text: str) -> bytes:
        before, after = self._plain_chunks.get(output.index) or self._plain_chunk(output.index)
        end = self._end_of(output) if self._parsed.repeats_usage else self._chunk_tail
        return b"".join((before, encode(text), after, end))

    def _plain_chunk(self, index: int) -> tuple[bytes, bytes]:
        """Encode the parts of an event around its text, which all tokens of a choice share."""
        if (chunk := self._plain_chunks.get(index)) is None:
            before = b'%b,"choices":[{"index":%d,"delta":{%b' % (self._chunk_head, index, CONTENT)
            after = b'},"logprobs":null,"finish_reason":null}]'
            chunk = self._plain_chunks[index] = before, after
        return chunk

    def _last_choice(self, output: Output) -> dict[str, Any]:
        choice = _chat_choice(output.index, {}, finish_reason=output.finish_reason)
        return choice | {"stop_reason": output.stopped_by} | self._token_ids(())

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": output.index,
                "message": _message(output, self._begun),
                "logprobs": self._logprobs(output.logprobs) if self._wants_logprobs else None,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stopped_by,
                **self._token_ids(output.token_ids),
            }
            for output in outputs
        ]
        shown = {"choices": choices, **self._prompt_tokens(outputs[0])}
        return {"object": "chat.completion", **self._common, **shown}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        by_id = self._parsed.names_tokens_by_id
        return {"content": self._texts.content(logprobs, by_id=by_id), "refusal": None}


def _chat_choice(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _message(output: Output, begun: str) -> dict[str, Any]:
    """Build a whole message.

    Its content is null if it has only calls or thoughts. `begun` is text that precedes the output.
    """
    content = begun + output.text or (None if output.parts else "")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": [],
    }
    if output.thoughts:
        message |= _reasoning(output.reasoning)
    if output.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in output.calls
        ]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Build the fields for thinking, under the names of SGLang and DeepSeek, and of vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    """Build the delta of a call: id and name with the first piece, later only arguments."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class CompletionAnswer(ChunkAnswer):
    """Responses of plain completions of one or more prompts."""

    chunk_kind = "text_completion"

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """`answer_id` is hexadecimal. `created` is in seconds since 1970."""
        common = {
            "id": f"cmpl-{answer_id}",
            "created": created,
            "model": parsed.model,
            "system_fingerprint": model.fingerprint,
        }
        super().__init__(parsed, model, common)
        self._positions: dict[int, TokenSpans] = {}  # of streams, by choice
        self._begun: set[int] = set()  # choices whose first event showed the tokens of the prompt
        self._prompt_chars: dict[int, int] = {}  # of echoed prompts, by number

    def delta(self, output: Output, new: Delta) -> bytes:
        columns, prompt = None, self._prompt_event(output)
        if new.logprobs:
            if (offsets := self._positions.get(output.index)) is None:
                offsets = self._texts.spans_after(self._start_of(output))
                self._positions[output.index] = offsets
            columns = self._texts.columns(new.logprobs, offsets, is_whole=False)
            if self._parsed.echoes:
                length = self._prompt_chars[output.index // self._parsed.choice_count]
                columns.text_offset = [length + offset for offset in columns.text_offset]
            if self._parsed.names_tokens_by_id:
                columns = by_ids(columns, new.logprobs)
        choice = _completion_choice(output.index, new.text, columns, None)
        return prompt + self._new_chunk(output, choice | self._token_ids(new.token_ids))

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        prompts = [self._prompt_event(output) for output in outputs]
        return b"".join((*prompts, super().closing(outputs, bill)))

    def _prompt_event(self, output: Output) -> bytes:
        """Encode the parts of the prompt that the answer shows as an event, once per choice."""
        shows = self._parsed.echoes or self._parsed.shows_token_ids
        if not shows or output.index in self._begun:
            return b""
        self._begun.add(output.index)
        text, columns = "", None
        if self._parsed.echoes:
            text = self._texts.prompt_text(self._start_of(output))
            self._prompt_chars[output.index // self._parsed.choice_count] = len(text)
            columns = self._echoed(output, (), text) if self._wants_logprobs else None
            output.prompt_logprobs = []  # sent
        choice = _completion_choice(output.index, text, columns, None)
        return self._chunk([choice | self._prompt_tokens(output) | self._token_ids(())])

    def _echoed(self, output: Output, logprobs: Sequence[TokenLogprobs], text: str) -> Columns:
        """Build the columns for the tokens of a prompt, whose text is `text`, and of output."""
        columns = self._texts.echoed(output.prompt_logprobs, logprobs, text)
        if self._parsed.names_tokens_by_id:
            return by_ids(columns, [*output.prompt_logprobs, *logprobs])
        return columns

    def _start_of(self, output: Output) -> pb.StartFrame:
        return self._parsed.starts[output.index // self._parsed.choice_count]

    def _last_choice(self, output: Output) -> dict[str, Any]:
        choice = _completion_choice(output.index, "", None, output.finish_reason)
        return choice | {"stop_reason": output.stopped_by} | self._token_ids(())

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = []
        for output in outputs:
            text, columns = output.text, None
            if self._parsed.echoes:
                prompt = self._texts.prompt_text(self._start_of(output))
                text = prompt + text
            if self._wants_logprobs and self._parsed.echoes:
                columns = self._echoed(output, output.logprobs, prompt)
            elif self._wants_logprobs:
                offsets = self._texts.spans_after(self._start_of(output))
                columns = self._texts.columns(output.logprobs, offsets, is_whole=True)
                if self._parsed.names_tokens_by_id:
                    columns = by_ids(columns, output.logprobs)
            choices.append(
                _completion_choice(output.index, text, columns, output.finish_reason)
                | {"stop_reason": output.stopped_by}
                | self._prompt_tokens(output)
                | self._token_ids(output.token_ids)
            )
        return {"object": self.chunk_kind, **self._common, "choices": choices}


def _completion_choice(
    index: int, text: str, logprobs: Columns | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
