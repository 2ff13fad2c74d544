"""The live holds of this process as they stand in the database, as far as it has been told: what ends or extends them reads none.

A guess, like all that a process remembers: the statement that ends or extends a hold compares what can have changed
(`quick_ends.py`, `quick_extensions.py`).
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

NO_LIMIT = -1  # of a quota that is removed, or counts only


class Return(NamedTuple):
    """What a rule counts of a claim that ends or moves on: a place, or tokens by these factors, rounded up.

    number, packed_number: of the quota, the second as `packed_id` has it. limit_value: how far it may be charged, or NO_LIMIT.
    window: see `QuotaRule`. per_held_input: at which input is held until something is posted.
    """

    number: int
    packed_number: bytes
    limit_value: int
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
        limit = rule.limit_value if rule.enforced and rule.limit_value is not None else NO_LIMIT
        place = rule.number, packed_id(rule.number), limit, rule.window
        if rule.kind is Kind.CONCURRENCY:
            return cls(*place, True, 0, 0, 0, 0, 1)
        scale = rule.scale(prices)
        dearest = max(scale.input, scale.cached_input)
        factors = scale.input, scale.cached_input, scale.output, scale.divisor
        return cls(*place, False, dearest, *factors)

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

    def get(self, number: int) -> OwnHold | None:
        """What is known of a hold."""
        return self._holds.get(number)

    def take(self, number: int) -> OwnHold | None:
        """What is known of a hold that is to be ended, and to be forgotten whatever comes of that."""
        return self._holds.pop(number, None)
