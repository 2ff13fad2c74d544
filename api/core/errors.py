"""Errors that the API itself raises. Each class has a reason code, and a text for the client.

They do not depend on gRPC: `statuses.py` converts them to statuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.retry_after import wait_text
from metering.tenants.networks import Address


class Cause(StrEnum):
    """Party that caused a request to end."""

    COMPLETION = "completion"
    CLIENT = "client"
    LIMIT = "customer limit"
    OPERATOR = "operator"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Path of an invalid field, and a description of the values that are allowed."""

    field: str
    description: str


class ApiError(Exception):
    """Base of the errors that the API itself raises. `violations` lists the invalid fields."""

    reason = "INTERNAL"
    violations: Sequence[FieldViolation] = ()

    def __init__(self, message: str, **facts: object) -> None:
        """`facts` are further details for the client, by name: the metadata of the error."""
        super().__init__(message)
        self.facts = {name: str(value) for name, value in facts.items()}


class Unauthenticated(ApiError):
    """The call has no valid API key."""

    reason = "UNAUTHENTICATED"


class AuthenticationThrottled(ApiError):
    """Authentication from this address failed too often. Retry after the delay in `RetryInfo`."""

    reason = "AUTHENTICATION_THROTTLED"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            "Too many calls from your address had an invalid API key. Keys that were valid recently"
            " still work; check yours."
        )
        self.retry_after_s = retry_after_s


class TooManyReports(ApiError):
    """Too many reports of this API key are running or waiting. Retry when one of them has ended."""

    reason = "TOO_MANY_REPORTS"
    retry_after_s = 1.0

    def __init__(self, report_count: int) -> None:
        super().__init__(
            f"Your API key has {report_count} reports running or waiting, which is the limit. Wait"
            " until one has ended."
        )


class PermissionDenied(ApiError):
    """The API key is valid, but does not have the scope or the right that this call requires."""

    reason = "PERMISSION_DENIED"


class RoleExceeded(PermissionDenied):
    """The call would give a key rights that the calling key does not have."""

    reason = "ROLE_EXCEEDED"

    def __init__(self, key_prefix: str, right: str) -> None:
        super().__init__(
            f"Your API key {key_prefix} cannot give or change a key with {right}, which it does not"
            " have itself. Name less, or use a key of a wider role."
        )


class AddressNotAllowed(PermissionDenied):
    """The API key may be used only from certain networks, and this call comes from elsewhere."""

    reason = "ADDRESS_NOT_ALLOWED"

    def __init__(self, address: Address | None) -> None:
        origin = "an unknown address" if address is None else str(address)
        super().__init__(
            f"Your API key may not be used from {origin}. Use it from one of its networks, or ask"
            " an administrator to allow this address.",
            address=origin,
        )


class OrganizationSuspended(PermissionDenied):
    """The operator has suspended the organization: it may not use models until it is resumed.

    suspension: the reason that the operator gave.
    """

    reason = "ORGANIZATION_SUSPENDED"

    def __init__(self, suspension: str) -> None:
        super().__init__(
            f"Your organization is suspended: {suspension}. Only the operator can resume it: ask"
            " them.",
            suspension=suspension,
        )


class ProjectSuspended(PermissionDenied):
    """The project is suspended: its keys may not use models until it is resumed.

    suspension: the reason that was given. by_operator: whether the operator suspended it, and not
    the organization itself.
    """

    reason = "PROJECT_SUSPENDED"

    def __init__(self, suspension: str, *, by_operator: bool) -> None:
        who = (
            "Only the operator can resume it: ask them."
            if by_operator
            else "An owner or administrator of your organization can resume it: ask them."
        )
        super().__init__(f"Your project is suspended: {suspension}. {who}", suspension=suspension)


class BoundToRegion(PermissionDenied):
    """The organization is bound to a region, and this server is in another one, or in none.

    region: the one that the organization is bound to. server_region: that of this server, empty for
    none.
    """

    reason = "BOUND_TO_REGION"

    def __init__(self, region: str, server_region: str) -> None:
        where = f"in {server_region!r}" if server_region else "in no region"
        if region == server_region:
            where = f"{where}, but took your request before that"
        super().__init__(
            f"Your organization is bound to the region {region!r}, and this server is {where}. Send"
            f" your request to a server in {region!r}.",
            region=region,
            server_region=server_region,
        )


class ModelNotAllowed(ApiError):
    """The API key may not use this model. `ListModels` lists the models that it may use."""

    reason = "MODEL_NOT_ALLOWED"

    def __init__(self, key_prefix: str, model: str) -> None:
        message = (
            f"Your API key {key_prefix} may not use the model {model[:64]!r}. List the models that"
            " it may use, or ask an administrator to allow this one."
        )
        super().__init__(message, model=model)


class InvalidRequest(ApiError):
    """Fields of the request are invalid. The `BadRequest` detail lists them."""

    reason = "FIELD_INVALID"

    def __init__(self, violations: Sequence[FieldViolation], **facts: object) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), **facts)
        self.violations = tuple(violations)


class KeepTooLong(InvalidRequest):
    """`keep_on_disconnect` exceeds `keep_on_disconnect_max_s`, the maximum of this server."""

    def __init__(self, keep_s: float, keep_max_s: float) -> None:
        wrong = f"must be at most {keep_max_s:g} s, got {keep_s:g} s"
        super().__init__(
            [FieldViolation("keep_on_disconnect", wrong)], keep_on_disconnect_max_s=keep_max_s
        )


class KeyBoundExceeded(InvalidRequest):
    """The request has, or asks for, more tokens than its API key allows per request."""

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
        """If `is_least`, the prompt was not tokenized and `input_token_count` is a lower bound."""
        output_token_count = 1 if max_output_tokens is None else max_output_tokens
        excess = input_token_count + output_token_count - context_window_tokens
        output = (
            "at least 1 output token"
            if max_output_tokens is None
            else f"max_output_tokens of {max_output_tokens}"
        )
        super().__init__(
            f"has {'at least ' if is_least else ''}{input_token_count} tokens; with {output} it"
            f" exceeds the context window of {context_window_tokens} by {excess} tokens: shorten"
            " the prompt or ask for less output",
            input_token_count=input_token_count,
            context_window_tokens=context_window_tokens,
            excess_token_count=excess,
        )
        self.violations = (FieldViolation("prompt", str(self)),)
        self.args = (f"The prompt {self}.",)


class PromptTooLarge(ApiError):
    """A text has more characters than fit a context window of this size. Shorten it.

    field: the path of the text in the request.
    """

    reason = "CONTEXT_EXCEEDED"

    def __init__(
        self, field: str, char_count: int, char_count_max: int, context_window_tokens: int
    ) -> None:
        super().__init__(
            f"has {char_count} characters and exceeds the context window of"
            f" {context_window_tokens} tokens: send at most {char_count_max} characters",
            char_count=char_count,
            char_count_max=char_count_max,
            context_window_tokens=context_window_tokens,
        )
        self.violations = (FieldViolation(field, str(self)),)
        self.args = (f"{field} {self}",)


@dataclass(frozen=True, slots=True)
class LongInput:
    """Input text that is too long. `index` is its position in the request's inputs.

    With `is_least`, `token_count` is a lower bound.
    """

    index: int
    token_count: int
    is_least: bool = False


class InputsTooLong(ApiError):
    """Texts to embed have more tokens than the model accepts per text. Split or truncate them."""

    reason = "CONTEXT_EXCEEDED"

    def __init__(self, inputs: Sequence[LongInput], context_window_tokens: int) -> None:
        first, other_count = inputs[0], len(inputs) - 1
        others = f"{other_count} other inputs are" if other_count > 1 else "1 other input is"
        also = f"; {others} too long as well" if other_count else ""
        at_least = "at least " if first.is_least else ""
        super().__init__(
            f"inputs[{first.index}] has {at_least}{first.token_count} tokens and exceeds the"
            f" context window of {context_window_tokens}{also}. Split your texts, or set truncation"
            " to cut their ends off.",
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

    rule: the operator's rule that matched. field: the field of the request with the prompt.
    """

    reason = "PROMPT_FILTERED"

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(
            f"is not allowed here: it matches the operator's rule {rule!r}; change your text, or"
            " ask the operator about the rule",
            rule=rule,
        )
        self.violations = (FieldViolation(field, str(self)),)
        self.args = (f"The prompt {self}.",)


class MessageUnreadable(ApiError):
    """The message cannot be parsed as the request type of this call."""

    reason = "MESSAGE_UNREADABLE"


class MessageTooLarge(ApiError):
    """The message has more bytes than this call allows."""

    reason = "MESSAGE_TOO_LARGE"

    def __init__(self, byte_count: int, byte_count_max: int) -> None:
        super().__init__(
            f"Your message has {byte_count:,} bytes, and this call takes at most"
            f" {byte_count_max:,}. Send a smaller message."
        )


class TooManyCalls(ApiError):
    """This API key is rate limited. Retry after the delay in `RetryInfo`."""

    reason = "TOO_MANY_CALLS"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            "Your API key sends calls faster than this server answers them. Send fewer at once."
        )
        self.retry_after_s = retry_after_s


class CallMissing(ApiError):
    """The API defines this call, but this server does not implement it."""

    reason = "UNIMPLEMENTED"

    def __init__(self, method: str) -> None:
        super().__init__(
            f"This server does not implement the call {method}. Update the server, or use a client"
            " of its version."
        )


class UnknownRequest(ApiError):
    """No such request on this stream; for `attach`, in this project."""

    reason = "REQUEST_UNKNOWN"


class RequestUnderWay(ApiError):
    """A request with this id is already running, and its payload differs from this frame's."""

    reason = "REQUEST_ID_REUSED"


class AttachedElsewhere(ApiError):
    """Another stream has attached to the request and receives its output. The request continues."""

    reason = "ATTACHED_ELSEWHERE"


class OutputGone(ApiError):
    """The output after this `seq` is no longer kept. Attach from `oldest_seq` to `last_seq`."""

    reason = "OUTPUT_GONE"

    def __init__(self, after_seq: int, oldest_seq: int, last_seq: int) -> None:
        there = (
            f"deltas {oldest_seq} to {last_seq} are kept"
            if oldest_seq <= last_seq
            else f"no output after {last_seq} is kept"
        )
        super().__init__(
            f"You asked for the output after delta {after_seq}, but {there}. Attach with an"
            f" after_seq of {oldest_seq - 1} to {last_seq} to receive the rest.",
            oldest_seq=oldest_seq,
            last_seq=last_seq,
        )


class RequestOver(ApiError):
    """The request has ended and its output is not kept. Run it again with a new request id.

    outcome: the outcome of the request, or the one that was settled after its server failed.
    """

    reason = "REQUEST_SETTLED"

    def __init__(self, outcome: str) -> None:
        how = (
            "The server died before your request was done"
            if outcome == "FAILED"
            else f"Your request has ended as {outcome or 'VOIDED'}"
        )
        message = (
            f"{how}, and its output is not kept. Use a new request_id to run it again; this one"
            " returns its usage."
        )
        super().__init__(message, outcome=outcome.lower())


class ProcessUnavailable(ApiError):
    """The server that runs the request does not answer. Attach again, with exponential backoff."""

    reason = "PROCESS_UNAVAILABLE"
    retry_after_s = 1.0


class IssuerUnavailable(ApiError):
    """The public keys of the issuer of a token cannot be read. Send the same call again."""

    reason = "ISSUER_UNAVAILABLE"
    retry_after_s = 5.0

    def __init__(self, issuer: str, cause: str) -> None:
        super().__init__(
            f"The keys of your token's issuer {issuer[:200]} cannot be read: {cause}. Send the same"
            " call again; if it lasts, tell your administrator."
        )


class Draining(ApiError):
    """This server is shutting down. Send the same request again; another server will accept it."""

    reason = "DRAINING"
    retry_after_s = 1.0

    def __init__(
        self, message: str = "This server is shutting down. Send the request to another one."
    ) -> None:
        super().__init__(message)


class Overloaded(ApiError):
    """This server is at its limit of concurrent requests. Send the same request again."""

    reason = "OVERLOADED"
    retry_after_s = 1.0


class PreparationLimit(ApiError):
    """Too many characters of this key's or organization's prompts are being tokenized. Retry
    after the delay in `RetryInfo`.
    """

    reason = "PREPARATION_LIMIT"
    retry_after_s = 1.0

    def __init__(self, owner: str, taken_chars: int, chars: int, chars_max: int) -> None:
        """`owner` is "API key" or "organization", depending on whose limit is reached."""
        super().__init__(
            f"Prompts of your {owner} with {taken_chars} characters are being prepared, and {chars}"
            f" more would exceed its limit of {chars_max}. Send fewer large prompts at once."
        )


class TooManyStreams(ApiError):
    """Too many calls without an API key, or without their first message, are open."""

    reason = "TOO_MANY_STREAMS"
    retry_after_s = 10.0


class MessageMissing(ApiError):
    """A unary call arrived without its request message."""

    reason = "MESSAGE_MISSING"

    def __init__(self, wait_s: float) -> None:
        super().__init__(
            f"The message of your call has not arrived. Send it within {wait_s:.0f} s of the call."
        )


class QueueFull(ApiError):
    """The model's queue is full. A place is reserved: send the same request again after the delay
    in `RetryInfo`.

    retry_after_s: the time in seconds until the reserved place is free.
    """

    reason = "QUEUE_FULL"

    def __init__(self, own_count: int, waiting_count: int, retry_after_s: float) -> None:
        waiting = own_count or waiting_count
        whose = " of your requests" if own_count else " requests"
        super().__init__(
            f"The queue of this model is full: {waiting}{whose} {'is' if waiting == 1 else 'are'}"
            " waiting. A place is reserved for this request."
        )
        self.retry_after_s = retry_after_s


class StartsTooLate(ApiError):
    """The request would still be waiting at its deadline. Raise the deadline, or try again later.

    wait_s: the expected wait in seconds. left_s: the seconds left until the deadline.
    retry_after_s: the seconds until the wait is expected to be short enough.
    """

    reason = "STARTS_TOO_LATE"

    def __init__(self, wait_s: float, left_s: float, retry_after_s: float) -> None:
        message = (
            f"Your request would wait about {wait_text(wait_s)}, and its deadline is in"
            f" {wait_text(max(left_s, 0.0))}. Allow more time."
        )
        super().__init__(message, estimated_wait_s=f"{wait_s:.3f}")
        self.wait_s = wait_s
        self.retry_after_s = retry_after_s


class EngineLost(ApiError):
    """The engine failed before the first token. Nothing is billed: send the same request again."""

    reason = "ENGINE_FAILED"

    def __init__(self, retry_after_s: float) -> None:
        message = (
            "The engine failed before the first token. Nothing is billed; send the same request."
        )
        super().__init__(message, retry_with="same_request_id")
        self.retry_after_s = retry_after_s


class EngineLostMidway(ApiError):
    """The engine failed after the first token.

    Delivered tokens are billed. Retry with a new request id.
    """

    reason = "ENGINE_FAILED_MIDWAY"

    def __init__(self, delivered_token_count: int) -> None:
        super().__init__(
            f"The engine failed after {delivered_token_count} tokens, which you have received and"
            " which are billed. Request the rest, or all of it, with a new request_id; this one"
            " returns its usage from now on.",
            delivered_token_count=delivered_token_count,
            retry_with="new_request_id",
        )


class Interrupted(ApiError):
    """The server had to end the request after some tokens.

    Delivered tokens are billed. Retry with a new request id. interruption: what the server could
    not do; the same error without tokens has its `cause` as its reason, and a time to retry.
    """

    reason = "INTERRUPTED"

    def __init__(self, interruption: str, cause: str, delivered_token_count: int) -> None:
        self.cause = cause
        super().__init__(
            f"Your request ended after {delivered_token_count} tokens, which are delivered and"
            f" billed. {interruption} Request the rest, or all of it, with a new request_id; this"
            " one returns its usage from now on.",
            cause=cause,
            delivered_token_count=delivered_token_count,
            retry_with="new_request_id",
        )


class NotAdmittedYet(ApiError):
    """The limits of a request cannot change before it is admitted. Wait for `admitted`."""

    reason = "NOT_ADMITTED_YET"


class CancelledEarly(ApiError):
    """The client cancelled the request before it was admitted."""

    reason = "CANCELLED"


class SiblingEnded(ApiError):
    """Another prompt of the same HTTP request has ended without an answer.

    cause: the cause of that end, which also becomes the cause of this one.
    """

    reason = "CANCELLED"

    def __init__(self, cause: Cause) -> None:
        super().__init__(
            "Another prompt of the same HTTP request has failed. Mend that one, and send the"
            " request again."
        )
        self.cause = cause


class CancelledByAdmin(ApiError):
    """An administrator ended the request. Delivered tokens are billed."""

    reason = "CANCELLED_BY_ADMIN"


class KeyRevokedMidway(ApiError):
    """The API key was revoked while the request waited or ran. Delivered tokens are billed."""

    reason = "KEY_REVOKED"


class DeadlineBeforeStart(ApiError):
    """The deadline passed before the request was admitted."""

    reason = "DEADLINE_EXCEEDED"
