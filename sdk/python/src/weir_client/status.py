"""Conversion of `google.rpc.Status` and failed RPCs to typed errors.

The status of a whole RPC is in the trailing metadata `grpc-status-details-bin`, that of one request
in its `failed` frame.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from weir_client import errors
from weir_client.generated_values import QuotaDimension, QuotaSubject
from weir_client.values import Partial

STATUS_DETAILS_KEY = "grpc-status-details-bin"

_CLASSES: Mapping[str, type[errors.WeirError]] = {
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "ABORTED": errors.Aborted,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
    "INTERNAL": errors.Internal,
    "DATA_LOSS": errors.Internal,
}

# Replaces the server's status in grpcio if a write fails as the stream ends (grpc/grpc#36066).
OVERWRITTEN = "Internal error from Core"
RESET = "RST_STREAM"  # in grpcio's details if a stream was reset, by a proxy for example
# Words of gRPC for a server that was not reached, and remedies by words of its reason.
NOT_REACHED = (
    "failed to connect",
    "to all backends failing",
    "errors resolving",
    "DNS resolution failed",
)
HINTS = {
    "WRONG_VERSION_NUMBER": (
        "the server does not use TLS: prefix its address with http://, or pass tls=False"
    ),
    "Expected SETTINGS frame": (
        "this is not a gRPC port, or it uses TLS: use the port of WEIR_LISTEN, not that of the HTTP"
        " API, and prefix the address with https:// for TLS"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not trusted or is for another name: pass root_certificates=, or use a"
        " name in the certificate as the address"
    ),
    "Connection refused": "nothing listens there: check the port, and that the server runs",
    "ame not found": "check the name of the host",
}
# Patterns of the contract's names in the server's texts, and the names that the caller used.
_NAMES = {
    r"start\.(?=\w)|sampling\.(?=\w)|response_format\.(?=\w)": "",
    r"conversation\.messages": "prompt",
    r"conversation\.(?=\w)": "",
    r"token_ids\.ids": "token_ids",
    r"beam_search(\.width)?(?!\.)": "beam_width",
    r"beam_search\.": "",
    r"stop_sequences": "stop",
    r"initial_credit_tokens": "prefetch_tokens",
    r"parameters_json_schema": "parameters",
    r"tool_choice\.\w+": "tool_choice",
    r"max_cost\.\w+": "max_cost",
    r"ListModels": "list_models()",
}

_Enum = TypeVar("_Enum", bound=StrEnum)


def in_arguments(text: str) -> str:
    """Replace the contract's names in a text by those of the client's arguments."""
    for pattern, name in _NAMES.items():
        text = re.sub(rf"\b(?:{pattern})", name, text)
    return text


def error_from_status(
    status: status_pb2.Status, *, request_id: str = "", partial: Partial | None = None
) -> errors.WeirError:
    """Convert a status with its details to a typed error, or to `WeirError` for an unknown code."""
    code = _code_name(status.code)
    details = _decode_details(status)
    kind = _CLASSES.get(code, errors.WeirError)
    if code == "RESOURCE_EXHAUSTED" and (details.quota is not None or details.quota_violations):
        kind = errors.QuotaExceeded
    message = in_arguments(status.message)
    for each in details.field_violations:
        if message == each.description and not message.startswith(each.field):
            message = f"{each.field}: {message}"
    return kind(
        message or code.lower().replace("_", " "),
        code=code,
        request_id=request_id or (details.metadata or {}).get("request_id", ""),
        details=details,
        partial=partial,
    )


def error_from_rpc(
    error: grpc.aio.AioRpcError,
    *,
    request_id: str = "",
    partial: Partial | None = None,
    tried: str = "",
) -> errors.WeirError:
    """Convert a failed RPC to a typed error, from the status details if the server sent them.

    `tried` is the server's address, which the error names if the server could not be reached.
    """
    status = _status_of(error, tried)
    return error_from_status(status, request_id=request_id, partial=partial)


def _status_of(error: grpc.aio.AioRpcError, tried: str) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break  # mangled by a proxy: use the plain status below
            if status.code:
                return status
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == OVERWRITTEN:
        message = "the server ended the stream while a message was in flight"
        return status_pb2.Status(code=code_pb2.UNAVAILABLE, message=message)
    if error.code() is grpc.StatusCode.INTERNAL and RESET in (error.details() or ""):
        message = "the stream was reset before its end, by the server or by a proxy"
        return status_pb2.Status(code=code_pb2.UNAVAILABLE, message=message)
    if error.code() is grpc.StatusCode.CANCELLED:
        # Not a cancellation by this client, which raises no RPC error: a stopping gRPC server drops
        # new calls this way.
        return status_pb2.Status(
            code=code_pb2.UNAVAILABLE, message="the server cancelled the call: it is stopping"
        )
    number, _ = error.code().value
    message = error.details() or ""
    hint = next((hint for words, hint in HINTS.items() if words in message), "")
    if tried and any(words in message for words in NOT_REACHED):
        message = f"the server at {tried} cannot be reached: {message}"
    if hint:
        message += f"; {hint}"
    return status_pb2.Status(code=number, message=message)


def _code_name(number: int) -> str:
    return code_pb2.Code.Name(number) if number in code_pb2.Code.values() else "UNKNOWN"


def _decode_details(status: status_pb2.Status) -> errors.ErrorDetails:
    reason = ""
    metadata: Mapping[str, str] | None = None
    fields: tuple[errors.FieldViolation, ...] = ()
    quotas: tuple[errors.QuotaViolation, ...] = ()
    preconditions: tuple[errors.PreconditionViolation, ...] = ()
    retry_after_s: float | None = None
    doc_url = ""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        failure = error_details_pb2.QuotaFailure()
        precondition = error_details_pb2.PreconditionFailure()
        retry = error_details_pb2.RetryInfo()
        page = error_details_pb2.Help()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            fields = tuple(
                errors.FieldViolation(in_arguments(each.field), in_arguments(each.description))
                for each in bad.field_violations
            )
        elif detail.Unpack(failure):
            quotas = tuple(
                errors.QuotaViolation(each.subject, each.description) for each in failure.violations
            )
        elif detail.Unpack(precondition):
            preconditions = tuple(
                errors.PreconditionViolation(each.type, each.description)
                for each in precondition.violations
            )
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Unpack(page) and page.links:
            doc_url = page.links[0].url
    return errors.ErrorDetails(
        reason=reason,
        metadata=metadata,
        field_violations=fields,
        quota_violations=quotas,
        retry_after_s=retry_after_s,
        preconditions=preconditions,
        doc_url=doc_url,
        quota=_exceeded_quota(metadata or {}, retry_after_s)
        if reason == "QUOTA_EXCEEDED"
        else None,
    )


def _exceeded_quota(
    metadata: Mapping[str, str], retry_after_s: float | None
) -> errors.ExceededQuota:
    return errors.ExceededQuota(
        quota_id=metadata.get("quota_id", ""),
        subject=_member(QuotaSubject, metadata.get("subject", "")),
        subject_id=metadata.get("subject_id", ""),
        model=metadata.get("model", ""),
        dimension=_member(QuotaDimension, metadata.get("dimension", "")),
        limit=_whole(metadata.get("limit")),
        used=_whole(metadata.get("used")),
        held=_whole(metadata.get("held")),
        remaining=_whole(metadata.get("remaining")),
        requested=_whole(metadata.get("requested")),
        reset_time=_time(metadata.get("reset_time")),
        retry_helps=metadata.get(
            "retry_helps", "true" if retry_after_s is not None else "false"
        ).lower()
        == "true",
        subject_name=metadata.get("subject_name", ""),
        window_minutes=_whole(metadata.get("window_minutes")) or 0,
        group=metadata.get("group", ""),
    )


def _member(kind: type[_Enum], text: str) -> _Enum:
    """Find the member of an enumeration; UNSPECIFIED for one that is newer than this client."""
    try:
        return kind(text)
    except ValueError:
        return kind["UNSPECIFIED"]


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
