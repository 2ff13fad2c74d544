"""From the one table of errors (`api/core/statuses.py`) to what OpenAI's clients expect: an HTTP status, headers and an error body.

Nothing is decided twice: every refusal is a `google.rpc.Status` first, as over gRPC. Only what is wrong as HTTP begins here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from api.core.errors import FieldViolation, InvalidRequest
from api.openai.rate_limits import headers_of_refusal, kind_of

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
    """The error of one parameter."""
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
        kind = kind_of(info.metadata.get("dimension", ""))
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
    """The detail of a type."""
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None
