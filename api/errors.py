"""The one table from domain error to status, and what goes into the details.

Domain errors know nothing of gRPC; this module knows nothing of how they come about. A test fails if a concrete error class of
`inference`, `metering` or this package is missing from the table.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from inference import errors as engine_errors
from inference.router import ModelMismatch, ModelUnknown
from metering import errors as metering_errors
from metering.operations import Settled

ERROR_DOMAIN = "weir.dev"
LONG_INPUTS_SHOWN_MAX = 20  # more would not fit the metadata that a status travels in
STATUS_DETAILS_KEY = "grpc-status-details-bin"

log = structlog.get_logger(__name__)


class ApiError(Exception):
    """Base of the errors that the wire itself raises."""

    reason = "INTERNAL"


class Unauthenticated(ApiError):
    """No usable API key came with the call."""

    reason = "UNAUTHENTICATED"


class AuthenticationThrottled(ApiError):
    """So many authentications of this address have failed that no more are tried. retry_after_s: until one is."""

    reason = "AUTHENTICATION_THROTTLED"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            f"too many API keys from this address were not valid: the next one is looked at in {retry_after_s:.1f} s; "
            "keys that were good lately are served meanwhile"
        )
        self.retry_after_s = retry_after_s


class PermissionDenied(ApiError):
    """The key is good, but not for this."""

    reason = "PERMISSION_DENIED"


class ModelNotAllowed(ApiError):
    """The key is limited to other models. Whether there is one of this name is not told."""

    reason = "MODEL_NOT_ALLOWED"

    def __init__(self, key_prefix: str, model: str) -> None:
        super().__init__(f"key {key_prefix} may not use the model {model!r}: ListModels tells those that it may use")
        self.model = model


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that is wrong, and what would be right."""

    field: str
    description: str


class InvalidRequest(ApiError):
    """Fields of the request are wrong."""

    reason = "FIELD_INVALID"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = tuple(violations)


class PromptTooLong(ApiError):
    """Prompt and asked-for output do not fit the context window."""

    reason = "CONTEXT_EXCEEDED"

    def __init__(self, input_token_count: int, max_output_tokens: int | None, context_window_tokens: int) -> None:
        wanted = 1 if max_output_tokens is None else max_output_tokens
        self.excess_token_count = input_token_count + wanted - context_window_tokens
        self.input_token_count = input_token_count
        self.context_window_tokens = context_window_tokens
        output = "at least 1 output token" if max_output_tokens is None else f"max_output_tokens of {max_output_tokens}"
        super().__init__(
            f"the prompt has {input_token_count} tokens; with {output} it exceeds the context window of "
            f"{context_window_tokens} by {self.excess_token_count} tokens"
        )


@dataclass(frozen=True, slots=True)
class LongInput:
    """One text that is too long. index: among the request's inputs."""

    index: int
    token_count: int


class InputsTooLong(ApiError):
    """Texts to embed have more tokens than the model takes in one."""

    reason = "CONTEXT_EXCEEDED"

    def __init__(self, inputs: Sequence[LongInput], context_window_tokens: int) -> None:
        self.inputs = tuple(inputs)
        self.context_window_tokens = context_window_tokens
        first, others = self.inputs[0], len(self.inputs) - 1
        also = f", and {others} more are too long" if others else ""
        super().__init__(
            f"inputs[{first.index}] has {first.token_count} tokens{also}: the model takes {context_window_tokens} in one text. "
            "Split it, or set truncation to leave its end out"
        )


class PromptFiltered(ApiError):
    """The safety stage refuses the prompt. rule: which of the operator's rules matched; field: where the prompt stands."""

    reason = "PROMPT_FILTERED"

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(f"the prompt is not allowed here: it matches the rule {rule!r}")
        self.rule = rule
        self.field = field


class MessageUnreadable(ApiError):
    """The bytes of a message are not what the contract says."""

    reason = "MESSAGE_UNREADABLE"


class CallMissing(ApiError):
    """The contract has this call, and this server does not."""

    reason = "UNIMPLEMENTED"

    def __init__(self, method: str) -> None:
        super().__init__(f"this server does not have the call {method}")


class UnknownRequest(ApiError):
    """A frame names a request that this stream, or for an attach this project, does not know."""

    reason = "REQUEST_UNKNOWN"


class RequestUnderWay(ApiError):
    """A frame starts a request that runs already, with another payload."""

    reason = "REQUEST_ID_REUSED"


class AttachedElsewhere(ApiError):
    """Another stream receives the request from now on; here it is over, and the request itself goes on."""

    reason = "ATTACHED_ELSEWHERE"


class OutputGone(ApiError):
    """An attach asks for output that is not kept any more, or not there yet. The first and the last that it can ask for behind."""

    reason = "OUTPUT_GONE"

    def __init__(self, after_seq: int, oldest_seq: int, last_seq: int) -> None:
        there = (
            f"the deltas {oldest_seq} to {last_seq} are there" if oldest_seq <= last_seq else f"there is nothing after {last_seq}"
        )
        super().__init__(
            f"what follows delta {after_seq} cannot be sent: {there}; attach with an after_seq of {oldest_seq - 1} to {last_seq} "
            "to receive the rest"
        )
        self.oldest_seq = oldest_seq
        self.last_seq = last_seq


class RequestOver(ApiError):
    """A request has ended and its output is not kept. outcome: how it ended, or how its server's end was settled."""

    reason = "REQUEST_SETTLED"

    def __init__(self, outcome: str) -> None:
        how = "its server went away before it was done" if outcome == "FAILED" else f"it ended as {outcome or 'VOIDED'}"
        super().__init__(f"{how}, and its output is not kept here: its usage stands beside this; a new request_id runs it again")
        self.outcome = outcome


class OwnerAway(ApiError):
    """The server that runs a request does not answer. It is asked again, or its requests are settled, in a while."""

    reason = "OWNER_AWAY"
    retry_after_s = 1.0


class Draining(ApiError):
    """This process takes no new requests; another one will."""

    reason = "DRAINING"
    retry_after_s = 1.0


class Overloaded(ApiError):
    """This process runs as many requests as it may."""

    reason = "OVERLOADED"
    retry_after_s = 1.0


class QueueFull(ApiError):
    """There is no place in the queue before the model's engine. retry_after_s: when there will be one for this request."""

    reason = "QUEUE_FULL"

    def __init__(self, own_count: int, waiting_count: int, retry_after_s: float) -> None:
        whose = f"{own_count} of yours wait" if own_count else f"{waiting_count} wait"
        super().__init__(
            f"the queue before this model is full, {whose}: a place is kept for the same request in {retry_after_s:.2f} s"
        )
        self.retry_after_s = retry_after_s


class StartsTooLate(ApiError):
    """The request would still wait for its turn at its deadline. Times in s; retry_after_s: when the wait will be short enough."""

    reason = "STARTS_TOO_LATE"

    def __init__(self, wait_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(f"the wait is about {wait_s:.2f} s, and the deadline is in {max(left_s, 0.0):.2f} s")
        self.wait_s = wait_s
        self.retry_after_s = retry_after_s


class EngineLost(ApiError):
    """The engine broke before anything of the request was delivered: nothing is billed, and the same request may come again."""

    reason = "ENGINE_FAILED"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the engine broke before the first token: nothing is billed, send the same request again")
        self.retry_after_s = retry_after_s


class EngineLostMidway(ApiError):
    """The engine broke after tokens had been delivered, which are billed: under this id the request is over."""

    reason = "ENGINE_FAILED_MIDWAY"

    def __init__(self, delivered_token_count: int) -> None:
        super().__init__(
            f"the engine broke after {delivered_token_count} tokens, which are delivered and billed: ask for the rest, or for all "
            "of it, under a new request_id; this one answers with its usage from now on"
        )
        self.delivered_token_count = delivered_token_count


class NotAdmittedYet(ApiError):
    """The limits of a request are changed before it has been admitted with those that it was started with."""

    reason = "NOT_ADMITTED_YET"


class CancelledEarly(ApiError):
    """The client cancelled before the request was admitted."""

    reason = "CANCELLED"


class CancelledByAdmin(ApiError):
    """An admin has ended the request while it waited or ran. What was delivered is settled."""

    reason = "CANCELLED_BY_ADMIN"


class KeyRevokedMidway(ApiError):
    """The key was revoked while the request waited or ran. What was delivered is settled."""

    reason = "KEY_REVOKED"


class DeadlineBeforeStart(ApiError):
    """The deadline passed before the request was admitted."""

    reason = "DEADLINE_EXCEEDED"


# The upper row wins. What is not in it is a bug of ours and goes out as INTERNAL without its text.
CODES: tuple[tuple[type[Exception], int], ...] = (
    (Unauthenticated, code_pb2.UNAUTHENTICATED),
    (metering_errors.KeyInvalid, code_pb2.UNAUTHENTICATED),
    (KeyRevokedMidway, code_pb2.UNAUTHENTICATED),
    (PermissionDenied, code_pb2.PERMISSION_DENIED),
    (ModelNotAllowed, code_pb2.PERMISSION_DENIED),
    (InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (PromptTooLong, code_pb2.INVALID_ARGUMENT),
    (InputsTooLong, code_pb2.INVALID_ARGUMENT),
    (PromptFiltered, code_pb2.INVALID_ARGUMENT),
    (MessageUnreadable, code_pb2.INVALID_ARGUMENT),
    (metering_errors.InvalidValue, code_pb2.INVALID_ARGUMENT),
    (engine_errors.ChatTemplateFailed, code_pb2.INVALID_ARGUMENT),
    (engine_errors.RequestImpossible, code_pb2.INVALID_ARGUMENT),
    (ModelUnknown, code_pb2.NOT_FOUND),
    (ModelMismatch, code_pb2.INVALID_ARGUMENT),
    (UnknownRequest, code_pb2.NOT_FOUND),
    (metering_errors.NotFound, code_pb2.NOT_FOUND),
    (Draining, code_pb2.UNAVAILABLE),
    (Overloaded, code_pb2.UNAVAILABLE),
    (QueueFull, code_pb2.UNAVAILABLE),
    (StartsTooLate, code_pb2.UNAVAILABLE),
    (OwnerAway, code_pb2.UNAVAILABLE),
    (metering_errors.StoreAway, code_pb2.UNAVAILABLE),
    (metering_errors.ChangesUnderWay, code_pb2.UNAVAILABLE),
    (metering_errors.StripeFailed, code_pb2.UNAVAILABLE),
    (EngineLost, code_pb2.UNAVAILABLE),
    (engine_errors.EngineOverloaded, code_pb2.UNAVAILABLE),
    (engine_errors.EngineUnavailable, code_pb2.UNAVAILABLE),
    (engine_errors.EngineStartFailed, code_pb2.UNAVAILABLE),
    (engine_errors.SafetyUnavailable, code_pb2.UNAVAILABLE),
    (engine_errors.CheckpointInvalid, code_pb2.UNAVAILABLE),
    (EngineLostMidway, code_pb2.ABORTED),
    (metering_errors.RequestInFlight, code_pb2.ABORTED),
    (AttachedElsewhere, code_pb2.ABORTED),
    (OutputGone, code_pb2.OUT_OF_RANGE),
    (metering_errors.HoldEnded, code_pb2.ABORTED),
    (RequestUnderWay, code_pb2.ALREADY_EXISTS),
    (RequestOver, code_pb2.ALREADY_EXISTS),
    (metering_errors.RequestIdReused, code_pb2.ALREADY_EXISTS),
    (metering_errors.RequestSettled, code_pb2.ALREADY_EXISTS),
    (metering_errors.AlreadyExists, code_pb2.ALREADY_EXISTS),
    (NotAdmittedYet, code_pb2.FAILED_PRECONDITION),
    (metering_errors.PriceMissing, code_pb2.FAILED_PRECONDITION),
    (metering_errors.KeyRevoked, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthClosed, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthNotClosable, code_pb2.FAILED_PRECONDITION),
    (metering_errors.MonthOpen, code_pb2.FAILED_PRECONDITION),
    (metering_errors.ApprovalRefused, code_pb2.FAILED_PRECONDITION),
    (metering_errors.InsufficientCredit, code_pb2.FAILED_PRECONDITION),
    (metering_errors.QuotaExceeded, code_pb2.RESOURCE_EXHAUSTED),
    (AuthenticationThrottled, code_pb2.RESOURCE_EXHAUSTED),
    (CallMissing, code_pb2.UNIMPLEMENTED),
    (CancelledEarly, code_pb2.CANCELLED),
    (CancelledByAdmin, code_pb2.CANCELLED),
    (DeadlineBeforeStart, code_pb2.DEADLINE_EXCEEDED),
    (engine_errors.EngineFailed, code_pb2.INTERNAL),
    (engine_errors.InvariantViolated, code_pb2.INTERNAL),
    (metering_errors.InvariantViolated, code_pb2.INTERNAL),
)


def status_of(error: BaseException) -> status_pb2.Status:
    """The status that a client sees for an error, details included. Internal errors carry an incident id and no text."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), code_pb2.INTERNAL)
    if code == code_pb2.INTERNAL:
        return internal_status(error)
    reason = getattr(error, "reason", "INTERNAL")
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata_of(error))
    details: list[Message] = [info, *details_of(error)]
    return pack(code, str(error), details)


def internal_status(error: BaseException) -> status_pb2.Status:
    """INTERNAL with an incident id, under which the log has the rest."""
    incident_id = uuid.uuid4().hex[:12]
    log.error("incident", incident_id=incident_id, exc_info=error)
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=ERROR_DOMAIN, metadata={"incident_id": incident_id})
    return pack(code_pb2.INTERNAL, f"internal error, incident {incident_id}: quote it to support", [info])


def pack(code: int, message: str, details: Sequence[Message]) -> status_pb2.Status:
    """A google.rpc.Status."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def metadata_of(error: BaseException) -> dict[str, str]:
    """Machine-readable facts of an error."""
    match error:
        case metering_errors.QuotaExceeded():
            return quota_metadata(error)
        case PromptTooLong():
            return {
                "input_token_count": str(error.input_token_count),
                "context_window_tokens": str(error.context_window_tokens),
                "excess_token_count": str(error.excess_token_count),
            }
        case InputsTooLong():
            first = error.inputs[0]
            return {
                "input_index": str(first.index),
                "input_token_count": str(first.token_count),
                "context_window_tokens": str(error.context_window_tokens),
                "excess_token_count": str(first.token_count - error.context_window_tokens),
            }
        case PromptFiltered():
            return {"rule": error.rule}
        case EngineLostMidway():
            return {"delivered_token_count": str(error.delivered_token_count), "retry_with": "new_request_id"}
        case OutputGone():
            return {"oldest_seq": str(error.oldest_seq), "last_seq": str(error.last_seq)}
        case RequestOver():
            return {"outcome": error.outcome.lower()}
        case EngineLost():
            return {"retry_with": "same_request_id"}
        case StartsTooLate():
            return {"estimated_wait_s": f"{error.wait_s:.3f}"}
        case ModelUnknown() | ModelMismatch() | ModelNotAllowed() | metering_errors.PriceMissing():
            return {"model": error.model}
        case metering_errors.MonthClosed():
            return {"organization_id": str(error.organization_id), "month": f"{error.month:%Y-%m}"}
        case metering_errors.NotFound() | metering_errors.AlreadyExists():
            return {"kind": error.kind, "ref": error.ref}
        case metering_errors.RequestSettled():
            return settled_metadata(error.settled)
        case _:
            return {}


def settled_metadata(settled: Settled) -> dict[str, str]:
    """What stands for a request that has ended before."""
    return {
        "outcome": settled.outcome,
        "input_token_count": str(settled.input_token_count),
        "cached_input_token_count": str(settled.cached_input_token_count),
        "generated_token_count": str(settled.generated_token_count),
        "delivered_token_count": str(settled.delivered_token_count),
        "billed_token_count": str(settled.billed_token_count),
        "embedding_token_count": str(settled.embedding_token_count),
        "cost_picos": str(settled.cost_picos),
        "currency_code": settled.currency_code,
    }


def quota_metadata(error: metering_errors.QuotaExceeded) -> dict[str, str]:
    """Which limit, how much of it is left, when it resets, and whether waiting helps."""
    first = error.failing[0]
    facts = {
        "quota_id": str(first.quota_id),
        "subject": str(first.subject),
        "subject_id": str(first.subject_id),
        "model": first.model,
        "dimension": str(first.dimension),
        "limit": str(first.limit_value),
        "used": str(first.used),
        "held": str(first.held),
        "remaining": str(max(first.remaining, 0)),
        "requested": str(error.requested[0]),
        "retry_helps": "true" if error.retry_helps else "false",
    }
    if first.resets_at is not None:
        facts["reset_time"] = first.resets_at.isoformat().replace("+00:00", "Z")
    return facts


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
    if isinstance(error, metering_errors.QuotaExceeded):
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
    """The fields to mend, where there are any."""
    match error:
        case InvalidRequest():
            return error.violations
        case metering_errors.InvalidValue():
            return (FieldViolation(error.field, error.remedy),)
        case PromptTooLong():
            return (FieldViolation("prompt", str(error)),)
        case InputsTooLong():
            limit = error.context_window_tokens
            shown = error.inputs[:LONG_INPUTS_SHOWN_MAX]
            return [FieldViolation(f"inputs[{each.index}]", f"{each.token_count} tokens, at most {limit}") for each in shown]
        case ModelMismatch():
            return (FieldViolation("model", str(error)),)
        case PromptFiltered():
            return (FieldViolation(error.field, str(error)),)
        case engine_errors.RequestImpossible(field=str(field)):
            return (FieldViolation(field, str(error)),)
        case engine_errors.ChatTemplateFailed():
            return (FieldViolation("conversation.messages", str(error)),)
        case _:
            return ()
