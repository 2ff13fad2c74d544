"""Errors of metering. Independent of gRPC; `api/core/statuses.py` maps each class to a status."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum

CHECK_NAME = "Check the name or id, and that your key may see it."


class ObstacleKind(StrEnum):
    """Reason why a month cannot be closed."""

    MONTH_NOT_OVER = "MONTH_NOT_OVER"
    EARLIER_MONTH_OPEN = "EARLIER_MONTH_OPEN"
    LATER_MONTH_CLOSED = "LATER_MONTH_CLOSED"
    MONTH_BEFORE_FIRST = "MONTH_BEFORE_FIRST"
    USAGE_MISSTATED = "USAGE_MISSTATED"
    USAGE_UNRATED = "USAGE_UNRATED"
    REQUESTS_RUNNING = "REQUESTS_RUNNING"
    ISSUER_INCOMPLETE = "ISSUER_INCOMPLETE"
    TEXT_NOT_SHOWN = "TEXT_NOT_SHOWN"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why a month cannot be closed; the description says what to do."""

    kind: ObstacleKind
    description: str


class MeteringError(Exception):
    """Base of all metering errors. `reason` is machine-readable; attributes carry the facts."""

    reason = "METERING_FAILED"


class DatabaseUnavailable(MeteringError):
    """PostgreSQL does not answer; nothing was written. Retry after `retry_after_s`."""

    reason = "DATABASE_UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WriteConflict(DatabaseUnavailable):
    """Other transactions kept getting in the way. Nothing was written: try again."""

    reason = "WRITE_CONFLICT"

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"Other transactions kept getting in the way ({cause}). Nothing was written; send the"
            " same call."
        )


class JournalUnavailable(MeteringError):
    """The server cannot write its usage journal. Send the same request again."""

    reason = "JOURNAL_UNAVAILABLE"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__(
            "This server cannot write its usage journal, so it serves no output. Use another server"
            " if there is one, and tell the operator."
        )


class NotFound(MeteringError):
    """`kind` `ref` does not exist, or not for this caller. remedy: ends the message."""

    reason = "NOT_FOUND"

    def __init__(
        self,
        kind: str,
        ref: str,
        remedy: str = CHECK_NAME,
    ) -> None:
        super().__init__(f"{kind} {ref[:64]!r} not found. {remedy}")
        self.kind = kind
        self.ref = ref


class AlreadyExists(MeteringError):
    """A resource of this kind and name already exists. detail: ends the message."""

    reason = "ALREADY_EXISTS"

    def __init__(self, kind: str, ref: str, detail: str = "") -> None:
        super().__init__(
            f"{kind} {ref[:64]!r} already exists {detail}"
            if detail
            else f"{kind} {ref[:64]!r} already exists. Use another name, or change the existing"
            " one."
        )
        self.kind = kind
        self.ref = ref


class EndUsersExhausted(MeteringError):
    """The organization has as many end users, or values of limited labels, as the server allows."""

    reason = "END_USERS_EXHAUSTED"

    def __init__(self, what: str, count_max: int) -> None:
        super().__init__(
            f"Your organization has {count_max:,} {what} in use, which is the maximum, and this one"
            " is new. Send a name that is in use, or ask the operator to raise WEIR_END_USERS_MAX."
        )
        self.count_max = count_max


class InvalidValue(MeteringError):
    """An invalid value of `field`. remedy: the end of the message, which says what is allowed."""

    reason = "FIELD_INVALID"

    def __init__(self, field: str, remedy: str) -> None:
        super().__init__(f"{field}: {remedy}")
        self.field = field
        self.remedy = remedy


class KeyInvalid(MeteringError):
    """The API key is unknown, revoked or expired; the reply does not reveal which."""

    reason = "UNAUTHENTICATED"

    def __init__(
        self,
        message: str = (
            "Your API key is unknown, revoked or expired. Check it, or ask an administrator for"
            " another one."
        ),
    ) -> None:
        super().__init__(message)


class OrganizationClosed(KeyInvalid):
    """The organization is closed for good, and all of its keys are revoked."""

    reason = "ORGANIZATION_CLOSED"

    def __init__(self, closure: str) -> None:
        super().__init__(
            f"Your organization is closed for good: {closure}. Its keys are revoked, and nothing"
            " opens it again: ask the operator for another organization."
        )


class ProjectClosed(KeyInvalid):
    """The project is closed for good, and all of its keys are revoked."""

    reason = "PROJECT_CLOSED"

    def __init__(self, closure: str) -> None:
        super().__init__(
            f"Your project is closed for good: {closure}. Its keys are revoked: use a key of"
            " another project, or ask an administrator of your organization for one."
        )


class TokenInvalid(KeyInvalid):
    """The token is not accepted; the text says why.

    `origins` are those of pages that may read this, because the token is for them.
    """

    reason = "TOKEN_INVALID"

    def __init__(
        self,
        why: str,
        remedy: str = "Send a new one from your identity provider.",
        origins: Sequence[str] = (),
    ) -> None:
        super().__init__(f"Your token is not accepted: {why}. {remedy}")
        self.origins = tuple(origins)


class KeyRevoked(MeteringError):
    """The key is revoked, which nothing can undo."""

    reason = "KEY_REVOKED"


class InvitationInvalid(KeyInvalid):
    """The token of the invitation is unknown, used, revoked or expired; the reply hides which."""

    reason = "INVITATION_INVALID"

    def __init__(self) -> None:
        super().__init__(
            "Your invitation is unknown, used, revoked or expired. Ask for another one."
        )


class LastOwner(MeteringError):
    """The change would leave the organization without an owner. Make another member owner first."""

    reason = "LAST_OWNER"

    def __init__(self, organization: str) -> None:
        super().__init__(
            f"This is the last owner of the organization {organization!r}, which would have none"
            " left. Make another member owner first."
        )
        self.organization = organization


class PriceMissing(MeteringError):
    """No price is in force for the model. Set one."""

    reason = "PRICE_MISSING"

    def __init__(self, model: str, currency_code: str) -> None:
        super().__init__(
            f"No {currency_code} price is in force for the model {model!r}. Set one with `weir"
            f" price set {model} --currency {currency_code}`."
        )
        self.model = model


class ConcurrentChanges(MeteringError):
    """Another change of the configuration is running. Nothing was changed: try again."""

    reason = "CONCURRENT_CHANGES"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__(
            "Another configuration is being applied. Nothing was changed; send the same call."
        )


class RequestIdReused(MeteringError):
    """The request id was used before in this project, with another payload. Use a new id."""

    reason = "REQUEST_ID_REUSED"

    def __init__(
        self,
        message: str = (
            "You used this request_id before, with another payload. Use a new one for a new"
            " request."
        ),
    ) -> None:
        super().__init__(message)


class RequestInFlight(MeteringError):
    """A request with this id and payload is running."""

    reason = "REQUEST_IN_FLIGHT"

    def __init__(
        self,
        message: str = (
            "A request with this request_id is running. Attach to it, or use a new request_id to"
            " run it again."
        ),
    ) -> None:
        super().__init__(message)


class HoldEnded(MeteringError):
    """The hold has ended, by expiry or by another process. The caller must stop streaming."""

    reason = "HOLD_ENDED"

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"The hold of your request has ended: {cause}. Run it again, with a new request_id."
        )


class MonthClosed(MeteringError):
    """The month is closed and takes no postings. Correct it in a later month."""

    reason = "MONTH_CLOSED"

    def __init__(self, organization_id: uuid.UUID, month: date) -> None:
        super().__init__(
            f"{month:%Y-%m} of this organization is closed. Post to the first month after it that"
            " is open."
        )
        self.organization_id = organization_id
        self.month = month


class MonthNotClosable(MeteringError):
    """A month cannot be closed now. obstacles: every reason why not, each with its remedy."""

    reason = "MONTH_NOT_CLOSABLE"

    def __init__(self, obstacles: Sequence[Obstacle]) -> None:
        super().__init__("; ".join(each.description for each in obstacles))
        self.obstacles = tuple(obstacles)


class MonthOpen(MeteringError):
    """The month is not closed, so its documents are not final."""

    reason = "MONTH_OPEN"


class ApprovalRefused(MeteringError):
    """The caller may not decide on this adjustment, or it is decided already."""

    reason = "APPROVAL_REFUSED"


class InvariantViolated(MeteringError):
    """An invariant does not hold. The operation was rolled back; an operator has to investigate."""

    reason = "INVARIANT_VIOLATED"


class BillingDetailsMissing(MeteringError):
    """Stripe would refuse to bill these organizations. Complete their billing profiles.

    missing: one sentence for each organization, with the remedy.
    """

    reason = "BILLING_DETAILS_MISSING"

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__("nothing was sent to Stripe:\n" + "\n".join(missing))
        self.missing = tuple(missing)


class StripeFailed(MeteringError):
    """Stripe refused or did not answer an administrative call; the message has Stripe's answer."""

    reason = "STRIPE_FAILED"
