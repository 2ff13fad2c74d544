"""What customers pay, as values: prices and who pays which, plans, prepaid credit, simulations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from weir_client.money import Money


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


@dataclass(frozen=True, slots=True)
class Plan:
    """One version of a plan. configuration: JSON mapping of `weir.v1.PlanConfiguration`."""

    name: str = field(metadata={"source": "configuration.name"})
    version: int
    configuration: Mapping[str, Any]
    create_time: datetime | None
    existed: bool = False  # True if making it found it there


@dataclass(frozen=True, slots=True)
class PlanAssignment:
    """The plan of an organization from a month on; an empty name for none."""

    organization_id: str
    organization_name: str
    first_month: str  # YYYY-MM
    plan: str
    version: int
    assigned_by: str
    existed: bool = False  # True if it was so before


@dataclass(frozen=True, slots=True)
class PlanList:
    """Plans, and who has which."""

    plans: tuple[Plan, ...]
    assignments: tuple[PlanAssignment, ...]


@dataclass(frozen=True, slots=True)
class CreditGrant:
    """Credit for what is billed in some months. `remaining` is by the months that are closed."""

    grant_id: str
    organization_id: str
    organization_name: str
    amount: Money
    spent: Money
    expired: Money
    remaining: Money
    first_month: str  # YYYY-MM
    last_month: str
    reason: str
    granted_by: str
    create_time: datetime | None


@dataclass(frozen=True, slots=True)
class CreditBalance:
    """What there is of an organization's credit at a moment."""

    organization_id: str
    organization_name: str
    prepaid: bool  # it is let in only as far as its credit reaches
    left: Money  # of grants for this month and later ones, by the months that are closed
    unbilled: Money  # what open months come to so far
    held: Money  # by running requests, of a prepaid organization
    available: Money  # what this month may still spend


@dataclass(frozen=True, slots=True)
class SimulatedCustomer:
    """What a month came to for an organization, and would have come to."""

    organization_id: str
    organization_name: str
    token_count: int
    old_amount: Money
    new_amount: Money
    difference: Money
    old_plan: str
    new_plan: str
