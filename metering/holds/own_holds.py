"""The live holds of this process as they stand in the database, as far as it has been told: what ends them need not be read.

A guess, like all that a process remembers: the statement that ends a hold compares what can have changed (`quick_ends.py`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from metering.billing.pricing import TokenPrices
from metering.operations import Admit


@dataclass(frozen=True, slots=True, eq=False)
class HoldTerms:
    """What holds of one key for one model have in common: whose they are, their price, what they are charged to.

    payer_ids: organization, project and key as a receipt has them, 48 bytes. quota_ids: numbers. Those of one batch are grouped by
    identity.
    """

    payer_ids: bytes
    model: str
    embedding: bool
    prices: TokenPrices
    quota_ids: tuple[int, ...]

    @property
    def project_id(self) -> bytes:
        """16 bytes."""
        return self.payer_ids[16:32]


class OwnHold(NamedTuple):
    """A live hold."""

    terms: HoldTerms
    request_id: uuid.UUID
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    admitted_at: datetime
    charged_at: datetime


class OwnHolds:
    """By the numbers of their ids. Holds that no request has yet are not among them: binding changes them."""

    def __init__(self) -> None:
        self._holds: dict[int, OwnHold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def admitted(self, op: Admit, terms: HoldTerms, leased_token_count: int, now: datetime) -> None:
        """A hold was taken."""
        number, request_id = op.hold_id.int, op.request_id
        if request_id.int != number:
            self._holds[number] = OwnHold(terms, request_id, op.input_token_count, 0, leased_token_count, 0, 0, now, now)

    def extended(self, hold_id: uuid.UUID, hold: OwnHold) -> None:
        """It stands otherwise now."""
        if hold.request_id != hold_id:
            self._holds[hold_id.int] = hold

    def take(self, number: int) -> OwnHold | None:
        """What is known of a hold that is to be ended, and to be forgotten whatever comes of that."""
        return self._holds.pop(number, None)
