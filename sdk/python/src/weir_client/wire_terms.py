"""From the messages about prices, plans and credit to the client's values."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict
from weir.v1 import plans_pb2
from weir.v1 import prices_pb2 as pb

from weir_client import billing_terms
from weir_client.wire import TIERS, money, time_of

_SOURCES = {pb.AppliedPrice.SOURCE_LIST: "list", pb.AppliedPrice.SOURCE_ORGANIZATION: "organization"}


def price_version(message: pb.PriceVersion) -> billing_terms.PriceVersion:
    """One price version."""
    return billing_terms.PriceVersion(
        version=message.version,
        model=message.model,
        currency_code=message.currency_code,
        tier=TIERS.get(message.tier, ""),
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        input_picos_per_token=message.input_picos_per_token,
        cached_input_picos_per_token=message.cached_input_picos_per_token,
        output_picos_per_token=message.output_picos_per_token,
        embedding_picos_per_token=message.embedding_picos_per_token,
        multiplier_milli=message.multiplier_milli,
        effective_time=time_of(message.effective_time) if message.HasField("effective_time") else None,
        withdrawn=message.withdrawn,
    )


def price_list(message: pb.ListPricesResponse) -> billing_terms.PriceList:
    """What is paid, and the history."""
    return billing_terms.PriceList(
        prices=tuple(
            billing_terms.AppliedPrice(
                each.model, TIERS.get(each.tier, ""), _SOURCES.get(each.source, ""), price_version(each.version)
            )
            for each in message.prices
        ),
        versions=tuple(map(price_version, message.versions)),
    )


def plan(message: plans_pb2.Plan, *, existed: bool = False) -> billing_terms.Plan:
    """One version of a plan."""
    return billing_terms.Plan(
        name=message.configuration.name,
        version=message.version,
        configuration=MessageToDict(message.configuration, preserving_proto_field_name=True),
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
        existed=existed,
    )


def assignment(message: plans_pb2.PlanAssignment, *, existed: bool = False) -> billing_terms.PlanAssignment:
    """Which plan from when on."""
    return billing_terms.PlanAssignment(
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        first_month=message.first_month,
        plan=message.plan,
        version=message.version,
        assigned_by=message.assigned_by,
        existed=existed,
    )


def plan_list(message: plans_pb2.ListPlansResponse) -> billing_terms.PlanList:
    """Plans, and who has which."""
    return billing_terms.PlanList(tuple(map(plan, message.plans)), tuple(map(assignment, message.assignments)))


def grant(message: plans_pb2.CreditGrant) -> billing_terms.CreditGrant:
    """Credit."""
    return billing_terms.CreditGrant(
        grant_id=message.grant_id,
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        amount=money(message.amount),
        spent=money(message.spent),
        expired=money(message.expired),
        remaining=money(message.remaining),
        first_month=message.first_month,
        last_month=message.last_month,
        reason=message.reason,
        granted_by=message.granted_by,
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
    )


def balance(message: plans_pb2.GetCreditBalanceResponse) -> billing_terms.CreditBalance:
    """What is left."""
    return billing_terms.CreditBalance(
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        prepaid=message.prepaid,
        left=money(message.left),
        unbilled=money(message.unbilled),
        held=money(message.held),
        available=money(message.available),
    )


def simulated(message: plans_pb2.SimulatedCustomer) -> billing_terms.SimulatedCustomer:
    """What a month would have come to."""
    return billing_terms.SimulatedCustomer(
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        token_count=message.token_count,
        old_amount=money(message.old_amount),
        new_amount=money(message.new_amount),
        difference=money(message.difference),
        old_plan=message.old_plan,
        new_plan=message.new_plan,
    )
