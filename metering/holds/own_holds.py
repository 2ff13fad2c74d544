"""The live holds of this process as they stand in the database, as far as it has been told: what ends them need not be read.

A guess, like all that a process remembers: the statement that ends a hold compares what can have changed (`quick_ends.py`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.billing.pricing import TokenPrices
from metering.holds.exchange import packed_id
from metering.operations import Admit
from metering.quotas.quota_rules import Kind, QuotaRule


class Return(NamedTuple):
    """What a rule counts of a claim that ends: a place, or tokens by these factors, rounded up. window: see `QuotaRule`.

    packed_number: of the quota, as `packed_id` has it. per_held_input: at which input is held until something is posted.
    """

    packed_number: bytes
    window: int
    is_place: bool
    per_held_input: int
    per_input: int
    per_cached_input: int
    per_output: int
    divisor: int

    @classmethod
    def of(cls, rule: QuotaRule, prices: TokenPrices) -> Return | None:
        """None for a rule that gets nothing back."""
        if rule.kind is Kind.REQUESTS:
            return None
        if rule.kind is Kind.CONCURRENCY:
            return cls(packed_id(rule.number), rule.window, True, 0, 0, 0, 0, 1)
        scale = rule.scale(prices)
        dearest = max(scale.input, scale.cached_input)
        factors = scale.input, scale.cached_input, scale.output, scale.divisor
        return cls(packed_id(rule.number), rule.window, False, dearest, *factors)

    def amount(self, input_token_count: int, cached_input_token_count: int, output_token_count: int) -> int:
        """The same as `Scale.amount`."""
        fresh = (input_token_count - cached_input_token_count) * self.per_input
        return -(-(fresh + cached_input_token_count * self.per_cached_input + output_token_count * self.per_output) // self.divisor)


@dataclass(slots=True, eq=False)
class HoldTerms:
    """What holds of one key for one model have in common: whose they are, their price, what they are charged to.

    payer_ids: organization, project and key as a receipt has them, 48 bytes. quota_ids: numbers. packed_quota_ids: the same as
    elements of a packed array. returns: what their ends give back by these rules (`Known.returns_of`). Those of one batch are
    grouped by identity, and live from batch to batch.
    """

    payer_ids: bytes
    model: str
    embedding: bool
    prices: TokenPrices
    quota_ids: tuple[int, ...]
    packed_quota_ids: list[bytes] = field(init=False)
    returns: tuple[tuple[QuotaRule, ...], tuple[Return, ...]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Work out once what each batch needs."""
        self.packed_quota_ids = list(map(packed_id, self.quota_ids))

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
