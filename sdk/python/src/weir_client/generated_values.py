"""Values of the contract: plain immutable data without gRPC.

Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from weir_client.money import Money
from weir_client.plain import LimitName, TokenSums, Value
from weir_client.receipts import Receipt


class QuotaSubject(StrEnum):
    """Owner of a quota."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    ORGANIZATION = "organization"
    """All projects and keys of one organization together."""
    PROJECT = "project"
    """All keys of one project together."""
    API_KEY = "api-key"
    """One API key."""
    END_USER = "end-user"
    """One end user, within an organization or project."""
    LABEL = "label"
    """The requests with one value of a label, within an organization or project."""


class QuotaDimension(StrEnum):
    """Measure and window of a quota."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    CONCURRENT_REQUESTS = "concurrent-requests"
    """Concurrent requests."""
    REQUESTS_PER_MINUTE = "requests-per-minute"
    """Requests admitted in a calendar minute."""
    REQUESTS_PER_HOUR = "requests-per-hour"
    """Requests admitted in a calendar hour, UTC."""
    REQUESTS_PER_DAY = "requests-per-day"
    """Requests admitted in a calendar day, UTC."""
    REQUESTS_PER_WEEK = "requests-per-week"
    """Requests admitted in an ISO week, from Monday, UTC."""
    REQUESTS_PER_MONTH = "requests-per-month"
    """Requests admitted in a calendar month, UTC."""
    REQUESTS_PER_WINDOW = "requests-per-window"
    """Requests admitted in any `window_minutes` minutes."""
    REQUESTS_PER_LIFETIME = "requests-per-lifetime"
    """Requests admitted in total: never reset."""
    TOKENS_PER_MINUTE = "tokens-per-minute"
    """Input and output tokens in a calendar minute, by their weights."""
    TOKENS_PER_HOUR = "tokens-per-hour"
    """Input and output tokens in a calendar hour, UTC, by their weights."""
    TOKENS_PER_DAY = "tokens-per-day"
    """Input and output tokens in a calendar day, UTC, by their weights."""
    TOKENS_PER_WEEK = "tokens-per-week"
    """Input and output tokens in an ISO week, from Monday, UTC, by their weights."""
    TOKENS_PER_MONTH = "tokens-per-month"
    """Input and output tokens in a calendar month, UTC, by their weights."""
    TOKENS_PER_WINDOW = "tokens-per-window"
    """Input and output tokens in any `window_minutes` minutes, by their weights."""
    TOKENS_PER_LIFETIME = "tokens-per-lifetime"
    """Input and output tokens in total, by their weights: never reset."""
    INPUT_TOKENS_PER_MINUTE = "input-tokens-per-minute"
    """Input tokens in a calendar minute, by their weights."""
    INPUT_TOKENS_PER_HOUR = "input-tokens-per-hour"
    """Input tokens in a calendar hour, UTC, by their weights."""
    INPUT_TOKENS_PER_DAY = "input-tokens-per-day"
    """Input tokens in a calendar day, UTC, by their weights."""
    INPUT_TOKENS_PER_WEEK = "input-tokens-per-week"
    """Input tokens in an ISO week, from Monday, UTC, by their weights."""
    INPUT_TOKENS_PER_MONTH = "input-tokens-per-month"
    """Input tokens in a calendar month, UTC, by their weights."""
    INPUT_TOKENS_PER_WINDOW = "input-tokens-per-window"
    """Input tokens in any `window_minutes` minutes, by their weights."""
    INPUT_TOKENS_PER_LIFETIME = "input-tokens-per-lifetime"
    """Input tokens in total, by their weights: never reset."""
    OUTPUT_TOKENS_PER_MINUTE = "output-tokens-per-minute"
    """Output tokens in a calendar minute, by their weight."""
    OUTPUT_TOKENS_PER_HOUR = "output-tokens-per-hour"
    """Output tokens in a calendar hour, UTC, by their weight."""
    OUTPUT_TOKENS_PER_DAY = "output-tokens-per-day"
    """Output tokens in a calendar day, UTC, by their weight."""
    OUTPUT_TOKENS_PER_WEEK = "output-tokens-per-week"
    """Output tokens in an ISO week, from Monday, UTC, by their weight."""
    OUTPUT_TOKENS_PER_MONTH = "output-tokens-per-month"
    """Output tokens in a calendar month, UTC, by their weight."""
    OUTPUT_TOKENS_PER_WINDOW = "output-tokens-per-window"
    """Output tokens in any `window_minutes` minutes, by their weight."""
    OUTPUT_TOKENS_PER_LIFETIME = "output-tokens-per-lifetime"
    """Output tokens in total, by their weight: never reset."""
    COST_PER_HOUR = "cost-per-hour"
    """Money in a calendar hour, UTC; the limit is in picos of the organization's currency."""
    COST_PER_DAY = "cost-per-day"
    """Money in a calendar day, UTC; the limit is in picos of the organization's currency."""
    COST_PER_WEEK = "cost-per-week"
    """Money in an ISO week, from Monday, UTC; the limit is in picos of the organization's
    currency."""
    COST_PER_MONTH = "cost-per-month"
    """Money in a calendar month, UTC; the limit is in picos of the organization's currency."""
    COST_PER_WINDOW = "cost-per-window"
    """Money in any `window_minutes` minutes; in picos."""
    COST_PER_LIFETIME = "cost-per-lifetime"
    """Money in total, in picos: never reset."""
    PREPAID_CREDIT = "prepaid-credit"
    """Credit of a prepaid organization. It cannot be set: it follows from credit grants. The limit
    is the usage before this month plus the credit that this month may spend, in picos; its
    remainder is the remaining credit."""


class AlertDeliveryState(StrEnum):
    """State of an alert's delivery."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    PENDING = "pending"
    """Attempted until the webhook responds with 2xx, for 24 hours."""
    DELIVERED = "delivered"
    """The webhook responded with 2xx."""
    FAILED = "failed"
    """Abandoned: `last_error` has the reason."""


@dataclass(frozen=True, slots=True)
class AlertDelivery(Value):
    """Delivery of an alert to a webhook."""

    state: AlertDeliveryState = AlertDeliveryState.UNSPECIFIED
    """State of the delivery."""
    attempt_count: int = 0
    """Number of attempts begun."""
    attempt_time: datetime | None = None
    """Time of the latest attempt. Unset if there was none."""
    end_time: datetime | None = None
    """Time of delivery or abandonment. Unset while pending."""
    last_error: str = ""
    """Error of the latest failed attempt. Empty if none failed."""


@dataclass(frozen=True, slots=True)
class AlertInvoice(Value):
    """A Stripe invoice at the time of an alert."""

    stripe_invoice_id: str
    """Id at Stripe."""
    stripe_number: str
    """Number at Stripe. Empty if no event has contained it."""
    month: str
    """The billed month, as YYYY-MM in UTC."""
    amount_due: Money
    """Amount due."""
    amount_paid: Money
    """Amount paid."""
    hosted_url: str = ""
    """Stripe's payment page. Empty if no event has contained it."""


@dataclass(frozen=True, slots=True)
class AlertKey(Value):
    """An API key that was rotated, or given more scopes, more networks or a longer life."""

    prefix: str = ""
    """The first characters of the key."""
    name: str = ""
    """The key's name at that time."""
    changed_by: str = ""
    """Prefix of the key that made the change, as in the audit log."""
    changed: tuple[str, ...] = ()
    """What changed: "secret", "scopes", "role", "allowed_networks", "expires_at"."""


@dataclass(frozen=True, slots=True)
class Alert(Value):
    """A threshold of a limit was crossed, or Stripe reported a payment. There is one alert per
    limit, threshold, window and limit value; and one per invoice and kind."""

    alert_id: str
    """UUID of the alert, the same in all deliveries and lists."""
    organization_id: str
    """UUID of the organization."""
    organization_name: str
    """The organization's name."""
    currency_code: str
    """ISO 4217 code of the organization's currency."""
    fire_time: datetime
    """Time of detection, seconds after the crossing if a worker runs."""
    quota_id: str = ""
    """The limit's id. Empty for tests and invoices, as are all fields up to the window."""
    subject: QuotaSubject = QuotaSubject.UNSPECIFIED
    """Owner of the limit."""
    subject_id: str = ""
    """UUID of the organization, project, key, end user or value of a label."""
    subject_name: str = ""
    """Display name: "organization", "organization/project", a key's prefix, the name of an end user
    or "key=value" of a label. An erased end user has its id."""
    model: str = ""
    """Limited model; empty: all models together."""
    dimension: QuotaDimension = QuotaDimension.UNSPECIFIED
    """Measure and window of the limit."""
    threshold: int = 0
    """Percent of the limit used; for prepaid credit, remaining picos."""
    limit_value: int = 0
    """The limit in force at that time, in requests, tokens or picos by dimension."""
    used_value: int = 0
    """Usage at that time, without the holds of running requests."""
    window_start_time: datetime | None = None
    """Start of the limit's window. Unset for prepaid credit."""
    delivery: AlertDelivery | None = None
    """Delivery to the organization's webhook. Unset if there was no webhook at that time."""
    kind: str = ""
    """"quota", "credit", "test", "invoice_payment_failed", "invoice_paid", "key_rotated" or
    "key_widened"."""
    invoice: AlertInvoice | None = None
    """The invoice at the time of the alert. Unset for other kinds."""
    key: AlertKey | None = None
    """The key that got a new secret or more rights. Unset for other kinds."""
    within_id: str = ""
    """UUID of the organization or project within which the limit of an end user or label counts.
    Empty for other subjects."""
    within_name: str = ""
    """Display name of that: "organization" or "organization/project"."""


@dataclass(frozen=True, slots=True)
class AuditEntry(Value):
    """One change: its time and author, and the object before and after it."""

    entry_id: int = 0
    """Increases with time, so that it orders entries and begins the next page."""
    create_time: datetime | None = None
    """Time of the change."""
    actor: str = ""
    """Author: the prefix of the API key, or "system"."""
    action: str = ""
    """Action, for example "api_key.revoke"."""
    subject_id: str = ""
    """Id of the changed object: a UUID, or the number of a price version."""
    before_json: str = ""
    """The object before, as JSON; empty if it did not exist."""
    after_json: str = ""
    """The object after, as JSON; empty if it was removed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Display names of the organizations, projects, keys, persons, service accounts, end users and
    labels that the entry refers to, by id, as they are now. An erased end user has none."""
    actor_role: str = ""
    """Role of the key that made the change: "operator", "owner", "admin", "developer", "finance",
    "viewer" or "billing". Empty: `actor` is not a key, or the entry is older than roles."""
    actor_organization_id: str = ""
    """Id of the organization of that key. Empty with `actor_role`."""
    actor_person_id: str = ""
    """Id of the person whom that key belongs to. `names` has the name of the person, unless it is
    the operator's. Empty: no person."""
    actor_address: str = ""
    """Network address that the change came from. Empty: it was not a call, or came by a local
    socket."""


class EndUserState(StrEnum):
    """State of an end user."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    ACTIVE = "active"
    """Requests name it."""
    ARCHIVED = "archived"
    """No request has named it for some weeks, or none yet. It does not count towards the maximum of
    the organization; its next request makes it active."""
    ERASED = "erased"
    """Its name is erased; its usage is kept under its id."""


@dataclass(frozen=True, slots=True)
class QuotaStatus(LimitName):
    """One limit with its current remainder."""

    quota_id: str = ""
    """Server-generated UUID of the quota. Empty for a limit that a selector gives with the first
    request."""
    subject: QuotaSubject = QuotaSubject.UNSPECIFIED
    """Owner of the limit."""
    subject_id: str = ""
    """UUID of the organization, project, key, end user or value of a label."""
    model: str = ""
    """Limited model; empty: all models together."""
    dimension: QuotaDimension = QuotaDimension.UNSPECIFIED
    """Measure and window."""
    limit_value: int = 0
    """The limit in force now, in requests, tokens or picos by dimension."""
    used_value: int = 0
    """Usage of this window; 9223372036854775807 for that or more."""
    held_value: int = 0
    """Held by running requests."""
    remaining_value: int = 0
    """`limit_value` - `used_value` - `held_value`. Negative if the limit is not enforced or was
    lowered below the usage."""
    reset_time: datetime | None = None
    """Time when the window ends and `used_value` resets to zero. In a rolling window, it falls step
    by step until then. Unset for concurrency, prepaid credit and the lifetime."""
    reset_delay_s: float | None = None
    """Time from now to `reset_time`. Unset with it."""
    subject_name: str = ""
    """Display name: "organization", "organization/project", a key's prefix, the name of an end
    user, or "key=value" of a label. In `admitted` and `finished` frames of end users and labels
    only."""
    enforced: bool = True
    """False: shadow mode, counts and reports without refusing."""
    would_refuse_count: int = 0
    """Admissions in this window that shadow mode would have refused. 0 in `admitted` and `finished`
    frames."""
    input_weight_milli: int = 0
    """Thousandths that an uncached input token counts. A request counts in whole tokens, rounded up
    once. 0 if the limit does not count such tokens."""
    cached_input_weight_milli: int = 0
    """Thousandths that a cached input token counts. 0 if the limit does not count such tokens."""
    output_weight_milli: int = 0
    """Thousandths that an output token counts. 0 if the limit does not count such tokens."""
    base_limit_value: int = 0
    """The limit without the temporary override; `limit_value` if there is none."""
    override_end_time: datetime | None = None
    """End of the temporary override. Unset if there is none."""
    override_reason: str = ""
    """Reason of the override. Empty if there is none, and in `admitted` and `finished` frames."""
    binding: bool = False
    """True if it has the smallest remainder of the enforced limits on its dimension that apply to
    the same requests. Only in lists of all limits of one key: GetQuota, Quote, and ListQuotas for a
    key."""
    narrowed_by_quota_id: str = ""
    """An inherited limit, or one on all models, that always runs out before or with this one, so
    that this one has no effect. Empty if there is none. Only set where `binding` is."""
    for_new_keys: bool = False
    """The limit is a default: each key created under its subject from then on gets a copy, and
    nothing else is limited."""
    alert_at: tuple[int, ...] = ()
    """Alert thresholds, ascending: percent of `limit_value` used; for prepaid credit, remaining
    picos. Empty for a limit without alerts, and in `admitted` and `finished` frames."""
    for_each: str = ""
    """The limit is a selector: it limits nothing itself, and gives a limit to each end user
    ("end_user"), to each value of a label ("label:team"), or to each key of a group ("key:free"),
    within its subject. Otherwise empty."""
    within_id: str = ""
    """UUID of the organization or project within which the limit of an end user or label counts.
    Empty for other subjects."""
    within_name: str = ""
    """Display name of that: "organization" or "organization/project". Empty in `admitted` and
    `finished` frames."""
    selector_id: str = ""
    """UUID of the selector that gives this limit its terms. Empty if it has terms of its own."""
    window_minutes: int = 0
    """Length of a rolling window. 0 for every other dimension."""
    group: str = ""
    """Group of keys by which the key has this limit, from a selector "key:GROUP". Otherwise
    empty."""
    set_by_organization: bool = False
    """Set by a key of the organization. It counts beside the operator's limits, which such a key
    cannot change. False: set by the operator."""


@dataclass(frozen=True, slots=True)
class EndUser(Value):
    """One user of a customer, as requests name it."""

    end_user_id: str = ""
    """Server-generated UUID."""
    name: str = ""
    """The name that requests give it. Empty once it is erased."""
    create_time: datetime | None = None
    """Time of its first request, or of its first limit if that came before."""
    last_use_day: str = ""
    """Day of its latest request, UTC, such as "2026-11-28"; of `create_time` if there was none."""
    state: EndUserState = EndUserState.UNSPECIFIED
    """Whether it is in use."""
    month_cost: Money | None = None
    """Exact cost of its requests that were settled in the current month (UTC), posted or not. Unset
    in lists without `with_usage`, as are the fields below."""
    month_request_count: int = 0
    """Number of these requests."""
    tightest_quota: QuotaStatus | None = None
    """The enforced limit of which the largest share is used or held, among its own limits and those
    that selectors give it. Unset if it has none."""


class FinishReason(StrEnum):
    """Reason why an admitted request ended."""

    UNSPECIFIED = "UNSPECIFIED"
    """Not set, or not known to this client."""
    STOP = "STOP"
    """The model ended its answer."""
    STOP_SEQUENCE = "STOP_SEQUENCE"
    """A stop sequence of the request was generated. It is not part of the text."""
    LENGTH = "LENGTH"
    """`max_output_tokens` or the end of the context window was reached."""
    CANCELLED = "CANCELLED"
    """The client cancelled or disconnected."""
    DEADLINE = "DEADLINE"
    """The deadline of the call passed."""
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    """A quota had no room for a further extension."""
    COST_LIMIT = "COST_LIMIT"
    """The `max_cost` of the request was reached."""
    SLOW_CONSUMER = "SLOW_CONSUMER"
    """The client stopped reading for longer than the server buffers."""
    FILTERED = "FILTERED"
    """A safety rule ended the answer."""
    TOOL_CALLS = "TOOL_CALLS"
    """The model ended its answer with tool calls, and waits for their results. Only for requests
    with `tools`. The usage event and `Generation.outcome` have STOP."""


class GenerationState(StrEnum):
    """State of a request."""

    UNSPECIFIED = "UNSPECIFIED"
    """Not set, or not known to this client."""
    RUNNING = "RUNNING"
    """It is running, and its tokens are held."""
    SETTLED = "SETTLED"
    """It ended, and its usage is recorded."""
    VOIDED = "VOIDED"
    """It ended before any billable work."""
    EXPIRED = "EXPIRED"
    """Its server was lost; the output known to be delivered is recorded."""


@dataclass(frozen=True, slots=True)
class Usage(Value):
    """Token counts of one request."""

    input_token_count: int = 0
    """Tokens of the prompt, cached ones included."""
    cached_input_token_count: int = 0
    """Prompt tokens served from the prefix cache. Never more than `input_token_count`."""
    generated_token_count: int = 0
    """Output tokens produced by the engine."""
    delivered_token_count: int = 0
    """Output tokens that the transport has taken. With `keep_on_disconnect`, those that were
    kept."""
    billed_token_count: int = 0
    """Billed output tokens: the delivered ones. After a crash of the server never more than the
    transport had taken."""
    embedding_token_count: int = 0
    """Embedded tokens, billed at their own price. An embedding request has no other tokens."""
    journalled_token_count: int = 0
    """Output tokens that the server was about to send: at least the delivered ones. The others are
    not billed. 0 while the request runs."""
    reasoning_token_count: int = 0
    """Delivered output tokens of the model's thinking, part of `delivered_token_count`. 0 unless
    the prompt is a conversation."""


@dataclass(frozen=True, slots=True)
class Timings(Value):
    """Time spent in each stage of a request, in milliseconds. Stages are disjoint and sum to
    `total_ms`, except `client_stall_ms`, which overlaps `decode_ms` up to the last token."""

    auth_ms: float = 0.0
    """Authenticating the API key."""
    tokenize_ms: float = 0.0
    """Rendering the chat template and tokenizing."""
    admission_ms: float = 0.0
    """Taking the hold in the database."""
    queue_ms: float = 0.0
    """Waiting in the queue before the engine."""
    cold_start_ms: float = 0.0
    """Waiting for an engine that was not running."""
    prefill_ms: float = 0.0
    """From the first prefill step to the first token."""
    decode_ms: float = 0.0
    """From the first token to the last."""
    client_stall_ms: float = 0.0
    """Time in which tokens were ready and the client did not take them: it had granted too little
    credit, or the transport could not send because it did not read. All such times of the request
    are added up. The engine goes on meanwhile, so the gaps between tokens do not include them."""
    settle_ms: float = 0.0
    """Writing usage event and settlement. For an answer in one piece, also waiting for the other
    prompts of the answer."""
    ttft_ms: float = 0.0
    """From the arrival of the start frame to the first token."""
    total_ms: float = 0.0
    """From the arrival of the start frame to the last frame."""
    itl_p50_ms: float = 0.0
    """Median of the gaps between two consecutive messages with tokens of one choice, as they are
    handed on to the client; waiting for the client is not part of them. These three are 0 with
    fewer than two messages, and for beam search."""
    itl_p99_ms: float = 0.0
    """99th percentile of these gaps."""
    itl_max_ms: float = 0.0
    """Longest of these gaps."""
    tokens_per_second: float = 0.0
    """Tokens after the first of each choice, by `decode_ms`. 0 without such tokens."""


@dataclass(frozen=True, slots=True)
class Generation(Value):
    """The record of one request."""

    request_id: str
    """Id generated by the client."""
    state: GenerationState
    """State of the request."""
    model: str
    """Model of the request."""
    admit_time: datetime | None
    """Time of admission."""
    settle_time: datetime | None
    """Time of settlement. Unset while it runs."""
    usage: Usage
    """Final counts; while it runs, the counts so far."""
    cost: Money | None = None
    """Cost. Unset while it runs."""
    timings: Timings | None = None
    """Time spent in each stage, without `settle_ms`. Unset while it runs and for a request
    recovered after a crash."""
    outcome: str = ""
    """Reason of the end: the name of a FinishReason without its prefix, or FAILED. Empty while it
    runs and if nothing was billed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the request."""
    receipts: tuple[Receipt, ...] = ()
    """Its receipts, one for each part of its usage; empty while it runs."""
    migration_count: int = 0
    """Number of moves to another engine after the first token, because one was lost or drained. 0
    while it runs, and after a recovery from a crash."""
    end_user: str = ""
    """The end user of the request. Empty: none was given, or it was erased."""


@dataclass(frozen=True, slots=True)
class UsageForecast(Value):
    """Estimated cost of a month at its prices, before plan discounts, credit and tax."""

    organization_name: str
    """The customer's name."""
    month: str
    """The month as YYYY-MM, in UTC."""
    as_of_time: datetime
    """Time of the forecast."""
    month_to_date: Money
    """Exact cost of the month's usage until then, posted or not."""
    expected: Money | None = None
    """The estimate for the whole month, rounded to minor units. Unset without a complete day of
    usage."""
    low: Money | None = None
    """Lower bound of the interval, rounded to minor units. Unset with too little history."""
    high: Money | None = None
    """Upper bound of the interval, rounded to minor units. Unset with too little history."""
    confidence_percent: int = 0
    """Confidence of the interval in percent, assuming that days vary as before."""
    complete_day_count: int = 0
    """Complete days (UTC) in the estimate."""
    method: str = ""
    """Method of the estimate, in a sentence."""
    warnings: tuple[str, ...] = ()
    """Caveats, a sentence each."""
    time_zone: str = ""
    """Time zone of days and the month: always UTC."""


@dataclass(frozen=True, slots=True)
class UsageShare(Value):
    """The part of a row with one outcome; included in the row's numbers."""

    request_count: int
    """Number of requests."""
    token_count: int
    """Billed tokens of all kinds."""
    amount: Money
    """Exact cost, posted or not."""


@dataclass(frozen=True, slots=True)
class UsageRow(TokenSums):
    """Usage of one group. Fields outside the grouping are empty. Never contains prompts or
    answers."""

    organization_id: str
    """The customer's id."""
    organization_name: str
    """The customer's name."""
    day: str
    """The day of settlement as YYYY-MM-DD, in UTC."""
    project_id: str
    """The project's id."""
    project_name: str
    """The project's name."""
    api_key_id: str
    """The API key's id."""
    api_key_name: str
    """The API key's name."""
    api_key_prefix: str
    """The API key's prefix."""
    model: str
    """The model."""
    request_id: str
    """The request's id."""
    outcome: str
    """Outcome of the request, as in Generation.outcome."""
    settle_time: datetime | None
    """Time of the request's settlement."""
    late: bool
    """True if it includes usage of a month closed before, which is billed as late usage."""
    request_count: int
    """Number of requests. Usage found after a request's settlement adds tokens but no request."""
    input_token_count: int
    """Computed input tokens, without cached ones."""
    cached_input_token_count: int
    """Input tokens from the prefix cache."""
    output_token_count: int
    """Billed output tokens, without those of the model's thinking."""
    cancelled: UsageShare
    """The part of requests cancelled by the client or by a deadline."""
    limited: UsageShare
    """The part of requests ended by a quota, a cost limit, a slow consumer or a filter."""
    failed: UsageShare
    """The part of requests failed by the server."""
    amount: Money
    """Exact amount posted to the ledger."""
    pending_amount: Money
    """Exact amount recorded but not posted yet. Posting takes about a second."""
    embedding_token_count: int = 0
    """Embedded tokens."""
    migration_count: int = 0
    """Number of moves of requests to another engine after their first token, because an engine was
    lost or drained."""
    reasoning_token_count: int = 0
    """Billed output tokens of the model's thinking."""
    cost: Money = field(default=Money("", 0))
    """Exact cost, posted or not: `amount` plus `pending_amount`."""
    hour: str = ""
    """The hour of settlement, in UTC: 2026-11-28T14:00Z."""
    end_user_id: str = ""
    """Id of the end user, also for single requests. Empty: none was given."""
    end_user: str = ""
    """Name of the end user. Empty with an id: erased."""
    label_value: str | None = None
    """Value of the label. Unset: the requests do not have it."""


@dataclass(frozen=True, slots=True)
class UsageReport(Value):
    """Usage of a key or a project."""

    rows: tuple[UsageRow, ...]
    """The rows, 10,000 at most: InvalidRequest for more."""
    total: UsageRow
    """Their sum."""
    first_day: str = ""
    """First day of the usage asked for, as YYYY-MM-DD in UTC. Late usage of a month may be
    older."""
    last_day: str = ""
    """Last day of the usage asked for, as YYYY-MM-DD in UTC."""
    time_zone: str = ""
    """Time zone of the days: always UTC."""


@dataclass(frozen=True, slots=True)
class UsagePage(Value):
    """A page of usage."""

    rows: tuple[UsageRow, ...] = ()
    """The rows."""
    total: UsageRow | None = None
    """Total of all pages as one row. On the first page of a single organization only."""
    has_more: bool = False
    """True if another page follows."""
    time_zone: str = ""
    """Time zone of days and months: always UTC."""


@dataclass(frozen=True, slots=True)
class Invitation(Value):
    """An invitation that is neither accepted nor revoked, without its token."""

    invitation_id: str = ""
    """Server-generated UUID."""
    organization_id: str = ""
    """UUID of the organization."""
    organization_name: str = ""
    """Name of the organization."""
    project_id: str = ""
    """UUID of the project of the future member."""
    project_name: str = ""
    """Name of that project."""
    email: str = ""
    """E-mail address of the person, in lower case."""
    role: str = ""
    """Role of the future member: see `Member.role`."""
    create_time: datetime | None = None
    """Time of the invitation."""
    expire_time: datetime | None = None
    """The token is refused from then on."""


@dataclass(frozen=True, slots=True)
class InvoiceLine(Value):
    """A line of an invoice."""

    kind: str
    """Stable kind: `usage`, `late_usage`, a charge as in `ChargeKind` in lower case, or `rounding`,
    which completes the other lines to the total."""
    description: str
    """Text of the line on the document, for people."""
    exact_amount: Money
    """Before rounding; 0 for the line of the rounding."""
    amount: Money
    """Billed amount, in whole minor units."""
    model: str = ""
    """The model; empty if not applicable."""
    price_version: int = 0
    """The price version; 0 if not applicable."""
    token_kind: str = ""
    """Token kind, in lower case as in the report's documents; empty if not applicable."""
    token_count: int = 0
    """Number of tokens; 0 if not applicable."""
    unit_price_picos: int = 0
    """Picos per token; 0 if not applicable."""
    usage_month: str = ""
    """The month of the usage as YYYY-MM, for usage lines."""
    source_id: str = ""
    """Id of the adjustment or the credit grant."""


class PaymentState(StrEnum):
    """Payment state of an invoice at Stripe."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    OPEN = "open"
    """Finalized, and to be paid."""
    FAILED = "failed"
    """An attempt to charge it failed, and none has succeeded."""
    OVERDUE = "overdue"
    """Unpaid after its due date."""
    PAID = "paid"
    """Paid. Final, regardless of older events that arrive later."""
    VOID = "void"
    """Voided: nothing is owed."""
    UNCOLLECTIBLE = "uncollectible"
    """Marked as uncollectible at Stripe. It may still be paid."""


@dataclass(frozen=True, slots=True)
class InvoicePayment(Value):
    """One invoice at Stripe, from its events."""

    stripe_invoice_id: str
    """Id of the invoice at Stripe, such as "in_1Nx"."""
    stripe_number: str
    """Number at Stripe. Empty if no event has contained it."""
    state: PaymentState
    """State of the payment as Stripe last reported it."""
    amount_due: Money
    """Amount due, including taxes and items added at Stripe."""
    amount_paid: Money
    """Amount paid so far, as Stripe last reported it."""
    hosted_url: str = ""
    """Stripe's payment page. Empty if no event has contained it."""
    finalize_time: datetime | None = None
    """Time when Stripe finalized it. Unset if no event has contained it."""
    pay_time: datetime | None = None
    """Time of payment. Unset if unpaid."""
    failure_time: datetime | None = None
    """Time of the latest failed charge. Unset if none failed."""


@dataclass(frozen=True, slots=True)
class Invoice(Value):
    """Invoice of a month. It never changes; mistakes are corrected by a credit note or an
    adjustment."""

    number: str
    """Its number: `INV-` and digits, without gaps."""
    organization_id: str
    """The organization's id."""
    organization_name: str
    """The organization's name at the close."""
    month: str
    """The month as YYYY-MM, in UTC."""
    issue_time: datetime | None
    """Time of issue."""
    issued_by: str
    """Author of the close: the prefix of a key."""
    lines: tuple[InvoiceLine, ...]
    """In the order of the report. Their amounts add up to `total`."""
    exact_total: Money
    """Sum of the lines before rounding."""
    carried_in: Money
    """Rounding remainder of previous months."""
    carried_out: Money
    """Rounding remainder for the next month: exact_total + carried_in - total."""
    total: Money
    """Amount owed, in whole minor units. Negative: in favour of the customer."""
    credited: Money
    """Sum of its approved credit notes."""
    tax_note: str = ""
    """Tax treatment of the amounts."""
    credit_notes: tuple[Adjustment, ...] = ()
    """Its credit notes."""
    payments: tuple[InvoicePayment, ...] = ()
    """Stripe's invoices of the same month. See `Month.payments`."""


@dataclass(frozen=True, slots=True)
class KeyChange(Value):
    """A change that gave an API key a new secret or more rights."""

    act: str
    """"rotated" or "widened": more scopes, another role, more networks, or a longer life."""
    actor: str
    """Prefix of the key that made the change, as in the audit log."""
    change_time: datetime
    """Time of the change."""


@dataclass(frozen=True, slots=True)
class KeyRestrictions(Value):
    """Permissions of a key, as visible to itself."""

    prefix: str = ""
    """The first characters of the key."""
    scopes: tuple[str, ...] = ()
    """Scopes: "inference", "admin", "billing", "scim"."""
    models: tuple[str, ...] = ()
    """Names of the allowed models. Empty: all models."""
    max_input_tokens: int | None = None
    """Limit of input tokens per request: its prompt, or all texts to embed. 0: the model's own
    limit."""
    max_output_tokens: int | None = None
    """Limit of output tokens per request, all choices together. 0: the model's own limit."""
    allowed_networks: tuple[str, ...] = ()
    """Networks that may use the key. Empty: all."""
    secret_expire_time: datetime | None = None
    """Time of expiry of the secret in use. Unset: never."""
    strict_parameters: bool = False
    """Refuses unknown parameters over HTTP."""
    latest_change: KeyChange | None = None
    """The latest rotation of the key or widening of its rights. Unset: there was none."""
    group: str = ""
    """Group of the key within its organization. Empty: none."""
    role: str = ""
    """Role of the key in its organization. Empty: none."""


@dataclass(frozen=True, slots=True)
class Plan(Value):
    """One immutable version of a plan."""

    name: str = field(default="", metadata={"source": "configuration.name"})
    """Name of the plan."""
    version: int = 0
    """Its version: 1 for the first of its name, and one more for each change."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Rules of the plan."""
    create_time: datetime | None = None
    """Time of creation."""
    existed: bool = False
    """True if creating it found an identical version."""


@dataclass(frozen=True, slots=True)
class PlanAssignment(Value):
    """The plan of an organization from a month on, until its next assignment."""

    organization_id: str = ""
    """UUID of the organization that has the plan."""
    organization_name: str = ""
    """Name of the organization that has the plan."""
    first_month: str = ""
    """The first month as YYYY-MM, UTC."""
    plan: str = ""
    """The name of the plan; empty for none."""
    version: int = 0
    """Its version; 0 for no plan."""
    assigned_by: str = ""
    """Author of the assignment: the prefix of the API key."""
    existed: bool = False
    """True if it was assigned before."""


@dataclass(frozen=True, slots=True)
class PlanList(Value):
    """Plans and their assignments."""

    plans: tuple[Plan, ...] = ()
    """Sorted by name, the latest version first."""
    assignments: tuple[PlanAssignment, ...] = ()
    """Sorted by organization, then month."""


@dataclass(frozen=True, slots=True)
class Price(Value):
    """Price of a model."""

    version: int = 0
    """Price version."""
    currency_code: str = ""
    """ISO 4217 code."""
    input_picos_per_token: int = 0
    """Picos of the currency unit per uncached input token."""
    cached_input_picos_per_token: int = 0
    """Picos per cached input token."""
    output_picos_per_token: int = 0
    """Picos per output token."""
    effective_time: datetime | None = None
    """Start of validity."""
    embedding_picos_per_token: int = 0
    """Picos per embedded token."""
    tier: str = "interactive"
    """Service tier of this price."""
    own: bool = False
    """True for the caller's own price instead of the list price."""
    reasoning_picos_per_token: int = 0
    """Picos per output token of the model's thinking."""


class ModelTask(StrEnum):
    """Task of a model."""

    UNSPECIFIED = "UNSPECIFIED"
    """Not set, or not known to this client."""
    GENERATE = "GENERATE"
    """Continues prompts: `Generate`, `CountTokens`, `Quote`."""
    EMBED = "EMBED"
    """Turns texts into vectors: `Embed`, and `CountTokens` for a text."""


@dataclass(frozen=True, slots=True)
class ModelVersion(Value):
    """One version of a model."""

    version: str = ""
    """The part after the `@`."""
    share: float = 0.0
    """Its fraction of the requests without a version, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class RefusedField(Value):
    """A field of `StartFrame` that a model's engine refuses."""

    field: str = ""
    """Path of the field, for example "sampling.min_p"."""
    values: str = ""
    """The refused values, for example "with a temperature above 0". Empty: all that have an
    effect."""


@dataclass(frozen=True, slots=True)
class Model(Value):
    """One available model."""

    name: str = ""
    """The name to send in requests."""
    architecture: str = ""
    """Architecture of the checkpoint, for example "LlamaForCausalLM"."""
    context_window_tokens: int = 0
    """Context window, input and output together."""
    vocabulary_size: int = 0
    """Size of the vocabulary."""
    engine: str = ""
    """Engine that runs it, for example "torch"."""
    price: Price | None = None
    """The caller's current price of interactive requests. Unset: no price is set, and the model
    cannot be used."""
    tier_prices: tuple[Price, ...] = ()
    """The caller's current price in each service tier."""
    task: ModelTask = ModelTask.GENERATE
    """Task of the model."""
    embedding_dimension: int = 0
    """Number of floats in each vector. 0 for a generating model. For an embedding model,
    `context_window_tokens` limits each text."""
    embedding_input_count_max: int = 0
    """Limit of texts in one `Embed` call. 0 for a generating model."""
    aliases: tuple[str, ...] = ()
    """Other names for requests. Billing and limits use the model's canonical name."""
    versions: tuple[ModelVersion, ...] = ()
    """Versions, requested as `name@version`; empty if there is only one. Billed and limited as the
    model."""
    ready_replica_count: int = 0
    """Number of engines that accept requests."""
    replica_count: int = 0
    """Number of all its engines, in any state."""
    drained_replica_count: int = 0
    """Number of engines drained by an admin."""
    kernels: tuple[str, ...] = ()
    """Kernels of its ready engines: the instruction set of the native ones, for example `amx`;
    `torch`, which is several times slower; `cuda`; `simulated`. Empty for other engines."""
    refused_fields: tuple[RefusedField, ...] = ()
    """Request fields that its engine would ignore. A request that uses one is refused with
    InvalidRequest before a hold is made. With several versions: of the one with most requests."""
    counts_from_usage: bool = False
    """An engine of the model reports no token ids. Its output tokens are counted from its usage,
    each is 2147483647 in `token_ids`, and `update.max_output_tokens` cannot be raised."""


class MonthExportFormat(StrEnum):
    """File format of a month."""

    INVOICE_PDF = "invoice_pdf"
    """The invoice as PDF, or its draft while the month is open."""
    FOCUS_CSV = "focus_csv"
    """Charges by day, project, key, price and token kind, as CSV with the columns of FOCUS 1.4, the
    FinOps Open Cost and Usage Specification. For a closed month the sum of BilledCost is the total
    of the invoice."""


class Stage(StrEnum):
    """Reason of a request's wait."""

    UNSPECIFIED = "UNSPECIFIED"
    """Not set, or not known to this client."""
    QUEUED = "QUEUED"
    """A slot in the batch."""
    ENGINE_LOADING = "ENGINE_LOADING"
    """The start of an engine."""
    RUNNING = "RUNNING"
    """Work without output for some seconds, such as computing a long prompt, or text that is held
    back because it may become a stop sequence or a tool call. May come after a `delta`."""


@dataclass(frozen=True, slots=True)
class Quote(Value):
    """Quote of a request, if it were started now."""

    input_token_count: int
    """Tokens of the rendered prompt, or of all texts to embed."""
    predicted_cached_token_count: int
    """Prompt tokens expected from the prefix cache. 0 if unknown."""
    max_output_token_count: int
    """Limit of output tokens, all choices together."""
    expected_output_token_count: int
    """Expected output tokens: the mean of the project's latest requests to the model, at most
    `max_output_token_count`; that limit if there were none."""
    worst_case_cost: Money
    """Upper bound of the cost: nothing cached, and `max_output_token_count` output tokens."""
    expected_cost: Money
    """Cost with `predicted_cached_token_count` and `expected_output_token_count`."""
    price_version: int = 0
    """Price version that it would be billed by."""
    would_admit: bool = False
    """Whether the quotas would admit it."""
    retry_helps: bool = False
    """Whether waiting can help if it would not be admitted: false for a request larger than a
    limit."""
    retry_after_s: float | None = field(default=None, metadata={"source": "retry_delay"})
    """Time to wait, if that helps. Unset otherwise."""
    failing_quotas: tuple[QuotaStatus, ...] = ()
    """Quotas that would refuse it, sorted by their reset, the earliest first."""
    quotas: tuple[QuotaStatus, ...] = ()
    """Every quota that applies, without this request. Sorted by organization, project, key, then
    dimension."""


@dataclass(frozen=True, slots=True)
class ResalePrice(Value):
    """One immutable version of what an organization charges its end users; corrections are later
    versions. A request pays the version in force when it starts."""

    version: int = 0
    """Version number."""
    model: str = ""
    """The priced model; empty: all models without a version of their own."""
    markup_milli: int = 0
    """What tokens without a price of their own are charged at, in thousandths of the organization's
    cost: 1250 adds a quarter."""
    input_picos_per_token: int | None = None
    """Picos per uncached input token. Unset: the markup."""
    cached_input_picos_per_token: int | None = None
    """Picos per cached input token. Unset: the markup."""
    output_picos_per_token: int | None = None
    """Picos per output token that is not thinking. Unset: the markup."""
    reasoning_picos_per_token: int | None = None
    """Picos per output token of the model's thinking. Unset: as output."""
    embedding_picos_per_token: int | None = None
    """Picos per embedded token. Unset: the markup."""
    request_picos: int = 0
    """Picos per request, beside its tokens."""
    withdrawn: bool = False
    """True if it only ends the price: that of all models applies from then on, or else the cost."""
    effective_time: datetime | None = None
    """Start of validity."""
    replica_hour_picos: int = 0
    """Picos per hour of each rented replica of the model."""


@dataclass(frozen=True, slots=True)
class ResaleStatementLine(Value):
    """Tokens of one kind and model, its requests, or seconds of its rented replicas, at one version
    of the resale prices."""

    model: str
    """The model."""
    item: str
    """"requests", "replica_seconds", or the kind of token in lower case, as in other documents."""
    quantity: int
    """Number of requests, seconds or tokens."""
    cost: Money
    """Cost of this usage to the organization. 0 for rented replicas, for which Weir charges
    nothing."""
    amount: Money
    """What the end user is charged, exact to the pico."""
    resale_price_version: int = 0
    """The version of the resale prices; 0 without one: at cost."""
    late_month: str = ""
    """The month of the usage as YYYY-MM, if that was closed before the usage was posted; else
    empty."""


@dataclass(frozen=True, slots=True)
class ResaleStatement(Value):
    """Charges of an organization to one end user for a month."""

    end_user: str
    """Name of the end user. Empty for an erased one, and for usage without an end user."""
    end_user_id: str
    """UUID of the end user. Empty for usage without an end user."""
    month: str
    """The month as YYYY-MM, in UTC."""
    state: str
    """State of the month. While it is open, amounts may still change."""
    request_count: int
    """Number of requests."""
    token_count: int
    """Number of tokens of all kinds."""
    cost: Money
    """What the organization pays for the usage, before its plan. The costs of all statements of a
    month add up to the usage on its invoice."""
    amount: Money
    """Exact sum of the lines."""
    carried_in: Money
    """Rounding remainder of the end user's previous statements."""
    total_rounded: Money
    """Amount to charge: amount + carried_in, rounded once to the currency's minor unit."""
    lines: tuple[ResaleStatementLine, ...] = ()
    """Lines by model and kind. Empty in lists."""
    replica_second_count: int = 0
    """Seconds of rented replicas, of each replica apart."""


class ResaleStatementFormat(StrEnum):
    """Format of a statement as a file."""

    JSON = "json"
    """JSON, with the organization's costs."""
    CSV = "csv"
    """CSV, with the organization's costs."""
    PDF = "pdf"
    """PDF for the end user, without costs."""


@dataclass(frozen=True, slots=True)
class ReplicaRental(Value):
    """Replicas of a model that an organization rents to one end user for some time. Each second of
    each replica is on the end user's statement, at the resale price per hour in force when it
    starts."""

    rental_id: int = 0
    """Number of the rental."""
    end_user: str = ""
    """Name of the end user. Empty for an erased one."""
    end_user_id: str = ""
    """UUID of the end user."""
    model: str = ""
    """The model."""
    replica_count: int = 0
    """Number of replicas."""
    start_time: datetime | None = None
    """Start, a whole second."""
    end_time: datetime | None = None
    """End, a whole second, which is not charged. Unset: open."""


@dataclass(frozen=True, slots=True)
class SimulatedModel(Value):
    """Part of the actual and simulated charges of one organization."""

    model: str
    """The model. Empty: lines of the plan that are for all models together."""
    token_count: int
    """Tokens of all kinds."""
    old_amount: Money
    """Actual charges: usage at its price, and the lines of the plan for this model."""
    new_amount: Money
    """Simulated charges."""
    difference: Money
    """`new_amount` less `old_amount`."""


@dataclass(frozen=True, slots=True)
class SimulatedCustomer(Value):
    """Actual and simulated charges of a month for one organization."""

    organization_id: str
    """The organization."""
    organization_name: str
    """Its name."""
    token_count: int
    """Tokens of all kinds."""
    old_amount: Money
    """Actual charges: usage at its price, and the lines of the plan. Without adjustments, credit
    and rounding."""
    new_amount: Money
    """Simulated charges."""
    difference: Money
    """`new_amount` less `old_amount`."""
    old_plan: str = ""
    """The actual plan; empty: none."""
    new_plan: str = ""
    """The simulated plan."""
    models: tuple[SimulatedModel, ...] = ()
    """The same by model, by its name; the amounts add up to those of the organization."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Value):
    """A token and its log-probability."""

    token_id: int = 0
    """Id in the model's vocabulary."""
    logprob: float = 0.0
    """Natural logarithm of its probability; 0 is certain."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Value):
    """Log-probability of a token in the model's own distribution: before logit_bias, penalties,
    response format and temperature."""

    chosen: TokenLogprob
    """The token itself."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens at its position, the likeliest first; their number is `top_logprobs` or
    `prompt_logprobs`."""


class UsageGrouping(StrEnum):
    """Grouping of usage rows."""

    ORGANIZATION = "organization"
    """A customer."""
    DAY = "day"
    """A day (UTC) of settlement."""
    PROJECT = "project"
    """A project."""
    API_KEY = "api_key"
    """An API key."""
    MODEL = "model"
    """A model."""
    REQUEST = "request"
    """Single requests, oldest first unless `latest_first`. Cannot be combined with other
    groupings."""
    END_USER = "end_user"
    """An end user, in the order of their ids. Requests without one are one row, each erased end
    user another."""
    LABEL = "label"
    """A value of the label that `label_key` names. Requests without this label are one row."""
    HOUR = "hour"
    """An hour (UTC) of settlement."""


@dataclass(frozen=True, slots=True)
class BillingProfile(Value):
    """Recipient of an organization's invoices. Unknown fields are empty. An address has at least
    `address_line1` and `country`. No field may contain control characters or line breaks."""

    emails: tuple[str, ...] = ()
    """E-mail addresses, at most 10, distinct. Stripe sends invoices to the first; the others are
    for the operator."""
    legal_name: str = ""
    """Registered name, up to 256 characters. Empty: documents are addressed to the organization's
    name."""
    address_line1: str = ""
    """Street and number, up to 200 characters."""
    address_line2: str = ""
    """Building, floor or department, up to 200 characters."""
    city: str = ""
    """City, up to 100 characters."""
    postal_code: str = ""
    """Postal code, up to 20 characters."""
    state: str = ""
    """State, province or region, up to 100 characters."""
    country: str = ""
    """ISO 3166-1 alpha-2 code, such as "DE"."""
    tax_id: str = ""
    """Tax id as printed on documents, up to 50 characters. It is not sent to Stripe."""
    language: str = ""
    """IETF language tag of Stripe's messages to the customer, such as "de" or "pt-BR"."""


@dataclass(frozen=True, slots=True)
class Suspension(Value):
    """Suspension of an organization or project."""

    reason: str = ""
    """The reason that was given."""
    create_time: datetime | None = None
    """Time of the suspension."""
    by_operator: bool = False
    """False: the organization suspended its own project, and can resume it."""


class RemainingCredit(StrEnum):
    """Choice for the prepaid credit that the final month of a closed organization leaves."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    REFUND = "refund"
    """The close of the final month posts it as owed to the customer, to be paid outside of Weir."""
    EXPIRE = "expire"
    """The close of the final month posts it as forfeited."""
    KEEP = "keep"
    """It stays until its grants end."""


@dataclass(frozen=True, slots=True)
class Closure(Value):
    """Closing of an organization or project: nothing opens it again."""

    reason: str = ""
    """The reason that was given."""
    close_time: datetime | None = None
    """Time of the closing."""
    by_operator: bool = False
    """False: the organization closed its own project."""
    remaining_credit: RemainingCredit = RemainingCredit.UNSPECIFIED
    """What happens to the credit that the final month leaves; UNSPECIFIED for a project, and if
    none remained."""
    final_month: str = ""
    """The last month with requests, as YYYY-MM."""
    is_final_month_closed: bool = False
    """Whether the final month of the organization is closed, with its invoice."""


@dataclass(frozen=True, slots=True)
class Organization(Value):
    """A customer: it owns projects, keys and limits, and gets one bill a month."""

    organization_id: str = ""
    """Server-generated UUID."""
    name: str = ""
    """Unique name: 1 to 63 of a-z, 0-9 and "-", starting with a letter."""
    currency_code: str = ""
    """ISO 4217 code of its bills, such as "USD". It never changes."""
    create_time: datetime | None = None
    """Time of creation."""
    billing_profile: BillingProfile | None = None
    """Recipient of its invoices. Unset if never set."""
    queue_weight_milli: int = 0
    """How much it counts in the fair queue, in thousandths: under load, twice the weight is twice
    the service. 1000 if it was never set."""
    suspension: Suspension | None = None
    """Why its requests are refused. Unset: they are not, or it is closed."""
    region: str = ""
    """The region that its requests do not leave. Empty: it is bound to none."""
    closure: Closure | None = None
    """When and why it was closed for good. Unset: it is open."""


@dataclass(frozen=True, slots=True)
class ClosureEffects(Value):
    """Objects that a closing changes, or that remain to be done, as they are at present."""

    running_request_count: int = 0
    """Requests that run now: they end, and are billed what was delivered."""
    active_key_count: int = 0
    """Keys that work: they are revoked."""
    limit_count: int = 0
    """Limits, which have nothing to limit any more."""
    overridden_limit_count: int = 0
    """Limits that are changed for a time."""
    open_project_count: int = 0
    """Projects of the organization that are not closed."""
    open_rental_count: int = 0
    """Rentals of replicas that have not ended: they end, and are on the statement up to the
    second."""
    has_webhook: bool = False
    """Whether a webhook stays for the alerts of the final invoice."""
    open_months: tuple[str, ...] = ()
    """Months with content that are not closed yet, as YYYY-MM, with the present one."""
    unbilled: Money | None = None
    """Usage and other charges of open months."""
    remaining_credit: Money | None = None
    """Prepaid credit that closed months have left."""


@dataclass(frozen=True, slots=True)
class ClosedOrganization(Value):
    """The organization."""

    organization: Organization
    """With its closure, unless the request was `validate_only`."""
    effects: ClosureEffects
    """What the closing changed, or would change."""


@dataclass(frozen=True, slots=True)
class Project(Value):
    """A subdivision of an organization, with its own keys."""

    project_id: str = ""
    """Server-generated UUID."""
    organization_id: str = ""
    """The organization it belongs to."""
    name: str = ""
    """Unique name inside the organization, formed like an organization's."""
    create_time: datetime | None = None
    """Time of creation."""
    suspension: Suspension | None = None
    """Why the requests of its keys are refused. Unset: they are not, unless the organization is
    suspended or one of both closed."""
    closure: Closure | None = None
    """When and why it was closed for good. Unset: it is open, unless its organization is closed."""


@dataclass(frozen=True, slots=True)
class ClosedProject(Value):
    """The project."""

    project: Project
    """With its closure, unless the request was `validate_only`."""
    effects: ClosureEffects
    """What the closing changed, or would change. Of the organization, only the keys, requests and
    limits of the project count."""


@dataclass(frozen=True, slots=True)
class ApiKey(Value):
    """An API key without its secret."""

    api_key_id: str = ""
    """Server-generated UUID."""
    organization_id: str = ""
    """The organization of its project."""
    project_id: str = ""
    """UUID of the project whose usage the key counts as."""
    name: str = ""
    """Display name, such as that of the program that uses the key. Need not be unique."""
    prefix: str = ""
    """The first characters of the key, which identify it."""
    scopes: tuple[str, ...] = ()
    """Permissions: "inference", "admin", "billing", "scim"."""
    create_time: datetime | None = None
    """Time of creation."""
    expire_time: datetime | None = None
    """Time of expiry. Unset: never."""
    revoke_time: datetime | None = None
    """Time of revocation. Unset: not revoked."""
    overlap_end_time: datetime | None = None
    """End of validity of the secret that the last rotation replaced. Unset: only one secret is
    valid."""
    models: tuple[str, ...] = ()
    """Names of the allowed models; a name covers all versions of the model. Empty: all models."""
    allowed_networks: tuple[str, ...] = ()
    """Networks that may use the key, such as "203.0.113.0/24" or "2001:db8::/32". Empty: all. Calls
    from other addresses get PermissionDenied with the reason ADDRESS_NOT_ALLOWED, and so do running
    requests from there when the networks are narrowed."""
    max_input_tokens: int | None = None
    """Limit of input tokens per request: its prompt, or all texts to embed. 0: the model's own
    limit. A larger request is InvalidRequest with the reason KEY_LIMIT_EXCEEDED."""
    max_output_tokens: int | None = None
    """Limit of output tokens per request, all choices together. 0: the model's own limit. A request
    that asks for more is refused in the same way; one without a limit of its own ends there with
    FINISH_REASON_LENGTH."""
    strict_parameters: bool = False
    """Refuses unknown parameters over HTTP, as `?strict=1` does for one request; `?strict=0` does
    not relax it. False: those that cannot change the answer are ignored and named in a header."""
    last_use_time: datetime | None = None
    """Time of the last successful use, by a call or a message on an open stream, accurate to two
    minutes. Unset: not used since `use_tracked_since_time`."""
    use_tracked_since_time: datetime | None = None
    """Time since when its uses are recorded: `create_time`, or later for keys older than this
    feature."""
    organization_name: str = ""
    """The name of the organization of its project."""
    project_name: str = ""
    """Name of its project, unique within the organization."""
    group: str = ""
    """Group of the key within its organization, such as "free". Limits can be set for each key of a
    group: `SetQuotaRequest.for_each`. Empty: none."""
    role: str = ""
    """Role of the key in its organization: "owner", "admin", "developer", "finance" or "viewer". It
    permits calls beside those of the scopes. Empty: none."""
    is_bound: bool = False
    """True for a key without a secret: it acts for a signed-in member, or for callers whose tokens
    are trusted. No secret authenticates it, and it cannot be rotated."""
    person_id: str = ""
    """The person whom the key belongs to. It ends with the person's membership. Empty: none."""
    service_account_id: str = ""
    """The service account that the key belongs to. Empty: none."""
    creator_id: str = ""
    """The person who created the key. Empty: a key without a person, or the service itself."""


@dataclass(frozen=True, slots=True)
class CreatedApiKey(Value):
    """The key with its secret, which no later call returns."""

    api_key: ApiKey
    """The new key, or with `allow_existing` the active one of this name."""
    secret: str = field(default="", repr=False)
    """The secret to send as bearer token. It is returned only once: empty if the key existed
    before. RotateApiKey creates a new one."""
    existed: bool = False
    """True if it existed before: by its name, or because the call was repeated."""


@dataclass(frozen=True, slots=True)
class RotatedApiKey(Value):
    """The rotated key."""

    api_key: ApiKey
    """The key, with unchanged id, prefix and limits."""
    secret: str = field(default="", repr=False)
    """The new secret. It is returned only once: empty if this repeats a call."""
    overlap_end_time: datetime | None = None
    """End of validity of the replaced secret."""


class ApiKeyState(StrEnum):
    """State of a key."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    VALID = "valid"
    """Neither revoked nor expired."""
    ENDED = "ended"
    """Revoked or expired."""


@dataclass(frozen=True, slots=True)
class PreviewedDay(Value):
    """Requests of one day."""

    day: str = ""
    """Day as YYYY-MM-DD, in UTC."""
    request_count: int = 0
    """Requests that the limit concerns."""
    refused_count: int = 0
    """Those that it would have refused."""
    shortened_count: int = 0
    """Those whose output it would have ended early."""


@dataclass(frozen=True, slots=True)
class PreviewedMember(Value):
    """Requests of an end user, of a label value, or of a key."""

    name: str = ""
    """Its name: of an end user or label value as requests gave it, of a key its prefix. Empty for
    an erased end user."""
    request_count: int = 0
    """Requests that the limit concerns."""
    refused_count: int = 0
    """Those that it would have refused."""
    shortened_count: int = 0
    """Those whose output it would have ended early."""


@dataclass(frozen=True, slots=True)
class QuotaPreview(Value):
    """Effect of a limit on past requests. Three things are not recorded, so that they cannot be
    known: requests that were refused, which another limit may have admitted; whether clients would
    have repeated what this limit refuses; and when within a minute a running request asked for more
    output."""

    start_time: datetime | None = None
    """First moment of the preview."""
    end_time: datetime | None = None
    """End of the preview."""
    request_count: int = 0
    """Requests that the limit concerns and that were admitted in this time. Without requests that
    ended before any billable work."""
    refused_count: int = 0
    """Those of them that the limit would have refused."""
    shortened_count: int = 0
    """Admitted requests whose output the limit would have ended early."""
    first_refusal_time: datetime | None = None
    """Time of the first refusal; unset without one."""
    days: tuple[PreviewedDay, ...] = ()
    """The same by day (UTC), in order; only days with requests."""
    members: tuple[PreviewedMember, ...] = ()
    """With `for_each`: by end user, label value or key, the most refused first, at most 100."""
    member_count: int = 0
    """Number of end users, label values or keys with requests; 0 without `for_each`."""
    refused_member_count: int = 0
    """Those of them with a refusal."""


@dataclass(frozen=True, slots=True)
class PriceVersion(Value):
    """One immutable price version; corrections are later versions."""

    version: int = 0
    """Version number."""
    model: str = ""
    """The priced model."""
    currency_code: str = ""
    """ISO 4217 code."""
    tier: str = ""
    """The priced service tier."""
    organization_id: str = ""
    """The organization, for its own price; empty for the list price."""
    organization_name: str = ""
    """That organization's name; empty for the list price."""
    input_picos_per_token: int = 0
    """Picos per uncached input token."""
    cached_input_picos_per_token: int = 0
    """Picos per cached input token."""
    output_picos_per_token: int = 0
    """Picos per output token that is not thinking."""
    embedding_picos_per_token: int = 0
    """Picos per embedded token."""
    multiplier_milli: int = 0
    """Thousandths of the interactive prices that these were derived with. 1000 for the interactive
    tier."""
    effective_time: datetime | None = None
    """Start of validity."""
    withdrawn: bool = False
    """True if it only ends the organization's own price: the list price applies from then on. Its
    prices are 0 and never charged."""
    reasoning_picos_per_token: int = 0
    """Picos per output token of the model's thinking."""


@dataclass(frozen=True, slots=True)
class AppliedPrice(Value):
    """Price that applies to a model in a service tier, with its source."""

    model: str
    """The model."""
    tier: str
    """The requested service tier. `version.tier` differs if that tier has no price of its own and
    uses the interactive one."""
    source: str
    """Source of the price."""
    version: PriceVersion
    """Price version of requests admitted at this time."""


@dataclass(frozen=True, slots=True)
class PriceList(Value):
    """Prices."""

    prices: tuple[AppliedPrice, ...] = ()
    """Prices in force at that time, by model, currency and tier."""
    versions: tuple[PriceVersion, ...] = ()
    """With `history`: all versions of list prices and of the organization's own, the oldest of each
    tier first."""


@dataclass(frozen=True, slots=True)
class CreditGrant(Value):
    """Credit that an organization may use for the charges of some months."""

    grant_id: str
    """Server-generated UUID."""
    organization_id: str
    """The organization."""
    organization_name: str
    """Its name."""
    amount: Money
    """Granted amount."""
    spent: Money
    """Amount spent by closed months."""
    expired: Money
    """Expired amount."""
    remaining: Money
    """Remaining amount, counting closed months."""
    first_month: str
    """First month that it covers, as YYYY-MM."""
    last_month: str
    """Last month that it covers. The rest expires at its close."""
    reason: str
    """Reason."""
    granted_by: str
    """Author of the grant: the prefix of the API key."""
    create_time: datetime | None
    """Time of the grant."""
    refunded: Money
    """Amount owed to the customer since its organization was closed."""


@dataclass(frozen=True, slots=True)
class CreditBalance(Value):
    """An organization's current credit."""

    organization_id: str
    """The organization."""
    organization_name: str
    """Its name."""
    prepaid: bool
    """True if requests are admitted only within the credit."""
    remaining: Money
    """Remainder of grants for this month and later ones, counting closed months."""
    unbilled: Money
    """Charges of open months so far."""
    held: Money
    """Held by running requests of a prepaid organization."""
    available: Money
    """Spendable this month: `remaining` less `unbilled` and `held`, as far as the grants' months
    allow it."""


@dataclass(frozen=True, slots=True)
class AuditPage(Value):
    """Audit entries, and the position after them."""

    entries: tuple[AuditEntry, ...] = ()
    """Oldest first. May be empty before the end while a change is under way: ask again."""
    position: int = 0
    """Where the next call continues: no entry appears before it any more."""


class RequestPhase(StrEnum):
    """Phase of a request."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    PREPARING = "preparing"
    """It is being checked, tokenized and admitted."""
    QUEUED = "queued"
    """It is waiting in the queue."""
    LOADING = "loading"
    """Its engine is being started."""
    PREFILL = "prefill"
    """The engine computes the prompt."""
    DECODE = "decode"
    """Tokens are generated."""
    ENDING = "ending"
    """It has ended and is being settled."""


@dataclass(frozen=True, slots=True)
class LiveRequest(Value):
    """A running or waiting request. Its content is never exposed."""

    request_id: str
    """Id chosen by the client, unique in its project."""
    organization_id: str
    """The billed organization."""
    organization_name: str
    """Its name."""
    project_id: str
    """The project of its key."""
    project_name: str
    """Its name."""
    api_key_id: str
    """The API key of the request."""
    api_key_prefix: str
    """The key's first characters."""
    model: str
    """Model of the request."""
    phase: RequestPhase
    """Phase of the request."""
    age_s: float
    """Time since its arrival; since its admission if not reported by its process."""
    input_token_count: int = 0
    """Tokens of the prompt. 0 while it is being prepared."""
    cached_input_token_count: int = 0
    """Part of the input tokens from the prefix cache."""
    delivered_token_count: int = 0
    """Output tokens handed to the transport."""
    tokens_per_second: float = 0.0
    """Output tokens per second since the first one. 0 before the second token."""
    leased_token_count: int = 0
    """Output tokens covered by its hold so far. 0 without a hold."""
    admit_time: datetime | None = None
    """Time when its hold was taken. Unset: it waits for one, and counts against no quota yet."""
    expire_time: datetime | None = None
    """Time when its hold expires unless its process extends it. Unset without a hold."""
    process_id: str = ""
    """UUID of the api process that runs it."""
    process_name: str = ""
    """Display name of that process: "host:pid". Empty if not reported."""
    end_user: str = ""
    """The end user of the request. Empty: none was given. Unset without a hold."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the request. Empty without a hold."""


@dataclass(frozen=True, slots=True)
class LiveOrganization(Value):
    """Totals of one organization's live requests."""

    organization_id: str = ""
    """UUID of the organization."""
    name: str = ""
    """Its name."""
    request_count: int = 0
    """Running and waiting requests."""
    hold_count: int = 0
    """Requests with a hold."""
    held_token_count: int = 0
    """Tokens of these holds: input and leased output."""
    tokens_per_second: float = 0.0
    """Output tokens per second over all of them."""


@dataclass(frozen=True, slots=True)
class LiveView(Value):
    """Live requests."""

    requests: tuple[LiveRequest, ...] = ()
    """The oldest first."""
    organizations: tuple[LiveOrganization, ...] = ()
    """Sorted by name; only organizations with live requests."""
    request_count: int = 0
    """Number of all requests, including those beyond `page_size`."""
    unresponsive_process_ids: tuple[str, ...] = ()
    """Processes with holds that did not answer: data about their requests may be outdated."""


@dataclass(frozen=True, slots=True)
class RecordedRequest(Value):
    """The record of one request and its owner. Its content is never exposed."""

    generation: Generation
    """The record."""
    organization_name: str = ""
    """Name of the billed organization."""
    project_name: str = ""
    """Name of the project of its key."""
    api_key_prefix: str = ""
    """First characters of the request's API key."""


class KillResult(StrEnum):
    """Result of ending a request."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    ENDED = "ended"
    """It was running, and this call ended it."""
    ALREADY_ENDED = "already-ended"
    """It had ended before; nothing was done."""
    PENDING = "pending"
    """Its process did not answer in time: the command remains, and the hold expires at
    `expire_time` if the process is lost."""


@dataclass(frozen=True, slots=True)
class KilledRequest(Value):
    """Result of ending a request."""

    result: KillResult = KillResult.UNSPECIFIED
    """Whether it has ended."""
    generation: Generation | None = None
    """Its record, with the final usage once it is settled. Unset if it waited without a hold."""
    expire_time: datetime | None = None
    """Latest expiry of its hold. Set for RESULT_PENDING only."""


class ReplicaState(StrEnum):
    """State of an engine."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    COLD = "cold"
    """Not running; the next request that needs it starts it."""
    LOADING = "loading"
    """Being started."""
    READY = "ready"
    """Takes requests."""
    RESTARTING = "restarting"
    """Lost or unreachable; retried automatically."""
    FAILED = "failed"
    """Cannot start until an operator has fixed the problem in `reason`."""
    CLOSED = "closed"
    """Its process is shutting down."""
    DRAINING = "draining"
    """Works but gets no new requests: it was drained, or is idle and about to stop."""
    TRIPPED = "tripped"
    """Works but is excluded for a while by its circuit breaker, after consecutive lost requests."""


@dataclass(frozen=True, slots=True)
class Replica(Value):
    """One engine of one process. A remote server has one in each connected process."""

    model: str = ""
    """The model, as `name` or, if it has versions, `name@version`."""
    replica: str = ""
    """Name of the replica: unique for the model, and the same in all processes with the same fleet
    file."""
    region: str = ""
    """Region. Empty: it serves every region."""
    state: ReplicaState = ReplicaState.UNSPECIFIED
    """State of the engine."""
    reason: str = ""
    """Reason of the state; may be empty."""
    drained: bool = False
    """Whether this process has applied an admin's drain order, whatever the state."""
    request_count: int = 0
    """Running requests of this process."""
    outstanding_token_count: int = 0
    """Estimated tokens still to compute for them."""
    process_id: str = ""
    """UUID of the api process."""
    process_name: str = ""
    """Display name of the process: "host:pid"."""


@dataclass(frozen=True, slots=True)
class ReplicaDrain(Value):
    """An admin's order to drain a replica. It holds until it is ended, even for processes that
    start later."""

    model: str
    """The model, as `name` or `name@version`."""
    replica: str
    """The name of the replica."""
    reason: str
    """Reason given with the order. May be empty."""
    drain_time: datetime
    """Time of the order."""
    move_after_s: float | None = None
    """Time after the order when running requests move to other replicas. Unset: never."""


@dataclass(frozen=True, slots=True)
class ReplicaList(Value):
    """The engines."""

    replicas: tuple[Replica, ...] = ()
    """Sorted by model, name and process. An adapter runs in the engines of its model, which are
    listed here."""
    drains: tuple[ReplicaDrain, ...] = ()
    """Present drain orders."""
    unresponsive_process_ids: tuple[str, ...] = ()
    """Processes with holds that did not answer; their replicas are unknown."""


@dataclass(frozen=True, slots=True)
class DrainedReplica(Value):
    """The order, and the processes that have applied it."""

    drain: ReplicaDrain
    """The order."""
    replicas: tuple[Replica, ...] = ()
    """This replica in each process that answered and has applied the order."""
    unresponsive_process_ids: tuple[str, ...] = ()
    """Processes with holds that did not answer. They apply the order within seconds, or when they
    are back."""


@dataclass(frozen=True, slots=True)
class UndrainedReplica(Value):
    """The processes with the replica back in service."""

    undrained: bool = False
    """True if there was an order; otherwise nothing was done."""
    replicas: tuple[Replica, ...] = ()
    """This replica in each process that answered."""
    unresponsive_process_ids: tuple[str, ...] = ()
    """Processes with holds that did not answer. They apply the change within seconds, or when they
    are back."""


@dataclass(frozen=True, slots=True)
class AlertWebhook(Value):
    """Webhook for an organization's alerts, without the secret that signs them."""

    organization_id: str = ""
    """UUID of the organization."""
    organization_name: str = ""
    """The organization's name."""
    url: str = ""
    """URL that alerts are posted to."""
    create_time: datetime | None = None
    """Time when it was last set."""
    pending_count: int = 0
    """Number of alerts to deliver."""
    failure_count: int = 0
    """Failed attempts since the last success."""
    pause_end_time: datetime | None = None
    """No attempt is made before this time after failures. Unset if not paused."""
    last_error: str = ""
    """Error of the latest failed attempt. Empty if none failed."""


@dataclass(frozen=True, slots=True)
class CreatedAlertWebhook(Value):
    """The webhook."""

    webhook: AlertWebhook
    """The webhook after the change."""
    secret: str = field(default="", repr=False)
    """The new signing secret; returned only in this response. Empty in a repetition."""


class ChangeAction(StrEnum):
    """Action on the object."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    CREATE = "create"
    """Create it."""
    UPDATE = "update"
    """Change some of its fields."""
    DELETE = "delete"
    """Remove a limit or a member, end a resale price, revoke a key or an invitation, or trust an
    issuer no more."""
    KEEP = "keep"
    """None: it exists, the configuration does not name it, and it stays."""


@dataclass(frozen=True, slots=True)
class FieldChange(Value):
    """One changed field."""

    field: str = ""
    """Name in the configuration."""
    before_json: str | None = None
    """Value before, as JSON; empty if absent."""
    after_json: str | None = None
    """Value after, as JSON; empty if absent."""


@dataclass(frozen=True, slots=True)
class ConfigurationChange(Value):
    """One difference between the current and the desired state."""

    action: ChangeAction = ChangeAction.UNSPECIFIED
    """Action."""
    kind: str = ""
    """Kind of the object: "organization", "billing_profile", "project", "key", "quota", "price",
    "resale_price", "member", "invitation" or "token_issuer"."""
    path: str = ""
    """Path of the object: "acme", "acme/search", "acme/search/laptop"; for a price the model and
    its customer. A quota has the path of its subject; a member that of its organization and
    address."""
    fields: tuple[FieldChange, ...] = ()
    """Changed fields; all fields of a new object."""
    quota: dict[str, object] = field(default_factory=dict)
    """Identity of a quota: dimension, `window_minutes`, model, `for_new_keys`, `for_each`,
    `end_user` and `label`."""
    api_key_prefix: str = ""
    """The first characters of a key. For a new key only after its creation."""
    secret: str = field(default="", repr=False)
    """Secret of a new key, or token of a new invitation, returned only when it is created."""


@dataclass(frozen=True, slots=True)
class ConfigurationViolation(Value):
    """One violation in a configuration."""

    field: str = ""
    """Path in `Configuration`, for example "organizations[0].projects[2].quotas[1].limit_value"."""
    description: str = ""
    """The violation and its remedy."""


@dataclass(frozen=True, slots=True)
class AppliedConfiguration(Value):
    """Applied or planned changes."""

    changes: tuple[ConfigurationChange, ...] = ()
    """In the order of the configuration; empty if there are none."""
    kept: tuple[ConfigurationChange, ...] = ()
    """Existing objects that the configuration does not name, inside objects that it names; with
    ACTION_KEEP."""
    violations: tuple[ConfigurationViolation, ...] = ()
    """All violations in the configuration. If there are any, nothing is changed, and the other
    fields are empty."""


@dataclass(frozen=True, slots=True)
class FleetVersion(Value):
    """One version of the fleet. Versions are only added; the newest one is in force."""

    number: int = 0
    """Number, from 1. 0: no version is stored, and each process serves the fleet of its
    settings."""
    document: str = ""
    """The fleet in canonical form: YAML with the keys of a fleet file, without defaults, with
    absolute paths on the machines of the servers. Empty in lists."""
    digest: str = ""
    """SHA-256 of the document, in hexadecimal."""
    actor: str = ""
    """Author: the prefix of an API key, or "system" for the file of a server's settings."""
    reason: str = ""
    """Reason that the author gave. May be empty."""
    create_time: datetime | None = None
    """Time when it was added. Unset for number 0."""


@dataclass(frozen=True, slots=True)
class FleetProcess(Value):
    """Version that one api process serves."""

    process_id: str = ""
    """UUID of the api process."""
    process_name: str = ""
    """Display name of the process: "host:pid"."""
    number: int = 0
    """Number of the version that it serves; 0: the fleet of its settings."""
    fault: str = ""
    """Why it does not serve the newest version yet; empty if it does."""


@dataclass(frozen=True, slots=True)
class ServedFleet(Value):
    """The version, and what the processes serve."""

    version: FleetVersion
    """The version. With number 0, the fleet of the settings of the process that answers."""
    processes: tuple[FleetProcess, ...] = ()
    """What each process serves now. Empty if `number` was set."""
    unresponsive_process_ids: tuple[str, ...] = ()
    """Processes that did not answer."""


@dataclass(frozen=True, slots=True)
class FleetChange(Value):
    """Difference between two fleets at one place."""

    path: str = ""
    """Place in the document, such as "models.chat.versions.v2.weight"."""
    before_json: str = ""
    """Value before, as JSON; empty if there was none."""
    after_json: str = ""
    """Value after, as JSON; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FleetViolation(Value):
    """Error in a document."""

    line: int = 0
    """Line, from 1; 0: the document as a whole."""
    location: str = ""
    """Place in the document, such as "models.chat.directory". May be empty."""
    message: str = ""
    """Description of the error, with the allowed values."""


@dataclass(frozen=True, slots=True)
class AppliedFleet(Value):
    """The new version, or why there is none."""

    version: FleetVersion
    """The version in force: the new one, or the present one if the document changes nothing, has
    violations, or with `dry_run`. Without its document."""
    changes: tuple[FleetChange, ...] = ()
    """Changes from the version before. With `dry_run`, those that the call would make."""
    violations: tuple[FleetViolation, ...] = ()
    """Errors of the document: nothing was changed."""


@dataclass(frozen=True, slots=True)
class ErasedEndUser(Value):
    """Result of an erasure."""

    erased: bool = False
    """True if anything had the name."""
    limit_count: int = 0
    """Number of limits that ended."""
    labelled_request_count: int = 0
    """Number of requests from which labels with this value were removed."""


@dataclass(frozen=True, slots=True)
class CreatedInvitation(Value):
    """The invitation with its token, which no later call returns."""

    invitation: Invitation
    """The invitation."""
    token: str = ""
    """The token to hand to the person. It is returned only once: empty if the call was repeated."""


@dataclass(frozen=True, slots=True)
class ResentInvitation(Value):
    """The invitation with its new token."""

    invitation: Invitation
    """The invitation after the change."""
    token: str = ""
    """The new token. The former one is refused from now on."""


@dataclass(frozen=True, slots=True)
class Member(Value):
    """A member: a person with a role in an organization."""

    membership_id: str = ""
    """Server-generated UUID of the membership."""
    person_id: str = ""
    """UUID of the person."""
    email: str = ""
    """E-mail address of the person."""
    display_name: str = ""
    """Name to show of the person."""
    organization_id: str = ""
    """UUID of the organization."""
    organization_name: str = ""
    """Name of the organization."""
    project_id: str = ""
    """UUID of the project that the member's own usage counts as; a developer has access to no
    other."""
    project_name: str = ""
    """Name of that project."""
    role: str = ""
    """"owner", "admin", "developer", "finance" or "viewer"; or "operator", of the whole service."""
    api_key_id: str = ""
    """UUID of the bound key that acts for the member."""
    key_prefix: str = ""
    """Prefix of that key, which the audit log names as the author of changes."""
    create_time: datetime | None = None
    """Time at which the invitation was accepted."""
    deactivate_time: datetime | None = None
    """Time since when all keys of the person in the organization are refused: the operator has
    deactivated the person, or the organization's identity provider the member. Unset: active."""


@dataclass(frozen=True, slots=True)
class AcceptedInvitation(Value):
    """The new member."""

    member: Member
    """The membership."""
    secret: str = field(default="", repr=False)
    """The secret of the new key, with `create_key`. No later call returns it."""


@dataclass(frozen=True, slots=True)
class RemovedMember(Value):
    """The member is removed."""

    revoked_keys: tuple[str, ...] = ()
    """Prefixes of the keys that were revoked."""
    kept_keys: tuple[str, ...] = ()
    """Prefixes of the keys that the person created and that stay."""


@dataclass(frozen=True, slots=True)
class ServiceAccount(Value):
    """A program of an organization that owns keys."""

    service_account_id: str = ""
    """Server-generated UUID."""
    organization_id: str = ""
    """UUID of the organization."""
    organization_name: str = ""
    """Name of the organization."""
    name: str = ""
    """Name, unique among the organization's service accounts."""
    role: str = ""
    """Role of its keys: see `ApiKey.role`. Empty: its keys are for models."""
    create_time: datetime | None = None
    """Time of creation."""
    key_count: int = 0
    """Number of its keys that are not revoked."""


@dataclass(frozen=True, slots=True)
class Person(Value):
    """A person, whichever organizations it is a member of."""

    person_id: str = ""
    """Server-generated UUID."""
    email: str = ""
    """E-mail address, in lower case. Unique in the service."""
    display_name: str = ""
    """Name to show."""
    create_time: datetime | None = None
    """Time of the first invitation that the person accepted."""
    deactivate_time: datetime | None = None
    """Time since when all keys of the person are refused. Unset: active."""


@dataclass(frozen=True, slots=True)
class TokenProject(Value):
    """A project whose bound key acts for tokens with a value of the project claim."""

    claim_value: str = ""
    """Value of the claim. Empty without a project claim."""
    project_name: str = ""
    """Name of the project."""
    api_key_id: str = ""
    """Id of the bound key. Its terms are changed with UpdateApiKey."""
    prefix: str = ""
    """Its prefix."""


@dataclass(frozen=True, slots=True)
class TokenIssuer(Value):
    """An issuer whose tokens for one audience authenticate callers of one organization. A bound key
    acts for them: its limits, usage and bills are theirs. Claims only narrow what the key may do; a
    claim that is named here must be in each token."""

    token_issuer_id: str = ""
    """Id, generated by the service."""
    organization_id: str = ""
    """The organization."""
    organization_name: str = ""
    """Its name."""
    issuer: str = ""
    """URL of the issuer, exactly as in the claim `iss`."""
    audience: str = ""
    """Audience that must be in the claim `aud`."""
    algorithms: tuple[str, ...] = ()
    """Accepted algorithms, such as "ES256". Empty: all asymmetric ones."""
    keys_url: str = ""
    """URL of the issuer's public keys. Empty, without `keys`: its discovery document has it."""
    keys: str = ""
    """Public keys as a JSON Web Key Set. Empty: they are read from the issuer."""
    leeway_s: float | None = None
    """By how much the clocks of issuer and service may differ."""
    lifetime_max_s: float | None = None
    """Longest life of a token, from `iat` to `exp`."""
    token_type: str = ""
    """Required header `typ`, such as "at+jwt". Empty: "JWT", "at+jwt" or none."""
    requires_id: bool = False
    """True if tokens without `jti` are refused."""
    project_claim: str = ""
    """Claim that chooses the project. Empty: there is one project."""
    end_user_claim: str = ""
    """Claim that names the end user, such as "sub". Empty: requests name it."""
    models_claim: str = ""
    """Claim with the allowed models, a list or a text with blanks. Empty: those of the key."""
    max_output_tokens_claim: str = ""
    """Claim with the output tokens per request. Empty: the key's limit."""
    label_claims: tuple[str, ...] = ()
    """Claims that become labels of each request."""
    projects: tuple[TokenProject, ...] = ()
    """The projects with their bound keys."""
    create_time: datetime | None = None
    """When it was trusted."""
    single_use: bool = False
    """True if each token is good for one call: the second one is refused, even on another
    server."""


@dataclass(frozen=True, slots=True)
class TokenRevocation(Value):
    """Tokens of an issuer that are refused before they expire."""

    claim: str = ""
    """The claim that names the tokens: "jti", "sid" or "sub"."""
    value: str = ""
    """Its value."""
    expire_time: datetime | None = None
    """When the last of them would have expired, and the revocation is forgotten."""


@dataclass(frozen=True, slots=True)
class ProvisionedGroup(Value):
    """A group of an organization's identity provider, with the role that it gives."""

    group_id: str = ""
    """UUID of the group. Empty: a role is set for its name, and it is not provisioned yet."""
    group: str = ""
    """Name of the group. Letter case does not matter."""
    member_count: int = 0
    """Number of its users."""
    role: str = ""
    """Role of its members in the organization: see `ApiKey.role`. Empty: it gives none."""
    project_id: str = ""
    """UUID of the project of its members. Empty: the oldest one."""
    project_name: str = ""
    """Name of that project."""


@dataclass(frozen=True, slots=True)
class ErasedPerson(Value):
    """Result of an erasure, or of its dry run."""

    person_id: str = ""
    """UUID of the person, which stays."""
    organizations: tuple[str, ...] = ()
    """Names of the organizations whose membership ended."""
    key_count: int = 0
    """Number of keys that were revoked."""
    session_count: int = 0
    """Number of sessions that were deleted."""
    invitation_count: int = 0
    """Number of invitations that lost the address."""
    provisioned_user_count: int = 0
    """Number of users of identity providers that were deleted, with their names."""
    audit_entry_count: int = 0
    """Number of entries of the audit log that lost a name or an address."""


@dataclass(frozen=True, slots=True)
class Latency(Value):
    """Percentiles of a duration, in milliseconds. 0 where nothing was measured."""

    p50_ms: tuple[float, ...] = ()
    """Median in each step."""
    p99_ms: tuple[float, ...] = ()
    """99th percentile in each step."""
    period_p50_ms: float = 0.0
    """Median of the whole period."""
    period_p99_ms: float = 0.0
    """99th percentile of the whole period."""


@dataclass(frozen=True, slots=True)
class TrafficError(Value):
    """Refused and failed requests of one reason."""

    reason: str = ""
    """The reason, as in `ErrorInfo`."""
    count: int = 0
    """Number of requests."""


@dataclass(frozen=True, slots=True)
class ModelTraffic(Value):
    """Traffic of one model, step by step. Percentiles are of the sum of the histograms of all
    processes, interpolated within a bucket, and never averages of percentiles."""

    model: str
    """Name of the model."""
    request_counts: tuple[int, ...]
    """Requests that ended, with refused and failed ones."""
    error_counts: tuple[int, ...]
    """The part of them that was refused or has failed."""
    input_token_counts: tuple[int, ...]
    """Computed input tokens, without cached ones."""
    cached_input_token_counts: tuple[int, ...]
    """Input tokens from the prefix cache."""
    output_token_counts: tuple[int, ...]
    """Output tokens."""
    embedding_token_counts: tuple[int, ...]
    """Tokens of embedded texts."""
    running_counts: tuple[float, ...]
    """Requests that ran, on average over the step."""
    waiting_counts: tuple[float, ...]
    """Requests that waited, on average over the step."""
    first_token: Latency
    """Time to the first token."""
    inter_token: Latency
    """Time between two messages with tokens."""
    errors: tuple[TrafficError, ...] = ()
    """Why requests were refused or have failed, the most frequent reason first."""


@dataclass(frozen=True, slots=True)
class Traffic(Value):
    """Traffic of all api processes together. Requests and tokens are counted when their request
    ends."""

    start_time: datetime | None
    """Begin of the first step. The last step ends at most 20 s before the call: processes add their
    counts every 15 s."""
    step_s: float | None
    """Length of a step."""
    step_count: int
    """Number of steps. Every list of a model has an element for each."""
    total: ModelTraffic
    """Sum over all models; its name is empty."""
    models: tuple[ModelTraffic, ...] = ()
    """The models with requests in the period, those with most requests first. Requests for models
    that do not exist have an empty name."""


class TrafficPeriod(StrEnum):
    """Period of a traffic report."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    QUARTER_HOUR = "quarter-hour"
    """The last 15 minutes, in steps of 15 seconds."""
    HOUR = "hour"
    """The last hour, in steps of a minute."""
    DAY = "day"
    """The last 24 hours, in steps of 15 minutes."""


class ConcernKind(StrEnum):
    """Kind of a concern."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    WORKER_MISSING = "worker-missing"
    """No billing worker is connected to the database."""
    USAGE_UNBILLED = "usage-unbilled"
    """Usage has waited for the billing worker for more than a minute. `count`: events, up to
    10,000."""
    HOLDS_OVERDUE = "holds-overdue"
    """Holds are overdue by more than 30 s. `count`: holds, up to 10,000."""
    EXPORT_LATE = "export-late"
    """Usage is exported late, by more than two hours. `count`: batches, up to 10,000."""
    WEBHOOK_FAILING = "webhook-failing"
    """A webhook of `organization_name` fails. `count`: attempts since the last success."""
    MONTH_OPEN = "month-open"
    """A month that has ended is not closed. `subject`: the month, as YYYY-MM; `count`:
    organizations; `organization_name`: one of them."""
    ADJUSTMENT_WAITING = "adjustment-waiting"
    """A correction of `organization_name` waits for a second person. `subject`: its id."""


@dataclass(frozen=True, slots=True)
class Concern(Value):
    """Something that an operator should look at."""

    kind: ConcernKind = ConcernKind.UNSPECIFIED
    """Its kind."""
    organization_name: str = ""
    """Name of the organization. Empty: it concerns all."""
    subject: str = ""
    """Object of the concern, by kind."""
    count: int = 0
    """Number, by kind."""
    age_s: float | None = None
    """How long it has lasted. Unset if unknown."""
    detail: str = ""
    """Error or reason, for people. May be empty."""


class TokenKind(StrEnum):
    """Kind of a token, each of which has its own price."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    INPUT = "input"
    """Input that the model computed."""
    CACHED_INPUT = "cached-input"
    """Input that was found in the prefix cache."""
    OUTPUT = "output"
    """Output, without the model's thinking."""
    EMBEDDING = "embedding"
    """Input of an embedding model."""
    REASONING = "reasoning"
    """Output that is the model's thinking."""


@dataclass(frozen=True, slots=True)
class MonthReportLine(Value):
    """Usage of one model at one price version, for one kind of token."""

    model: str
    """Name of the model that ran the requests, without aliases."""
    token_kind: TokenKind
    """Kind of the tokens, each of which has its own price."""
    price_version: int
    """The price version that applied."""
    request_count: int
    """Requests with at least one token of this kind."""
    token_count: int
    """Number of tokens of this kind, those of cancelled requests included."""
    cancelled_token_count: int
    """Tokens of `token_count` that belong to cancelled requests."""
    unit_price_picos: int
    """Price per token in picos: 1e-12 of the currency unit."""
    amount: Money
    """`token_count` times `unit_price_picos`, exact."""
    late_month: str = ""
    """The month of the usage as YYYY-MM, if that was closed before the usage was posted; else
    empty."""
    rounded_amount: Money | None = None
    """`amount` in whole minor units, rounded by itself. In months closed with report_format 2, the
    line's part of `total_rounded`."""
    tier: str = ""
    """The service tier of the price version: "interactive" or "batch"."""


@dataclass(frozen=True, slots=True)
class RequestCounts(Value):
    """Number of requests by outcome."""

    total_count: int = 0
    """All requests."""
    completed_count: int = 0
    """Ended by the model, a stop sequence or a length limit."""
    cancelled_count: int = 0
    """Cancelled by the client, by its disconnection or by a deadline."""
    limited_count: int = 0
    """Ended by a quota, a cost limit, a slow consumer or a filter."""
    failed_count: int = 0
    """Failed by the server; delivered output is settled."""


@dataclass(frozen=True, slots=True)
class Reconciliation(Value):
    """Comparison of usage and ledger."""

    usage_token_count: int = 0
    """Tokens of all kinds in the usage events of the month."""
    ledger_token_count: int = 0
    """Tokens of all kinds in the ledger postings of the month."""
    unrated_token_count: int = 0
    """Tokens of all kinds in events that are not rated yet."""
    balanced: bool = False
    """True if usage = ledger + unrated."""


class MonthState(StrEnum):
    """State of an organization's month."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    OPEN = "open"
    """Usage may still be added."""
    CLOSING = "closing"
    """A close has begun; closing it again continues."""
    CLOSED = "closed"
    """Final: the month has its documents, and no more usage is added to it."""


@dataclass(frozen=True, slots=True)
class MonthCharge(Value):
    """A line of the month besides usage: of the plan, of credit, or a correction."""

    kind: str
    """Which rule caused the charge."""
    description: str
    """Text of the line on the documents, for people."""
    amount: Money
    """Exact amount; negative for reductions."""
    rounded_amount: Money
    """`amount` in whole minor units. See `MonthReportLine.rounded_amount`."""
    model: str = ""
    """The model whose tokens it concerns; empty for all models."""
    token_count: int = 0
    """Number of tokens; 0 if not applicable."""
    source_id: str = ""
    """Id of the adjustment or the credit grant; empty for lines of the plan."""


@dataclass(frozen=True, slots=True)
class PrepaidCredit(Value):
    """Changes of an organization's prepaid credit in a month."""

    granted: Money
    """Credit that was granted in the month."""
    expired: Money
    """Credit that expired unused at the end of the month."""
    remaining: Money
    """Credit left after the charges and the expiry of the month."""
    refunded: Money
    """Credit that the final month of a closed organization left, to be paid back."""


@dataclass(frozen=True, slots=True)
class CreditNoteSummary(Value):
    """A credit note in the report of its month."""

    number: str
    """Number of the credit note, as printed on it."""
    invoice_number: str
    """Number of the invoice that it corrects."""
    amount: Money
    """Refunded amount; above zero."""
    reason: str = ""
    """Reason that its author gave, shown on the document."""


@dataclass(frozen=True, slots=True)
class MonthReport(Value):
    """One month of one organization."""

    organization_id: str
    """The organization's id."""
    organization_name: str
    """The organization's name."""
    month: str
    """The month as YYYY-MM, in UTC."""
    lines: tuple[MonthReportLine, ...]
    """One line per model, price version and token kind, in that order."""
    request_counts: RequestCounts
    """Number of requests of the month, by outcome."""
    total: Money
    """Sum of the lines and charges, exact to the pico and before rounding."""
    total_rounded: Money
    """Amount owed: total + carried_in, rounded half up to the currency's minor unit."""
    unrated_event_count: int
    """Usage events that are recorded but not yet rated into the ledger, and so not included in the
    lines."""
    reconciliation: Reconciliation
    """Comparison of the lines with the usage events."""
    state: MonthState = MonthState.UNSPECIFIED
    """State of the month. For an open month, the report shows the invoice as of now."""
    invoice_number: str = ""
    """Number of the invoice; empty before the close, and for a month with nothing to invoice."""
    close_time: datetime | None = None
    """When the month was closed; unset while it is open."""
    closed_by: str = ""
    """Author of the close: the prefix of a key."""
    charges: tuple[MonthCharge, ...] = ()
    """Charges and deductions besides usage, in the order of the invoice."""
    carried_in: Money | None = None
    """Rounding remainder of previous months; part of `total_rounded`, not of `total`."""
    carried_out: Money | None = None
    """Rounding remainder for the next month: total + carried_in - total_rounded."""
    prepaid_credit: PrepaidCredit | None = None
    """Prepaid credit granted, expired and remaining."""
    credit_notes: tuple[CreditNoteSummary, ...] = ()
    """Credit notes of the month. They are separate from the invoice and its total."""
    tax_note: str = ""
    """Tax treatment of the amounts: "tax not included"."""
    report_format: int = 0
    """Version of the format of this month's documents."""
    receipts_root: str = ""
    """Root of the month's receipts, in hexadecimal; empty if there are none."""
    billing_profile: BillingProfile | None = None
    """Recipient of the month's documents; for a closed month as it was at the close. Unset without
    a profile."""
    rounding: Money | None = None
    """Completes the rounded amounts of lines and charges: their sum + rounding = total_rounded."""


@dataclass(frozen=True, slots=True)
class EndUserLimits(Value):
    """One end user."""

    end_user: EndUser
    """The end user."""
    quotas: tuple[QuotaStatus, ...] = ()
    """Its limits within the organization and its projects with their remainders: its own, and those
    that selectors give it. Without its requests, those of the first request to come."""


class DocumentFormat(StrEnum):
    """File format of a report's document."""

    JSON = "json"
    """JSON, UTF-8."""
    CSV = "csv"
    """CSV by RFC 4180, UTF-8."""


@dataclass(frozen=True, slots=True)
class Month(Value):
    """One month of one organization."""

    organization_name: str = ""
    """The organization's name; for a closed month that at the close."""
    organization_id: str = ""
    """The organization's id."""
    month: str = ""
    """The month as YYYY-MM, in UTC."""
    state: MonthState = MonthState.UNSPECIFIED
    """Whether usage may still be added, or the documents are final."""
    closing_time: datetime | None = None
    """Time when the close began; unset before."""
    closing_by: str = ""
    """Author of the close: the prefix of a key."""
    close_time: datetime | None = None
    """Time of the close; unset before."""
    closed_by: str = ""
    """Prefix of the key that completed the close."""
    invoice_number: str = ""
    """Number of the invoice; empty before the close, and for a month with nothing to invoice."""
    total: Money | None = None
    """Total of the invoice; unset if there is none."""
    json_sha256: str = ""
    """SHA-256 of the report as JSON, in hexadecimal; empty before the close."""
    csv_sha256: str = ""
    """SHA-256 of the report as CSV, in hexadecimal; empty before the close."""
    report_format: int = 0
    """Version of the format of these documents; 0 before the close."""
    receipts_root: str = ""
    """Root of the month's receipts, in hexadecimal; empty if there are none."""
    payments: tuple[InvoicePayment, ...] = ()
    """Stripe's invoices of the month from its events, one for each subscription."""
    pdf_sha256: str = ""
    """SHA-256 of the PDF as issued, in hexadecimal; empty before the close, and until the first
    export of a month that was closed before PDFs were kept."""


@dataclass(frozen=True, slots=True)
class Obstacle(Value):
    """A reason why a month cannot be closed."""

    kind: str = ""
    """Stable kind: MONTH_NOT_OVER, EARLIER_MONTH_OPEN, LATER_MONTH_CLOSED, MONTH_BEFORE_FIRST,
    USAGE_MISSTATED, USAGE_UNRATED, REQUESTS_RUNNING, ISSUER_INCOMPLETE or TEXT_NOT_SHOWN."""
    description: str = ""
    """Description with the remedy."""


@dataclass(frozen=True, slots=True)
class ClosedMonth(Value):
    """Result of a close."""

    month: Month
    """The month after the call; unchanged with `validate_only`."""
    obstacles: tuple[Obstacle, ...] = ()
    """Obstacles; with `validate_only` only."""
    already_closed: bool = False
    """True if it was closed before."""


@dataclass(frozen=True, slots=True)
class MonthVerification(Value):
    """A closed month recomputed from the ledger."""

    month: Month
    """The month with the digests of its close."""
    json_sha256: str = ""
    """SHA-256 of the report as JSON today."""
    csv_sha256: str = ""
    """SHA-256 of the report as CSV today."""
    reproduced: bool = False
    """Whether the recomputed documents are equal."""
    differences: tuple[str, ...] = ()
    """Descriptions of the differences; empty if there are none."""


class AdjustmentState(StrEnum):
    """State of an adjustment."""

    UNSPECIFIED = "unspecified"
    """Not set, or not known to this client."""
    PROPOSED = "proposed"
    """Waits for approval by a person other than its author."""
    APPROVED = "approved"
    """Final; posted to the ledger."""
    REJECTED = "rejected"
    """Final; never posted."""


@dataclass(frozen=True, slots=True)
class Adjustment(Value):
    """A manual correction. With `invoice_number` it is a credit note, a separate document;
    otherwise a line of the next invoice."""

    adjustment_id: str
    """UUID of the adjustment, for its approval or rejection."""
    organization_id: str
    """The organization's id."""
    amount: Money
    """Positive: charged to the customer; negative: credited. Always negative for a credit note."""
    reason: str = ""
    """Reason, as shown on the invoice or the credit note."""
    invoice_number: str = ""
    """The invoice of a credit note; empty for an adjustment."""
    state: AdjustmentState = AdjustmentState.UNSPECIFIED
    """Whether it waits for a decision, and which was made."""
    author: str = ""
    """Author: the prefix of a key."""
    create_time: datetime | None = None
    """Time of the proposal."""
    decided_by: str = ""
    """Prefix of the key that approved or rejected it; empty before."""
    decide_time: datetime | None = None
    """Time of the decision."""
    billing_month: str = ""
    """The month as YYYY-MM that it was posted to."""
    credit_note_number: str = ""
    """Number of an approved credit note: `CN-` and digits, without gaps."""
