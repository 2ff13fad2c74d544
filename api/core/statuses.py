"""Conversion of errors to gRPC statuses: the table of codes, and details that fit into the
metadata.

An error without an entry in the table is a bug: it becomes INTERNAL, without its text. A test fails
if a concrete error class of `inference`, `metering` or `api/core/errors.py` is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from api.core import errors
from api.core.errors import ApiError, FieldViolation, InvalidRequest
from common.incidents import log_incident
from common.retry_after import wait_text
from inference import errors as engine_errors
from inference.routing.router import ModelMismatch, ModelUnknown
from metering.core import errors as metering_errors
from metering.holds.operations import RequestSettled
from metering.quotas.quotas import InsufficientCredit, QuotaExceeded

# Bytes of a status in the metadata of a call, where its message is percent-encoded, and again in
# its details, which are base64. By default a gRPC client refuses metadata above 8 KiB, all of it:
# it then shows neither message nor details.
STATUS_BYTES_MAX = 6 * 2**10
STATUS_OVERHEAD_BYTES = 400  # names, types and lengths around the texts
FACT_BYTES_MIN = 32  # shorter ones are numbers, times and names
REST_BYTES = 40  # "and 80 more" as a violation
ERROR_DOMAIN = "weir.dev"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# A first word that a sentence begins with; not a field, a path or a name in quotes.
FIRST_WORD = re.compile(r"[a-z]+(?:'s)?(?= )")
# Errors that only the operator can mend, with texts that say how.
FOR_OPERATORS = (engine_errors.CheckpointInvalid, engine_errors.EngineStartFailed)
# Bytes that take three in the header `grpc-message`.
PERCENT_ENCODED = bytes({*range(256)} - {*range(0x20, 0x7F)} | {ord("%")})
# Of the message, percent-encoded, and of its parts if there are too many to show all.
MESSAGE_BYTES_MAX, PART_BYTES_MAX = 1400, 450
# Of the facts of an `ErrorInfo`, alone and beside violations; of a violation.
FACTS_BYTES_MAX, FACTS_BESIDE_BYTES_MAX = 1600, 600
FIELD_BYTES_MAX, DESCRIPTION_BYTES_MAX = 200, 400
# An error without an entry is a bug and becomes INTERNAL without its text.
KINDS: Mapping[int, tuple[type[Exception], ...]] = {
    code_pb2.UNAUTHENTICATED: (
        errors.Unauthenticated,
        errors.KeyRevokedMidway,
        metering_errors.KeyInvalid,
        metering_errors.InvitationInvalid,
        metering_errors.OrganizationClosed,
        metering_errors.ProjectClosed,
        metering_errors.TokenInvalid,
    ),
    code_pb2.PERMISSION_DENIED: (
        errors.AddressNotAllowed,
        errors.PermissionDenied,
        errors.OrganizationSuspended,
        errors.ProjectSuspended,
        errors.ModelNotAllowed,
        errors.RoleExceeded,
    ),
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
        errors.ProcessUnavailable,
        errors.IssuerUnavailable,
        errors.EngineLost,
        engine_errors.EngineOverloaded,
        engine_errors.EngineUnavailable,
        engine_errors.EngineStartFailed,
        engine_errors.SafetyUnavailable,
        engine_errors.CheckpointInvalid,
        metering_errors.DatabaseUnavailable,
        metering_errors.WriteConflict,
        metering_errors.JournalUnavailable,
        metering_errors.ConcurrentChanges,
        metering_errors.StripeFailed,
    ),
    code_pb2.RESOURCE_EXHAUSTED: (
        errors.PreparationLimit,
        errors.AuthenticationThrottled,
        errors.TooManyReports,
        errors.TooManyCalls,
        errors.TooManyStreams,
        metering_errors.EndUsersExhausted,
        QuotaExceeded,
    ),
    code_pb2.FAILED_PRECONDITION: (
        errors.NotAdmittedYet,
        metering_errors.BillingDetailsMissing,
        metering_errors.PriceMissing,
        metering_errors.KeyRevoked,
        metering_errors.LastOwner,
        metering_errors.MonthClosed,
        metering_errors.MonthNotClosable,
        metering_errors.MonthOpen,
        metering_errors.ApprovalRefused,
        InsufficientCredit,
    ),
    code_pb2.ABORTED: (
        errors.EngineLostMidway,
        errors.Interrupted,
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
    code_pb2.INTERNAL: (
        engine_errors.EngineFailed,
        engine_errors.InvariantViolated,
        metering_errors.InvariantViolated,
    ),
}
CODES_BY_CLASS: Mapping[type, int] = {kind: code for code, kinds in KINDS.items() for kind in kinds}
# Pages of the reasons, below the documentation site; without one, files of this repository.
PAGES, FILES = "reference/errors/{}.html", "docs/reference/errors/{}.md"
CHECKOUT = Path(__file__).resolve().parents[2]
_page_url = FILES


def link_to_docs(url: str, *, local: bool = False) -> None:
    """Set the documentation site that all errors of this process link to.

    Without a site, a server that is `local` links to the files of its checkout, which its clients
    on the same machine can open.
    """
    global _page_url  # errors are converted in every part of a process
    _page_url = f"{url.rstrip('/')}/{PAGES}" if url else FILES
    if not url and local and (CHECKOUT / FILES.format("INTERNAL")).is_file():
        _page_url = f"{CHECKOUT.as_uri()}/{FILES}"


def doc_url_of(reason: str) -> str:
    """Return the address of a reason's page; a path in the repository if it has none."""
    return _page_url.replace("{}", reason)


def help_of(reason: str) -> error_details_pb2.Help:
    """Build the detail that links an error to the page of its reason."""
    links = [error_details_pb2.Help.Link(description=reason, url=doc_url_of(reason))]
    return error_details_pb2.Help(links=links)


def code_of(error: BaseException) -> int:
    """Look up the status code of an error's class, or of its nearest base class in the table."""
    return next(
        (CODES_BY_CLASS[kind] for kind in type(error).__mro__ if kind in CODES_BY_CLASS),
        code_pb2.INTERNAL,
    )


def reason_of(error: BaseException) -> str:
    """Return the reason code that the client receives, one of a few dozen constants."""
    return (
        "INTERNAL"
        if code_of(error) == code_pb2.INTERNAL
        else str(getattr(error, "reason", "INTERNAL"))
    )


def status_of(error: BaseException) -> status_pb2.Status:
    """Convert an error to a status with details.

    Internal errors get an incident id instead of their text.
    """
    code = code_of(error)
    if code == code_pb2.INTERNAL:
        return internal_status(error)
    reason = getattr(error, "reason", "INTERNAL")
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=ERROR_DOMAIN, metadata=metadata_of(error)
    )
    keep_short(info, FACTS_BESIDE_BYTES_MAX if violations_of(error) else FACTS_BYTES_MAX)
    message = message_of(error)
    # Base64 has 4 bytes for 3.
    room = (STATUS_BYTES_MAX - STATUS_OVERHEAD_BYTES - percent_size(message)) * 3 // 4
    page = help_of(reason)
    room -= utf8_size(message) + info.ByteSize() + page.ByteSize()
    return pack(code, message, [info, *details_of(error, room), page])


def internal_status(error: BaseException) -> status_pb2.Status:
    """Log an error under a new incident id, and build the INTERNAL status that has the id."""
    incident_id = log_incident(error)
    info = error_details_pb2.ErrorInfo(
        reason="INTERNAL", domain=ERROR_DOMAIN, metadata={"incident_id": incident_id}
    )
    return pack(
        code_pb2.INTERNAL,
        internal_message(incident_id),
        [info, help_of("INTERNAL")],
    )


def internal_message(incident_id: str) -> str:
    """Return the message of an error whose own text is not for clients."""
    return (
        "The server failed, and not because of your request. Tell the operator the incident"
        f" {incident_id}, which is in the server's log."
    )


def message_of(error: BaseException) -> str:
    """Return the message for the client, which ends with the time of a retry if one can succeed."""
    message = text_of(error)
    if not violations_of(error):
        message = as_sentence(message)
    wait_s = retry_after_of(error)
    if wait_s is None:
        return f"{message} Tell the operator." if isinstance(error, FOR_OPERATORS) else message
    return f"{message} Try again {f'in {wait_text(wait_s)}' if wait_s > 0 else 'now'}."


def as_sentence(text: str) -> str:
    """Begin a text with a capital letter and end it with a full stop, as far as it has neither."""
    if FIRST_WORD.match(text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def retry_after_of(error: BaseException) -> float | None:
    """Return the seconds until a retry of the request can succeed; None if it cannot."""
    if isinstance(error, QuotaExceeded) and not error.retry_helps:
        return None
    wait_s: float | None = getattr(error, "retry_after_s", None)
    return wait_s


def text_of(error: BaseException) -> str:
    """Return the error's text for clients; if too long, shortened, with a count of the rest."""
    message = getattr(error, "client_message", "") or str(error)
    if percent_size(message) <= MESSAGE_BYTES_MAX:
        return message
    match error:
        case InvalidRequest():
            parts = [f"{each.field}: {each.description}" for each in error.violations]
        case metering_errors.MonthNotClosable():
            parts = [each.description for each in error.obstacles]
        case _:
            parts = [message]
    if len(parts) == 1:
        return shortened(message, MESSAGE_BYTES_MAX, percent_size)
    shown: list[str] = []
    room = MESSAGE_BYTES_MAX - REST_BYTES
    for part in parts:
        part = shortened(part, PART_BYTES_MAX, percent_size)
        room -= percent_size(part) + len("; ")
        if room < 0:
            break
        shown.append(part)
    return "; ".join([*shown, f"and {len(parts) - len(shown)} more"])


def utf8_size(text: str) -> int:
    return len(text.encode(errors="replace"))


def percent_size(text: str) -> int:
    """Return the size of a text in bytes, percent-encoded as in the `grpc-message` header."""
    data = text.encode(errors="replace")
    return 3 * len(data) - 2 * len(data.translate(None, PERCENT_ENCODED))


def shortened(text: str, size_max: int, size_of: Callable[[str], int] = utf8_size) -> str:
    """Cut out the middle of a text that is longer than `size_max`, as `size_of` measures it."""
    if size_of(text) <= size_max:
        return text
    half = (size_max - len(" ... ")) // 2
    tail = head_of(text[: -half - 1 : -1], half, size_of)[::-1]
    return f"{head_of(text[:half], half, size_of)} ... {tail}"


def head_of(text: str, size_max: int, size_of: Callable[[str], int]) -> str:
    """Return the longest prefix of a text whose size is at most `size_max`."""
    for index, char in enumerate(text):
        if (size_max := size_max - size_of(char)) < 0:
            return text[:index]
    return text


def keep_short(info: error_details_pb2.ErrorInfo, size_max: int) -> None:
    """Shorten the longest values of an `ErrorInfo` until it has at most `size_max` bytes."""
    while info.ByteSize() > size_max:
        name, value = max(info.metadata.items(), key=lambda fact: utf8_size(fact[1]))
        if (size := utf8_size(value)) <= FACT_BYTES_MIN:
            return
        info.metadata[name] = shortened(value, max(size // 2, FACT_BYTES_MIN))


def pack(code: int, message: str, details: Sequence[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def metadata_of(error: BaseException) -> dict[str, str]:
    match error:
        case ApiError():
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
            names = {each.name for each in fields(error.settled)} - {"hold_id", "receipts"}
            return facts(error.settled, *names)
        case _:
            return {}


def facts(source: object, *names: str) -> dict[str, str]:
    return {name: str(getattr(source, name)) for name in names}


def quota_metadata(error: QuotaExceeded) -> dict[str, str]:
    """Describe the exceeded quota: limit, remaining amount, reset, and if a retry can succeed."""
    first = error.failing[0]
    message = facts(first, "quota_id", "subject_id", "model", "used", "held") | {
        "subject": first.subject.spelling,
        "dimension": first.dimension.spelling,
        "limit": str(first.limit_value),
        "remaining": str(max(first.remaining, 0)),
        "requested": str(error.requested[0]),
        "retry_helps": "true" if error.retry_helps else "false",
    }
    if first.rule.within_id is not None:  # the name as the request gave it
        message["subject_name"] = first.rule.subject_name
    if first.rule.window_minutes:
        message["window_minutes"] = str(first.rule.window_minutes)
    if first.rule.group:
        message["group"] = first.rule.group
    if first.resets_at is not None:
        message["reset_time"] = first.resets_at.isoformat().replace("+00:00", "Z")
    return message


def fill(
    violations: Any, found: Sequence[Mapping[str, str]], detail: Message, room: int
) -> Message:
    """Add violations to a detail until it has `room` bytes; the last one then counts the rest.

    `violations` is the repeated field of the detail, `found` the field values of each violation.
    """
    for index, each in enumerate(found):
        limits = {"description": DESCRIPTION_BYTES_MAX}
        violations.add(
            **{
                name: shortened(text, limits.get(name, FIELD_BYTES_MAX))
                for name, text in each.items()
            }
        )
        if detail.ByteSize() > (room if index == len(found) - 1 else room - REST_BYTES):
            del violations[-1]
            violations.add(description=f"and {len(found) - index} more")
            break
    return detail


def details_of(error: BaseException, room: int) -> list[Message]:
    """Build the standard details besides ErrorInfo: BadRequest, QuotaFailure, RetryInfo and others.

    `room` limits the size of the violations, in bytes.
    """
    details: list[Message] = []
    if violations := violations_of(error):
        bad_request = error_details_pb2.BadRequest()
        found = [{"field": each.field, "description": each.description} for each in violations]
        details.append(fill(bad_request.field_violations, found, bad_request, room))
    if isinstance(error, metering_errors.MonthNotClosable):
        precondition = error_details_pb2.PreconditionFailure()
        found = [
            {"type": each.kind, "subject": "month", "description": each.description}
            for each in error.obstacles
        ]
        details.append(fill(precondition.violations, found, precondition, room))
    if isinstance(error, QuotaExceeded):
        failure = error_details_pb2.QuotaFailure()
        found = [
            {
                "subject": f"{state.subject.spelling}:{state.subject_id}",
                "description": (
                    f"{state.dimension.spelling}: {max(state.remaining, 0)} of {state.limit_value}"
                    " left"
                ),
            }
            for state in error.failing
        ]
        details.append(fill(failure.violations, found, failure, room))
    if (retry_after_s := retry_after_of(error)) is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def violations_of(error: BaseException) -> Sequence[FieldViolation]:
    match error:
        case ApiError():
            return error.violations
        case metering_errors.InvalidValue():
            return (FieldViolation(error.field, error.remedy),)
        case ModelMismatch():
            return (FieldViolation("model", str(error)),)
        case engine_errors.RequestImpossible(field=str(field)):
            return (FieldViolation(field, str(error)),)
        case engine_errors.ChatTemplateFailed(index=index):
            index_text = "" if index is None else f"[{index}]"
            return (FieldViolation(f"conversation.messages{index_text}", str(error)),)
        case _:
            return ()
