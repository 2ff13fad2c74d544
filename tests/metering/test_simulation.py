"""Simulated months: the actual side is the bill, and the models of each side add up to it."""

from __future__ import annotations

from collections import Counter
from datetime import date

from metering.core.models import TokenKind
from metering.invoicing.months import month_report
from metering.ledger.rating import rate_all_pending
from metering.plans.plan_admin import assign_plan, create_plan
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.plans.simulation import simulate
from metering.pricing.prices import PriceTerms
from metering.store.db import Sessions
from tests.metering.usage import (
    NOVEMBER,
    Consumed,
    Customer,
    add_usage,
    new_customer,
    new_price,
    rates_of,
)

MONTH = f"{NOVEMBER:%Y-%m}"
RULES = PlanRules(
    (Allowance(Selector("chat", TokenKind.OUTPUT), 100),),
    (
        TieredPrice(
            LineKind.VOLUME,
            Selector("chat", TokenKind.INPUT),
            (PriceStep(1_000, None, 900), PriceStep(None, None, 333)),
        ),
    ),
    5 * 10**12,
)


async def used(sessions: Sessions) -> Customer:
    async with sessions.begin() as session:
        customer = await new_customer(session, "plural")
        chat = await new_price(session, "chat", **rates_of(7, 3, 11))
        code = await new_price(session, "code", **rates_of(13, 5, 17))
        await create_plan(session, name="own", currency_code="USD", rules=RULES, actor="test")
        await assign_plan(
            session,
            organization=customer.name,
            plan="own",
            version=0,
            first_month=date(NOVEMBER.year, NOVEMBER.month, 1),
            actor="test",
        )
        await add_usage(session, customer, chat, [Consumed(1_001, 10, 333), Consumed(7, 0, 0)])
        await add_usage(session, customer, code, [Consumed(11, 11, 5)])
    await rate_all_pending(sessions)
    return customer


async def test_the_actual_side_of_each_model_is_that_of_the_bill(sessions: Sessions) -> None:
    customer = await used(sessions)
    async with sessions() as session:
        report = await month_report(session, organization=customer.name, month=MONTH)
        [simulated] = await simulate(session, month=MONTH)

    billed: Counter[str] = Counter()
    for line in report.lines:
        billed[line.model] += line.amount_picos
    for charge in report.charges:
        billed[charge.model] += charge.amount_picos
    assert {each.model: each.old_picos for each in simulated.models} == dict(billed)
    assert [each.model for each in simulated.models] == ["chat", "code", ""]
    assert simulated.old_picos == report.total_picos == 5 * 10**12
    assert {each.model: each.token_count for each in simulated.models} == {
        "chat": 1_341,
        "code": 16,
        "": 0,
    }


async def test_a_proposed_price_changes_its_model_and_what_the_plan_adds(
    sessions: Sessions,
) -> None:
    await used(sessions)
    async with sessions() as session:
        terms = PriceTerms(model="code", **rates_of(0, 10**12, 0))
        [simulated] = await simulate(session, month=MONTH, prices=[terms])

    models = {each.model: each.new_picos - each.old_picos for each in simulated.models}
    assert models["chat"] == 0
    assert models["code"] == 11 * 10**12 - 140
    assert simulated.new_picos == sum(each.new_picos for each in simulated.models)
    assert simulated.models[-1].new_picos == 0, "the commitment is reached"
