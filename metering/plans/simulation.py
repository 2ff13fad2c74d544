"""Simulation of a past month with other prices or plans: its real usage, rated again. Changes
nothing.

The database sums usage per customer, price version and token kind from the month's events; the rest
is pure. A month of a million events costs one statement, however many proposals there are.
Adjustments, credit and rounding are left out on both sides: they are equal or follow from the
difference.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, record_of
from metering.core.money import checked_currency
from metering.ledger.ledger import month_bounds
from metering.plans.plan_admin import NO_PLAN, plan_in_force
from metering.plans.plans import MonthUsage, PlanRules, plan_lines
from metering.pricing.prices import (
    COUNTS_OF_EVENT,
    MULTIPLIER_SCALE,
    PRICES,
    RATES,
    PriceTerms,
    checked_model,
    multiplied_rates,
    versions_in_force,
)
from metering.tenants.tenants import find_organization

KIND_SUMS = ", ".join(
    f"sum({count})::bigint AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items()
)
KIND_VALUES = ", ".join(f"('{kind}', {kind}, {price})" for kind, price in PRICES.items())
# By month of settlement, rated or not: the usage of a month, whichever month bills it.
USED = text(f"""
SELECT o.id AS organization_id, o.name, o.currency_code,
       p.id AS price_version, p.model, p.tier, p.effective_at, kind.*,
       p.organization_id IS NOT NULL AS is_own
FROM (
    SELECT organization_id, price_version_id, {KIND_SUMS}
    FROM usage_sums
    WHERE settled_at >= :begins
      AND settled_at < :ends
      AND (CAST(:organization_id AS uuid) IS NULL OR organization_id = :organization_id)
    GROUP BY 1, 2
) sums
JOIN organizations o ON o.id = sums.organization_id
JOIN price_versions p ON p.id = sums.price_version_id,
LATERAL (VALUES {KIND_VALUES}) AS kind (token_kind, token_count, unit_price_picos)
WHERE token_count > 0
ORDER BY o.name, o.id, p.id
""")
# One statement reads a month of millions of events.
TIMEOUT = text("SET LOCAL statement_timeout = '5min'")
ROWS_AT_ONCE = 500  # read between two turns of the event loop, in some milliseconds
RATE_OF = {kind: RATES.index(price) for kind, (_, price) in COUNTS_OF_EVENT.items()}


@dataclass(frozen=True, slots=True)
class ProposedPlan:
    """Proposed plan. `organizations` has names; empty means all with the plan's currency."""

    name: str
    currency_code: str
    rules: PlanRules
    organizations: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Part of a customer's amounts; `model` is empty for plan lines of all models together."""

    model: str
    token_count: int
    old_picos: int
    new_picos: int


@dataclass(frozen=True, slots=True)
class SimulatedCustomer:
    """A customer's actual and simulated amount for a month, including plan lines, in picos.

    Those of `models` add up to them.
    """

    organization_id: uuid.UUID
    organization_name: str
    currency_code: str
    token_count: int
    old_picos: int
    new_picos: int
    old_plan: str
    new_plan: str
    models: tuple[SimulatedModel, ...] = ()


# By model, currency, organization ("" for the list) and tier.
Prices = Mapping[tuple[str, str, str, ServiceTier], tuple[int, ...]]


async def simulate(
    session: AsyncSession,
    *,
    month: str,
    prices: Sequence[PriceTerms] = (),
    plans: Sequence[ProposedPlan] = (),
    organization: str = "",
) -> list[SimulatedCustomer]:
    """Recompute a month `YYYY-MM` with proposed prices and plans, for customers with usage.

    Everything else stays as it was. Customers are sorted by name. Raises: NotFound; InvalidValue,
    naming the proposal, for a value that could not be set.
    """
    begins, ends = month_bounds(month)
    owner = await find_organization(session, organization) if organization else None
    await session.execute(TIMEOUT)
    proposed = await _checked_prices(session, prices)
    await _check_plans(session, plans)
    parameters = {
        "begins": begins,
        "ends": ends,
        "organization_id": None if owner is None else owner.id,
    }
    usage: defaultdict[tuple[uuid.UUID, str, str], list[MonthUsage]] = defaultdict(list)
    own: set[int] = set()
    found = await session.stream(USED, parameters)
    async for rows_read in found.partitions(ROWS_AT_ONCE):
        for row in rows_read:
            owner_key = row.organization_id, row.name, row.currency_code
            usage[owner_key].append(record_of(MonthUsage, row))
            if row.is_own:
                own.add(row.price_version)
    customers = []
    for (owner_id, name, currency_code), rows in usage.items():
        present = await plan_in_force(session, owner_id, begins.date())
        chosen = plan_for(name, currency_code, plans)
        rules = NO_PLAN if present is None else present.rules
        proposed_usage = [repriced(row, name, currency_code, proposed, own) for row in rows]
        models = by_model(
            rows,
            model_amounts(rules, rows),
            model_amounts(rules if chosen is None else chosen.rules, proposed_usage),
        )
        customers.append(
            SimulatedCustomer(
                organization_id=owner_id,
                organization_name=name,
                currency_code=currency_code,
                token_count=sum(each.token_count for each in models),
                old_picos=sum(each.old_picos for each in models),
                new_picos=sum(each.new_picos for each in models),
                models=models,
                old_plan="" if present is None else present.name,
                new_plan=(
                    chosen.name if chosen is not None else "" if present is None else present.name
                ),
            )
        )
    return customers


def repriced(
    row: MonthUsage, organization: str, currency_code: str, prices: Prices, own: Container[int]
) -> MonthUsage:
    """Apply a proposed price to usage: own before list, its tier before interactive.

    `own` has the price versions of the customer's own, which a proposal for the list leaves alone.
    """
    for owner in (organization,) if row.price_version in own else (organization, ""):
        for tier in dict.fromkeys((row.tier, ServiceTier.INTERACTIVE)):
            if (rates := prices.get((row.model, currency_code, owner, tier))) is not None:
                return replace(row, unit_price_picos=rates[RATE_OF[row.token_kind]])
    return row


def model_amounts(rules: PlanRules, usage: Sequence[MonthUsage]) -> Counter[str]:
    """Compute a month's amounts by model, including plan lines; "" for those of all models."""
    amounts: Counter[str] = Counter()
    for row in usage:
        amounts[row.model] += row.amount_picos
    for line in plan_lines(rules, usage):
        amounts[line.model] += line.amount_picos
    return amounts


def by_model(
    usage: Sequence[MonthUsage], old: Counter[str], new: Counter[str]
) -> tuple[SimulatedModel, ...]:
    """Put the amounts of each model side by side, sorted by name."""
    tokens: Counter[str] = Counter()
    for row in usage:
        tokens[row.model] += row.token_count
    names = sorted(tokens.keys() | old.keys() | new.keys(), key=lambda name: (not name, name))
    return tuple(SimulatedModel(each, tokens[each], old[each], new[each]) for each in names)


def plan_for(name: str, currency_code: str, plans: Sequence[ProposedPlan]) -> ProposedPlan | None:
    """Choose the proposed plan of a customer: one that names it before one for all.

    Plans in another currency are skipped. Returns None if no plan fits.
    """
    fitting = [each for each in plans if each.currency_code == currency_code]
    named = [each for each in fitting if name in each.organizations]
    return next(iter(named or [each for each in fitting if not each.organizations]), None)


async def _checked_prices(session: AsyncSession, prices: Sequence[PriceTerms]) -> Prices:
    """Validate proposed prices; return them by model, currency, organization and tier."""
    checked: dict[tuple[str, str, str, ServiceTier], tuple[int, ...]] = {}
    for index, each in enumerate(prices):
        owner = await find_organization(session, each.organization) if each.organization else None
        currency_code = each.currency_code or (owner.currency_code if owner else "USD")
        key = (
            checked_model(each.model),
            checked_currency(currency_code),
            owner.name if owner else "",
        )
        if (*key, ServiceTier.INTERACTIVE) in checked:
            raise InvalidValue(
                f"prices[{index}]", f"{each.model} is proposed twice: list each price once"
            )
        given = {"embedding_picos_per_token": 0, **each.rates}
        for field, rate in given.items():
            if rate < 0:
                raise InvalidValue(f"prices[{index}].{field}", "must be 0 or more picos")
        given.setdefault("reasoning_picos_per_token", each.output_picos_per_token)
        rates = [given[name] for name in RATES]
        checked[*key, ServiceTier.INTERACTIVE] = tuple(rates)
        multiplier = each.batch_multiplier_milli
        if multiplier is None:
            multiplier = await _multiplier(session, key[0], currency_code)
        checked[*key, ServiceTier.BATCH] = tuple(multiplied_rates(rates, multiplier))
    return checked


async def _multiplier(session: AsyncSession, model: str, currency_code: str) -> int:
    """Read the present batch multiplier of the list price, in thousandths."""
    versions = await versions_in_force(session, model=model, currency_code=currency_code)
    batch = (each.multiplier_milli for each in versions if each.tier is ServiceTier.BATCH)
    return next(batch, MULTIPLIER_SCALE)


async def _check_plans(session: AsyncSession, plans: Sequence[ProposedPlan]) -> None:
    for index, plan in enumerate(plans):
        checked_currency(plan.currency_code)
        for name in sorted(plan.organizations):
            owner = await find_organization(session, name)
            if owner.currency_code != plan.currency_code or owner.name != name:
                raise InvalidValue(
                    f"plans[{index}].organizations",
                    f"{name} is billed in {owner.currency_code}: list names of organizations billed"
                    f" in {plan.currency_code}",
                )
