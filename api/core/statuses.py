"""The one table from domain error to status, and what goes into the details.

Domain errors know nothing of gRPC; this module knows nothing of how they come about. A test fails if a concrete error class of
`inference`, `metering` or this package is missing from the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from api.core import errors
from api.core.errors import FieldViolation
from common.incidents import log_incident
from inference import errors as engine_errors
from inference.routing.router import ModelMismatch, ModelUnknown
from metering.core import errors as metering_errors
from metering.holds.operations import RequestSettled
from metering.quotas.quotas import InsufficientCredit, QuotaExceeded

ERROR_DOMAIN = "weir.dev"
LONG_INPUTS_SHOWN_MAX = 20  # more would not fit the metadata that a status travels in
STATUS_DETAILS_KEY = "grpc-status-details-bin"


# The upper row wins. What is not in it is a bug of ours and goes out as INTERNAL without its text.
CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.Unauthenticated, code_pb2.UNAUTHENTICATED),
    (metering_errors.KeyInvalid, code_pb2.UNAUTHENTICATED),
    (errors.KeyRevokedMidway, code_pb2.UNAUTHENTICATED),
    (errors.AddressNotAllowed, code_pb2.PERMISSION_DENIED),
    (errors.PermissionDenied, code_pb2.PERMISSION_DENIED),
    (errors.ModelNotAllowed, code_pb2.PERMISSION_DENIED),
    (errors.KeepTooLong, code_pb2.INVALID_ARGUMENT),
    (errors.KeyBoundExceeded, code_pb2.INVALID_ARGUMENT),
    (errors.InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (errors.PromptTooLong, code_pb2.INVALID_ARGUMENT),
    (errors.PromptTooLarge, code_pb2.INVALID_ARGUMENT),
    (errors.InputsTooLong, code_pb2.INVALID_ARGUMENT),
    (errors.PromptFiltered, code_pb2.INVALID_ARGUMENT),
    (errors.MessageUnreadable, code_pb2.INVALID_ARGUMENT),
    (errors.MessageMissing, code_pb2.INVALID_ARGUMENT),
    (errors.MessageTooLarge, code_pb2.INVALID_ARGUMENT),
    (metering_errors.InvalidValue, code_pb2.INVALID_ARGUMENT),
    (engine_errors.ChatTemplateFailed, code_pb2.INVALID_ARGUMENT),
    (engine_errors.RequestImpossible, code_pb2.INVALID_ARGUMENT),
    (ModelUnknown, code_pb2.NOT_FOUND),
    (ModelMismatch, code_pb2.INVALID_ARGUMENT),
    (errors.UnknownRequest, code_pb2.NOT_FOUND),
    (metering_errors.NotFound, code_pb2.NOT_FOUND),
    (errors.Draining, code_pb2.UNAVAILABLE),
    (errors.Overloaded, code_pb2.UNAVAILABLE),
    (errors.PreparationLimit, code_pb2.RESOURCE_EXHAUSTED),
    (errors.QueueFull, code_pb2.UNAVAILABLE),
    (errors.StartsTooLate, code_pb2.UNAVAILABLE),
    (errors.OwnerAway, code_pb2.UNAVAILABLE),
    (metering_errors.StoreAway, code_pb2.UNAVAILABLE),
    (metering_errors.ChangesUnderWay, code_pb2.UNAVAILABLE),
    (metering_errors.BillingDetailsMissing, code_pb2.FAILED_PRECONDITION),
    (metering_errors.StripeFailed, code_pb2.UNAVAILABLE),
    (errors.EngineLost, code_pb2.UNAVAILABLE),
    (engine_errors.EngineOverloaded, code_pb2.UNAVAILABLE),
    (engine_errors.EngineUnavailable, code_pb2.UNAVAILABLE),
    (engine_errors.EngineStartFailed, code_pb2.UNAVAILABLE),
    (engine_errors.SafetyUnavailable, code_pb2.UNAVAILABLE),
    (engine_errors.CheckpointInvalid, code_pb2.UNAVAILABLE),
    (errors.EngineLostMidway, code_pb2.ABORTED),
    (metering_errors.RequestInFlight, code_pb2.ABORTED),
    (errors.AttachedElsewhere, code_pb2.ABORTED),
    (errors.OutputGone, code_pb2.OUT_OF_RANGE),
    (metering_errors.HoldEnded, code_pb2.ABORTED),
    (errors.RequestUnderWay, code_pb2.ALREADY_EXISTS),
    (errors.RequestOver, code_pb2.ALREADY_EXISTS),
    (metering_errors.RequestIdReused, code_pb2.ALREADY_EXISTS),
    (RequestSettled, code_pb2.ALREADY_EXISTS),
    (metering_errors.AlreadyExists, code_pb2.ALREADY_EXISTS),
    (errors.NotAdmittedYet, code_pb2.FAILED_PRECONDITION),
    (metering_errors.PriceMissing, code_pb2.FAILED_PRECONDITION),
    (metering_errors.KeyRevoked, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthClosed, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthNotClosable, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthOpen, code_pb2.FAILED_PRECONDITION),
    (metering_errors.ApprovalRefused, code_pb2.FAILED_PRECONDITION),
    (InsufficientCredit, code_pb2.FAILED_PRECONDITION),
    (QuotaExceeded, code_pb2.RESOURCE_EXHAUSTED),
    (errors.AuthenticationThrottled, code_pb2.RESOURCE_EXHAUSTED),
    (errors.TooManyReports, code_pb2.RESOURCE_EXHAUSTED),
    (errors.TooManyCalls, code_pb2.RESOURCE_EXHAUSTED),
    (errors.TooManyStreams, code_pb2.RESOURCE_EXHAUSTED),
    (errors.CallMissing, code_pb2.UNIMPLEMENTED),
    (errors.CancelledEarly, code_pb2.CANCELLED),
    (errors.SiblingEnded, code_pb2.CANCELLED),
    (errors.CancelledByAdmin, code_pb2.CANCELLED),
    (errors.DeadlineBeforeStart, code_pb2.DEADLINE_EXCEEDED),
    (engine_errors.EngineFailed, code_pb2.INTERNAL),
    (engine_errors.InvariantViolated, code_pb2.INTERNAL),
    (metering_errors.InvariantViolated, code_pb2.INTERNAL),
)


def code_of(error: BaseException) -> int:
    kind = type(error)
    if (code := _CODES_BY_KIND.get(kind)) is None:
        code = _CODES_BY_KIND[kind] = code_of_kind(kind)
    return code


_CODES_BY_KIND: dict[type[BaseException], int] = {}  # of the errors that were told so far


def code_of_kind(raised: type[BaseException]) -> int:
    return next((code for kind, code in CODES if issubclass(raised, kind)), code_pb2.INTERNAL)


def reason_of(error: BaseException) -> str:
    """The reason that a client is told: one of some dozens, whatever the error says."""
    return "INTERNAL" if code_of(error) == code_pb2.INTERNAL else str(getattr(error, "reason", "INTERNAL"))


def status_of(error: BaseException) -> status_pb2.Status:
    """The status that a client sees for an error, details included. Internal errors carry an incident id and no text."""
    code = code_of(error)
    if code == code_pb2.INTERNAL:
        return internal_status(error)
    reason = getattr(error, "reason", "INTERNAL")
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata_of(error))
    details: list[Message] = [info, *details_of(error)]
    return pack(code, str(error), details)


def internal_status(error: BaseException) -> status_pb2.Status:
    """INTERNAL with an incident id, under which the log has the rest."""
    incident_id = log_incident(error)
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=ERROR_DOMAIN, metadata={"incident_id": incident_id})
    return pack(code_pb2.INTERNAL, f"internal error, incident {incident_id}: quote it to support", [info])


def pack(code: int, message: str, details: Sequence[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def metadata_of(error: BaseException) -> dict[str, str]:
    match error:
        case QuotaExceeded():
            return quota_metadata(error)
        case errors.AddressNotAllowed():
            return {"address": error.address}
        case errors.KeepTooLong():
            return {"keep_max_s": str(error.keep_max_s)}
        case errors.KeyBoundExceeded():
            excess = error.token_count - error.token_count_max
            return {"limit": str(error.token_count_max), "requested": str(error.token_count), "excess_token_count": str(excess)}
        case errors.PromptTooLong():
            return facts(error, "input_token_count", "context_window_tokens", "excess_token_count")
        case errors.PromptTooLarge():
            return facts(error, "char_count", "char_count_max", "context_window_tokens")
        case errors.InputsTooLong():
            first = error.inputs[0]
            return {
                "input_index": str(first.index),
                "input_token_count": str(first.token_count),
                "context_window_tokens": str(error.context_window_tokens),
                "excess_token_count": str(first.token_count - error.context_window_tokens),
            }
        case errors.PromptFiltered():
            return {"rule": error.rule}
        case errors.EngineLostMidway():
            return facts(error, "delivered_token_count") | {"retry_with": "new_request_id"}
        case errors.OutputGone():
            return facts(error, "oldest_seq", "last_seq")
        case errors.RequestOver():
            return {"outcome": error.outcome.lower()}
        case errors.EngineLost():
            return {"retry_with": "same_request_id"}
        case errors.StartsTooLate():
            return {"estimated_wait_s": f"{error.wait_s:.3f}"}
        case ModelUnknown() | ModelMismatch() | errors.ModelNotAllowed() | metering_errors.PriceMissing():
            return {"model": error.model}
        case metering_errors.MonthClosed():
            return {"organization_id": str(error.organization_id), "month": f"{error.month:%Y-%m}"}
        case metering_errors.NotFound() | metering_errors.AlreadyExists():
            return {"kind": error.kind, "ref": error.ref}
        case RequestSettled():
            settled = error.settled
            return facts(settled, *(each.name for each in fields(settled) if each.name not in ("hold_id", "receipts")))
        case _:
            return {}


def facts(source: object, *names: str) -> dict[str, str]:
    return {name: str(getattr(source, name)) for name in names}


def quota_metadata(error: QuotaExceeded) -> dict[str, str]:
    """Which limit, how much of it is left, when it resets, and whether waiting helps."""
    first = error.failing[0]
    told = facts(first, "quota_id", "subject", "subject_id", "model", "dimension", "used", "held") | {
        "limit": str(first.limit_value),
        "remaining": str(max(first.remaining, 0)),
        "requested": str(error.requested[0]),
        "retry_helps": "true" if error.retry_helps else "false",
    }
    if first.resets_at is not None:
        told["reset_time"] = first.resets_at.isoformat().replace("+00:00", "Z")
    return told


def details_of(error: BaseException) -> list[Message]:
    """Standard details beside ErrorInfo: BadRequest, QuotaFailure, RetryInfo."""
    details: list[Message] = []
    if violations := violations_of(error):
        bad_request = error_details_pb2.BadRequest()
        for violation in violations:
            bad_request.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad_request)
    if isinstance(error, metering_errors.MonthNotClosable):
        precondition = error_details_pb2.PreconditionFailure()
        for each in error.obstacles:
            precondition.violations.add(type=each.kind, subject="month", description=each.description)
        details.append(precondition)
    if isinstance(error, QuotaExceeded):
        failure = error_details_pb2.QuotaFailure()
        for state in error.failing:
            failure.violations.add(
                subject=f"{state.subject}:{state.subject_id}",
                description=f"{state.dimension}: {max(state.remaining, 0)} of {state.limit_value} left",
            )
        details.append(failure)
        if not error.retry_helps:
            return details
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def violations_of(error: BaseException) -> Sequence[FieldViolation]:
    match error:
        case errors.InvalidRequest():
            return error.violations
        case metering_errors.InvalidValue():
            return (FieldViolation(error.field, error.remedy),)
        case errors.PromptTooLong():
            return (FieldViolation("prompt", str(error)),)
        case errors.InputsTooLong():
            limit = error.context_window_tokens
            shown = error.inputs[:LONG_INPUTS_SHOWN_MAX]
            return [FieldViolation(f"inputs[{each.index}]", f"{each.token_count} tokens, at most {limit}") for each in shown]
        case errors.PromptTooLarge():
            return (FieldViolation(error.field, str(error)),)
        case ModelMismatch():
            return (FieldViolation("model", str(error)),)
        case errors.PromptFiltered():
            return (FieldViolation(error.field, str(error)),)
        case engine_errors.RequestImpossible(field=str(field)):
            return (FieldViolation(field, str(error)),)
        case engine_errors.ChatTemplateFailed():
            return (FieldViolation("conversation.messages", str(error)),)
        case _:
            return ()
