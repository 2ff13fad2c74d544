"""Errors of the client, one class per reaction of the caller.

`WeirError` is the base class. `reason` is the server's machine-readable reason (`QUOTA_EXCEEDED`,
`CONTEXT_EXCEEDED`, …), `code` the canonical gRPC code. `partial` holds the received output if a
generation broke off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from weir_client.generated_values import QuotaDimension, QuotaSubject
from weir_client.plain import LimitName, Value, plain
from weir_client.values import Partial


@dataclass(frozen=True, slots=True)
class FieldViolation(Value):
    """Field of a request that the server refused, and the reason."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation(Value):
    """Quota that a request exceeded, in the server's words."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class PreconditionViolation(Value):
    """Precondition that a call does not meet. `kind` is a stable, machine-readable identifier."""

    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class ExceededQuota(LimitName):
    """Quota that refused the request, with its numbers.

    Its text names it: `str(error.quota)` is "requests per minute of the API key". Values are
    requests, tokens or picos by dimension; None if the server did not send them.
    """

    quota_id: str
    subject: QuotaSubject
    subject_id: str
    model: str
    dimension: QuotaDimension  # UNSPECIFIED: one that is newer than this client
    limit: int | None
    used: int | None
    held: int | None
    remaining: int | None
    requested: int | None
    reset_time: datetime | None
    retry_helps: bool  # False: the request is larger than the limit, so waiting does not help
    subject_name: str = ""  # of an end user, or `KEY=VALUE` of a label
    window_minutes: int = 0  # length of a rolling window; 0 for every other dimension
    group: str = ""  # by which the key has the limit


@dataclass(frozen=True, slots=True)
class ErrorDetails(Value):
    """Details of an error, decoded from a `google.rpc.Status`."""

    reason: str = ""
    metadata: Mapping[str, str] | None = None
    field_violations: tuple[FieldViolation, ...] = ()
    quota_violations: tuple[QuotaViolation, ...] = ()
    retry_after_s: float | None = None
    quota: ExceededQuota | None = None
    preconditions: tuple[PreconditionViolation, ...] = ()
    doc_url: str = ""


class WeirError(Exception):
    """Base of all errors. Its text is the server's message, followed by the request id if known."""

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str = "",
        request_id: str = "",
        details: ErrorDetails | None = None,
        partial: Partial | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.details = details or ErrorDetails()
        self.reason = reason or self.details.reason or self.code
        self.request_id = request_id
        self.partial = partial
        if self.doc_url:
            self.add_note(f"See {self.doc_url}")

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the server's `ErrorInfo`; empty if there is none."""
        return self.details.metadata or {}

    @property
    def doc_url(self) -> str:
        """Page that explains the reason of the error and its remedy; empty if none was sent."""
        return self.details.doc_url

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before a retry; None if the server did not send it."""
        return self.details.retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for `json.dumps`, with the details and the received output."""
        return {
            "error": type(self).__name__,
            **{name: getattr(self, name) for name in ("code", "reason", "message", "request_id")},
            "details": self.details.to_dict(),
            "partial": plain(self.partial),
        }

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message


class Unauthenticated(WeirError):
    """The API key is missing, unknown, expired or revoked."""

    default_code = "UNAUTHENTICATED"


class PermissionDenied(WeirError):
    """The key is valid but lacks a scope or the permission to use a model."""

    default_code = "PERMISSION_DENIED"


class InvalidRequest(WeirError):
    """The request can never succeed unchanged. `field_violations` describes each wrong field."""

    default_code = "INVALID_ARGUMENT"

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """Fields that the server refused, with reasons."""
        return self.details.field_violations


class NotFound(WeirError):
    """The model, organization, key or request does not exist or is not visible to this key."""

    default_code = "NOT_FOUND"


class AlreadyExists(WeirError):
    """The name is taken, or the request id was used before.

    If `reason` is `REQUEST_SETTLED`, the request has already run, and `partial` has its usage.
    """

    default_code = "ALREADY_EXISTS"


class FailedPrecondition(WeirError):
    """The current state forbids the call, such as `INSUFFICIENT_CREDIT`. Waiting does not help."""

    default_code = "FAILED_PRECONDITION"


class Aborted(WeirError):
    """The request conflicted with another one. Send it again."""

    default_code = "ABORTED"


class ResourceExhausted(WeirError):
    """A limit other than a quota was exceeded, for example the size of a message."""

    default_code = "RESOURCE_EXHAUSTED"


class QuotaExceeded(ResourceExhausted):
    """A quota refused the request. `quota` has its remainder and reset time."""

    @property
    def quota(self) -> ExceededQuota | None:
        """Quota that refused the request, with its values."""
        return self.details.quota

    @property
    def violations(self) -> tuple[QuotaViolation, ...]:
        """Exceeded quotas, in the server's words."""
        return self.details.quota_violations

    @property
    def remaining(self) -> int | None:
        """Remainder of the quota in requests, tokens or picos, by its dimension."""
        return self.quota.remaining if self.quota else None

    @property
    def reset_time(self) -> datetime | None:
        """Time when the window of the quota ends and it can be used again; None if unknown."""
        return self.quota.reset_time if self.quota else None

    @property
    def retry_helps(self) -> bool:
        """True if the quota can admit the same request later."""
        return self.quota.retry_helps if self.quota else self.retry_after_s is not None


class Unavailable(WeirError):
    """The server is unreachable, is draining, or has no free engine. A later retry can succeed."""

    default_code = "UNAVAILABLE"


class DeadlineExceeded(WeirError):
    """The time limit `timeout` has passed. `partial` holds the output received so far."""

    default_code = "DEADLINE_EXCEEDED"


class Cancelled(WeirError):
    """The request was cancelled before its admission; there is no result."""

    default_code = "CANCELLED"


class IncompleteGeneration(WeirError):
    """The stream ended during the request, without its final frame.

    `partial` holds the received output. Delivered output is billed; `get_generation(request_id)`
    returns the settled usage.
    """

    default_code = "UNAVAILABLE"


class Internal(WeirError):
    """The server failed. Quote `incident_id` when you report it."""

    default_code = "INTERNAL"

    @property
    def incident_id(self) -> str:
        """Id that the server gave this incident; empty if it sent none."""
        return self.metadata.get("incident_id", "")
