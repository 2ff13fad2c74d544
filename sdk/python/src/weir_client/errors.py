"""Every error of the client, one class per thing that the caller can do about it.

`WeirError` is the base: catch it to catch all. `reason` is the machine-readable word of the server (`QUOTA_EXCEEDED`,
`CONTEXT_EXCEEDED`, …), `code` the canonical gRPC code. `partial` holds what was already received where a generation broke in the
middle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from weir_client.values import Partial


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused, and why."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One quota that a request ran into, in the server's words."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class PreconditionViolation:
    """One thing that stands in the way of a call. kind: stable and machine-readable."""

    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class ExceededQuota:
    """The quota that refused a request. Values are requests, tokens or picos by dimension; None where not told."""

    quota_id: str
    subject: str
    subject_id: str
    model: str
    dimension: str
    limit: int | None
    used: int | None
    held: int | None
    remaining: int | None
    requested: int | None
    reset_time: datetime | None
    retry_helps: bool  # False: the request is larger than the limit, so that waiting does not help


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The details of a `google.rpc.Status`, decoded."""

    reason: str = ""
    metadata: Mapping[str, str] | None = None
    field_violations: tuple[FieldViolation, ...] = ()
    quota_violations: tuple[QuotaViolation, ...] = ()
    retry_after_s: float | None = None
    quota: ExceededQuota | None = None
    preconditions: tuple[PreconditionViolation, ...] = ()


class WeirError(Exception):
    """Base of all errors. Its text is the server's sentence, then the request id where there is one."""

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

    @property
    def metadata(self) -> Mapping[str, str]:
        """`ErrorInfo.metadata` of the server; empty if it sent none."""
        return self.details.metadata or {}

    @property
    def retry_after_s(self) -> float | None:
        """How long to wait before trying again, in seconds; None if the server did not say."""
        return self.details.retry_after_s

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message


class Unauthenticated(WeirError):
    """No API key, or one that is unknown, expired or revoked."""

    default_code = "UNAUTHENTICATED"


class PermissionDenied(WeirError):
    """The key is good but may not do this: a missing scope, or a model that it may not use."""

    default_code = "PERMISSION_DENIED"


class InvalidRequest(WeirError):
    """The request can never succeed as it is. `field_violations` names each field and what is wrong with it."""

    default_code = "INVALID_ARGUMENT"

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """The refused fields."""
        return self.details.field_violations


class NotFound(WeirError):
    """A model, organization, key or request of that name does not exist, as far as this key can see."""

    default_code = "NOT_FOUND"


class AlreadyExists(WeirError):
    """The name is taken; or the request id was used before. `REQUEST_SETTLED`: it ran already, and `partial` has its usage."""

    default_code = "ALREADY_EXISTS"


class FailedPrecondition(WeirError):
    """Something else must happen first, for example paying (`INSUFFICIENT_CREDIT`). Waiting alone does not help."""

    default_code = "FAILED_PRECONDITION"


class Aborted(WeirError):
    """The request collided with another one. Start over."""

    default_code = "ABORTED"


class ResourceExhausted(WeirError):
    """Something is too large or too much, other than a quota: a message over the size limit, for example."""

    default_code = "RESOURCE_EXHAUSTED"


class QuotaExceeded(ResourceExhausted):
    """A quota refused the request. `quota` says which one, what is left of it and when it resets."""

    @property
    def quota(self) -> ExceededQuota | None:
        """The quota that refused, with its numbers."""
        return self.details.quota

    @property
    def violations(self) -> tuple[QuotaViolation, ...]:
        """The quotas that refused, in the server's words."""
        return self.details.quota_violations

    @property
    def remaining(self) -> int | None:
        """What is left of the quota, in requests, tokens or picos by its dimension."""
        return self.quota.remaining if self.quota else None

    @property
    def reset_time(self) -> datetime | None:
        """When the quota's window starts anew."""
        return self.quota.reset_time if self.quota else None

    @property
    def retry_helps(self) -> bool:
        """Whether the same request can pass later."""
        return self.quota.retry_helps if self.quota else self.retry_after_s is not None


class Unavailable(WeirError):
    """The server cannot be reached, drains, or has no engine free. Trying again later helps."""

    default_code = "UNAVAILABLE"


class DeadlineExceeded(WeirError):
    """The time given with `timeout=` was over. `partial` holds the text so far, and its usage if the server told it in time."""

    default_code = "DEADLINE_EXCEEDED"


class Cancelled(WeirError):
    """The request was cancelled before it was let in, so that there is no result."""

    default_code = "CANCELLED"


class IncompleteGeneration(WeirError):
    """The stream ended in the middle of the request, without its final frame. `partial` holds what arrived; what was delivered
    is billed all the same, and `get_generation(request_id)` tells the settled usage."""

    default_code = "UNAVAILABLE"


class Internal(WeirError):
    """The server broke. Quote `incident_id` when reporting it."""

    default_code = "INTERNAL"

    @property
    def incident_id(self) -> str:
        """The server's id of this incident; empty if it gave none."""
        return self.metadata.get("incident_id", "")
