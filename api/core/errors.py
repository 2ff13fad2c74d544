"""Errors of the wire, and the table that maps domain errors to statuses and their details.

Domain errors do not depend on gRPC. A test fails if a concrete error class of `inference`,
`metering` or this package is missing from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.incidents import log_incident
from inference import errors as engine_errors
from inference.routing.router import ModelMismatch, ModelUnknown
from metering.core import errors as metering_errors
from metering.holds.operations import RequestSettled
from metering.quotas.quotas import InsufficientCredit, QuotaExceeded
from metering.tenants.networks import Address

VIOLATION_COUNT_MAX = 100  # violations recorded at once
# Bytes of a status in the metadata of a call, where its message is percent-encoded, and again in
# its details, which are base64. By default a gRPC client refuses metadata above 8 KiB, all of it:
# it then shows neither message nor details.
STATUS_BYTES_MAX = 6 * 2**10
STATUS_OVERHEAD_BYTES = 400  # names, types and lengths around the texts
FACT_BYTES_MIN = 32  # shorter ones are numbers, times and names
REST_BYTES = 40  # "and 80 more" as a violation
TEXT_CHARS_MAX = 256  # of names, ids, labels and filters; the longest database column has 200
# Longer fields. Handlers check lower limits of some.
CHARS_MAX: Mapping[str, int] = {
    "reason": 1000,
    "override_reason": 1000,
    "url": 2000,
    "page_token": 2000,
}
# Text for a model, with any content. The message and its parser limit its size.
FREE_TEXT = frozenset(
    {
        "weir.v1.Conversation",
        "weir.v1.CountTokensRequest.text",
        "weir.v1.EmbedInput",
        "weir.v1.StartFrame.conversation",
        "weir.v1.StartFrame.response_format",
        "weir.v1.StartFrame.stop_sequences",
        "weir.v1.StartFrame.text",
        "weir.v1.Tool",
    }
)
# Elements per message: checking takes a millisecond on the event loop, before the key is known.
ELEMENT_COUNT_MAX = 2000
CONFIGURATION_ELEMENT_COUNT_MAX = 100_000  # per configuration, which an administrator sends
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A reason may have line breaks and tabs.
CONTROL_IN_PROSE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PROSE = frozenset({"reason", "override_reason"})
ERROR_DOMAIN = "weir.dev"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# Bytes that take three in the header `grpc-message`.
PERCENT_ENCODED = bytes({*range(256)} - {*range(0x20, 0x7F)} | {ord("%")})


class Cause(StrEnum):
    """The party that caused the end of a request."""

    COMPLETION = "completion"
    CLIENT = "client"
    LIMIT = "customer limit"
    OPERATOR = "operator"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Path of an invalid field, and the values that are allowed."""

    field: str
    description: str


class ApiError(Exception):
    """Base of the errors that the wire raises itself. violations: invalid fields."""

    reason = "INTERNAL"
    violations: Sequence[FieldViolation] = ()

    def __init__(self, message: str, **facts: object) -> None:
        """facts: further details for the client, by name."""
        super().__init__(message)
        self.facts = {name: str(value) for name, value in facts.items()}


class Unauthenticated(ApiError):
    """The call has no valid API key."""

    reason = "UNAUTHENTICATED"


class AuthenticationThrottled(ApiError):
    """Too many authentications from this address have failed. Wait `retry_after_s`."""

    reason = "AUTHENTICATION_THROTTLED"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            f"too many invalid API keys from this address: retry in {retry_after_s:.1f} s; keys"
            " that were valid recently still work"
        )
        self.retry_after_s = retry_after_s


class TooManyReports(ApiError):
    """Too many reports of the key run or wait. Wait for one to end."""

    reason = "TOO_MANY_REPORTS"
    retry_after_s = 1.0

    def __init__(self, report_count: int) -> None:
        super().__init__(
            f"{report_count} reports of this API key are running or waiting, which is the limit:"
            " retry when some have ended"
        )


class PermissionDenied(ApiError):
    """The key is valid, but lacks the scope or the right for this call."""

    reason = "PERMISSION_DENIED"


class AddressNotAllowed(PermissionDenied):
    """The key is limited to networks, and the call comes from another address."""

    reason = "ADDRESS_NOT_ALLOWED"

    def __init__(self, address: Address | None) -> None:
        origin = "an unknown address" if address is None else str(address)
        super().__init__(
            f"this API key may not be used from {origin}: use it from one of its networks, "
            "or ask an administrator to allow this one",
            address=origin,
        )


class ModelNotAllowed(ApiError):
    """The key is limited to other models. `ListModels` lists them."""

    reason = "MODEL_NOT_ALLOWED"

    def __init__(self, key_prefix: str, model: str) -> None:
        message = (
            f"key {key_prefix} may not use the model {model[:64]!r}: see ListModels for those it"
            " may use"
        )
        super().__init__(message, model=model)


class InvalidRequest(ApiError):
    """Fields of the request are invalid. `BadRequest` lists them."""

    reason = "FIELD_INVALID"

    def __init__(self, violations: Sequence[FieldViolation], **facts: object) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), **facts)
        self.violations = tuple(violations)


class KeepTooLong(InvalidRequest):
    """`keep_on_disconnect` is longer than this server allows, `keep_on_disconnect_max_s`."""

    def __init__(self, keep_s: float, keep_max_s: float) -> None:
        wrong = f"must be at most {keep_max_s:g} s, got {keep_s:g} s"
        super().__init__(
            [FieldViolation("keep_on_disconnect", wrong)], keep_on_disconnect_max_s=keep_max_s
        )


class KeyBoundExceeded(InvalidRequest):
    """The request has, or asks for, more tokens than its key allows per request."""

    reason = "KEY_LIMIT_EXCEEDED"

    def __init__(self, field: str, wrong: str, token_count: int, token_count_max: int) -> None:
        excess = token_count - token_count_max
        super().__init__(
            [FieldViolation(field, wrong)],
            limit=token_count_max,
            requested=token_count,
            excess_token_count=excess,
        )


class PromptTooLong(ApiError):
    """The prompt and the requested output do not fit the context window. Shorten either."""

    reason = "CONTEXT_EXCEEDED"

    def __init__(
        self,
        input_token_count: int,
        max_output_tokens: int | None,
        context_window_tokens: int,
        *,
        is_least: bool = False,
    ) -> None:
        """is_least: the prompt was not tokenized; input_token_count is a lower bound."""
        output_token_count = 1 if max_output_tokens is None else max_output_tokens
        excess = input_token_count + output_token_count - context_window_tokens
        output = (
            "at least 1 output token"
            if max_output_tokens is None
            else f"max_output_tokens of {max_output_tokens}"
        )
        super().__init__(
            f"the prompt has {'at least ' if is_least else ''}{input_token_count} tokens; with"
            f" {output} it exceeds the context window of {context_window_tokens} by {excess}"
            " tokens",
            input_token_count=input_token_count,
            context_window_tokens=context_window_tokens,
            excess_token_count=excess,
        )
        self.violations = (FieldViolation("prompt", str(self)),)


class PromptTooLarge(ApiError):
    """A text has more characters than a context window of this size can hold. Shorten it.

    field: path of the text.
    """

    reason = "CONTEXT_EXCEEDED"

    def __init__(
        self, field: str, char_count: int, char_count_max: int, context_window_tokens: int
    ) -> None:
        super().__init__(
            f"{field} has {char_count} characters; with a context window of {context_window_tokens}"
            f" tokens the model takes at most {char_count_max}: send less",
            char_count=char_count,
            char_count_max=char_count_max,
            context_window_tokens=context_window_tokens,
        )
        self.violations = (
            FieldViolation(
                field,
                f"has {char_count} characters and exceeds the context window of"
                f" {context_window_tokens} tokens: send at most {char_count_max} characters",
            ),
        )


@dataclass(frozen=True, slots=True)
class LongInput:
    """A text that is too long.

    index: in the request's inputs. is_least: token_count is a lower bound.
    """

    index: int
    token_count: int
    is_least: bool = False


class InputsTooLong(ApiError):
    """Texts to embed have more tokens than the model takes in one text. Split or truncate them."""

    reason = "CONTEXT_EXCEEDED"

    def __init__(self, inputs: Sequence[LongInput], context_window_tokens: int) -> None:
        first, other_count = inputs[0], len(inputs) - 1
        also = f", and {other_count} other inputs are too long" if other_count else ""
        at_least = "at least " if first.is_least else ""
        super().__init__(
            f"inputs[{first.index}] has {at_least}{first.token_count} tokens{also}: "
            f"the model accepts {context_window_tokens} per text. "
            "Split it, or set truncation to cut its end off",
            input_index=first.index,
            input_token_count=first.token_count,
            context_window_tokens=context_window_tokens,
            excess_token_count=first.token_count - context_window_tokens,
        )
        self.violations = [
            FieldViolation(
                f"inputs[{each.index}]",
                f"has {'at least ' if each.is_least else ''}{each.token_count} tokens and exceeds"
                f" the context window of {context_window_tokens}: split it, or set truncation to"
                " cut its end off",
            )
            for each in inputs
        ]


class PromptFiltered(ApiError):
    """The safety checks reject the prompt.

    rule: the operator's rule that matched; field: where the prompt is.
    """

    reason = "PROMPT_FILTERED"

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(f"the prompt is not allowed here: it matches the rule {rule!r}", rule=rule)
        self.violations = (FieldViolation(field, str(self)),)


class MessageUnreadable(ApiError):
    """The message is not valid in the contract's encoding."""

    reason = "MESSAGE_UNREADABLE"


class MessageTooLarge(ApiError):
    """A message has more bytes than its call allows."""

    reason = "MESSAGE_TOO_LARGE"

    def __init__(self, byte_count: int, byte_count_max: int) -> None:
        super().__init__(
            f"the message has {byte_count:,} bytes; this call takes at most {byte_count_max:,}:"
            " send a smaller message"
        )


class TooManyCalls(ApiError):
    """Too many calls of this API key wait for their share of time. Wait `retry_after_s`."""

    reason = "TOO_MANY_CALLS"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            "calls of this API key arrive faster than they are answered: retry in"
            f" {retry_after_s:.1f} s"
        )
        self.retry_after_s = retry_after_s


class CallMissing(ApiError):
    """The contract has this call, but this server does not."""

    reason = "UNIMPLEMENTED"

    def __init__(self, method: str) -> None:
        super().__init__(f"this server does not implement the call {method}")


class UnknownRequest(ApiError):
    """A frame names a request that this stream, or for `attach` this project, does not have."""

    reason = "REQUEST_UNKNOWN"


class RequestUnderWay(ApiError):
    """A `start` frame names a running request, with another payload."""

    reason = "REQUEST_ID_REUSED"


class AttachedElsewhere(ApiError):
    """Another stream receives the request from now on. The request itself continues."""

    reason = "ATTACHED_ELSEWHERE"


class OutputGone(ApiError):
    """The output after this `seq` is not kept. Attach from `oldest_seq` to `last_seq`."""

    reason = "OUTPUT_GONE"

    def __init__(self, after_seq: int, oldest_seq: int, last_seq: int) -> None:
        there = (
            f"deltas {oldest_seq} to {last_seq} are kept"
            if oldest_seq <= last_seq
            else f"no output after {last_seq} is kept"
        )
        super().__init__(
            f"output after delta {after_seq} cannot be sent: {there}; attach with an after_seq of"
            f" {oldest_seq - 1} to {last_seq} to receive the rest",
            oldest_seq=oldest_seq,
            last_seq=last_seq,
        )


class RequestOver(ApiError):
    """The request has ended and its output is not kept. Run it again with a new request id.

    outcome: how it ended, or how the end of its server was settled.
    """

    reason = "REQUEST_SETTLED"

    def __init__(self, outcome: str) -> None:
        how = (
            "its server died before it was done"
            if outcome == "FAILED"
            else f"it ended as {outcome or 'VOIDED'}"
        )
        message = (
            f"{how}, and its output is not kept: its usage is included; use a new request_id to run"
            " it again"
        )
        super().__init__(message, outcome=outcome.lower())


class ProcessUnavailable(ApiError):
    """The server that runs the request does not answer. Attach again, with backoff."""

    reason = "PROCESS_UNAVAILABLE"
    retry_after_s = 1.0


class Draining(ApiError):
    """This process takes no new requests, but others do. Send the same request again."""

    reason = "DRAINING"
    retry_after_s = 1.0


class Overloaded(ApiError):
    """This process is at its limit of requests. Send the same request again."""

    reason = "OVERLOADED"
    retry_after_s = 1.0


class PreparationLimit(ApiError):
    """Text of this key or organization in preparation is at its limit of characters. Wait."""

    reason = "PREPARATION_LIMIT"
    retry_after_s = 1.0

    def __init__(self, owner: str, taken_chars: int, chars: int, chars_max: int) -> None:
        """owner: "API key" or "organization"."""
        super().__init__(
            f"prompts of this {owner} with {taken_chars} characters are being prepared, and {chars}"
            f" more would exceed its limit of {chars_max}: send fewer large prompts at once, and"
            " retry this one"
        )


class TooManyStreams(ApiError):
    """Too many calls are open that have no key or have not sent their message."""

    reason = "TOO_MANY_STREAMS"
    retry_after_s = 10.0


class MessageMissing(ApiError):
    """A unary call arrived without its message."""

    reason = "MESSAGE_MISSING"

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"the message of this call has not arrived: send it within {wait_s:.0f} s")


class QueueFull(ApiError):
    """The model's queue is full. A place is reserved for the same request.

    retry_after_s: time until the place is free.
    """

    reason = "QUEUE_FULL"

    def __init__(self, own_count: int, waiting_count: int, retry_after_s: float) -> None:
        counted = (
            f"{own_count} of your requests are waiting"
            if own_count
            else f"{waiting_count} requests are waiting"
        )
        super().__init__(
            f"the queue of this model is full ({counted}): retry the same request in"
            f" {retry_after_s:.2f} s, when it will have a place"
        )
        self.retry_after_s = retry_after_s


class StartsTooLate(ApiError):
    """The request would still wait at its deadline. Raise the deadline, or try again later.

    wait_s, left_s: expected wait and time to the deadline, in s. retry_after_s: time until the wait
    is short enough.
    """

    reason = "STARTS_TOO_LATE"

    def __init__(self, wait_s: float, left_s: float, retry_after_s: float) -> None:
        message = (
            f"the wait is about {wait_s:.2f} s, and the deadline is in {max(left_s, 0.0):.2f} s"
        )
        super().__init__(message, estimated_wait_s=f"{wait_s:.3f}")
        self.wait_s = wait_s
        self.retry_after_s = retry_after_s


class EngineLost(ApiError):
    """The engine failed before the first token. Nothing is billed: send the same request again."""

    reason = "ENGINE_FAILED"

    def __init__(self, retry_after_s: float) -> None:
        message = (
            "the engine failed before the first token: nothing is billed; send the same request"
            " again"
        )
        super().__init__(message, retry_with="same_request_id")
        self.retry_after_s = retry_after_s


class EngineLostMidway(ApiError):
    """The engine broke after the first token. Delivered tokens are billed: use a new request id."""

    reason = "ENGINE_FAILED_MIDWAY"

    def __init__(self, delivered_token_count: int) -> None:
        super().__init__(
            f"the engine failed after {delivered_token_count} tokens, which are delivered and"
            " billed: request the rest, or all of it, with a new request_id; this one returns its"
            " usage from now on",
            delivered_token_count=delivered_token_count,
            retry_with="new_request_id",
        )


class NotAdmittedYet(ApiError):
    """The limits of a request cannot change before it is admitted. Wait for `admitted`."""

    reason = "NOT_ADMITTED_YET"


class CancelledEarly(ApiError):
    """The client cancelled before admission."""

    reason = "CANCELLED"


class SiblingEnded(ApiError):
    """Another prompt of the same HTTP request has ended without an answer.

    cause: cause of that end, and so of this one.
    """

    reason = "CANCELLED"

    def __init__(self, cause: Cause) -> None:
        super().__init__("another prompt of the same HTTP request has failed")
        self.cause = cause


class CancelledByAdmin(ApiError):
    """An administrator has ended the request. Delivered tokens are settled."""

    reason = "CANCELLED_BY_ADMIN"


class KeyRevokedMidway(ApiError):
    """The key was revoked while the request waited or ran. Delivered tokens are settled."""

    reason = "KEY_REVOKED"


class DeadlineBeforeStart(ApiError):
    """The deadline passed before admission."""

    reason = "DEADLINE_EXCEEDED"


# Of the message, percent-encoded, and of its parts if there are too many to show all.
MESSAGE_BYTES_MAX, PART_BYTES_MAX = 1400, 450
# Of the facts of an `ErrorInfo`, alone and beside violations; of a violation.
FACTS_BYTES_MAX, FACTS_BESIDE_BYTES_MAX = 1600, 600
FIELD_BYTES_MAX, DESCRIPTION_BYTES_MAX = 200, 400


class Violations:
    """Collector of violations of a message."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def check(self, right: bool, field: str, description: str) -> None:
        """Record a violation unless `right`.

        Raises: InvalidRequest once too many are recorded.
        """
        if right:
            return
        is_last = len(self._found) + 1 == VIOLATION_COUNT_MAX
        rest = "; further fields were not checked" if is_last else ""
        self._found.append(FieldViolation(field, description + rest))
        if is_last:
            self.raise_if_any()

    def check_count(self, count: int, count_max: int, field: str) -> bool:
        """Record a violation if there are too many elements.

        Return whether to check each of them.
        """
        self.check(count <= count_max, field, f"at most {count_max} are allowed, got {count}")
        return count <= count_max

    def check_text(self, text: str, field: str, name: str = "", *, missing: str = "") -> None:
        """Record a violation if a name, id, label or filter is too long or has control characters.

        name: of the field, if `field` is a path. missing: violation of an empty text; without it,
        the text is optional.
        """
        chars_max = CHARS_MAX.get(name or field, TEXT_CHARS_MAX)
        if missing and not text:
            self.check(False, field, missing)
        elif len(text) > chars_max:
            self.check(False, field, f"must have at most {chars_max} characters, got {len(text)}")
        elif (
            not text.isprintable()
            and (CONTROL_IN_PROSE if name in PROSE else CONTROL).search(text) is not None
        ):
            self.check(False, field, "must not contain control characters")

    def raise_if_any(self) -> None:
        """Raise InvalidRequest with all violations, if any."""
        if self._found:
            raise InvalidRequest(self._found)


def check_texts(message: Message) -> None:
    """Check all short texts of a message at any depth; text for a model is exempt.

    Raises: InvalidRequest.
    """
    wrong = Violations()
    is_configuration = message.DESCRIPTOR.full_name == "weir.v1.ApplyConfigurationRequest"
    limit = CONFIGURATION_ELEMENT_COUNT_MAX if is_configuration else ELEMENT_COUNT_MAX
    for count, (text, field, name) in enumerate(_texts(message, ""), 1):
        if count > limit:
            excess = f"the message has more than {limit:,} elements; send fewer"
            raise InvalidRequest([FieldViolation(field, excess)])
        wrong.check_text(text, field, name)
    wrong.raise_if_any()


def _texts(message: Message, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the texts of a message with path and name of their field; message elements count as
    empty texts."""
    for name, is_repeated, is_map, is_text in _fields_with_text(message.DESCRIPTOR):
        value = getattr(message, name)
        field = f"{path}{name}"
        if is_map:
            for key, each in value.items():
                place = f"{field}[{key[:64]!r}]"
                yield key, place, name
                yield each, place, name
        elif is_repeated:
            for index, each in enumerate(value):
                yield (each if is_text else ""), f"{field}[{index}]", name
                if not is_text:
                    yield from _texts(each, f"{field}[{index}].")
        elif is_text:
            yield value, field, name
        elif message.HasField(name):
            yield from _texts(value, f"{field}.")


@cache
def _fields_with_text(kind: Descriptor) -> tuple[tuple[str, bool, bool, bool], ...]:
    """Return the fields of a message type with short texts: name, is repeated, is a map of texts,
    is a text."""
    return tuple(
        (
            field.name,
            field.is_repeated,
            _is_text_map(field),
            field.type == FieldDescriptor.TYPE_STRING,
        )
        for field in kind.fields
        if _holds_text(field, ())
    )


def _holds_text(field: FieldDescriptor, above: tuple[Descriptor, ...]) -> bool:
    kind = field.message_type
    if field.full_name in FREE_TEXT or (
        kind is not None and (kind.full_name in FREE_TEXT or kind in above)
    ):
        return False
    if kind is None:
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    return any(_holds_text(each, (*above, kind)) for each in kind.fields)


def _is_text_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or not kind.GetOptions().map_entry:
        return False
    return all(each.type == FieldDescriptor.TYPE_STRING for each in kind.fields)


# An error without an entry is a bug and becomes INTERNAL without its text.
KINDS: Mapping[int, tuple[type[Exception], ...]] = {
    code_pb2.UNAUTHENTICATED: (Unauthenticated, KeyRevokedMidway, metering_errors.KeyInvalid),
    code_pb2.PERMISSION_DENIED: (AddressNotAllowed, PermissionDenied, ModelNotAllowed),
    code_pb2.INVALID_ARGUMENT: (
        KeepTooLong,
        KeyBoundExceeded,
        InvalidRequest,
        PromptTooLong,
        PromptTooLarge,
        InputsTooLong,
        PromptFiltered,
        MessageUnreadable,
        MessageMissing,
        MessageTooLarge,
        engine_errors.ChatTemplateFailed,
        engine_errors.RequestImpossible,
        metering_errors.InvalidValue,
        ModelMismatch,
    ),
    code_pb2.NOT_FOUND: (UnknownRequest, ModelUnknown, metering_errors.NotFound),
    code_pb2.UNAVAILABLE: (
        Draining,
        Overloaded,
        QueueFull,
        StartsTooLate,
        ProcessUnavailable,
        EngineLost,
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
        PreparationLimit,
        AuthenticationThrottled,
        TooManyReports,
        TooManyCalls,
        TooManyStreams,
        QuotaExceeded,
    ),
    code_pb2.FAILED_PRECONDITION: (
        NotAdmittedYet,
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
        EngineLostMidway,
        AttachedElsewhere,
        metering_errors.RequestInFlight,
        metering_errors.HoldEnded,
    ),
    code_pb2.OUT_OF_RANGE: (OutputGone,),
    code_pb2.ALREADY_EXISTS: (
        RequestUnderWay,
        RequestOver,
        metering_errors.RequestIdReused,
        RequestSettled,
        metering_errors.AlreadyExists,
    ),
    code_pb2.UNIMPLEMENTED: (CallMissing,),
    code_pb2.CANCELLED: (CancelledEarly, SiblingEnded, CancelledByAdmin),
    code_pb2.DEADLINE_EXCEEDED: (DeadlineBeforeStart,),
    code_pb2.INTERNAL: (
        engine_errors.EngineFailed,
        engine_errors.InvariantViolated,
        metering_errors.InvariantViolated,
    ),
}
CODES: Mapping[type, int] = {kind: code for code, kinds in KINDS.items() for kind in kinds}


def code_of(error: BaseException) -> int:
    """Return the code of an error's class, or of the nearest base class with one."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), code_pb2.INTERNAL)


def reason_of(error: BaseException) -> str:
    """Return the reason sent to the client: one of some dozens."""
    return (
        "INTERNAL"
        if code_of(error) == code_pb2.INTERNAL
        else str(getattr(error, "reason", "INTERNAL"))
    )


def status_of(error: BaseException) -> status_pb2.Status:
    """Return the status for an error, with details.

    Internal errors get an incident id and no text.
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
    room -= utf8_size(message) + info.ByteSize()
    return pack(code, message, [info, *details_of(error, room)])


def internal_status(error: BaseException) -> status_pb2.Status:
    """Return INTERNAL with an incident id, under which the error is logged."""
    incident_id = log_incident(error)
    info = error_details_pb2.ErrorInfo(
        reason="INTERNAL", domain=ERROR_DOMAIN, metadata={"incident_id": incident_id}
    )
    return pack(
        code_pb2.INTERNAL, f"internal error, incident {incident_id}: quote it to support", [info]
    )


def message_of(error: BaseException) -> str:
    """Return the message for the client, with a count of the parts that it has no room for."""
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
    """Return the bytes of a text in the header `grpc-message`."""
    data = text.encode(errors="replace")
    return 3 * len(data) - 2 * len(data.translate(None, PERCENT_ENCODED))


def shortened(text: str, size_max: int, size_of: Callable[[str], int] = utf8_size) -> str:
    """Return a text that fits, without its middle if it is too long."""
    if size_of(text) <= size_max:
        return text
    half = (size_max - len(" ... ")) // 2
    tail = head_of(text[: -half - 1 : -1], half, size_of)[::-1]
    return f"{head_of(text[:half], half, size_of)} ... {tail}"


def head_of(text: str, size_max: int, size_of: Callable[[str], int]) -> str:
    """Return as many of the first characters as fit."""
    for index, char in enumerate(text):
        if (size_max := size_max - size_of(char)) < 0:
            return text[:index]
    return text


def keep_short(info: error_details_pb2.ErrorInfo, size_max: int) -> None:
    """Shorten the longest facts until all of them fit."""
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
    """Return the exceeded limit, the rest of it, its reset, and whether waiting helps."""
    first = error.failing[0]
    message = facts(first, "quota_id", "subject", "subject_id", "model", "used", "held") | {
        "dimension": first.dimension.spelling,
        "limit": str(first.limit_value),
        "remaining": str(max(first.remaining, 0)),
        "requested": str(error.requested[0]),
        "retry_helps": "true" if error.retry_helps else "false",
    }
    if first.resets_at is not None:
        message["reset_time"] = first.resets_at.isoformat().replace("+00:00", "Z")
    return message


def fill(
    violations: Any, found: Sequence[Mapping[str, str]], detail: Message, room: int
) -> Message:
    """Add violations to a detail while there is room, and a count of the rest as the last one.

    violations: field of the detail. found: the fields of each.
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
    """Return the standard details besides ErrorInfo: BadRequest, QuotaFailure, RetryInfo.

    room: in bytes, for violations.
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
                "subject": f"{state.subject}:{state.subject_id}",
                "description": (
                    f"{state.dimension.spelling}: {max(state.remaining, 0)} of {state.limit_value}"
                    " left"
                ),
            }
            for state in error.failing
        ]
        details.append(fill(failure.violations, found, failure, room))
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
        case ApiError():
            return error.violations
        case metering_errors.InvalidValue():
            return (FieldViolation(error.field, error.remedy),)
        case ModelMismatch():
            return (FieldViolation("model", str(error)),)
        case engine_errors.RequestImpossible(field=str(field)):
            return (FieldViolation(field, str(error)),)
        case engine_errors.ChatTemplateFailed(index=index):
            place = "" if index is None else f"[{index}]"
            return (FieldViolation(f"conversation.messages{place}", str(error)),)
        case _:
            return ()
