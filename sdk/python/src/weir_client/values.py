"""Values returned by the inference client: output, usage, cost, limits.

Plain immutable data without gRPC. Names follow the published proto; counts are in tokens or
requests, `_ms` is milliseconds, `_s` seconds, money is exact. Times are aware datetimes in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.plain import Value
from weir_client.receipts import Receipt
from weir_client.tools import ToolCall, ToolCallDelta


class FinishReason(StrEnum):
    """Reason why a request ended after it was admitted."""

    UNSPECIFIED = "UNSPECIFIED"  # a reason that this client does not know
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
    """Reason why a request has no new output at present."""

    UNSPECIFIED = "UNSPECIFIED"
    QUEUED = "QUEUED"
    ENGINE_LOADING = "ENGINE_LOADING"
    RUNNING = "RUNNING"


class GenerationState(StrEnum):
    """State of a request in the server's records."""

    UNSPECIFIED = "UNSPECIFIED"
    RUNNING = "RUNNING"
    SETTLED = "SETTLED"
    VOIDED = "VOIDED"
    EXPIRED = "EXPIRED"


class QuotaSubject(StrEnum):
    """Kind of owner of a quota: organization, project or key."""

    UNSPECIFIED = "unspecified"
    ORGANIZATION = "organization"
    PROJECT = "project"
    API_KEY = "api-key"


class QuotaDimension(StrEnum):
    """Quantity and window that a quota limits. The values are its names on the command line."""

    UNSPECIFIED = "unspecified"
    CONCURRENT_REQUESTS = "concurrent-requests"
    REQUESTS_PER_MINUTE = "requests-per-minute"
    TOKENS_PER_MINUTE = "tokens-per-minute"
    INPUT_TOKENS_PER_MINUTE = "input-tokens-per-minute"
    OUTPUT_TOKENS_PER_MINUTE = "output-tokens-per-minute"
    TOKENS_PER_DAY = "tokens-per-day"
    TOKENS_PER_MONTH = "tokens-per-month"
    COST_PER_DAY = "cost-per-day"
    PREPAID_CREDIT = "prepaid-credit"  # limit of a prepaid organization, from its credit grants
    COST_PER_MONTH = "cost-per-month"


@dataclass(frozen=True, slots=True)
class Usage(Value):
    """Token counts of one request, which its bill is based on."""

    input_token_count: int = 0
    cached_input_token_count: int = 0  # part of `input_token_count`, served from the prefix cache
    generated_token_count: int = 0  # produced by the engine
    delivered_token_count: int = 0  # handed to the transport
    billed_token_count: int = 0  # output tokens on the bill: the delivered ones
    embedding_token_count: int = 0  # priced separately; an embedding request has no other tokens
    journalled_token_count: int = 0  # about to be sent; 0 while the request runs
    # Part of the delivered tokens: the model's thinking. Billed at a price of its own.
    reasoning_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Timings(Value):
    """Milliseconds spent in each stage of a request, and its tokens per second.

    The stages sum to `total_ms`, except `client_stall_ms`, which overlaps `decode_ms` up to the
    last token.
    """

    auth_ms: float = 0.0
    tokenize_ms: float = 0.0
    admission_ms: float = 0.0
    queue_ms: float = 0.0
    cold_start_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    client_stall_ms: float = 0.0  # tokens were ready, and the client did not take them
    settle_ms: float = 0.0
    ttft_ms: float = 0.0  # from the start frame's arrival at the server to the first token
    total_ms: float = 0.0
    # Gaps between consecutive messages with tokens, without waiting for the client.
    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0
    itl_max_ms: float = 0.0
    tokens_per_second: float = 0.0  # after the first token


@dataclass(frozen=True, slots=True)
class QuotaStatus(Value):
    """Limit with its remainder. Values are requests, tokens or picos of the currency, by dimension.

    Weights say how much a token of a kind counts, in thousandths; 0 for limits that do not count
    tokens. Only lists of all limits of one key set `binding` and `narrowed_by_quota_id`; with a
    generation, `would_refuse_count`, `subject_name` and `override_reason` are not set.
    """

    quota_id: str
    subject: QuotaSubject
    subject_id: str
    model: str  # empty: all models together
    dimension: QuotaDimension
    limit_value: int
    used_value: int
    held_value: int  # reserved by running requests
    remaining_value: int
    reset_time: datetime | None  # None for concurrency
    reset_delay_s: float | None
    subject_name: str = ""  # display name
    enforced: bool = True  # False: shadow mode, counts without refusing
    would_refuse_count: int = 0  # admissions of this window that shadow mode would have refused
    input_weight_milli: int = 0
    cached_input_weight_milli: int = 0
    output_weight_milli: int = 0
    base_limit_value: int = 0  # without the temporary override
    override_end_time: datetime | None = None  # end of the temporary override; None: none
    override_reason: str = ""
    binding: bool = False  # has the smallest remainder of its dimension's limits
    narrowed_by_quota_id: str = ""  # an inherited limit that always runs out first
    for_new_keys: bool = False  # no limit itself, but a default copied to new keys
    alert_at: tuple[int, ...] = ()  # percent of the limit used; for prepaid credit, remaining picos


@dataclass(frozen=True, slots=True)
class Admitted(Value):
    """Event: the request was admitted and its tokens are held."""

    input_token_count: int
    predicted_cached_token_count: int
    quotas: tuple[QuotaStatus, ...]
    price_version: int
    max_output_token_count: int = 0  # of all choices; 0 from older servers
    limited_by_key: bool = False  # limited by the key, as the request gives no limit


@dataclass(frozen=True, slots=True)
class KeyChange(Value):
    """Change that gave a key a new secret or more rights."""

    act: str  # "rotated" or "widened": more scopes, more networks, or a longer life
    actor: str  # prefix of the key that made the change
    change_time: datetime


@dataclass(frozen=True, slots=True)
class KeyRestrictions(Value):
    """Scopes, models and limits of a key."""

    prefix: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]  # allowed models; empty: all
    max_input_tokens: int | None  # per request; None: the model's own limit
    max_output_tokens: int | None  # per request, all choices together
    allowed_networks: tuple[str, ...]  # allowed client networks; empty: all
    secret_expire_time: datetime | None  # when the secret in use expires; None: never
    strict_parameters: bool = False  # the HTTP API refuses unknown parameters
    latest_change: KeyChange | None = None  # None: never rotated or widened


@dataclass(frozen=True, slots=True)
class Progress(Value):
    """Event: the request is waiting, or is RUNNING without output for some seconds."""

    stage: Stage
    queue_position: int  # number of requests ahead, only while QUEUED
    estimated_wait_s: float | None  # None: unknown
    loading_fraction: float = 0.0  # progress of the engine, 0 to 1, only while ENGINE_LOADING
    loading_stage: str = ""  # memory, process, import, weights, or a newer stage


@dataclass(frozen=True, slots=True)
class TokenLogprob(Value):
    """Token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Value):
    """Log-probability of an output token in the model's distribution, and of the likeliest ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # the likeliest first


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


@dataclass(frozen=True, slots=True)
class Partial(Value):
    """Output received from a request whose final frame did not arrive.

    `usage` and `cost` are None if the server did not send them. Text and tokens are the first
    choice's.
    """

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
class Generation(Value):
    """Record of one request on the server."""

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
    migration_count: int = 0  # number of moves to another engine
