"""Values of prices, plans, prepaid credit and simulations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from weir_client.money import Money
from weir_client.plain import Value


@dataclass(frozen=True, slots=True)
class PriceVersion(Value):
    """Price of a model from a time on, in picos of the currency per token. Never changes."""

    version: int
    model: str
    currency_code: str
    tier: str  # "interactive" or "batch"
    organization_id: str  # organization with its own price; empty for the list price
    organization_name: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int
    multiplier_milli: int  # thousandths of the interactive prices that these were derived with
    effective_time: datetime | None
    withdrawn: bool  # this version only ends the organization's own price
    reasoning_picos_per_token: int = 0  # price of the output that is thinking


@dataclass(frozen=True, slots=True)
class AppliedPrice(Value):
    """Price that applies to a model in a tier. `source` is "list" or "organization".

    `version.tier` differs from `tier` if the tier has no price of its own.
    """

    model: str
    tier: str
    source: str
    version: PriceVersion


@dataclass(frozen=True, slots=True)
class PriceList(Value):
    """Prices that apply at one time. With `history`, past and future versions too."""

    prices: tuple[AppliedPrice, ...]
    versions: tuple[PriceVersion, ...]


@dataclass(frozen=True, slots=True)
class Plan(Value):
    """One version of a plan. `configuration` is a JSON mapping of `weir.v1.PlanConfiguration`."""

    name: str = field(metadata={"source": "configuration.name"})
    version: int
    configuration: Mapping[str, Any]
    create_time: datetime | None
    existed: bool = False  # True if creating it found an identical version


@dataclass(frozen=True, slots=True)
class PlanAssignment(Value):
    """Plan of an organization from a month on. The name is empty if it has no plan from then on."""

    organization_id: str
    organization_name: str
    first_month: str  # YYYY-MM
    plan: str
    version: int
    assigned_by: str
    existed: bool = False  # True if it was assigned before


@dataclass(frozen=True, slots=True)
class PlanList(Value):
    """Plans and their assignments to organizations."""

    plans: tuple[Plan, ...]
    assignments: tuple[PlanAssignment, ...]


@dataclass(frozen=True, slots=True)
class CreditGrant(Value):
    """Credit for the charges of some months. `remaining` is reduced only when a month is closed."""

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
class CreditBalance(Value):
    """Credit of an organization at one time."""

    organization_id: str
    organization_name: str
    prepaid: bool  # admitted only within its credit
    remaining: Money  # of grants for this month or later, less charges of closed months
    unbilled: Money  # charges of open months so far
    held: Money  # reserved by running requests of a prepaid organization
    available: Money  # spendable this month


@dataclass(frozen=True, slots=True)
class SimulatedCustomer(Value):
    """Charges of one organization in a month: the actual ones, and those of the simulation."""

    organization_id: str
    organization_name: str
    token_count: int
    old_amount: Money
    new_amount: Money
    difference: Money
    old_plan: str
    new_plan: str
