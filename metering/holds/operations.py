"""Operations on holds and their answers. One batch (`hold_connection.py`) carries any mix of them.

Operations are not changed once they are submitted.
"""

from __future__ import annotations

import random
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
    """Return True if two hashes differ in payload; hashes of different keys count as equal.

    A repeated request is thus recognized even after the key has changed; but an id reused for
    another payload after a key change gets the first request's result.
    """
    n = PAYLOAD_KEY_NAME_BYTES
    return first[:n] == second[:n] and first != second


class Admit(msgspec.Struct):
    """Operation that takes a hold for a new request. Answer: `Admitted`.

    `payload_hash` has 32 bytes over all fields that define the request (`is_other_payload`). It
    leases `first_slice_token_count` output tokens if they fit, otherwise fewer, but at least
    `least_slice_token_count`. `tier` decides the price. With `embedding` the embedding price is
    charged and both slices are 0. `end_user` is a name checked by `checked_end_user`, empty if none
    was given. With `only_asks` nothing is taken and the answer is `Fits`;
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
    end_user: str = ""


class Fits(msgspec.Struct, frozen=True):
    """Answer: a hold could be taken now, and none was."""


class Extend(msgspec.Struct, frozen=True):
    """Operation that leases at least one more output token. Answer: `Extended`. Counts are totals.

    `reasoning_token_count` counts the delivered tokens known to be thinking.
    """

    hold_id: uuid.UUID
    delivered_token_count: int
    cached_input_token_count: int
    wanted_token_count: int
    reasoning_token_count: int = 0


class Settle(msgspec.Struct, frozen=True):
    """Operation that ends a hold and writes its usage event. Idempotent. Answer: `Settled`.

    `input_token_count` are the prompt tokens to bill, 0 if the engine never began; for an embedding
    they are the embedded tokens. `journalled_token_count` are the output tokens written to be sent,
    at least the delivered ones. `migration_count` counts moves to another engine after the first
    token. `reasoning_token_count` counts the delivered tokens of thinking.
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
    """Operation that ends a hold without usage and undoes its charges. Answer: `Ended`.

    Charges posted by its extensions are reversed in the windows they were posted to. A hold with
    delivered tokens is refused: it must be settled.
    """

    hold_id: uuid.UUID


class Expire(msgspec.Struct, frozen=True):
    """Operation that ends a hold whose expiry has passed. Answer: `Ended`; no effect if not due.

    Bills the tokens delivered by the last extension. Quotas, also of a lifetime, keep the whole
    lease as used, since more may have been delivered and a limit must not be exceeded. Prepaid
    credit keeps the billed tokens.
    """

    hold_id: uuid.UUID


class Renew(msgspec.Struct, frozen=True):
    """Operation that extends the expiry of an owner's live holds. Answer: `Renewed`.

    Holds of the owner that are in neither set are voided: their admissions were committed, but the
    answers were lost. `spared_ids` are holds with delivered tokens whose settlement was refused;
    they end by expiry.
    """

    process_id: uuid.UUID
    hold_ids: frozenset[uuid.UUID]
    spared_ids: frozenset[uuid.UUID] = frozenset()


HoldOperation = Admit | Extend | Settle | Void | Expire | Renew


class Admitted(msgspec.Struct):
    """Answer: a new hold. `quotas` are the states of all limits that apply, including this hold.

    `limited` names the fields with limits, as `AdmissionTerms.limited` (`decide.py`).
    """

    hold_id: uuid.UUID
    leased_token_count: int
    prices: TokenPrices
    quotas: QuotaStates
    admitted_at: datetime
    limited: frozenset[str] = frozenset()


class Extended(msgspec.Struct, frozen=True):
    """Answer: a larger lease. `leased_token_count` output tokens may be delivered in total."""

    leased_token_count: int


@dataclass(slots=True)
class Settled:
    """Answer: the recorded usage of a request.

    `cost_picos` is the exact cost in `currency_code`. `receipts` has one per part.
    """

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
            "This request has already ended, and its usage is attached. Use a new request_id to run"
            " it again."
        )
        self.settled = settled


class Ended(msgspec.Struct, frozen=True):
    """Answer to an operation without a result. `done` is True if it had an effect."""

    done: bool


class Renewed(msgspec.Struct, frozen=True):
    """Answer: the holds whose expiry was extended. Others have ended or are being ended."""

    hold_ids: frozenset[uuid.UUID]


HoldAnswer = Admitted | Fits | Extended | Settled | Ended | Renewed


def new_hold_id() -> uuid.UUID:
    """Generate a UUID v7: milliseconds since 1970, their fraction in 4096ths, 62 random bits.

    They need not be secret, only different in each process; `os.urandom` is a system call.
    """
    milliseconds, rest = divmod(time.time_ns(), NANOSECONDS)
    fraction = (rest << 12) // NANOSECONDS
    return uuid.UUID(
        int=milliseconds << 80 | VERSION_AND_VARIANT | fraction << 64 | random.getrandbits(62)
    )
