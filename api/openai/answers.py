"""What the answers of all APIs share: outputs as they grow, why they ended, what they cost, and the bytes of one event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

import msgspec
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.openai.refusals import Refusal

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


@dataclass(slots=True)
class Call:
    """One call of a tool, as far as it was told."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """All of them."""
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
        """More of it."""
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
        """All of it."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
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
        self.cost_picos += cost.units * wire.PICOS_PER_UNIT + cost.picos
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

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """Events at the end."""
        ...

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
    picos = cost.units * wire.PICOS_PER_UNIT + cost.picos
    return {"currency_code": cost.currency_code, "amount": f"{Decimal(picos).scaleb(-12).normalize():f}", "picos": picos}


def encode(value: Any) -> bytes:
    """JSON that every reader of lines leaves whole."""
    data = msgspec.json.encode(value)
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + encode(value) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def reason_name(reason: types_pb2.FinishReason.ValueType) -> str:
    """A reason by its name in the contract, without its prefix."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
