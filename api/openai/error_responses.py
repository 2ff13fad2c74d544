"""Error responses of the HTTP API: conversion of a `google.rpc.Status` to status, headers and body.

Errors come from the table in `api/core/statuses.py`, as over gRPC. Only HTTP faults begin here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weir.v1 import types_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.core.statuses import as_sentence, doc_url_of
from api.core.wire import DIMENSION_NUMBERS
from metering.core.models import QuotaDimension
from metering.quotas.quota_rules import DIMENSIONS, Kind

# Non-standard status that proxies log for a closed connection; clients do not retry it.
CLIENT_CLOSED = 499
# Has the reason where a proxy can read it: an answer with DRAINING may be sent to another process.
REASON_HEADER = "weir-reason"
INVALID_HTTP = "invalid_http"  # error code for input that is not HTTP
# Seconds. OpenAI's clients wait at most this long and would otherwise retry too early.
CLIENT_WAIT_MAX_S = 120.0
HTTP_STATUSES: Mapping[int, int] = {
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.UNIMPLEMENTED: 400,
    code_pb2.FAILED_PRECONDITION: 400,
    code_pb2.OUT_OF_RANGE: 400,
    code_pb2.UNAUTHENTICATED: 401,
    code_pb2.PERMISSION_DENIED: 403,
    code_pb2.NOT_FOUND: 404,
    code_pb2.ABORTED: 409,
    code_pb2.ALREADY_EXISTS: 409,
    code_pb2.RESOURCE_EXHAUSTED: 429,
    code_pb2.CANCELLED: CLIENT_CLOSED,
    code_pb2.INTERNAL: 500,
    code_pb2.UNAVAILABLE: 503,
    code_pb2.DEADLINE_EXCEEDED: 504,
}
# Reasons with another HTTP status than their code's.
REASON_HTTP_STATUSES: Mapping[str, int] = {"INSUFFICIENT_CREDIT": 429}

# Error codes that are not the reason in lower case.
ERROR_CODES: Mapping[str, str] = {
    "UNAUTHENTICATED": "invalid_api_key",
    "PERMISSION_DENIED": "insufficient_permissions",
    "FIELD_INVALID": "invalid_value",
    "MESSAGE_UNREADABLE": "invalid_json",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "PROMPT_FILTERED": "content_policy_violation",
    "MODEL_UNKNOWN": "model_not_found",
    "INTERNAL": "server_error",
}
# Reasons of errors that begin in HTTP, by error code.
FAULT_REASONS: Mapping[str, str] = {
    "unknown_url": "URL_UNKNOWN",
    "method_not_allowed": "URL_UNKNOWN",
    "not_offered": "URL_UNKNOWN",
    INVALID_HTTP: "HTTP_INVALID",
    "expectation_failed": "HTTP_INVALID",
    "unsupported_encoding": "HTTP_INVALID",
    "unsupported_media_type": "HTTP_INVALID",
    "request_timeout": "MESSAGE_MISSING",
    "request_too_large": "MESSAGE_TOO_LARGE",
    "invalid_json": "MESSAGE_UNREADABLE",
    "model_not_found": "MODEL_UNKNOWN",
    "cancelled": "CANCELLED",
    "deadline": "DEADLINE_EXCEEDED",
    "slow_consumer": "SLOW_CONSUMER",
}

USE_OPENAI = "choose OpenAI's API in the client, with a base URL that ends in /v1"
# Alternatives to endpoints of OpenAI, Anthropic and other servers that are not served. The first
# pattern that matches the path applies.
REMEDIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (
            r"/v1/responses/compact",
            "conversations are not shortened: send the part that the model needs as input",
        ),
        (r"/v1/chat/completions/input_tokens", "use /tokenize with messages"),
        (
            r"/v1/(responses|chat/completions)(/.+)?",
            "answers are not stored: keep the one that POST returned, and to stop it, close its"
            " connection",
        ),
        (r"/v1/conversations(/.+)?", "nothing is stored: send the whole conversation as input"),
        (
            r"/v1/(messages/)?batches(/.+)?",
            "batches are not served: send each request by itself, with service_tier flex",
        ),
        (
            r"/v1/(files|uploads|vector_stores|containers|skills)(/.+)?",
            "files are not stored: put their text into a message",
        ),
        (r"/v1/(assistants|threads|agents|sessions)(/.+)?", "use /v1/responses"),
        (r"/v1/models/.+", "the operator adds and removes models"),
        (r"/v1/fine_tuning/.+", "the operator adds and removes models"),
        (r"/v1/moderations", "the operator configures the safety checks"),
        (r"/v1/(images|audio|videos|realtime)(/.+)?", "send and read text, by /v1/responses"),
        (r"/v1/complete", "use /v1/messages"),
        (r"(/v1|/v2)?/(rerank|score|classify|pooling)", "compare vectors of /v1/embeddings"),
        (r"/(completion|infill|generate(_stream)?)", "use /v1/completions"),
        (r"/embeddings?|/embed(_all)?", "use /v1/embeddings"),
        (r"/apply-template", "use /tokenize with messages"),
        (r"/api/(chat|generate|embed|embeddings|tags|show|ps|version)", USE_OPENAI),
        (r"/(props|slots|get_model_info|info)", "GET /v1/models describes the models"),
    )
)

# Field names of the gRPC API in messages, which differ between APIs, and fixed words.
TERMS = re.compile(
    r"\b(?:max_output_tokens|min_output_tokens|choice_count|tool_choice\.single|TOOL_MODE_[A-Z]+"
    r"|request_id|truncation)\b"
)
WORDS = {
    "TOOL_MODE_NONE": "none",
    "TOOL_MODE_AUTO": "auto",
    "TOOL_MODE_REQUIRED": "required",
    "request_id": "Idempotency-Key",
}
INDEX = re.compile(r"\[\d+\]")
REQUESTS, TOKENS = "requests", "tokens"
COUNTED: Mapping[QuotaDimension, str] = {
    dimension: REQUESTS if kind is Kind.REQUESTS else TOKENS
    for dimension, (kind, *_) in DIMENSIONS.items()
    if kind in (Kind.REQUESTS, Kind.TOKENS)
}
# Limits that reset within a minute: rate limits for OpenAI; the others are quotas.
RATES = {QuotaDimension.CONCURRENT_REQUESTS: REQUESTS} | {
    each: kind for each, kind in COUNTED.items() if each.endswith("_per_minute")
}
COUNTED_NUMBERS = {DIMENSION_NUMBERS[dimension]: kind for dimension, kind in COUNTED.items()}

Detail = TypeVar("Detail", bound=Message)


def remedy_of(path: str) -> str:
    """Return an alternative to an endpoint that is not served; empty if it is unknown."""
    return next((remedy for pattern, remedy in REMEDIES if pattern.fullmatch(path)), "")


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Error response of the HTTP API.

    `kind` is OpenAI's `type`, `param` the parameter at fault, `facts` the reason and metadata of
    the error, and `doc_url` the page of the reason.
    """

    http_status: int
    message: str
    kind: str
    code: str
    param: str | None
    headers: Mapping[str, str]
    facts: Mapping[str, str]
    doc_url: str

    def body(self, request_id: str = "") -> dict[str, Any]:
        """Build the body in OpenAI's format, with the metadata in `weir`.

        `request_id` is unused: OpenAI has it in the headers only, other APIs in the body.
        """
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        error["doc_url"] = self.doc_url
        error["weir"] = dict(self.facts)
        return {"error": error}


class HttpFault(Exception):
    """Refusal of a request at the level of HTTP, before its body is parsed."""

    def __init__(
        self,
        http_status: int,
        message: str,
        code: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        closing: bool = False,
    ) -> None:
        """With `closing`, the connection must close, because the end of the request is unknown."""
        super().__init__(message)
        self.closing = closing
        self.refusal = http_refusal(http_status, message, code, headers, param)


def http_refusal(
    http_status: int,
    message: str,
    code: str,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> ErrorResponse:
    """Build the response to an error that begins in HTTP, with the reason of its code."""
    reason = FAULT_REASONS[code]
    return ErrorResponse(
        http_status,
        as_sentence(message),
        "invalid_request_error",
        code,
        param,
        headers or {},
        {"reason": reason},
        doc_url_of(reason),
    )


def invalid_http_message(message: str | None) -> str:
    """Build the message for a request that is not valid HTTP, from the message of the parser."""
    return (
        "this is not a valid HTTP request:"
        f" {(message or '').partition(chr(10))[0].rstrip(':.')[:200]}. Check that your client"
        " speaks HTTP/1.1, with TLS only if this port has it"
    )


def invalid_parameter(param: str | None, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(param or "", description)])


def error_response(
    status: status_pb2.Status, names: Mapping[str, str] | None = None
) -> ErrorResponse:
    """Convert a status to an error response. `names` maps fields of a start frame to parameters."""
    info = detail_of(status, error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo(
        reason="INTERNAL"
    )
    http_status = http_status_of(status.code, info.reason)
    message, param = wording(status, info, names or {})
    kind, code = category(http_status, info)
    retry = detail_of(status, error_details_pb2.RetryInfo)
    wait_s = None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    headers = {REASON_HEADER: info.reason, **retry_headers(http_status, wait_s)}
    headers |= refusal_headers(info.metadata)
    if http_status == 401:
        headers["www-authenticate"] = "Bearer"
    page = detail_of(status, error_details_pb2.Help)
    return ErrorResponse(
        http_status,
        message,
        kind,
        code,
        param,
        headers,
        {"reason": info.reason, **info.metadata},
        doc_url_of(info.reason) if page is None else page.links[0].url,
    )


def http_status_of(code: int, reason: str) -> int:
    """Choose the HTTP status of an error from its gRPC code and the reason in its `ErrorInfo`."""
    return REASON_HTTP_STATUSES.get(reason) or HTTP_STATUSES.get(code, 500)


def wording(
    status: status_pb2.Status, info: error_details_pb2.ErrorInfo, names: Mapping[str, str]
) -> tuple[str, str | None]:
    """Build the message with the API's names, and find the parameter at fault, or None."""
    bad_request = detail_of(status, error_details_pb2.BadRequest)
    if bad_request is None or not bad_request.field_violations:
        return translate_terms(names, status.message), (
            "model" if info.reason == "MODEL_UNKNOWN" else None
        )
    violations = [
        (parameter(each.field, names), translate_terms(names, each.description))
        for each in bad_request.field_violations
    ]
    return (
        "; ".join(
            f"{param}: {description}" if param else description for param, description in violations
        ),
        violations[0][0] or None,
    )


def translate_terms(names: Mapping[str, str], message: str) -> str:
    """Replace field names of the gRPC API in a message by those of the API that was called."""
    return TERMS.sub(lambda term: WORDS.get(term[0]) or names.get(term[0], term[0]), message)


def category(http_status: int, info: error_details_pb2.ErrorInfo) -> tuple[str, str]:
    """Choose the `type` and `code` of an error: OpenAI's, or the nearest equivalents."""
    if info.reason == "QUOTA_EXCEEDED":
        kind = counted_unit(RATES, info.metadata)
        return (
            ("insufficient_quota", "insufficient_quota")
            if kind is None
            else (kind, "rate_limit_exceeded")
        )
    if info.reason == "INSUFFICIENT_CREDIT":
        return "insufficient_quota", "insufficient_quota"
    kind = "server_error" if http_status >= 500 else "invalid_request_error"
    return kind, ERROR_CODES.get(info.reason, info.reason.lower())


def retry_headers(http_status: int, wait_s: float | None) -> dict[str, str]:
    """Build the retry-after headers, or the header that advises against a retry."""
    if wait_s is not None:
        ms = math.ceil(wait_s * 1000)
        headers = {"retry-after": str(math.ceil(ms / 1000)), "retry-after-ms": str(ms)}
        return headers if wait_s <= CLIENT_WAIT_MAX_S else headers | {"x-should-retry": "false"}
    return {"x-should-retry": "false"} if http_status in (409, 429) else {}


def parameter(field_name: str, names: Mapping[str, str]) -> str:
    """Convert a field of the start frame to the request's parameter, by its longest known prefix.

    `names` maps fields to parameters. `[]` in a field matches any index, which is kept.
    """
    for end in prefix_ends(field_name):
        head, rest = field_name[:end], field_name[end:]
        if head in names:
            return names[head] + rest
        if (name := names.get(INDEX.sub("[]", head))) is not None:
            for index in INDEX.findall(head):
                name = name.replace("[]", index, 1)
            return name + rest
    return field_name


def prefix_ends(field_name: str) -> Sequence[int]:
    """List the ends of the prefixes of a field path, longest first."""
    return [
        len(field_name),
        *(end for end in range(len(field_name) - 1, 0, -1) if field_name[end] in "[."),
    ]


def detail_of(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def counted_unit(table: Mapping[QuotaDimension, str], facts: Mapping[str, str]) -> str | None:
    """Return the unit that a quota counts, `requests` or `tokens`; None if not in the table."""
    named = facts.get("dimension", "")
    return next((unit for dimension, unit in table.items() if dimension.spelling == named), None)


def quota_headers(quotas: Iterable[types_pb2.QuotaStatus]) -> dict[str, str]:
    """Build the rate-limit headers of an admitted request from the quotas that it counts in."""
    tightest: dict[str, types_pb2.QuotaStatus] = {}
    for quota in quotas:
        kind = COUNTED_NUMBERS.get(quota.dimension)
        if kind is not None and (
            kind not in tightest or quota.remaining_value < tightest[kind].remaining_value
        ):
            tightest[kind] = quota
    headers: dict[str, str] = {}
    for kind, quota in tightest.items():
        delay = quota.reset_delay if quota.HasField("reset_delay") else None
        reset_s = None if delay is None else delay.seconds + delay.nanos / 1e9
        headers |= limit_headers(kind, quota.limit_value, quota.remaining_value, reset_s)
    return headers


def refusal_headers(facts: Mapping[str, str]) -> dict[str, str]:
    """Build the rate-limit headers of a request that a quota refused; empty for other errors.

    `facts` are those of `api.core.statuses.quota_metadata`.
    """
    kind = counted_unit(COUNTED, facts)
    if kind is None:
        return {}
    left_s = None
    if "reset_time" in facts:
        left_s = (datetime.fromisoformat(facts["reset_time"]) - datetime.now(UTC)).total_seconds()
    return limit_headers(kind, int(facts["limit"]), int(facts["remaining"]), left_s)


def limit_headers(kind: str, limit: int, remaining: int, reset_s: float | None) -> dict[str, str]:
    """Build the headers with a limit, the remaining amount and the time until it resets.

    `reset_s` is None if it never does.
    """
    headers = {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(remaining, 0)),
    }
    if reset_s is not None:
        headers[f"x-ratelimit-reset-{kind}"] = duration_text(reset_s)
    return headers


def duration_text(seconds: float) -> str:
    """Format a duration as OpenAI does: `350ms`, `12s`, `6m0s`, `2h0m5s`."""
    ms = max(round(seconds * 1000), 0)
    if ms < 1000:
        return f"{ms}ms"
    minutes, whole_s = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{whole_s}s"
    return f"{minutes}m{whole_s}s" if minutes else f"{whole_s}s"


def check_count(elements: Sized | None, param: str, count_max: int) -> None:
    """Limit the number of elements of a parameter before checking any. Raises: InvalidRequest."""
    if elements is not None and len(elements) > count_max:
        raise invalid_parameter(
            param, f"must have at most {count_max} elements, got {len(elements)}"
        )
