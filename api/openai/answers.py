"""Formats of the responses of OpenAI's chat, completion and responses APIs, whole or as events."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.generation.delivery.delta import Delta
from api.openai.history import REASONING_TEXT
from api.openai.parameters import (
    Namespaces,
    ParsedRequest,
    ResponseParameters,
    echoed_format,
    echoed_tool_choice,
    echoed_tools,
    tier_name,
    wants_logprobs,
)
from api.openai.refusals import Refusal
from inference import engine
from inference.engine import SamplingParams, StoppedBy
from inference.text.tokenizer import Place, Tokenizer, TokenPlaces
from inference.text.tools import CallPiece

# Of a prompt, which arrive in frames, or of output, which arrive as the engine gives them.
TokenLogprob = pb.TokenLogprob | engine.TokenLogprob
TokenLogprobs = pb.TokenLogprobs | engine.TokenLogprobs

LOGPROB_MIN = -9999.0  # OpenAI's value for probability 0: JSON has no infinity
DONE = b"data: [DONE]\n\n"
# Event-stream comment, which clients skip and which keeps proxies from closing the connection.
PING = b": waiting\n\n"  # a comment, which clients skip

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

# Names in the contract without their prefix.
REASON_NAMES: Mapping[int, str] = {
    number: name.removeprefix("FINISH_REASON_") for name, number in types_pb2.FinishReason.items()
}

# Characters that some clients take for line ends; JSON may escape them.
LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
SUMMARIES = frozenset({"auto", "concise", "detailed"})  # of reasoning, as responses repeat them
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Codes that OpenAI's clients know; all others become `server_error`.
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
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
UNDECIDED_TOKENS_MAX = 64  # whose text is held back; some 100 kB with all alternatives
CONTEXT_CHARS = 256  # of a prompt, that decide how its output begins
CACHED_TOKENS_MAX = 16_384  # whose text and bytes are kept
ALIGN_CHARS = 16  # that normalization may add to a token
CHOICES = b',"choices":'  # precedes the choices in the events of a chat
CONTENT = b'"content":'  # precedes the text in most events of a chat


@dataclass(slots=True)
class Columns:
    """Tokens of a plain completion: one entry of each list for each token.

    tokens: what each adds to the text: nothing for an end token and a part of a character, whose
    last part adds the character. text_offset: in code points of the text.
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


class TokenTexts:
    """Texts of the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text_and_bytes = lru_cache(CACHED_TOKENS_MAX)(self._find_text_and_bytes)

    def entry(self, token: TokenLogprob, *, by_id: bool = False) -> dict[str, Any]:
        """Return a token with its log-probability. by_id: name it by its id."""
        text, data = self._text_and_bytes(token.token_id)
        return {
            "token": named_by_id(token) if by_id else text,
            "bytes": data,
            "logprob": max(token.logprob, LOGPROB_MIN),
        }

    def _find_text_and_bytes(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), tuple(data)

    def content(
        self, logprobs: Sequence[TokenLogprobs], *, by_id: bool = False
    ) -> list[dict[str, Any]]:
        return [
            self.entry(each.chosen, by_id=by_id)
            | {"top_logprobs": [self.entry(token, by_id=by_id) for token in each.top]}
            for each in logprobs
        ]

    def of_prompt(
        self, logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Return the tokens of a prompt in vLLM's form: by id; None for the first, which has none.

        A rank counts from 1, the most likely token; that of a token beyond those is not known.
        """
        positions: list[dict[str, dict[str, Any]] | None] = [None] * min(len(logprobs), 1)
        for each in logprobs[1:]:
            top: Sequence[TokenLogprob] = each.top
            ranked = {token.token_id: rank for rank, token in enumerate(top, 1)}
            positions.append(
                {
                    str(token.token_id): {
                        "logprob": max(token.logprob, LOGPROB_MIN),
                        "rank": ranked.get(token.token_id),
                        "decoded_token": self._text_and_bytes(token.token_id)[0],
                    }
                    for token in (each.chosen, *top)
                }
            )
        return positions

    def span_of(
        self, text: str, logprobs: Sequence[TokenLogprobs], *, is_last: bool
    ) -> tuple[int, int]:
        """Return where the tokens of a text begin and end among others.

        is_last: it is at its last place among them, otherwise at its first.
        """
        sought, decoder = text.encode(), self._tokenizer.decoder
        parts = [
            b""  # control tokens, such as end tokens
            if decoder.token_text(each.chosen.token_id, True) == ""
            else self._tokenizer.token_bytes(each.chosen.token_id)
            for each in logprobs
        ]
        joined = b"".join(parts)
        begin = joined.rfind(sought) if is_last else joined.find(sought)
        ends = [*itertools.accumulate(map(len, parts))]
        return bisect_right(ends, begin), bisect_left(ends, begin + len(sought)) + (begin >= 0)

    def prompt_text(self, start: pb.StartFrame) -> str:
        """Return a plain prompt as text: as it was sent, or that of its tokens."""
        return start.text or self._tokenizer.decoder.text_of(tuple(start.token_ids.ids))

    def places_after(self, start: pb.StartFrame) -> TokenPlaces:
        """Open the places of the output of a plain prompt."""
        tail = start.text[-CONTEXT_CHARS:]
        ids = start.token_ids.ids or self._tokenizer.encode(tail, add_special_tokens=False)
        return self._tokenizer.decoder.places(tuple(ids))

    def columns(
        self, logprobs: Sequence[TokenLogprobs], places: TokenPlaces, *, is_whole: bool
    ) -> Columns:
        """Return output tokens in the form of plain completions. is_whole: no tokens follow."""
        return self._columns(logprobs, _placed(logprobs, places, is_whole=is_whole))

    def echoed(
        self,
        prompt_logprobs: Sequence[TokenLogprobs],
        logprobs: Sequence[TokenLogprobs],
        prompt: str,
    ) -> Columns:
        """Return the tokens of a prompt and of its output. prompt: its text."""
        decoder = self._tokenizer.decoder
        ids = tuple(each.chosen.token_id for each in prompt_logprobs)
        placed = _placed(prompt_logprobs, decoder.places(), is_whole=True)
        if decoder.text_of(ids) != prompt:
            controls = map(self._tokenizer.backend.id_to_token, ids)
            texts = [place.text for place in placed]
            bounds = [0, *aligned(prompt, texts, [*controls])[1:], len(prompt)]
            placed = [
                Place(prompt[start:end], start, place.follows)
                for place, (start, end) in zip(placed, itertools.pairwise(bounds), strict=True)
            ]
        placed += [
            place._replace(offset=place.offset + len(prompt))
            for place in _placed(logprobs, decoder.places(ids), is_whole=True)
        ]
        columns = self._columns([*prompt_logprobs, *logprobs], placed)
        # Nothing precedes the first token.
        columns.token_logprobs[:1] = [None]
        columns.top_logprobs[:1] = [None]
        return columns

    def _columns(
        self,
        logprobs: Sequence[TokenLogprobs],
        places: Sequence[Place],
    ) -> Columns:
        """Return the columns of tokens.

        Most likely tokens of equal text are named by their ids, except the token that is there.
        """
        columns = Columns()
        for place, each in zip(places, logprobs, strict=True):
            chosen = each.chosen
            top: dict[str, float] = {}
            for token in each.top:
                name = place.text
                if token.token_id != chosen.token_id:
                    name = self._name(token.token_id, place)
                    if name == place.text or name in top:
                        name = f"token_id:{token.token_id}"
                top[name] = max(token.logprob, LOGPROB_MIN)
            logprob = max(chosen.logprob, LOGPROB_MIN)
            top.setdefault(place.text, logprob)
            columns.tokens.append(place.text)
            columns.token_logprobs.append(logprob)
            columns.top_logprobs.append(top)
            columns.text_offset.append(place.offset)
        return columns

    def _name(self, token_id: int, place: Place) -> str:
        """Return the name of a token that could have been at this place."""
        text = self._tokenizer.decoder.token_text(token_id, place.follows)
        if text is None:  # a part of a character, as OpenAI spells it
            data = self._tokenizer.token_bytes(token_id)
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text or self._tokenizer.backend.id_to_token(token_id) or f"token_id:{token_id}"


def named_by_id(token: TokenLogprob) -> str:
    """Return the name of a token by its id, as vLLM spells it."""
    return f"token_id:{token.token_id}"


def by_ids(columns: Columns, logprobs: Sequence[TokenLogprobs]) -> Columns:
    """Return the columns with each token named by its id."""
    top = [
        {named_by_id(token): max(token.logprob, LOGPROB_MIN) for token in (*each.top, each.chosen)}
        for each in logprobs
    ]
    return replace(
        columns,
        tokens=[named_by_id(each.chosen) for each in logprobs],
        top_logprobs=[
            None if known is None else each
            for known, each in zip(columns.top_logprobs, top, strict=True)
        ],
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the model of an answer.

    fingerprint: of its weights and engine. sampling: its defaults.
    """

    texts: TokenTexts
    fingerprint: str
    sampling: SamplingParams


def _placed(
    logprobs: Sequence[TokenLogprobs], places: TokenPlaces, *, is_whole: bool
) -> list[Place]:
    placed = [places.add(each.chosen.token_id) for each in logprobs]
    if is_whole and placed:  # a torn character counts as the last token's
        placed[-1] = placed[-1]._replace(text=placed[-1].text + places.finish())
    return placed


def aligned(text: str, parts: Sequence[str], controls: Sequence[str | None]) -> list[int]:
    """Return where each token is in a text from which the tokens' own texts may differ.

    parts: texts of the tokens. controls: their names, which the text has for control tokens if it
    has them. A tokenizer may also normalize the text.
    """
    offsets, at = [], 0
    for part, control in zip(parts, controls, strict=True):
        offset, length = at, len(part)
        if not part and control and text.startswith(control, at):
            length = len(control)
        for each in (part, part.strip()):
            if each and (found := text.find(each, at, at + len(part) + ALIGN_CHARS)) >= 0:
                offset, length = found, len(each)
                break
        offsets.append(offset)
        at = min(offset + length, len(text))
    return offsets


@dataclass(slots=True)
class Call:
    """Tool call, as far as it was generated."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Output:
    """One choice of one prompt so far.

    index: among all choices of the response. parts: in the order in which they began: the number of
    a tool call, None for the text, or -1, -2 and so on for thoughts. input_token_count: of its
    prompt. token_count: sent so far. prompt_token_ids, token_ids: if the answer shows them.
    stopped_by: the stop of the request that ended it.
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
        """The text of all thoughts."""
        return "".join(piece for pieces in self.thoughts for piece in pieces)

    def thought(self, part: int) -> str:
        """Return the text of one thought, by its number in `parts`."""
        return "".join(self.thoughts[-part - 1])

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS.get(self.reason, "stop")


def _is_call(part: int | None) -> bool:
    return part is not None and part >= 0


def is_thought(part: int | None) -> bool:
    """Return whether an entry of `Output.parts` is a thought."""
    return part is not None and part < 0


@dataclass(slots=True)
class Bill:
    """Usage and cost of a response: sums of the usage events of its requests. Amounts in picos."""

    input_token_count: int = 0
    cached_input_token_count: int = 0
    output_token_count: int = 0
    reasoning_token_count: int = 0  # part of the output
    cost_picos: int = 0
    currency_code: str = ""
    price_version: int = 0
    request_ids: list[str] = field(default_factory=list)  # in the order of the prompts

    def add(self, usage: types_pb2.Usage, cost: types_pb2.Money) -> None:
        """Add a request that has ended."""
        self.input_token_count += usage.input_token_count
        self.cached_input_token_count += usage.cached_input_token_count
        self.output_token_count += usage.billed_token_count
        self.reasoning_token_count += usage.reasoning_token_count
        self.cost_picos += wire.picos_of(cost)
        self.currency_code = cost.currency_code

    def completion_usage(self) -> dict[str, Any]:
        """Return the usage object of chat and plain completions."""
        return {
            "prompt_tokens": self.input_token_count,
            "completion_tokens": self.output_token_count,
            "total_tokens": self.input_token_count + self.output_token_count,
            "prompt_tokens_details": {"cached_tokens": self.cached_input_token_count},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_token_count},
        }

    def extension(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return fields that OpenAI's API lacks, such as the exact cost."""
        return {
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
    """Return an exact amount as decimal text and in picos."""
    return {
        "currency_code": currency_code,
        "amount": f"{Decimal(picos).scaleb(-12).normalize():f}",
        "picos": picos,
    }


def encode(value: Any) -> bytes:
    """Encode as JSON without characters that some clients take for line ends."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode(value) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


class Answer(ABC):
    """Format of one API's responses: as events, or as one body."""

    streams_done = True
    repeats_output = False  # whether the end of a stream repeats the entire output
    ping = PING  # event that keeps a silent stream alive

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        self._parsed = parsed
        self._texts = model.texts
        self._wants_logprobs = parsed.starts[0].HasField("top_logprobs")

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """Return the events before the first output."""
        return b""

    def kept(self, new: Delta) -> Delta:
        """Return new output without what the responses of this API have no place for."""
        return new

    @abstractmethod
    def delta(self, output: Output, new: Delta) -> bytes:
        """Return the events of new output, which `output` already includes."""

    def choice_ended(self, output: Output) -> bytes:
        """Return the events for the end of one of several choices; may be called again."""
        return b""

    @abstractmethod
    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """Return the last events."""

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """Return the events of a failure after the response began."""
        return event(self.error_body(refusal))

    def error_body(self, refusal: Refusal, request_id: str = "") -> dict[str, Any]:
        """Return the body of an error."""
        return refusal.body(request_id)

    @abstractmethod
    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the body without the fields of `tail`."""

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """Return the fields that are known only after settlement; `body` has none of them."""
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def failed_tail(self, outputs: Sequence[Output], refusal: Refusal) -> dict[str, Any]:
        """Return the same fields for output that is complete but could not be settled."""
        return {"usage": None, **refusal.body()}


class ChunkAnswer(Answer):
    """Format of chat and plain completions: an event is of one choice, each of which ends with its
    reason when it ends, and the last event has usage and cost.
    """

    chunk_kind = ""

    def __init__(self, parsed: ParsedRequest, model: ServedModel, common: dict[str, Any]) -> None:
        """common: fields of every event and of the body."""
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
        """Return the end of a choice."""

    def choice_ended(self, output: Output) -> bytes:
        """Implement `Answer.choice_ended`; the last choice ends with `closing`."""
        if output.index in self._ended or self._open_count == 1:
            return b""
        self._ended.add(output.index)
        self._open_count -= 1
        return self._new_chunk(output, self._last_choice(output))

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the member of a choice with its tokens, if the answer shows them."""
        return {"token_ids": list(token_ids)} if self._parsed.shows_token_ids else {}

    def _prompt_tokens(self, output: Output) -> dict[str, Any]:
        """Return the members with the tokens of the prompt that the answer shows, as JSON.

        They are made once for all choices of a prompt.
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
        """Return the end of an event of a choice. has_begun: it has output so far."""
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
        """Return one event with new output."""
        return b"".join(
            (self._chunk_head, b',"choices":[', encode(choice), b"]", self._end_of(output))
        )

    def _chunk(
        self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None
    ) -> bytes:
        """Return one event. more: fields beside those of every event; replaces `"usage": null`."""
        if more is None:
            return b"".join((self._chunk_head, b',"choices":', encode(choices), self._chunk_tail))
        return b"".join((self._chunk_head, b",", encode({"choices": choices, **more})[1:], b"\n\n"))


class ChatAnswer(ChunkAnswer):
    """Format of chat completions."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
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
            before, after = self._plain_chunk(output.index)
            return b"".join((before, encode(new.text), after, self._end_of(output)))
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

    def _plain_chunk(self, index: int) -> tuple[bytes, bytes]:
        """Return the parts of an event before and after its text, the same for all tokens of a
        choice, without the end.
        """
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
    """Return a whole message; one that has calls or thoughts only has null content.

    begun: text that precedes the output.
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
    """Return thinking under both names that clients know: SGLang's and DeepSeek's, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    """Return the delta of a call: id and name with its first piece, later only arguments."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class CompletionAnswer(ChunkAnswer):
    """Format of plain completions of one or more prompts."""

    chunk_kind = "text_completion"

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        common = {
            "id": f"cmpl-{answer_id}",
            "created": created,
            "model": parsed.model,
            "system_fingerprint": model.fingerprint,
        }
        super().__init__(parsed, model, common)
        self._places: dict[int, TokenPlaces] = {}  # of streams, by choice
        self._begun: set[int] = set()  # choices whose first event showed the tokens of the prompt
        self._prompt_chars: dict[int, int] = {}  # of echoed prompts, by number

    def delta(self, output: Output, new: Delta) -> bytes:
        columns, prompt = None, self._prompt_event(output)
        if new.logprobs:
            if (places := self._places.get(output.index)) is None:
                places = self._texts.places_after(self._start_of(output))
                self._places[output.index] = places
            columns = self._texts.columns(new.logprobs, places, is_whole=False)
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
        """Return the event with what the answer shows of a choice's prompt, if it is still due."""
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
        """Return the tokens of a prompt and of output. text: of the prompt."""
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
                places = self._texts.places_after(self._start_of(output))
                columns = self._texts.columns(output.logprobs, places, is_whole=True)
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


class ResponseAnswer(Answer):
    """Format of responses: thoughts, a message and calls, as items in the order they began."""

    streams_done = False
    repeats_output = True

    def __init__(
        self, parsed: ParsedRequest, model: ServedModel, answer_id: str, created: int
    ) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
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
        """Return the events before the first output."""
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
                    **self._thought_place(part),
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
                place = self._place(piece.index)
                events.append(
                    self._event(
                        "response.function_call_arguments.delta",
                        delta=piece.arguments,
                        **place,
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

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        response = self._response("failed") | self.failed_tail(outputs, refusal)
        return self._event("response.failed", response=response)

    def failed_tail(self, outputs: Sequence[Output], refusal: Refusal) -> dict[str, Any]:
        """Implement `Answer.failed_tail`."""
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
        """Return the items of a response. status: that of the last item; others are complete."""
        parts = output.parts or [None]
        statuses = ["completed"] * (len(parts) - 1) + [status]
        return [
            self._message(each, [self._text(output.text, output.logprobs)])
            if place is None
            else self._thought_item(place, output.thought(place), each)
            if place < 0
            else self._call(place, output, each)
            for place, each in zip(parts, statuses, strict=True)
        ]

    # Events of thoughts.

    def _thought_place(self, part: int) -> dict[str, Any]:
        item_id = f"rs_{self._answer_id}_{-part}"
        return {"item_id": item_id, "output_index": self._open.index(part), "content_index": 0}

    def _begin_thought(self, part: int) -> bytes:
        self._open.append(part)
        self._open_thought = part
        place = self._open.index(part)
        item = self._thought_item(part, None, "in_progress")
        begun = self._event("response.output_item.added", item=item, output_index=place)
        empty = {"type": REASONING_TEXT, "text": ""}
        return begun + self._event(
            "response.content_part.added", part=empty, **self._thought_place(part)
        )

    def _end_thought(self, output: Output, status: str) -> bytes:
        """Return the events that end the open thought, if there is one."""
        part, self._open_thought = self._open_thought, None
        if part is None:
            return b""
        text, place = output.thought(part), self._thought_place(part)
        whole = {"type": REASONING_TEXT, "text": text}
        item = self._thought_item(part, text, status)
        return b"".join(
            (
                self._event("response.reasoning_text.done", text=text, **place),
                self._event("response.content_part.done", part=whole, **place),
                self._event(
                    "response.output_item.done", item=item, output_index=place["output_index"]
                ),
            )
        )

    def _thought_item(self, part: int, text: str | None, status: str) -> dict[str, Any]:
        """Return a thought as an item. text: None before it has any."""
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
        place = self._open.index(None)
        text = self._text(output.text, output.logprobs)
        logprobs = self._texts.content(output.logprobs)
        return b"".join(
            (
                self._event(
                    "response.output_text.done", text=output.text, logprobs=logprobs, **self._part
                ),
                self._event("response.content_part.done", part=text, **self._part),
                self._event(
                    "response.output_item.done", item=body["output"][place], output_index=place
                ),
            )
        )

    # Events of tool calls.

    def _call_id(self, number: int) -> str:
        return f"fc_{self._answer_id}_{number}"

    def _place(self, number: int) -> dict[str, Any]:
        return {"item_id": self._call_id(number), "output_index": self._open.index(number)}

    def _begin_call(self, call: Call, number: int) -> bytes:
        self._open.append(number)
        item = self._call_item(number, Call(call.id, call.name), "in_progress")
        return self._event(
            "response.output_item.added", item=item, output_index=self._open.index(number)
        )

    def _end_calls(self, output: Output, count: int) -> bytes:
        """Return the events that end all calls before this number, except those already sent."""
        events = []
        status = (
            "incomplete"
            if output.finish_reason in INCOMPLETE and self._open and _is_call(self._open[-1])
            else "completed"
        )
        for number in range(self._done_count, count):
            call, place = output.calls[number], self._place(number)
            events.append(
                self._event(
                    "response.function_call_arguments.done",
                    name=self._members.get(call.name, ("", call.name))[1],
                    arguments=call.arguments,
                    **place,
                )
            )
            item = self._call_item(
                number, call, status if number == self._open[-1] else "completed"
            )
            events.append(
                self._event(
                    "response.output_item.done", item=item, output_index=place["output_index"]
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
        """Return the response object with the requested parameters.

        Error and usage are left out: a complete response has them in its tail.
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
