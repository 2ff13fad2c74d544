"""The operations on a hold, and what each answers. One batch (`batch.py`) carries any mix of them.

Nobody changes one once it is handed over.
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


def is_other_payload(known: bytes, asked: bytes) -> bool:
    """True if two payload hashes are of different payloads. Hashes of different keys tell nothing, and count as equal.

    So a repeated request is answered as such after the key has changed, and a request id that is used for another payload then is
    answered with the first one's result.
    """
    n = PAYLOAD_KEY_NAME_BYTES
    return known[:n] == asked[:n] and known != asked


class Admit(msgspec.Struct):
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
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    tier: ServiceTier = ServiceTier.INTERACTIVE
    embedding: bool = False
    only_asks: bool = False


class Fits(msgspec.Struct, frozen=True):
    """A hold could be taken now; none was."""


class Extend(msgspec.Struct, frozen=True):
    """Lease more output tokens, at least one. Answers `Extended`. Delivered and cached counts are those known now."""

    hold_id: uuid.UUID
    delivered_token_count: int
    cached_input_token_count: int
    wanted_token_count: int


class Settle(msgspec.Struct, frozen=True):
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


class Void(msgspec.Struct, frozen=True):
    """End a hold of which nothing is to be billed, as if it had never been. Answers `Ended`.

    What its extensions have posted is taken back in the windows it was posted to. Refused if tokens are known to be delivered:
    those must be settled.
    """

    hold_id: uuid.UUID


class Expire(msgspec.Struct, frozen=True):
    """End a hold whose owner has been silent past its expiry. Answers `Ended`; does nothing if it is not due.

    Bills what was known to be delivered at the last extension. Quotas with a window keep the whole lease as used: nobody knows how
    much more went out, and a limit must not be exceeded. Lifetime quotas keep what is billed.
    """

    hold_id: uuid.UUID


class Renew(msgspec.Struct, frozen=True):
    """Prove that the owner of these holds lives: moves their expiry. Answers `Renewed`.

    Holds of the same owner that are neither among them nor spared are voided: their admission was committed but its answer lost.
    spared_ids: holds that delivered something and whose end was refused; expiry takes them.
    """

    owner_id: uuid.UUID
    hold_ids: frozenset[uuid.UUID]
    spared_ids: frozenset[uuid.UUID] = frozenset()


HoldOperation = Admit | Extend | Settle | Void | Expire | Renew


class Admitted(msgspec.Struct):
    """A hold was taken. quotas: every limit that applies, this hold counted."""

    hold_id: uuid.UUID
    leased_token_count: int
    prices: TokenPrices
    quotas: QuotaStates
    admitted_at: datetime


class Extended(msgspec.Struct, frozen=True):
    """The lease grew. leased_token_count: output tokens that may be delivered in all."""

    leased_token_count: int


@dataclass(slots=True)
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
    receipts: list[IssuedReceipt] = field(default_factory=list, compare=False)  # beside the usage, which is what it is


class RequestSettled(MeteringError):
    """A request with this id and payload has ended; `settled` is what stands. It is never billed again."""

    reason = "REQUEST_SETTLED"

    def __init__(self, settled: Settled) -> None:
        super().__init__("this request has already ended: its usage stands beside this; use a new request_id to run again")
        self.settled = settled


class Ended(msgspec.Struct, frozen=True):
    """Nothing to tell but whether anything was done."""

    done: bool


class Renewed(msgspec.Struct, frozen=True):
    """The expiry of these holds was moved. The others have ended, or somebody is about to end them."""

    hold_ids: frozenset[uuid.UUID]


HoldAnswer = Admitted | Fits | Extended | Settled | Ended | Renewed


NANOSECONDS = 1_000_000  # in a millisecond

VERSION_AND_VARIANT = 7 << 76 | 2 << 62


def new_hold_id() -> uuid.UUID:
    """Milliseconds since 1970, what is over of them in 4096ths, and 62 random bits."""
    milliseconds, rest = divmod(time.time_ns(), NANOSECONDS)
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(int=milliseconds << 80 | VERSION_AND_VARIANT | (rest << 12) // NANOSECONDS << 64 | random)
