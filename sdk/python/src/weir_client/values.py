"""Values of the inference client that no single message has: events, results and parts of them.

Plain immutable data without gRPC. Counts are in tokens or requests, `_ms` is milliseconds, `_s`
seconds, money is exact. Times are aware datetimes in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weir_client.generated_values import (
    FinishReason,
    QuotaStatus,
    Stage,
    Timings,
    TokenLogprobs,
    Usage,
)
from weir_client.money import Money
from weir_client.plain import Value
from weir_client.receipts import Receipt
from weir_client.tools import ToolCall, ToolCallDelta

LABEL_PREFIX = "label:"  # of a grouping by a label, before its key


@dataclass(frozen=True, slots=True)
class Admitted(Value):
    """Event: the request was admitted and its tokens are held."""

    input_token_count: int
    predicted_cached_token_count: int
    quotas: tuple[QuotaStatus, ...]
    price_version: int
    max_output_token_count: int = 0  # of all choices; 0 from older servers
    limited_by_key: bool = False  # limited by the key, as the request gives no limit
    model: str = ""  # the model that has taken the request; empty from older servers
    requested_model: str = ""  # the model that was asked for, if `model` is its fallback


@dataclass(frozen=True, slots=True)
class Progress(Value):
    """Event: the request is waiting, or is RUNNING without output for some seconds."""

    stage: Stage
    queue_position: int  # number of requests ahead, only while QUEUED
    estimated_wait_s: float | None  # None: unknown
    loading_fraction: float = 0.0  # progress of the engine, 0 to 1, only while ENGINE_LOADING
    loading_stage: str = ""  # memory, process, import, weights, or a newer stage


@dataclass(frozen=True, slots=True)
class Delta(Value):
    """Event: new output of a request."""

    seq: int  # grows by one, from 1
    text: str  # empty while a character is incomplete or may belong to a stop sequence
    token_ids: tuple[int, ...]
    received_s: float  # `time.monotonic()` at which this client read it, for latency measurements
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if `top_logprobs` was given
    choice_index: int = 0  # choice of the output, if `choice_count` is more than 1
    tool_calls: tuple[ToolCallDelta, ...] = ()  # increments of calls, if `tools` was given
    reasoning: str = ""  # new thinking, which precedes the text
    reasoning_token_count: int = 0  # tokens now known to be thinking
    finish_reason: FinishReason | None = None  # of a choice that ends with this delta


@dataclass(frozen=True, slots=True)
class Resumed(Value):
    """Event: the request continues on another stream. No output is missing or repeated."""

    after_seq: int  # the next `Delta` has the number after this one
    last_seq: int  # number of the last `Delta` generated so far
    running: bool  # False: it has ended, and the rest of its output follows


@dataclass(frozen=True, slots=True)
class UsageUpdate(Value):
    """Event: token counts so far. Sent at the interval that `usage_interval_tokens` asks for."""

    usage: Usage
    cost: Money


Event = Admitted | Progress | Delta | UsageUpdate | Resumed


@dataclass(frozen=True, slots=True)
class Choice(Value):
    """One of the answers to a prompt."""

    index: int
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""  # the model's thinking, apart from the text
    stopped_by: str | int | None = None  # the stop sequence or stop token of yours that ended it


@dataclass(frozen=True, slots=True)
class Result(Value):
    """Outcome of a completed request, with the numbers on the bill.

    `choices` has every output in order, one unless `choice_count` was given; text, tokens and
    reason beside it are those of the first. `usage` and `cost` cover all choices.
    """

    _repr_first: ClassVar[tuple[str, ...]] = ("text", "finish_reason", "cost")

    request_id: str
    model: str
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    cost: Money  # before plan and tax
    timings: Timings
    admitted: Admitted | None
    exhausted_quotas: tuple[QuotaStatus, ...] = ()  # exhausted quotas, for QUOTA_EXHAUSTED
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if `top_logprobs` was given
    choices: tuple[Choice, ...] = ()
    receipts: tuple[Receipt, ...] = ()  # one, unless nothing was billed; `verify_receipt` checks it
    migration_count: int = 0  # number of moves to another engine after the loss of one
    tool_calls: tuple[ToolCall, ...] = ()  # the model's calls, if `tools` was given
    reasoning: str = ""  # the model's thinking, apart from the text
    stopped_by: str | int | None = None  # the stop sequence or stop token of yours that ended it
    requested_model: str = ""  # the model that was asked for, if its fallback `model` answered


@dataclass(frozen=True, slots=True)
class Partial(Value):
    """Output received from a request whose final frame did not arrive.

    `usage` and `cost` are None if the server did not send them. Text and tokens are the first
    choice's.
    """

    _repr_first: ClassVar[tuple[str, ...]] = ("text", "cost")

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage | None = None
    cost: Money | None = None
    timings: Timings | None = None
    admitted: Admitted | None = None
    receipts: tuple[Receipt, ...] = ()  # signed records of `usage`, if it is final
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Limits(Value):
    """Limits on the output and cost of a running request."""

    max_output_tokens: int  # limit of each choice
    max_cost: Money | None  # None: limited by the quotas only


@dataclass(frozen=True, slots=True)
class TokenCount(Value):
    """Number of tokens of a prompt."""

    input_token_count: int
    context_window_tokens: int


@dataclass(frozen=True, slots=True)
class MonthFile(Value):
    """Complete file of an exported month."""

    file_name: str
    media_type: str
    content: bytes
