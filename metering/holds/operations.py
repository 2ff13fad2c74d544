"""Operations on holds and their answers. One batch (`hold_connection.py`) carries any mix of them.

Operations are not changed once they are submitted.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from metering.core.errors import MeteringError
from metering.core.models import Outcome, ServiceTier
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import Payer, QuotaStates
from metering.receipts.chaining import IssuedReceipt

PAYLOAD_KEY_NAME_BYTES = 4  # at the beginning of a payload hash

NANOSECONDS = 1_000_000  # in a millisecond
VERSION_AND_VARIANT = 7 << 76 | 2 << 62


def is_other_payload(first: bytes, second: bytes) -> bool:
    """Return whether two hashes are of different payloads; hashes of different keys count as equal.

    So a repeated request is still recognized after the key has changed. A request id reused for
    another payload after such a change gets the first request's result.
    """
    n = PAYLOAD_KEY_NAME_BYTES
    return first[:n] == second[:n] and first != second


class Admit(msgspec.Struct):
    """Take a hold for a new request. Answers `Admitted`.

    payload_hash: 32 bytes over all fields that define the request (`is_other_payload`).
    first_slice_token_count: output tokens to lease first if they fit; otherwise fewer, but at
    least `least_slice_token_count`. tier: decides the price. embedding: charge the embedding
    price; both slices are 0. only_asks: take nothing and answer `Fits` if the hold would fit;
    refusals are the same and are counted.
    """

    hold_id: uuid.UUID
    payer: Payer
    request_id: uuid.UUID
    payload_hash: bytes
    model: str
    input_token_count: int
    first_slice_token_count: int
    least_slice_token_count: int
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    tier: ServiceTier = ServiceTier.INTERACTIVE
    embedding: bool = False
    only_asks: bool = False


class Fits(msgspec.Struct, frozen=True):
    """A hold could be taken now; none was."""


class Extend(msgspec.Struct, frozen=True):
    """Lease at least one more output token. Answers `Extended`. Counts are current totals.

    reasoning_token_count: delivered tokens known to be thinking.
    """

    hold_id: uuid.UUID
    delivered_token_count: int
    cached_input_token_count: int
    wanted_token_count: int
    reasoning_token_count: int = 0


class Settle(msgspec.Struct, frozen=True):
    """End a hold with its delivered tokens; write the usage event. Answers `Settled`; idempotent.

    input_token_count: prompt tokens to bill, 0 if the engine never began; of an embedding the
    embedded tokens, which the usage event keeps apart from input. journalled_token_count: output
    tokens written to be sent, at least the delivered ones. migration_count: moves to another engine
    after the first token. reasoning_token_count: delivered tokens of thinking.
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
    journalled_token_count: int = 0
    reasoning_token_count: int = 0


class Void(msgspec.Struct, frozen=True):
    """End a hold that bills nothing and undo its charges. Answers `Ended`.

    Charges posted by its extensions are reversed in the windows they were posted to. Refused if
    the hold has delivered tokens, which must be settled.
    """

    hold_id: uuid.UUID


class Expire(msgspec.Struct, frozen=True):
    """End a hold whose expiry has passed. Answers `Ended`; no effect if it is not due.

    Bills the tokens delivered by the last extension. Quotas with a window keep the whole lease as
    used: more may have been delivered, and a limit must not be exceeded. Lifetime quotas keep the
    billed tokens.
    """

    hold_id: uuid.UUID


class Renew(msgspec.Struct, frozen=True):
    """Extend the expiry of an owner's live holds. Answers `Renewed`.

    Other holds of the owner are voided, except `spared_ids`: their admissions were committed, but
    the answers were lost. spared_ids: holds with delivered tokens whose settlement was refused;
    they end by expiry.
    """

    process_id: uuid.UUID
    hold_ids: frozenset[uuid.UUID]
    spared_ids: frozenset[uuid.UUID] = frozenset()


HoldOperation = Admit | Extend | Settle | Void | Expire | Renew


class Admitted(msgspec.Struct):
    """A new hold. quotas: every limit that applies, including this hold."""

    hold_id: uuid.UUID
    leased_token_count: int
    prices: TokenPrices
    quotas: QuotaStates
    admitted_at: datetime


class Extended(msgspec.Struct, frozen=True):
    """A larger lease. leased_token_count: output tokens that may be delivered in total."""

    leased_token_count: int


@dataclass(slots=True)
class Settled:
    """Recorded usage of a request. cost_picos: of `currency_code`, exact. receipts: one a part."""

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
    journalled_token_count: int = 0
    reasoning_token_count: int = 0
    billed_reasoning_token_count: int = 0
    receipts: list[IssuedReceipt] = field(default_factory=list, compare=False)


class RequestSettled(MeteringError):
    """A request with this id and payload has ended with usage `settled`; it is billed once."""

    reason = "REQUEST_SETTLED"

    def __init__(self, settled: Settled) -> None:
        super().__init__(
            "this request has already ended: its usage is attached; use a new request_id to run"
            " again"
        )
        self.settled = settled


class Ended(msgspec.Struct, frozen=True):
    """Answer to an operation without a result. done: whether it had an effect."""

    done: bool


class Renewed(msgspec.Struct, frozen=True):
    """Holds whose expiry was extended. The other holds have ended or are being ended."""

    hold_ids: frozenset[uuid.UUID]


HoldAnswer = Admitted | Fits | Extended | Settled | Ended | Renewed


def new_hold_id() -> uuid.UUID:
    """Return a UUID v7: milliseconds since 1970, their fraction in 4096ths, 62 random bits."""
    milliseconds, rest = divmod(time.time_ns(), NANOSECONDS)
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(
        int=milliseconds << 80 | VERSION_AND_VARIANT | (rest << 12) // NANOSECONDS << 64 | random
    )
