"""The calls of `AdminService` about plans, prepaid credit, and what other prices would have come to."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import date

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import configuration_pb2, types_pb2
from weir.v1 import plans_pb2 as pb
from weir.v1.inference_service_pb2 import SERVICE_TIER_UNSPECIFIED

from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.interceptor import Context
from metering.core.errors import InvalidValue
from metering.core.models import Organization, TokenKind
from metering.ledger.ledger import month_bounds
from metering.plans import credits, plan_admin, prepaid, simulation
from metering.plans.plans import Allowance, PlanLineKind, PlanRules, PriceStep, Selector, TieredPrice

KINDS = {str(kind): kind for kind in TokenKind}
Names = Mapping[uuid.UUID, str]


class TermCalls(AdminCalls):
    """See `proto/weir/v1/plans.proto`."""

    async def SimulatePrices(self, request: pb.SimulatePricesRequest, context: Context) -> pb.SimulatePricesResponse:
        """Rates a past month anew."""
        await self._caller(context)
        async with self._sessions() as session:
            found = await simulation.simulate(
                session,
                month=request.month,
                prices=[proposed_price(each) for each in request.prices],
                plans=[proposed_plan(f"plans[{index}]", each) for index, each in enumerate(request.plans)],
                organization=request.organization,
            )
        return pb.SimulatePricesResponse(customers=map(simulated_message, found))

    async def CreatePlan(self, request: pb.CreatePlanRequest, context: Context) -> pb.CreatePlanResponse:
        """Makes a version of a plan."""
        async with self._acting(context) as acting:
            plan, existed = await plan_admin.create_plan(
                acting.session,
                name=request.plan.name,
                currency_code=request.plan.currency_code or "USD",
                rules=rules_of("plan", request.plan),
                actor=acting.actor,
            )
            return pb.CreatePlanResponse(plan=plan_message(plan), existed=existed)

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:
        """Lists plans and assignments."""
        async with self._transaction(context) as (session, _):
            assigned = await plan_admin.list_assignments(session, organization=request.organization)
            wanted = [each for each in assigned if not request.name or (each.plan and each.plan.name == request.name)]
            names = await organization_names(session, {each.organization_id for each in wanted})
            return pb.ListPlansResponse(
                plans=map(plan_message, await plan_admin.list_plans(session, name=request.name)),
                assignments=[assignment_message(each, names) for each in wanted],
            )

    async def AssignPlan(self, request: pb.AssignPlanRequest, context: Context) -> pb.AssignPlanResponse:
        """Gives an organization a plan."""
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
            return pb.AssignPlanResponse(assignment=assignment_message(assignment, names), existed=existed)

    async def GrantCredit(self, request: pb.GrantCreditRequest, context: Context) -> pb.GrantCreditResponse:
        """Grants credit; a prepaid organization may use it at once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is None:
                last_month = parse_month(request.last_month, "last_month")
                if last_month is None:
                    raise InvalidValue("last_month", "give the last month that the credit is good for, as YYYY-MM")
                grant = await credits.grant_credit(
                    acting.session,
                    organization=request.organization,
                    amount_picos=request.amount_picos,
                    first_month=parse_month(request.first_month, "first_month"),
                    last_month=last_month,
                    reason=request.reason,
                    actor=acting.actor,
                )
                await prepaid.refresh(acting.session, grant.organization_id, actor=acting.actor, granted_picos=grant.amount_picos)
                await acting.made(request, grant.id)
            else:
                grant = await credits.find_grant(acting.session, uuid.UUID(earlier))
            names = await organization_names(acting.session, {grant.organization_id})
            return pb.GrantCreditResponse(grant=grant_message(grant, names))

    async def ListCreditGrants(self, request: pb.ListCreditGrantsRequest, context: Context) -> pb.ListCreditGrantsResponse:
        """Lists credit."""
        async with self._transaction(context) as (session, _):
            found = await credits.list_grants(session, organization=request.organization)
            names = await organization_names(session, {each.organization_id for each in found})
            return pb.ListCreditGrantsResponse(grants=[grant_message(each, names) for each in found])

    async def GetCreditBalance(self, request: pb.GetCreditBalanceRequest, context: Context) -> pb.GetCreditBalanceResponse:
        """Tells what is left."""
        async with self._transaction(context) as (session, _):
            balance = await prepaid.credit_balance(session, organization=request.organization)
            currency_code = balance.organization.currency_code
            return pb.GetCreditBalanceResponse(
                organization_id=str(balance.organization.id),
                organization_name=balance.organization.name,
                prepaid=balance.prepaid,
                left=wire.money(currency_code, balance.left_picos),
                unbilled=wire.money(currency_code, balance.unbilled_picos),
                held=wire.money(currency_code, balance.held_picos),
                available=wire.money(currency_code, balance.available_picos),
            )

    async def SetPrepaid(self, request: pb.SetPrepaidRequest, context: Context) -> pb.SetPrepaidResponse:
        """Keeps an organization to its credit, or no longer."""
        async with self._acting(context) as acting:
            _, existed = await prepaid.set_prepaid(
                acting.session,
                organization=request.organization,
                prepaid=request.prepaid,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=acting.actor,
            )
            return pb.SetPrepaidResponse(existed=existed)


async def organization_names(session: AsyncSession, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, str]:
    """The names of organizations, by id."""
    rows = await session.execute(select(Organization.id, Organization.name).where(Organization.id.in_(set(ids))))
    return {row.id: row.name for row in rows}


def parse_month(text: str, field: str) -> date | None:
    """The first day of a month `YYYY-MM`; None for nothing. Raises: InvalidValue naming the field."""
    try:
        return month_bounds(text)[0].date() if text else None
    except InvalidValue as wrong:
        raise InvalidValue(field, wrong.remedy) from None


def rules_of(path: str, message: pb.PlanConfiguration) -> PlanRules:
    """What a plan says. Raises: InvalidValue naming the field in `path`."""
    try:
        return PlanRules(
            tuple(Allowance(selector_of(each.selector), each.token_count) for each in message.allowances),
            tuple(
                TieredPrice(
                    PlanLineKind(each.kind) if each.kind in set(PlanLineKind) else PlanLineKind.COMMITMENT,
                    selector_of(each.selector),
                    tuple(map(step_of, each.steps)),
                )
                for each in message.tiered_prices
            ),
            message.commitment_picos,
        )
    except InvalidValue as wrong:
        raise InvalidValue(f"{path}.{wrong.field}", wrong.remedy) from None


def selector_of(message: pb.TokenSelector) -> Selector:
    """Which tokens. Raises: InvalidValue."""
    if message.token_kind and message.token_kind not in KINDS:
        raise InvalidValue("token_kind", f"{message.token_kind[:64]!r} is none of {', '.join(KINDS)}")
    return Selector(message.model, KINDS.get(message.token_kind), wire.TIERS[message.tier] if message.tier else None)


def step_of(message: pb.PlanPriceStep) -> PriceStep:
    """One step."""
    has = message.HasField
    return PriceStep(
        message.up_to_token_count if has("up_to_token_count") else None,
        message.price_picos if has("price_picos") else None,
        message.price_milli if has("price_milli") else None,
    )


def plan_message(plan: plan_admin.Plan) -> pb.Plan:
    """One version of a plan."""
    configuration = pb.PlanConfiguration(
        name=plan.name, currency_code=plan.currency_code, commitment_picos=plan.rules.commitment_picos
    )
    for allowance in plan.rules.allowances:
        configuration.allowances.add(selector=selector_message(allowance.selector), token_count=allowance.token_count)
    for tiered in plan.rules.tiered_prices:
        steps = (pb.PlanPriceStep(**step_fields(step)) for step in tiered.steps)
        configuration.tiered_prices.add(selector=selector_message(tiered.selector), kind=str(tiered.kind), steps=steps)
    return pb.Plan(configuration=configuration, version=plan.version, create_time=wire.timestamp(plan.created_at))


def step_fields(step: PriceStep) -> dict[str, int]:
    """What a step says."""
    values = {"up_to_token_count": step.up_to_token_count, "price_picos": step.price_picos, "price_milli": step.price_milli}
    return {name: value for name, value in values.items() if value is not None}


def selector_message(selector: Selector) -> pb.TokenSelector:
    """Which tokens."""
    tier = SERVICE_TIER_UNSPECIFIED if selector.tier is None else wire.TIER_NUMBERS[selector.tier]
    return pb.TokenSelector(model=selector.model, token_kind=str(selector.token_kind or ""), tier=tier)


def assignment_message(assignment: plan_admin.Assignment, names: Names) -> pb.PlanAssignment:
    """Which plan from when on."""
    plan = assignment.plan
    return pb.PlanAssignment(
        organization_id=str(assignment.organization_id),
        organization_name=names[assignment.organization_id],
        first_month=f"{assignment.first_month:%Y-%m}",
        plan="" if plan is None else plan.name,
        version=0 if plan is None else plan.version,
        assigned_by=assignment.assigned_by,
    )


def grant_message(grant: credits.Grant, names: Names) -> pb.CreditGrant:
    """Credit as it stands."""

    def money(picos: int) -> types_pb2.Money:
        return wire.money(grant.currency_code, picos)

    return pb.CreditGrant(
        grant_id=str(grant.id),
        organization_id=str(grant.organization_id),
        organization_name=names[grant.organization_id],
        amount=money(grant.amount_picos),
        spent=money(grant.spent_picos),
        expired=money(grant.expired_picos),
        remaining=money(grant.remaining_picos),
        first_month=f"{grant.first_month:%Y-%m}",
        last_month=f"{grant.last_month:%Y-%m}",
        reason=grant.reason,
        granted_by=grant.granted_by,
        create_time=wire.timestamp(grant.created_at),
    )


def proposed_price(message: configuration_pb2.PriceConfiguration) -> simulation.ProposedPrice:
    """A price as it would have been."""
    return simulation.ProposedPrice(
        model=message.model,
        currency_code=message.currency_code,
        rates=(
            message.input_picos_per_token,
            message.cached_input_picos_per_token,
            message.output_picos_per_token,
            message.embedding_picos_per_token,
        ),
        organization=message.organization,
        batch_multiplier_milli=message.batch_multiplier_milli if message.HasField("batch_multiplier_milli") else None,
    )


def proposed_plan(path: str, message: pb.PlanConfiguration) -> simulation.ProposedPlan:
    """A plan as it would have been. Raises: InvalidValue."""
    rules = rules_of(path, message)
    return simulation.ProposedPlan(message.name, message.currency_code or "USD", rules, frozenset(message.organizations))


def simulated_message(customer: simulation.SimulatedCustomer) -> pb.SimulatedCustomer:
    """What a month would have come to."""

    def money(picos: int) -> types_pb2.Money:
        return wire.money(customer.currency_code, picos)

    return pb.SimulatedCustomer(
        organization_id=str(customer.organization_id),
        organization_name=customer.organization_name,
        token_count=customer.token_count,
        old_amount=money(customer.old_picos),
        new_amount=money(customer.new_picos),
        difference=money(customer.new_picos - customer.old_picos),
        old_plan=customer.old_plan,
        new_plan=customer.new_plan,
    )
