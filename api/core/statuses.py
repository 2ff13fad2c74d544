"""The one table from domain error to status, and what goes into the details.

Domain errors know nothing of gRPC; this module knows nothing of how they come about. A test fails if a concrete error class of
`inference`, `metering` or this package is missing from the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
STATUS_DETAILS_KEY = "grpc-status-details-bin"


# What is not in it is a bug of ours and goes out as INTERNAL without its text.
KINDS: Mapping[int, tuple[type[Exception], ...]] = {
    code_pb2.UNAUTHENTICATED: (errors.Unauthenticated, errors.KeyRevokedMidway, metering_errors.KeyInvalid),
    code_pb2.PERMISSION_DENIED: (errors.AddressNotAllowed, errors.PermissionDenied, errors.ModelNotAllowed),
    code_pb2.INVALID_ARGUMENT: (
        errors.KeepTooLong,
        errors.KeyBoundExceeded,
        errors.InvalidRequest,
        errors.PromptTooLong,
        errors.PromptTooLarge,
        errors.InputsTooLong,
        errors.PromptFiltered,
        errors.MessageUnreadable,
        errors.MessageMissing,
        errors.MessageTooLarge,
        engine_errors.ChatTemplateFailed,
        engine_errors.RequestImpossible,
        metering_errors.InvalidValue,
        ModelMismatch,
    ),
    code_pb2.NOT_FOUND: (errors.UnknownRequest, ModelUnknown, metering_errors.NotFound),
    code_pb2.UNAVAILABLE: (
        errors.Draining,
        errors.Overloaded,
        errors.QueueFull,
        errors.StartsTooLate,
        errors.OwnerAway,
        errors.EngineLost,
        engine_errors.EngineOverloaded,
        engine_errors.EngineUnavailable,
        engine_errors.EngineStartFailed,
        engine_errors.SafetyUnavailable,
        engine_errors.CheckpointInvalid,
        metering_errors.StoreAway,
        metering_errors.ChangesUnderWay,
        metering_errors.StripeFailed,
    ),
    code_pb2.RESOURCE_EXHAUSTED: (
        errors.PreparationLimit,
        errors.AuthenticationThrottled,
        errors.TooManyReports,
        errors.TooManyCalls,
        errors.TooManyStreams,
        QuotaExceeded,
    ),
    code_pb2.FAILED_PRECONDITION: (
        errors.NotAdmittedYet,
        metering_errors.BillingDetailsMissing,
        metering_errors.PriceMissing,
        metering_errors.KeyRevoked,
        metering_errors.MonthClosed,
        metering_errors.MonthNotClosable,
        metering_errors.MonthOpen,
        metering_errors.ApprovalRefused,
        InsufficientCredit,
    ),
    code_pb2.ABORTED: (
        errors.EngineLostMidway,
        errors.AttachedElsewhere,
        metering_errors.RequestInFlight,
        metering_errors.HoldEnded,
    ),
    code_pb2.OUT_OF_RANGE: (errors.OutputGone,),
    code_pb2.ALREADY_EXISTS: (
        errors.RequestUnderWay,
        errors.RequestOver,
        metering_errors.RequestIdReused,
        RequestSettled,
        metering_errors.AlreadyExists,
    ),
    code_pb2.UNIMPLEMENTED: (errors.CallMissing,),
    code_pb2.CANCELLED: (errors.CancelledEarly, errors.SiblingEnded, errors.CancelledByAdmin),
    code_pb2.DEADLINE_EXCEEDED: (errors.DeadlineBeforeStart,),
    code_pb2.INTERNAL: (engine_errors.EngineFailed, engine_errors.InvariantViolated, metering_errors.InvariantViolated),
}
CODES: Mapping[type, int] = {kind: code for code, kinds in KINDS.items() for kind in kinds}


def code_of(error: BaseException) -> int:
    """The code of its class, or else of the nearest of its bases."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), code_pb2.INTERNAL)


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
        case errors.ApiError():
            return error.facts
        case QuotaExceeded():
            return quota_metadata(error)
        case ModelUnknown() | ModelMismatch() | metering_errors.PriceMissing():
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
        case errors.ApiError():
            return error.violations
        case metering_errors.InvalidValue():
            return (FieldViolation(error.field, error.remedy),)
        case ModelMismatch():
            return (FieldViolation("model", str(error)),)
        case engine_errors.RequestImpossible(field=str(field)):
            return (FieldViolation(field, str(error)),)
        case engine_errors.ChatTemplateFailed():
            return (FieldViolation("conversation.messages", str(error)),)
        case _:
            return ()
