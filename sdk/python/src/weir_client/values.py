"""The values that a client hands out: what was generated, what it used, what it costs, what is left.

Plain immutable data without any gRPC in it. Names follow the published proto; counts are in tokens or requests, `_ms` is
milliseconds, `_s` seconds, money is exact. Times are aware datetimes in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.receipts import Receipt
from weir_client.tools import ToolCall, ToolCallDelta


class FinishReason(StrEnum):
    """Why a request that ran came to its end."""

    UNSPECIFIED = "UNSPECIFIED"  # a reason that this version of the client does not know
    STOP = "STOP"
    STOP_SEQUENCE = "STOP_SEQUENCE"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    COST_LIMIT = "COST_LIMIT"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    FILTERED = "FILTERED"
    TOOL_CALLS = "TOOL_CALLS"  # the model waits for the results of its calls


class Stage(StrEnum):
    """What a request waits for before its first token."""

    UNSPECIFIED = "UNSPECIFIED"
    QUEUED = "QUEUED"
    ENGINE_LOADING = "ENGINE_LOADING"


class GenerationState(StrEnum):
    """Where a recorded request stands."""

    UNSPECIFIED = "UNSPECIFIED"
    RUNNING = "RUNNING"
    SETTLED = "SETTLED"
    VOIDED = "VOIDED"
    EXPIRED = "EXPIRED"


class QuotaSubject(StrEnum):
    """What a quota hangs on."""

    UNSPECIFIED = "unspecified"
    ORGANIZATION = "organization"
    PROJECT = "project"
    API_KEY = "api-key"


class QuotaDimension(StrEnum):
    """What a quota counts, and over which time. The values are the names that the command line uses."""

    UNSPECIFIED = "unspecified"
    CONCURRENT_REQUESTS = "concurrent-requests"
    REQUESTS_PER_MINUTE = "requests-per-minute"
    TOKENS_PER_MINUTE = "tokens-per-minute"
    INPUT_TOKENS_PER_MINUTE = "input-tokens-per-minute"
    OUTPUT_TOKENS_PER_MINUTE = "output-tokens-per-minute"
    TOKENS_PER_DAY = "tokens-per-day"
    TOKENS_PER_MONTH = "tokens-per-month"
    COST_PER_DAY = "cost-per-day"
    PREPAID_CREDIT = "prepaid-credit"  # of an organization that pays in advance; follows from what is granted
    COST_PER_MONTH = "cost-per-month"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, counted where it matters for the bill."""

    input_token_count: int = 0
    cached_input_token_count: int = 0  # part of `input_token_count`, served from the prefix cache
    generated_token_count: int = 0  # produced by the engine
    delivered_token_count: int = 0  # handed to the transport
    billed_token_count: int = 0  # output tokens on the bill: the delivered ones
    embedding_token_count: int = 0  # embedded, at their own price; a request that has some has no others


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in milliseconds. The stages follow each other and sum up to `total_ms`."""

    auth_ms: float = 0.0
    tokenize_ms: float = 0.0
    admission_ms: float = 0.0
    queue_ms: float = 0.0
    cold_start_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    client_stall_ms: float = 0.0
    settle_ms: float = 0.0
    ttft_ms: float = 0.0  # from the start frame's arrival at the server to the first token
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """One limit and how much of it is left. Values are requests, tokens or picos of the currency, by dimension.

    Weights are thousandths that a token of a kind counts; 0 where no tokens are counted. `binding` and `narrowed_by_quota_id` are
    told only with all the limits of one key; `would_refuse_count`, `subject_name` and `raise_reason` not with a generation.
    """

    quota_id: str
    subject: QuotaSubject
    subject_id: str
    model: str  # empty: all models together
    dimension: QuotaDimension
    limit_value: int
    used_value: int
    held_value: int  # held by requests that run now
    remaining_value: int
    reset_time: datetime | None  # None for concurrency
    reset_delay_s: float | None
    subject_name: str = ""  # for people
    enforced: bool = True  # False: it counts and reports, and refuses nobody
    would_refuse_count: int = 0  # admissions in this window that it would have refused
    input_weight_milli: int = 0
    cached_input_weight_milli: int = 0
    output_weight_milli: int = 0
    standing_limit_value: int = 0  # without a raise
    raised_until_time: datetime | None = None  # None: not raised
    raise_reason: str = ""
    binding: bool = False  # of the limits on its dimension, it has least left
    narrowed_by_quota_id: str = ""  # a limit further up that always runs out first
    for_new_keys: bool = False  # it limits nothing itself: new keys get a copy
    alert_at: tuple[int, ...] = ()  # percent of the limit that are used; of prepaid credit, picos that are left


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request was let in and its tokens are held."""

    input_token_count: int
    predicted_cached_token_count: int
    quotas: tuple[QuotaStatus, ...]
    price_version: int
    max_output_token_count: int = 0  # of all choices; 0 from older servers, which do not tell
    bounded_by_key: bool = False  # that is what the key may have, since the request does not say how much it wants


@dataclass(frozen=True, slots=True)
class KeyRestrictions:
    """What a key is good for."""

    prefix: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]  # that it may use; empty: every one
    max_input_tokens: int | None  # of one request; None: as many as the model takes
    max_output_tokens: int | None  # of one request, all choices together
    allowed_networks: tuple[str, ...]  # that it may be used from; empty: everywhere
    secret_expire_time: datetime | None  # of the secret that the client has; None: it does not end


@dataclass(frozen=True, slots=True)
class Progress:
    """The request waits."""

    stage: Stage
    queue_position: int  # requests ahead of it, only while QUEUED
    estimated_wait_s: float | None  # None: unknown
    loading_fraction: float = 0.0  # of the engine, 0 to 1, only while ENGINE_LOADING
    loading_stage: str = ""  # what is done to start it: memory, process, import, weights, or newer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely an output token was in the model's own distribution, and the likeliest ones at its place."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # the likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a request."""

    seq: int  # grows by one, from 1
    text: str  # empty while a character is incomplete or may belong to a stop sequence
    token_ids: tuple[int, ...]
    received_s: float  # `time.monotonic()` at which this client read it, for latency measurements
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if `top_logprobs` was given
    choice_index: int = 0  # whose output, if `choice_count` is more than 1
    tool_calls: tuple[ToolCallDelta, ...] = ()  # new of calls, if `tools` was given


@dataclass(frozen=True, slots=True)
class Resumed:
    """The request goes on, on another stream than it was started on. No output is missing, and none comes twice."""

    after_seq: int  # the next `Delta` has the number after this one
    last_seq: int  # the last one that there was by then
    running: bool  # False: it has ended, and the rest of its output follows


@dataclass(frozen=True, slots=True)
class UsageUpdate:
    """Running counts, sent at the interval asked for with `usage_interval_tokens`."""

    usage: Usage
    cost: Money


Event = Admitted | Progress | Delta | UsageUpdate | Resumed


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several outputs of a prompt."""

    index: int
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A request that ran to its end, with the numbers that will be on the bill.

    `choices` has every output in order, one unless `choice_count` was given; text, tokens and reason beside it are the first one's.
    `usage` and `cost` are of all.
    """

    request_id: str
    model: str
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    cost: Money  # before plan and tax
    timings: Timings
    admitted: Admitted | None
    exhausted_quotas: tuple[QuotaStatus, ...] = ()  # which quota ran out, for QUOTA_EXHAUSTED
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if `top_logprobs` was given
    choices: tuple[Choice, ...] = ()
    receipts: tuple[Receipt, ...] = ()  # one, unless nothing was to be billed; `verify_receipt` checks it
    migration_count: int = 0  # how often it went on in another engine because its own was lost
    tool_calls: tuple[ToolCall, ...] = ()  # what the model calls, if `tools` was given


@dataclass(frozen=True, slots=True)
class Partial:
    """What is known of a request that has no proper end. `usage` and `cost` are None where the server did not tell.

    Text and tokens are the first choice's.
    """

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage | None = None
    cost: Money | None = None
    timings: Timings | None = None
    admitted: Admitted | None = None
    receipts: tuple[Receipt, ...] = ()  # of `usage`, if that is final


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The size of a prompt."""

    input_token_count: int
    context_window_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What the server has recorded of one request."""

    request_id: str
    state: GenerationState
    model: str
    admit_time: datetime | None
    settle_time: datetime | None  # None while it runs
    usage: Usage
    cost: Money | None  # None while it runs
    timings: Timings | None  # None while it runs, and after a recovery
    outcome: str  # a finish reason or the name of a status code; empty while it runs
    labels: Mapping[str, str]
    receipts: tuple[Receipt, ...] = ()  # one per part of its usage; none while it runs
    migration_count: int = 0  # times that it went on in another engine
