"""What a difference between two stages of a month is: where, how much, since when, and what to do about it. Pure."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Stage(StrEnum):
    """Between which stages a difference lies."""

    RATING = "usage to ledger"
    INVOICING = "ledger to invoice"
    BATCHING = "ledger to batches"
    DELIVERY = "batches to biller"
    COUNTING = "biller's own count"
    INVOICE = "biller's invoice"
    LATE = "after the biller's invoice"
    SETTLEMENT = "our invoice to the biller's"


@dataclass(frozen=True, slots=True)
class Difference:
    """What is missing at a stage, in tokens, or in picos of the currency; negative: what is too much. since: how old it is."""

    stage: Stage
    organization_id: uuid.UUID
    organization: str
    detail: str
    remedy: str
    model: str = ""
    price_version: int | None = None
    token_kind: str = ""
    token_count: int = 0
    amount_picos: int = 0
    currency_code: str = ""
    since: datetime | None = None
