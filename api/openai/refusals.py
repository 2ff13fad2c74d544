"""From the one table of errors (`api/core/errors.py`) to what OpenAI's clients expect: an HTTP status, headers and an error body.

Nothing is decided twice: every refusal is a `google.rpc.Status` first, as over gRPC. Only what is wrong as HTTP begins here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weir.v1 import types_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.core.wire import DIMENSIONS
from metering.core.models import QuotaDimension

CLIENT_CLOSED = 499  # no number of the standard, but the one that proxies log; no client sends such a request again by itself
INVALID_HTTP = "invalid_http"  # the code of what is no HTTP at all
CLIENT_WAIT_MAX_S = 120.0  # seconds: for longer than that no OpenAI client waits by itself, it would only come too early
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

# Reasons whose code is not simply the reason in small letters.
CODES: Mapping[str, str] = {
    "UNAUTHENTICATED": "invalid_api_key",
    "PERMISSION_DENIED": "insufficient_permissions",
    "FIELD_INVALID": "invalid_value",
    "MESSAGE_UNREADABLE": "invalid_json",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "PROMPT_FILTERED": "content_policy_violation",
    "MODEL_UNKNOWN": "model_not_found",
    "INTERNAL": "server_error",
}

# Of the contract, as messages name them: parameters, which each API calls as it likes, and words that are the same in all of them.
TERMS = re.compile(r"\b(?:max_output_tokens|min_output_tokens|choice_count|tool_choice\.single|TOOL_MODE_[A-Z]+|request_id)\b")
WORDS = {"TOOL_MODE_NONE": "none", "TOOL_MODE_AUTO": "auto", "TOOL_MODE_REQUIRED": "required", "request_id": "Idempotency-Key"}
INDEX = re.compile(r"\[\d+\]")
Detail = TypeVar("Detail", bound=Message)

REQUESTS, TOKENS = "requests", "tokens"
COUNTED: Mapping[QuotaDimension, str] = {
    QuotaDimension.REQUESTS_PER_MINUTE: REQUESTS,
    QuotaDimension.TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.INPUT_TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.TOKENS_PER_DAY: TOKENS,
    QuotaDimension.TOKENS_PER_MONTH: TOKENS,
}

# Limits that come back within a minute: waiting for them is what OpenAI calls a rate limit. The others are quotas.
RATES = {QuotaDimension.CONCURRENT_REQUESTS: REQUESTS} | {
    each: kind for each, kind in COUNTED.items() if each.endswith("_per_minute")
}
COUNTED_NUMBERS = {DIMENSIONS[dimension]: kind for dimension, kind in COUNTED.items()}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What goes out instead of an answer. code: machine-readable; param: the parameter to mend; facts: what else is known."""

    http_status: int
    message: str
    kind: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it, with the facts beside it."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.facts:
            error["weir"] = dict(self.facts)
        return {"error": error}


class HttpFault(Exception):
    """What is wrong with a request as HTTP, before anything of it was understood."""

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
        """closing: what else comes on the connection cannot be told from the rest of this request."""
        super().__init__(message)
        self.closing = closing
        self.refusal = Refusal(http_status, message, "invalid_request_error", code, param, headers or {})


def no_http(message: str | None) -> str:
    """What is told of a request that is not HTTP. message: the parser's, whose first line says it."""
    return f"this is not a valid HTTP request: {(message or '').partition(chr(10))[0].rstrip(':')[:200]}"


def wrong_parameter(param: str | None, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(param or "", description)])


def refusal_of(status: status_pb2.Status, names: Mapping[str, str] | None = None) -> Refusal:
    """What a client is told of a status. names: how the fields of a start frame are called in the request that it came from."""
    info = detail_of(status, error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo(reason="INTERNAL")
    http_status = 429 if info.reason == "INSUFFICIENT_CREDIT" else HTTP_STATUSES.get(status.code, 500)
    message, param = wording(status, info, names or {})
    kind, code = category(http_status, info)
    retry = detail_of(status, error_details_pb2.RetryInfo)
    wait_s = None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    headers = retry_headers(http_status, wait_s) | headers_of_refusal(info.metadata)
    if http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Refusal(http_status, message, kind, code, param, headers, {"reason": info.reason, **info.metadata})


def wording(status: status_pb2.Status, info: error_details_pb2.ErrorInfo, names: Mapping[str, str]) -> tuple[str, str | None]:
    """The message, and the parameter that it is about."""
    bad_request = detail_of(status, error_details_pb2.BadRequest)
    if bad_request is None or not bad_request.field_violations:
        return in_words_of(names, status.message), "model" if info.reason == "MODEL_UNKNOWN" else None
    told = [(parameter(each.field, names), in_words_of(names, each.description)) for each in bad_request.field_violations]
    return "; ".join(f"{param}: {description}" if param else description for param, description in told), told[0][0] or None


def in_words_of(names: Mapping[str, str], remedy: str) -> str:
    """A message with what it says of the contract in the words of the API that was used."""
    return TERMS.sub(lambda found: WORDS.get(found[0]) or names.get(found[0], found[0]), remedy)


def category(http_status: int, info: error_details_pb2.ErrorInfo) -> tuple[str, str]:
    """Type and code of an error, by OpenAI's names where it has one."""
    if info.reason == "QUOTA_EXCEEDED":
        kind = in_table(RATES, info.metadata)
        return ("insufficient_quota", "insufficient_quota") if kind is None else (kind, "rate_limit_exceeded")
    if info.reason == "INSUFFICIENT_CREDIT":
        return "insufficient_quota", "insufficient_quota"
    kind = "server_error" if http_status >= 500 else "invalid_request_error"
    return kind, CODES.get(info.reason, info.reason.lower())


def retry_headers(http_status: int, wait_s: float | None) -> dict[str, str]:
    """When to come again, in the forms that clients read; that it is of no use where it is not."""
    if wait_s is not None:
        ms = math.ceil(wait_s * 1000)
        headers = {"retry-after": str(math.ceil(ms / 1000)), "retry-after-ms": str(ms)}
        return headers if wait_s <= CLIENT_WAIT_MAX_S else headers | {"x-should-retry": "false"}
    return {"x-should-retry": "false"} if http_status in (409, 429) else {}


def parameter(field_name: str, names: Mapping[str, str]) -> str:
    """What the request calls a field of the start frame: the longest name that it begins with decides, indices stay.

    names: of one element, or with `[]` for any index, which then stands in the same order in the request's name.
    """
    for end in boundaries(field_name):
        head, rest = field_name[:end], field_name[end:]
        if head in names:
            return names[head] + rest
        if (name := names.get(INDEX.sub("[]", head))) is not None:
            for index in INDEX.findall(head):
                name = name.replace("[]", index, 1)
            return name + rest
    return field_name


def boundaries(field_name: str) -> Sequence[int]:
    """Where a field's name may be cut: at its end, and before each index or member, the longest first."""
    return [len(field_name), *(place for place in range(len(field_name) - 1, 0, -1) if field_name[place] in "[.")]


def detail_of(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def in_table(table: Mapping[QuotaDimension, str], facts: Mapping[str, str]) -> str | None:
    """What a limit counts, `requests` or `tokens`; None for one that is not in the table."""
    dimension = facts.get("dimension", "")
    return table.get(QuotaDimension(dimension)) if dimension in set(QuotaDimension) else None


def headers_of(quotas: Iterable[types_pb2.QuotaStatus]) -> dict[str, str]:
    """Headers of a request that was let in. quotas: all that it met, itself counted."""
    tightest: dict[str, types_pb2.QuotaStatus] = {}
    for quota in quotas:
        kind = COUNTED_NUMBERS.get(quota.dimension)
        if kind is not None and (kind not in tightest or quota.remaining_value < tightest[kind].remaining_value):
            tightest[kind] = quota
    headers: dict[str, str] = {}
    for kind, quota in tightest.items():
        delay = quota.reset_delay
        headers |= three(kind, quota.limit_value, quota.remaining_value, delay.seconds + delay.nanos / 1e9)
    return headers


def headers_of_refusal(facts: Mapping[str, str]) -> dict[str, str]:
    """Headers of a request that a limit refused. facts: `api.core.errors.quota_metadata`; of any other error there are none."""
    kind = in_table(COUNTED, facts)
    if kind is None or "reset_time" not in facts:
        return {}
    left_s = (datetime.fromisoformat(facts["reset_time"]) - datetime.now(UTC)).total_seconds()
    return three(kind, int(facts["limit"]), int(facts["remaining"]), left_s)


def three(kind: str, limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    """Limit, what is left of it, and when it is whole again."""
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(remaining, 0)),
        f"x-ratelimit-reset-{kind}": duration_text(reset_s),
    }


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: `350ms`, `12s`, `6m0s`, `2h0m5s`."""
    ms = max(round(seconds * 1000), 0)
    if ms < 1000:
        return f"{ms}ms"
    minutes, whole_s = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{whole_s}s"
    return f"{minutes}m{whole_s}s" if minutes else f"{whole_s}s"


def check_count(elements: Sized | None, param: str, most: int) -> None:
    """As many as there may be, before any is looked at. Raises: InvalidRequest."""
    if elements is not None and len(elements) > most:
        raise wrong_parameter(param, f"at most {most} are allowed, not {len(elements)}")
