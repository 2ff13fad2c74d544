"""What customers pay, as values: price versions, and who pays which."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """One price version, in picos of the currency per token. It never changes."""

    version: int
    model: str
    currency_code: str
    tier: str  # "interactive" or "batch"
    organization_id: str  # whose own price it is; empty for the list
    organization_name: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int
    multiplier_milli: int  # thousandths of the interactive prices that these were made with
    effective_time: datetime | None
    withdrawn: bool  # it only ends the organization's own price


@dataclass(frozen=True, slots=True)
class AppliedPrice:
    """What somebody pays for a model in a tier. source: "list" or "organization". version.tier differs where it falls back."""

    model: str
    tier: str
    source: str
    version: PriceVersion


@dataclass(frozen=True, slots=True)
class PriceList:
    """What is paid at one time; and every version there ever was and will be, if that was asked for."""

    prices: tuple[AppliedPrice, ...]
    versions: tuple[PriceVersion, ...]
