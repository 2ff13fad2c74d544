"""Year of closes with a movable clock: new prices, late usage, a plan, credit, corrections, a
refund.

At its end every report has the same bytes as on the day of its close, and money is conserved:
usage at the prices of its admission plus every other line equals the invoiced and the carried
amounts, to the pico.
"""

from __future__ import annotations

import os
import random
from datetime import UTC, date, datetime, timedelta

from metering.core.models import ServiceTier, TokenKind
from metering.core.money import PICOS_PER_UNIT
from metering.invoicing.month_report import MonthReport, to_csv, to_json
from metering.invoicing.months import list_months
from metering.ledger.ledger import AccountKind, month_end
from metering.ledger.rating import rate_all_pending
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.invariants import check_invariants
from tests.metering.usage import Consumed, Customer, balances

YEAR = [date(2025, month, 1) for month in range(1, 13)]
GRACIOUS = timedelta(hours=2)
INPUT = Selector("demo", TokenKind.INPUT)
OUTPUT = Selector("demo", TokenKind.OUTPUT)
STEPS = (
    PriceStep(30_000, price_milli=1000),
    PriceStep(60_000, price_milli=805),
    PriceStep(None, price_picos=333_333),
)
RULES = PlanRules((Allowance(INPUT, 400_000),), (TieredPrice(LineKind.GRADUATED, OUTPUT, STEPS),))
COMMITTED = PlanRules(RULES.allowances, RULES.tiered_prices, commitment_picos=PICOS_PER_UNIT // 4)


class Year:
    """Year of the customer: its usage, and the expected amounts."""

    def __init__(self, world: ClosingWorld, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.used_picos = 0
        self.prices: list[tuple[datetime, ModelPrice]] = []

    async def use(self, day: datetime, count: int) -> None:
        """Settle requests of a day at the current price."""
        for begins, price in reversed(self.prices):
            if begins <= day:
                events = [self.request(day) for _ in range(count)]
                self.used_picos += sum(event.cost(price) for event in events)
                await self.world.use(price, *events)
                return

    def request(self, day: datetime) -> Consumed:
        """Return the usage of one random request."""
        sent = self.random.randint(1, 60_000)
        outcome = self.random.choice(["stop", "stop", "length", "cancelled", "failed"])
        at = day + timedelta(seconds=self.random.randrange(86_000))
        return Consumed(
            sent, self.random.randint(0, sent), self.random.randint(0, 9_000), outcome, at
        )


async def live_through(year: Year) -> dict[str, MonthReport]:
    """Run a year of months, each closed after two hours; return the reports."""
    world, closed = year.world, dict[str, MonthReport]()
    year.prices.append(
        (datetime(2025, 1, 1, tzinfo=UTC), await world.price(datetime(2024, 12, 1, tzinfo=UTC)))
    )
    await world.plan("steps", YEAR[1], RULES)
    await world.grant(5 * PICOS_PER_UNIT, YEAR[1], YEAR[2], "a welcome that ends in March")
    await world.grant(PICOS_PER_UNIT // 7, YEAR[4], YEAR[11], "paid in advance")
    for month in YEAR:
        begins = datetime(month.year, month.month, 1, tzinfo=UTC)
        if month.month == 4:
            change = datetime(2025, 4, 15, tzinfo=UTC)
            year.prices.append(
                (change, await world.price(change, input_picos=120_007, output_picos=500_003))
            )
        if month.month == 9:
            await world.plan("committed", month, COMMITTED)
        for day in (3, 14, 20, 27) if month.month != 11 else ():
            await year.use(begins + timedelta(days=day - 1), 3)
        if month.month > 1:
            # Usage of the month before, found late.
            await year.use(begins - timedelta(days=year.random.randint(1, 20)), 2)
        if month.month == 7:
            await world.adjust(-PICOS_PER_UNIT // 333, "an outage of two hours")
        if month.month == 8:
            await world.give_back("INV-000001", PICOS_PER_UNIT // 100, "a refund for January")
        world.clock.now = month_end(month) + GRACIOUS
        report = (await world.close(f"{month:%Y-%m}")).report
        closed[report.month] = report
    return closed


async def test_a_year_of_closes_loses_nothing_and_can_be_proved(
    sessions: Sessions, customer: Customer, database_url: str
) -> None:
    seed = int(os.environ.get("WEIR_YEAR_SEED", random.SystemRandom().getrandbits(32)))
    print(f"WEIR_YEAR_SEED={seed}")
    world = ClosingWorld(sessions, customer)
    year = Year(world, seed)

    closed = await live_through(year)

    # Reports are unchanged, and the later changes of their months are on later ones.
    for month, report in closed.items():
        verification = await world.verify(month)
        assert verification.differences == ()
        assert to_json(verification.report) == to_json(report)
        assert to_csv(verification.report) == to_csv(report)
    assert [
        month for month, report in closed.items() if any(line.late_month for line in report.lines)
    ] == [f"{month:%Y-%m}" for month in YEAR[1:]]
    assert {line.price_version for line in closed["2025-04"].lines if not line.late_month} == {
        price.prices.version for _, price in year.prices
    }
    assert closed["2025-07"].charges[-2].kind is LineKind.ADJUSTMENT
    assert [note.number for note in closed["2025-08"].credit_notes] == ["CN-000001"]

    # Credit: spent and expired add up to the grants; credit that ends in March is gone after March.
    spent = {
        month: -sum(c.amount_picos for c in r.charges if c.kind is LineKind.CREDIT)
        for month, r in closed.items()
    }
    assert spent["2025-01"] == spent["2025-04"] == 0
    assert (
        spent["2025-02"] + spent["2025-03"] + closed["2025-03"].credit.expired_picos
        == 5 * PICOS_PER_UNIT
    )
    assert closed["2025-03"].credit.expired_picos > 0
    assert closed["2025-03"].credit.remaining_picos == 0
    later = sum(picos for month, picos in spent.items() if month > "2025-04")
    assert later + closed["2025-12"].credit.expired_picos == PICOS_PER_UNIT // 7
    assert closed["2025-12"].credit.remaining_picos == 0

    # The commitment: the shortfall is charged, in November for hardly any usage.
    for month in ("2025-09", "2025-10", "2025-11", "2025-12"):
        usage = sum(line.amount_picos for line in closed[month].lines)
        plan = sum(
            c.amount_picos
            for c in closed[month].charges
            if c.kind not in (LineKind.ADJUSTMENT, LineKind.CREDIT)
        )
        assert usage + plan >= COMMITTED.commitment_picos
    assert LineKind.COMMITMENT in [charge.kind for charge in closed["2025-11"].charges]

    # Usage at its prices and all charges equal the invoiced and carried amounts, to the pico.
    charges = sum(charge.amount_picos for report in closed.values() for charge in report.charges)
    invoiced = sum(report.total_rounded_picos for report in closed.values())
    assert year.used_picos + charges == invoiced + closed["2025-12"].carried_out_picos
    async with sessions() as session:
        stand = {
            key.kind: picos
            for key, picos in (await balances(session, customer.organization_id)).items()
        }
        months = await list_months(session, await find_organization(session, customer.name))
    given_back = PICOS_PER_UNIT // 100
    assert stand[AccountKind.RECEIVABLE] == invoiced - given_back
    assert stand[AccountKind.ROUNDING] == closed["2025-12"].carried_out_picos
    assert stand[AccountKind.PREPAID_CREDIT] == 0
    assert stand[AccountKind.REVENUE] == -year.used_picos
    assert sum(stand.values()) == 0
    assert [each.invoice_number for each in months if each.month < "2026"] == [
        f"INV-{n:06d}" for n in range(12, 0, -1)
    ]
    check_invariants(database_url)


async def test_the_plans_lines_and_the_credit_stand_on_the_invoice_as_reckoned_by_hand(
    sessions: Sessions, customer: Customer
) -> None:
    """Amounts computed by hand: 400,000 of 500,000 input tokens are free, for example."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2024, 12, 1, tzinfo=UTC))
    batch = await world.price(
        datetime(2024, 12, 1, tzinfo=UTC), input_picos=75_000, tier=ServiceTier.BATCH
    )
    await world.plan("steps", YEAR[1], RULES)
    grant_id = await world.grant(10**9, YEAR[1], YEAR[1], "a little")
    at = datetime(2025, 2, 10, tzinfo=UTC)
    await world.use(price, Consumed(400_000, 0, 70_000, settled_at=at))
    await world.use(batch, Consumed(100_000, 0, 0, settled_at=at))
    await rate_all_pending(sessions)
    open_report = await world.report("2025-02")

    report = (await world.close("2025-02")).report

    # Shared between the tiers in proportion to their tokens.
    free = -320_000 * 150_000 - 80_000 * 75_000
    steps = (-30_000 * 600_000 * 195 // 1000, 10_000 * (333_333 - 600_000))
    used = 400_000 * 150_000 + 70_000 * 600_000 + 100_000 * 75_000
    assert sum(c.amount_picos for c in report.charges if c.kind is LineKind.ALLOWANCE) == free
    assert tuple(c.amount_picos for c in report.charges if c.kind is LineKind.GRADUATED) == steps
    assert [(c.amount_picos, c.source_id) for c in report.charges if c.kind is LineKind.CREDIT] == [
        (-(10**9), grant_id)
    ]
    assert report.total_picos == used + free + sum(steps) - 10**9
    assert [line.tier for line in report.lines] == [
        ServiceTier.INTERACTIVE,
        ServiceTier.INTERACTIVE,
        ServiceTier.BATCH,
    ]
    assert open_report.charges == report.charges
    assert open_report.total_rounded_picos == report.total_rounded_picos
    assert (await world.verify("2025-02")).differences == ()
