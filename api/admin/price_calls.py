"""RPCs for prices and their simulation, plans and prepaid credit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import plans_pb2 as plan_pb
from weir.v1 import prices_pb2 as price_pb

from api.access.pages import RECORD_BYTES_MAX, as_it_is, read_page
from api.access.servicer import AuthenticatedServicer, CallerTransaction, once
from api.admin.configuration_calls import price_terms
from api.core import wire
from api.core.interceptor import Context
from metering.core.errors import InvalidValue
from metering.core.models import TokenKind
from metering.ledger.ledger import month_bounds
from metering.plans import plan_admin, prepaid, simulation
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.pricing import prices
from metering.pricing.prices import CustomerPrice, ModelPrice
from metering.tenants.tenants import find_organization, organization_names

KINDS = {str(kind): kind for kind in TokenKind}
STEP_FIELDS = ("up_to_token_count", "price_picos", "price_milli")


class PriceCalls(AuthenticatedServicer):
    """RPCs for prices."""

    async def SimulatePrices(
        self, request: plan_pb.SimulatePricesRequest, context: Context
    ) -> plan_pb.SimulatePricesResponse:
        await self._caller(context)
        async with self._sessions() as session:
            matches = await simulation.simulate(
                session,
                month=request.month,
                prices=list(map(price_terms, request.prices)),
                plans=[
                    proposed_plan(f"plans[{index}]", each)
                    for index, each in enumerate(request.plans)
                ],
                organization=request.organization,
            )
        return plan_pb.SimulatePricesResponse(customers=map(simulated_message, matches))

    @once
    async def SetPrice(
        self, request: pb.SetPriceRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.SetPriceResponse]:
        """Add a price version, and a second one for the batch tier if the batch price differs."""
        if earlier:
            price = await prices.get_price(acting.session, int(earlier))
        else:
            terms = price_terms(request)
            price = await prices.set_price(acting.session, terms, actor=acting.actor)
        versions = await versions_of_change(acting.session, price)
        number = price.prices.version
        return number, pb.SetPriceResponse(version=number, versions=versions)

    @once
    async def WithdrawPrice(
        self, request: price_pb.WithdrawPriceRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, price_pb.WithdrawPriceResponse]:
        if earlier:
            price = await prices.get_price(acting.session, int(earlier))
        else:
            price, *_ = await prices.withdraw_price(
                acting.session,
                model=request.model,
                organization=request.organization,
                effective_at=wire.given_time(request, "effective_time"),
                actor=acting.actor,
            )
        versions = await versions_of_change(acting.session, price)
        return price.prices.version, price_pb.WithdrawPriceResponse(versions=versions)


async def price_lists(
    session: AsyncSession,
    *,
    organization: str,
    model: str,
    currency_code: str,
    history: bool,
    time: datetime | None = None,
) -> price_pb.ListPricesResponse:
    """List the prices that an organization pays, with their origin, and all versions if wanted."""
    owner = await find_organization(session, organization) if organization else None
    owner_id = None if owner is None else owner.id
    about: dict[str, Any] = {
        "model": model or None,
        "currency_code": currency_code or (owner.currency_code if owner else None),
        "organization_id": owner_id,
    }
    matches = await prices.versions_in_force(session, at=time, **about)
    versions = await prices.price_history(session, **about) if history else []
    names = {} if owner is None else {owner.id: owner.name}
    paid = prices.customer_prices(matches, owner_id)
    return price_pb.ListPricesResponse(
        prices=[applied_message(each, names) for each in paid],
        versions=[version_message(each, names) for each in versions],
    )


async def versions_of_change(
    session: AsyncSession, price: ModelPrice
) -> list[price_pb.PriceVersion]:
    """Describe all versions that the change to a price wrote, one for each tier."""
    written = await prices.versions_of_change(session, price)
    owners = (each.organization_id for each in written if each.organization_id is not None)
    names = await organization_names(session, owners)
    return [version_message(each, names) for each in written]


def proposed_plan(path: str, message: plan_pb.PlanConfiguration) -> simulation.ProposedPlan:
    """Parse the plan that a simulation proposes. `path` is its field. Raises: InvalidValue."""
    rules = rules_of(path, message)
    return simulation.ProposedPlan(
        message.name, message.currency_code or "USD", rules, frozenset(message.organizations)
    )


def simulated_message(customer: simulation.SimulatedCustomer) -> plan_pb.SimulatedCustomer:
    code = customer.currency_code
    return wire.message_of(
        plan_pb.SimulatedCustomer,
        customer,
        **amounts_of(customer),
        models=[
            wire.message_of(plan_pb.SimulatedModel, each, code, **amounts_of(each))
            for each in customer.models
        ],
    )


def amounts_of(part: simulation.SimulatedCustomer | simulation.SimulatedModel) -> dict[str, int]:
    old, new = part.old_picos, part.new_picos
    return {"old_amount": old, "new_amount": new, "difference": new - old}


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


class PlanCalls(AuthenticatedServicer):
    """RPCs for plans and prepaid credit."""

    async def CreatePlan(
        self, request: plan_pb.CreatePlanRequest, context: Context
    ) -> plan_pb.CreatePlanResponse:
        async with self._acting(context) as acting:
            plan, existed = await plan_admin.create_plan(
                acting.session,
                name=request.plan.name,
                currency_code=request.plan.currency_code or "USD",
                rules=rules_of("plan", request.plan),
                actor=acting.actor,
            )
            return plan_pb.CreatePlanResponse(plan=plan_message(plan), existed=existed)

    async def AssignPlan(
        self, request: plan_pb.AssignPlanRequest, context: Context
    ) -> plan_pb.AssignPlanResponse:
        async with self._acting(context) as acting:
            assignment, existed = await plan_admin.assign_plan(
                acting.session,
                organization=request.organization,
                plan=request.plan,
                version=request.version,
                first_month=parse_month(request.first_month, "first_month"),
                actor=acting.actor,
            )
            names = await organization_names(acting.session, {assignment.organization_id})
            return plan_pb.AssignPlanResponse(
                assignment=assignment_message(assignment, names), existed=existed
            )

    @once
    async def GrantCredit(
        self, request: plan_pb.GrantCreditRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, plan_pb.GrantCreditResponse]:
        """Grant credit to an organization. A prepaid organization can use it at once."""
        session, actor = acting.session, acting.actor
        if earlier:
            grant = await prepaid.find_grant(session, uuid.UUID(earlier))
        else:
            last_month = parse_month(request.last_month, "last_month")
            if last_month is None:
                raise InvalidValue(
                    "last_month", "is required: the last month of the credit, as YYYY-MM"
                )
            grant = await prepaid.grant_credit(
                session,
                organization=request.organization,
                amount_picos=request.amount_picos,
                first_month=parse_month(request.first_month, "first_month"),
                last_month=last_month,
                reason=request.reason,
                actor=actor,
            )
            await prepaid.refresh(
                session, grant.organization_id, actor=actor, granted_picos=grant.amount_picos
            )
        names = await organization_names(session, {grant.organization_id})
        return grant.id, plan_pb.GrantCreditResponse(grant=grant_message(grant, names))

    async def SetPrepaid(
        self, request: plan_pb.SetPrepaidRequest, context: Context
    ) -> plan_pb.SetPrepaidResponse:
        """Make an organization prepaid, or billed in arrears."""
        async with self._acting(context) as acting:
            _, existed = await prepaid.set_prepaid(
                acting.session,
                organization=request.organization,
                prepaid=request.prepaid,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=acting.actor,
            )
            return plan_pb.SetPrepaidResponse(existed=existed)


async def plan_lists(
    session: AsyncSession, *, name: str, page_token: str, page_size: int = 0, organization: str
) -> plan_pb.ListPlansResponse:
    """List a page of the assignments of plans, and on the first page all plans."""
    plans = [] if page_token else await plan_admin.list_plans(session, name=name)
    response = plan_pb.ListPlansResponse(plans=map(plan_message, plans))

    async def assignments(**page: Any) -> tuple[list[plan_pb.PlanAssignment], str]:
        found, following = await plan_admin.list_assignments(
            session, name=name, organization=organization, **page
        )
        names = await organization_names(session, {each.organization_id for each in found})
        return [assignment_message(each, names) for each in found], following

    messages, response.next_page_token = await read_page(
        assignments,
        as_it_is,
        page_size=page_size,
        page_token=page_token,
        bytes_max=max(RECORD_BYTES_MAX - response.ByteSize(), 0),
    )
    response.assignments.extend(messages)
    return response


async def credit_grants(
    session: AsyncSession, **page: Any
) -> tuple[list[plan_pb.CreditGrant], str]:
    """List a page of the credit grants of an organization, or of all."""
    found, following = await prepaid.list_grants(session, **page)
    names = await organization_names(session, {each.organization_id for each in found})
    return [grant_message(each, names) for each in found], following


async def credit_balance(
    session: AsyncSession, *, organization: str
) -> plan_pb.GetCreditBalanceResponse:
    balance = await prepaid.credit_balance(session, organization=organization)
    owner = balance.organization
    names = {"organization_id": owner.id, "organization_name": owner.name}
    return wire.message_of(plan_pb.GetCreditBalanceResponse, balance, owner.currency_code, **names)


def parse_month(text: str, field: str) -> date | None:
    """Parse a month `YYYY-MM` and return its first day; None for an empty string.

    Raises InvalidValue, which names the field.
    """
    try:
        return month_bounds(text)[0].date() if text else None
    except InvalidValue as wrong:
        raise InvalidValue(field, wrong.remedy) from None


def rules_of(path: str, message: plan_pb.PlanConfiguration) -> PlanRules:
    """Parse the rules of a plan. Raises InvalidValue, which names the field below `path`."""
    try:
        return PlanRules(
            tuple(
                Allowance(selector_of(each.selector), each.token_count)
                for each in message.allowances
            ),
            tuple(
                TieredPrice(
                    LineKind(each.kind) if each.kind in set(LineKind) else LineKind.COMMITMENT,
                    selector_of(each.selector),
                    tuple(
                        PriceStep(*(wire.given(step, name) for name in STEP_FIELDS))
                        for step in each.steps
                    ),
                )
                for each in message.tiered_prices
            ),
            message.commitment_picos,
        )
    except InvalidValue as wrong:
        raise InvalidValue(f"{path}.{wrong.field}", wrong.remedy) from None


def selector_of(message: plan_pb.TokenSelector) -> Selector:
    """Parse a selector of tokens by model, token kind and tier. Raises: InvalidValue."""
    if message.token_kind and message.token_kind not in KINDS:
        raise InvalidValue(
            "token_kind", f"must be one of {', '.join(KINDS)}, got {message.token_kind[:64]!r}"
        )
    if message.tier not in wire.TIERS:
        raise InvalidValue("tier", "must be SERVICE_TIER_INTERACTIVE or SERVICE_TIER_BATCH")
    return Selector(
        message.model,
        KINDS.get(message.token_kind),
        wire.TIERS[message.tier] if message.tier else None,
    )


def plan_message(plan: plan_admin.Plan) -> plan_pb.Plan:
    terms = {"name": plan.name, "currency_code": plan.currency_code, "organizations": ()}
    configuration = wire.message_of(plan_pb.PlanConfiguration, plan.rules, **terms)
    return plan_pb.Plan(
        configuration=configuration,
        version=plan.version,
        create_time=wire.timestamp(plan.created_at),
    )


def assignment_message(
    assignment: plan_admin.Assignment, names: Mapping[uuid.UUID, str]
) -> plan_pb.PlanAssignment:
    plan = assignment.plan
    return wire.message_of(
        plan_pb.PlanAssignment,
        assignment,
        organization_name=names[assignment.organization_id],
        first_month=f"{assignment.first_month:%Y-%m}",
        plan=plan and plan.name,
        version=plan and plan.version,
    )


def grant_message(grant: prepaid.Grant, names: Mapping[uuid.UUID, str]) -> plan_pb.CreditGrant:
    return wire.message_of(
        plan_pb.CreditGrant,
        grant,
        grant_id=grant.id,
        organization_name=names[grant.organization_id],
        first_month=f"{grant.first_month:%Y-%m}",
        last_month=f"{grant.last_month:%Y-%m}",
    )
