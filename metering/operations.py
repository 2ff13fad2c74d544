"""The acts on a hold, and what each answers. One batch of `hold_batch.py` carries any mix of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Protocol

from metering.billing.pricing import TokenPrices
from metering.models import QuotaDimension, QuotaSubject, ServiceTier
from metering.quotas.quota_rules import QuotaRule, window_ends
from metering.receipts.chaining import IssuedReceipt


class Outcome(StrEnum):
    """How a request that cost something ended, as stored in `usage_events.outcome`."""

    __hash__ = str.__hash__  # an Enum's own is Python, at ten times the cost

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUOTA_EXHAUSTED = "quota_exhausted"
    COST_LIMIT = "cost_limit"
    SLOW_CONSUMER = "slow_consumer"
    FILTERED = "filtered"
    FAILED = "failed"


class QuotaState(NamedTuple):
    """One limit at a moment. Values in requests, tokens or picos by dimension.

    subject_name: the subject for people. It, raise_reason and would_refuse_count are empty where nobody looked them up.
    would_refuse_count: admissions of this window that the quota would have refused if it were enforced.
    for_new_keys: it limits nothing itself, but is copied to each key that is created under its subject. alert_at: percent of the
    limit, of prepaid credit picos that are left; empty where nobody looked it up.
    """

    rule: QuotaRule
    used: int
    held: int
    now: datetime
    subject_name: str = ""
    raise_reason: str = ""
    would_refuse_count: int = 0
    for_new_keys: bool = False
    alert_at: tuple[int, ...] = ()

    @property
    def quota_id(self) -> uuid.UUID:
        """Which quota."""
        return self.rule.id

    @property
    def subject(self) -> QuotaSubject:
        """What it hangs on."""
        return self.rule.subject

    @property
    def subject_id(self) -> uuid.UUID:
        """On which one."""
        return self.rule.subject_id

    @property
    def model(self) -> str:
        """The model that it limits; empty for all together."""
        return self.rule.model

    @property
    def dimension(self) -> QuotaDimension:
        """What it counts."""
        return self.rule.dimension

    @property
    def limit_value(self) -> int:
        """The limit in force, so with a raise."""
        return self.rule.limit_value or 0

    @property
    def remaining(self) -> int:
        """What may still be held; negative where it is not enforced, or has become less than what was used. At least -2**63."""
        return max(self.limit_value - self.used - self.held, -(2**63))

    @property
    def resets_at(self) -> datetime | None:
        """When `used` starts again at zero; None for concurrency."""
        return window_ends(self.now)[self.rule.window]

    @property
    def resets_in_s(self) -> float | None:
        """Seconds from `now` to `resets_at`."""
        resets_at = self.resets_at
        return None if resets_at is None else (resets_at - self.now).total_seconds()


PAYLOAD_KEY_NAME_BYTES = 4  # at the beginning of a payload hash


def is_other_payload(known: bytes, asked: bytes) -> bool:
    """True if two payload hashes are of different payloads. Hashes of different keys tell nothing, and count as equal.

    So a repeated request is answered as such after the key has changed, and a request id that is used for another payload then is
    answered with the first one's result.
    """
    n = PAYLOAD_KEY_NAME_BYTES
    return known[:n] == asked[:n] and known != asked


class Owner(Protocol):
    """Whose work something is: a payer, or the principal of a call."""

    @property
    def organization_id(self) -> uuid.UUID: ...

    @property
    def api_key_id(self) -> uuid.UUID: ...


@dataclass(frozen=True, slots=True)
class Payer:
    """Whom a request is charged to."""

    organization_id: uuid.UUID
    project_id: uuid.UUID
    api_key_id: uuid.UUID
    currency_code: str

    def __hash__(self) -> int:
        """A key has one project, organization and currency. Of its number, since UUIDs hash in Python."""
        return hash(self.api_key_id.int)

    @property
    def subject_ids(self) -> frozenset[uuid.UUID]:
        """Everything that quotas of this payer can hang on."""
        return frozenset((self.organization_id, self.project_id, self.api_key_id))

    @property
    def receipt_ids(self) -> bytes:
        """Organization, project and key as a receipt begins with them, 48 bytes."""
        return self.organization_id.bytes + self.project_id.bytes + self.api_key_id.bytes


@dataclass(frozen=True, slots=True)
class Admit:
    """Take a hold for a new request. Answers `Admitted`.

    payload_hash: 32 bytes over everything that makes the request what it is (`is_other_payload`).
    first_slice_token_count: output tokens to lease at first, if they fit; at least `least_slice_token_count`. tier: whose price it
    has. embedding: the input is to be embedded, at the price of that; both slices are 0 then. only_asks: take nothing, and answer
    `Fits` where a hold could be taken; refusals are the same, and counted.
    """

    hold_id: uuid.UUID
    payer: Payer
    request_id: uuid.UUID
    payload_hash: bytes
    model: str
    input_token_count: int
    first_slice_token_count: int
    least_slice_token_count: int
    labels: dict[str, str] = field(default_factory=dict)
    tier: ServiceTier = ServiceTier.INTERACTIVE
    embedding: bool = False
    only_asks: bool = False


@dataclass(frozen=True, slots=True)
class Fits:
    """A hold could be taken now; none was."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Lease more output tokens, at least one. Answers `Extended`. Delivered and cached counts are those known now."""

    hold_id: uuid.UUID
    delivered_token_count: int
    cached_input_token_count: int
    wanted_token_count: int


@dataclass(frozen=True, slots=True)
class Settle:
    """End a hold with what was delivered, and write the usage event. Answers `Settled`; doing it again answers the same.

    input_token_count: prompt tokens to bill: all, or 0 if the engine never began. Of an embedding: those embedded, which the usage
    event has as embedded tokens, not as input. migration_count: how often it went on in another engine after its first token.
    """

    hold_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    generated_token_count: int
    delivered_token_count: int
    outcome: Outcome
    timings: dict[str, float] | None = None
    recovered: bool = False
    migration_count: int = 0


@dataclass(frozen=True, slots=True)
class Void:
    """End a hold of which nothing is to be billed, as if it had never been. Answers `Ended`.

    What its extensions have posted is taken back in the windows it was posted to. Refused if tokens are known to be delivered:
    those must be settled.
    """

    hold_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Expire:
    """End a hold whose owner has been silent past its expiry. Answers `Ended`; does nothing if it is not due.

    Bills what was known to be delivered at the last extension. Quotas with a window keep the whole lease as used: nobody knows how
    much more went out, and a limit must not be exceeded. Lifetime quotas keep what is billed.
    """

    hold_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Renew:
    """Prove that the owner of these holds lives: moves their expiry. Answers `Renewed`.

    Holds of the same owner that are neither among them nor spared are voided: their admission was committed but its answer lost.
    spared_ids: holds that delivered something and whose end was refused; expiry takes them.
    """

    owner_id: uuid.UUID
    hold_ids: frozenset[uuid.UUID]
    spared_ids: frozenset[uuid.UUID] = frozenset()


HoldOperation = Admit | Extend | Settle | Void | Expire | Renew


@dataclass(frozen=True, slots=True)
class Admitted:
    """A hold was taken. quotas: every limit that applies, this hold counted."""

    hold_id: uuid.UUID
    leased_token_count: int
    prices: TokenPrices
    quotas: tuple[QuotaState, ...]
    admitted_at: datetime


@dataclass(frozen=True, slots=True)
class Extended:
    """The lease grew. leased_token_count: output tokens that may be delivered in all."""

    leased_token_count: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The usage of a request stands. Costs are exact, in picos of `currency_code`. receipts: one for each part."""

    hold_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    generated_token_count: int
    delivered_token_count: int
    billed_token_count: int
    cost_picos: int
    currency_code: str
    outcome: str
    embedding_token_count: int = 0
    receipts: tuple[IssuedReceipt, ...] = field(default=(), compare=False)  # beside the usage, which is what it is

    def receipted(self, receipt: IssuedReceipt) -> Settled:
        """With its receipt; `dataclasses.replace` takes six times as long, for each request."""
        return Settled(
            self.hold_id,
            self.input_token_count,
            self.cached_input_token_count,
            self.generated_token_count,
            self.delivered_token_count,
            self.billed_token_count,
            self.cost_picos,
            self.currency_code,
            self.outcome,
            self.embedding_token_count,
            (receipt,),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing to tell but whether anything was done."""

    done: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """The expiry of these holds was moved. The others have ended, or somebody is about to end them."""

    hold_ids: frozenset[uuid.UUID]


HoldAnswer = Admitted | Fits | Extended | Settled | Ended | Renewed
