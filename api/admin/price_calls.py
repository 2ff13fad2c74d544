"""Prices: set, withdraw, list, simulate."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import configuration_pb2
from weir.v1 import plans_pb2 as plan_pb
from weir.v1 import prices_pb2 as price_pb

from api.access.servicer import AuthenticatedServicer
from api.admin.plan_calls import rules_of
from api.core import wire
from api.core.interceptor import Context
from metering.core.models import record_of
from metering.plans import simulation
from metering.pricing import prices
from metering.pricing.prices import CustomerPrice, ModelPrice
from metering.tenants.tenants import find_organization, organization_names


class PriceCalls(AuthenticatedServicer):
    """Calls on prices."""

    async def SimulatePrices(
        self, request: plan_pb.SimulatePricesRequest, context: Context
    ) -> plan_pb.SimulatePricesResponse:
        await self._caller(context)
        async with self._sessions() as session:
            matches = await simulation.simulate(
                session,
                month=request.month,
                prices=[proposed_price(each) for each in request.prices],
                plans=[
                    proposed_plan(f"plans[{index}]", each)
                    for index, each in enumerate(request.plans)
                ],
                organization=request.organization,
            )
        picos = (
            {
                "old_amount": each.old_picos,
                "new_amount": each.new_picos,
                "difference": each.new_picos - each.old_picos,
            }
            for each in matches
        )
        customers = [
            wire.message_of(plan_pb.SimulatedCustomer, each, **sums)
            for each, sums in zip(matches, picos, strict=True)
        ]
        return plan_pb.SimulatePricesResponse(customers=customers)

    async def SetPrice(self, request: pb.SetPriceRequest, context: Context) -> pb.SetPriceResponse:
        """Add a price version, and one for the batch tier if its price differs."""
        effective_at = wire.given_time(request, "effective_time")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price = await prices.set_price(
                    acting.session,
                    model=request.model,
                    currency_code=request.currency_code,
                    input_picos_per_token=request.input_picos_per_token,
                    cached_input_picos_per_token=request.cached_input_picos_per_token,
                    output_picos_per_token=request.output_picos_per_token,
                    embedding_picos_per_token=wire.given(request, "embedding_picos_per_token"),
                    reasoning_picos_per_token=wire.given(request, "reasoning_picos_per_token"),
                    organization=request.organization,
                    batch_multiplier_milli=wire.given(request, "batch_multiplier_milli"),
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.record(request, price.prices.version)
            written = await prices.versions_of_change(acting.session, price)
            names = await owner_names(acting.session, written)
            return pb.SetPriceResponse(
                version=price.prices.version,
                versions=[version_message(each, names) for each in written],
            )

    async def WithdrawPrice(
        self, request: price_pb.WithdrawPriceRequest, context: Context
    ) -> price_pb.WithdrawPriceResponse:
        effective_at = wire.given_time(request, "effective_time")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price, *_ = await prices.withdraw_price(
                    acting.session,
                    model=request.model,
                    organization=request.organization,
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.record(request, price.prices.version)
            written = await prices.versions_of_change(acting.session, price)
            names = await owner_names(acting.session, written)
            return price_pb.WithdrawPriceResponse(
                versions=[version_message(each, names) for each in written]
            )

    async def ListPrices(
        self, request: price_pb.ListPricesRequest, context: Context
    ) -> price_pb.ListPricesResponse:
        """Return the prices that apply to an organization, with their sources and times."""
        at = wire.given_time(request, "time")
        async with self._transaction(context) as (session, _):
            owner = (
                await find_organization(session, request.organization)
                if request.organization
                else None
            )
            owner_id = None if owner is None else owner.id
            currency_code = request.currency_code or (owner.currency_code if owner else None)
            model = request.model or None
            matches = await prices.versions_in_force(
                session, model=model, currency_code=currency_code, organization_id=owner_id, at=at
            )
            history: list[ModelPrice] = []
            if request.history:
                history = await prices.price_history(
                    session, model=model, currency_code=currency_code, organization_id=owner_id
                )
            names = {} if owner is None else {owner.id: owner.name}
            return price_pb.ListPricesResponse(
                prices=[
                    applied_message(each, names)
                    for each in prices.customer_prices(matches, owner_id)
                ],
                versions=[version_message(each, names) for each in history],
            )


async def owner_names(
    session: AsyncSession, versions: Collection[ModelPrice]
) -> dict[uuid.UUID, str]:
    """Return the names of the organizations that the price versions belong to."""
    return await organization_names(
        session, (each.organization_id for each in versions if each.organization_id is not None)
    )


def proposed_price(message: configuration_pb2.PriceConfiguration) -> simulation.ProposedPrice:
    rates = {name: getattr(message, name) for name in prices.RATES}
    if not message.HasField("reasoning_picos_per_token"):
        rates["reasoning_picos_per_token"] = message.output_picos_per_token
    multiplier = wire.given(message, "batch_multiplier_milli")
    return record_of(
        simulation.ProposedPrice,
        message,
        rates=tuple(rates.values()),
        batch_multiplier_milli=multiplier,
    )


def proposed_plan(path: str, message: plan_pb.PlanConfiguration) -> simulation.ProposedPlan:
    """Return a plan for a simulation. Raises: InvalidValue."""
    rules = rules_of(path, message)
    return simulation.ProposedPlan(
        message.name, message.currency_code or "USD", rules, frozenset(message.organizations)
    )


def version_message(version: ModelPrice, names: Mapping[uuid.UUID, str]) -> price_pb.PriceVersion:
    owner = version.organization_id
    return wire.message_of(
        price_pb.PriceVersion,
        version.prices,
        model=version.model,
        tier=version.tier,
        organization_id=owner,
        organization_name=owner and names[owner],
        multiplier_milli=version.multiplier_milli,
        effective_time=version.effective_at,
        withdrawn=version.withdrawn,
    )


def applied_message(
    applied: CustomerPrice, names: Mapping[uuid.UUID, str]
) -> price_pb.AppliedPrice:
    is_own = applied.price.organization_id is not None
    return price_pb.AppliedPrice(
        model=applied.price.model,
        tier=wire.TIER_NUMBERS[applied.tier],
        source=(
            price_pb.AppliedPrice.SOURCE_ORGANIZATION
            if is_own
            else price_pb.AppliedPrice.SOURCE_LIST
        ),
        version=version_message(applied.price, names),
    )
