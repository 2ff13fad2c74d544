"""Stripe's invoice equals ours to the cent, by items on a draft or the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_DOWN
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from metering.core.errors import InvalidValue
from metering.core.models import TokenKind
from metering.core.money import PICOS_PER_UNIT
from metering.export import invoice_items
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import Finalizing, stripe_settings
from metering.export.invoice_items import hold_draft, settle_months, whole_units
from metering.export.reconciliation import Stage, conclude, local_differences, our_month
from metering.export.stripe_gateway import StripeGateway
from metering.export.stripe_inbox import handle_events
from metering.export.stripe_sync import Sync
from metering.ledger.ledger import month_bounds
from metering.ledger.rating import rate_all_pending
from metering.plans.plans import Allowance, PlanRules, Selector
from metering.pricing.prices import ModelPrice
from metering.proof.check import Moment
from metering.store.db import Sessions
from tests.metering.closing_world import ClosingWorld
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen
from tests.metering.queries import execute, execute_unguarded, fetch_rows
from tests.metering.usage import Consumed, Customer
from tests.stripe_double.server import StripeDouble, stripe_double

NOW = datetime(2025, 12, 3, 12, tzinfo=UTC)  # at Stripe
CENT = PICOS_PER_UNIT // 100

NOVEMBER = datetime(2025, 11, 20, 12, 20, tzinfo=UTC)
USED = (
    Consumed(2_345_678, 45_678, 1_234_567, settled_at=NOVEMBER),
    Consumed(7, 0, 3, settled_at=NOVEMBER),
)


@dataclass(slots=True)
class Billed(ClosingWorld):
    """Customer of November 2025 with a plan and a customer at Stripe."""

    double: StripeDouble | None = None
    gateway: StripeGateway | None = None

    @property
    def stripe(self) -> StripeDouble:
        assert self.double is not None
        return self.double

    @property
    def customer_id(self) -> str:
        [customer] = self.stripe.account.of("customers")
        return customer

    async def deliver(self) -> None:
        """Rate, batch and deliver all pending usage, like the worker."""
        assert self.gateway is not None
        await rate_all_pending(self.sessions)
        await form_batches(self.sessions)
        await deliver_pending(self.sessions, self.gateway)

    async def settle(self, runs: int = 3) -> int:
        """Settle months repeatedly, like the worker."""
        assert self.gateway is not None
        return sum([await settle_months(self.sessions, self.gateway) for _ in range(runs)])

    def end_of(self, month: date) -> list[dict[str, Any]]:
        """Let Stripe end the month; return its drafts."""
        begins, ends = month_bounds(f"{month:%Y-%m}")
        return self.stripe.account.end_period(
            self.customer_id, int(begins.timestamp()), int(ends.timestamp())
        )

    async def items(self) -> list[tuple[str, int]]:
        """Return our items, by month and place."""
        query = (
            "SELECT description, amount_minor FROM stripe_month_items WHERE stripe_id IS NOT"
            " NULL ORDER BY month, position"
        )
        return [(row[0], row[1]) for row in await fetch_rows(self.sessions, query)]

    async def unsettled(self, month: str) -> list[Stage]:
        """Return the findings of `weir reconcile` about invoices."""
        async with self.sessions() as session:
            ours = await our_month(session, month)
            found = conclude(month, ours, await local_differences(session, ours)).differences
        return [each.stage for each in found if each.stage in (Stage.SETTLEMENT, Stage.INVOICE)]


@pytest.fixture
def double() -> Iterator[StripeDouble]:
    with stripe_double(NOW.timestamp) as running:
        yield running


@pytest.fixture
async def world(
    sessions: Sessions, customer: Customer, double: StripeDouble
) -> tuple[Billed, ModelPrice]:
    world = Billed(
        sessions,
        customer,
        double=double,
        gateway=StripeGateway(stripe_settings(double.environment)),
    )
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC))
    await world.plan(
        "starter",
        date(2025, 11, 1),
        PlanRules((Allowance(Selector(token_kind=TokenKind.INPUT), 2_000_000),)),
    )
    assert world.gateway is not None
    await Sync(sessions, world.gateway, False).run()
    await execute(
        sessions,
        "INSERT INTO export_progress (id, closed_until, scanned_until) VALUES (1,"
        " date_trunc('hour', now()), '2025-01-01')",
    )
    await execute(sessions, "UPDATE export_progress SET month_items_since = '2025-01-01'")
    return world, price


async def invoiced(world: ClosingWorld, month: str) -> int:
    """Return the total of our invoice, in cents."""
    cents: int
    cents, rest = divmod((await world.report(month)).total_rounded_picos, CENT)
    assert rest == 0
    return cents


async def test_the_draft_of_a_closed_month_is_held_until_it_comes_to_our_invoice(
    world: tuple[Billed, ModelPrice], database_url: str
) -> None:
    billed, price = world
    await billed.use(price, *USED)
    await billed.grant(PICOS_PER_UNIT // 10, date(2025, 11, 1), date(2025, 11, 1), "welcome")
    await billed.adjust(-3 * CENT // 2, "an outage")
    [draft] = billed.end_of(date(2025, 11, 1))
    await billed.deliver()  # after the draft was made: Stripe counts again when it finalizes

    before = await billed.settle()
    await billed.close("2025-11")
    settled = await billed.settle()

    assert (before, settled) == (0, 1)
    assert draft["status"] == "open"
    assert draft["total"] == await invoiced(billed, "2025-11") > 0
    words = [description for description, _ in await billed.items()]
    assert words[0].startswith("2025-11: free allowance of 2,000,000 tokens a month")
    assert [each for each in words if each.endswith(("an outage", "welcome"))] == words[1:3]
    assert await billed.unsettled("2025-11") == []
    assert billed.stripe.calls["POST /v1/invoices/{id}/finalize"] == 1
    assert await billed.settle() == 0
    check_invariants(database_url)


async def test_an_early_final_invoice_is_corrected_later(world: tuple[Billed, ModelPrice]) -> None:
    billed, price = world
    await billed.use(price, *USED)
    [first] = billed.end_of(date(2025, 11, 1))
    await billed.deliver()
    billed.stripe.account.finalize(first["id"])
    await billed.close("2025-11")
    assert await billed.unsettled("2025-11") == [Stage.SETTLEMENT]

    settled = await billed.settle()
    [second] = billed.end_of(date(2025, 12, 1))

    assert settled >= 1
    assert await billed.unsettled("2025-11") == []
    assert first["total"] > await invoiced(billed, "2025-11")
    assert first["total"] + second["total"] == await invoiced(billed, "2025-11")


async def test_nothing_is_settled_before_all_usage_is_delivered_or_without_an_invoice(
    world: tuple[Billed, ModelPrice], monkeypatch: pytest.MonkeyPatch
) -> None:
    billed, price = world
    monkeypatch.setattr(invoice_items, "NO_INVOICE_AFTER", timedelta(days=36_500))
    await billed.use(price, *USED)
    await billed.close("2025-11")
    await billed.deliver()

    without_invoice = await billed.settle()
    [draft] = billed.end_of(date(2025, 11, 1))
    await execute_unguarded(
        billed.sessions, "UPDATE meter_batches SET state = 'parked' WHERE token_kind = 'output'"
    )
    undelivered = await billed.settle()

    assert (without_invoice, undelivered, draft["status"]) == (0, 0, "draft")
    assert await billed.items() == []
    await execute_unguarded(billed.sessions, "UPDATE meter_batches SET state = 'delivered'")
    assert await billed.settle() == 1


async def test_the_final_draft_is_compared_and_corrected(world: tuple[Billed, ModelPrice]) -> None:
    """Here Stripe rounds its lines in an unexpected way."""
    billed, price = world
    billed.stripe.account.rounding = ROUND_DOWN
    await billed.use(price, *USED)
    await billed.deliver()
    [first] = billed.end_of(date(2025, 11, 1))
    await billed.close("2025-11")

    settled = await billed.settle()
    [second] = billed.end_of(date(2025, 12, 1))

    assert settled == 1
    assert first["total"] < await invoiced(billed, "2025-11") == first["total"] + second["total"]
    assert (await billed.items())[-1][
        0
    ] == "2025-11: rounding, and usage that is invoiced in another month"


async def test_an_item_whose_answer_was_lost_is_found(world: tuple[Billed, ModelPrice]) -> None:
    billed, price = world
    await billed.use(price, *USED)
    await billed.deliver()
    [draft] = billed.end_of(date(2025, 11, 1))
    await billed.adjust(-7 * CENT)
    await billed.close("2025-11")
    billed.stripe.lose_items = 2
    for _ in range(2):
        assert await billed.settle(1) == 0
        billed.stripe.answered.clear()  # as a day later

    assert await billed.settle() == 1
    assert len(billed.stripe.account.of("invoiceitems")) == len(await billed.items()) == 2
    assert draft["total"] == await invoiced(billed, "2025-11")


@pytest.mark.parametrize("finalizing", Finalizing)
async def test_a_draft_of_usage_is_held_as_soon_as_stripe_reports_it(
    world: tuple[Billed, ModelPrice], finalizing: Finalizing
) -> None:
    billed, _ = world
    environment = billed.stripe.environment | {"WEIR_STRIPE_FINALIZE": finalizing.value}
    gateway = StripeGateway(stripe_settings(environment))
    [draft] = billed.end_of(date(2025, 11, 1))
    event = {
        "id": "evt_1",
        "type": "invoice.created",
        "created": 1,
        "data": {"object": {"id": draft["id"]}},
    }
    await execute(
        billed.sessions,
        "INSERT INTO stripe_events (id, type, payload) VALUES ('evt_1', 'invoice.created',"
        " CAST(:payload AS jsonb))",
        {"payload": json.dumps(event)},
    )

    assert await handle_events(billed.sessions, gateway) == 1

    assert draft["auto_advance"] is (finalizing is Finalizing.STRIPE)


async def test_drafts_of_others_are_left_alone(world: tuple[Billed, ModelPrice]) -> None:
    billed, _ = world
    assert billed.gateway is not None
    [draft] = billed.end_of(date(2025, 11, 1))
    first = draft | {"id": "in_first", "period_end": draft["period_start"]}
    single = draft | {"id": "in_single", "parent": None}
    billed.stripe.account.of("invoices").update({each["id"]: each for each in (first, single)})

    held = [await hold_draft(billed.gateway, id) for id in ("in_first", "in_single", "in_none")]
    for subscription in billed.stripe.account.of("subscriptions").values():
        subscription["metadata"] = {"namespace": "another"}
    held.append(await hold_draft(billed.gateway, draft["id"]))

    assert held == [False] * 4
    assert draft["auto_advance"]


async def test_over_months_with_late_items_and_late_closes_all_invoices_together_are_ours(
    world: tuple[Billed, ModelPrice], database_url: str
) -> None:
    """October is finalized with a late item, November held, late usage in between."""
    billed, price = world
    october = NOVEMBER - timedelta(days=31)
    billed.stripe.account.clock = datetime(2025, 11, 5, tzinfo=UTC).timestamp
    await billed.use(price, Consumed(1_111_111, 3, 333_333, settled_at=october))
    await billed.deliver()
    [first] = billed.end_of(date(2025, 10, 1))
    billed.stripe.account.finalize(first["id"])
    # Known before the close, but too late for Stripe.
    await billed.use(price, Consumed(0, 0, 55_555, settled_at=october))
    await billed.close("2025-10")
    await billed.deliver()
    late = 55_555 * 600_000 // CENT
    await execute(
        billed.sessions,
        """
            INSERT INTO stripe_late_items (organization_id, currency_code, period_start, period_end,
                                           token_count, exact_picos, carried_in_picos, amount_minor,
                                           stripe_id)
            VALUES (:owner, 'USD', '2025-10-01+00', '2025-11-01+00', 55555, 33333000000, 0, :late,
                'ii_late')
            """,
        {"owner": billed.customer.organization_id, "late": late},
    )
    item = {"customer": billed.customer_id, "amount": late, "currency": "usd"}
    billed.stripe.account.create("invoiceitems", item)
    settled = await billed.settle()
    await billed.use(price, *USED, Consumed(0, 0, 77_777, settled_at=october))
    billed.stripe.account.clock = NOW.timestamp
    await billed.deliver()
    [second] = billed.end_of(date(2025, 11, 1))
    await billed.close("2025-11")
    settled += await billed.settle()

    ours = await invoiced(billed, "2025-10") + await invoiced(billed, "2025-11")
    assert settled == 2
    assert first["total"] + second["total"] == ours
    assert (
        abs(
            sum(
                amount
                for description, amount in await billed.items()
                if description.startswith("2025-10: rounding")
            )
        )
        <= 2
    )
    check_invariants(database_url)


FAULTS = faults("""
    is due         | UPDATE stripe_month_items SET amount_minor = amount_minor - 1
    is due         | UPDATE stripe_month_settlements SET invoiced_minor = invoiced_minor + 1
    the invoice is | UPDATE stripe_month_settlements SET due_picos = due_picos + 1
    is not closed  | UPDATE billing_months SET state = 'open', closed_at = NULL, closed_by = NULL
                   | WHERE month = '2025-11-01'
""")


async def test_settled_items_cannot_be_changed_and_each_planted_fault_is_detected(
    world: tuple[Billed, ModelPrice], database_url: str
) -> None:
    billed, price = world
    await billed.use(price, *USED)
    await billed.deliver()
    billed.end_of(date(2025, 11, 1))
    await billed.close("2025-11")
    await billed.settle()

    for change in (
        "UPDATE stripe_month_items SET amount_minor = 1",
        "UPDATE stripe_month_items SET stripe_id = 'ii_2'",
        "DELETE FROM stripe_month_items",
        "UPDATE stripe_month_settlements SET due_minor = 1",
        "UPDATE stripe_month_settlements SET settled_at = now()",
        "TRUNCATE stripe_month_settlements CASCADE",
    ):
        with pytest.raises(DBAPIError, match=r"never changes|append-only"):
            await execute(billed.sessions, change)
    assert unseen(database_url, FAULTS, Moment.ALWAYS) == []
    await execute_unguarded(
        billed.sessions, "UPDATE stripe_month_settlements SET invoiced_minor = invoiced_minor - 1"
    )
    assert await billed.unsettled("2025-11") == [Stage.SETTLEMENT]


def test_a_bad_setting_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="must be close or stripe"):
        stripe_settings({"STRIPE_API_KEY": "sk_test_1", "WEIR_STRIPE_FINALIZE": "never"})


@pytest.mark.parametrize(
    ("currency_code", "picos", "units"),
    [
        ("USD", -123 * CENT, -123),
        ("USD", CENT // 2, 1),
        ("JPY", 12 * PICOS_PER_UNIT, 12),
        ("MGA", 1_990_000_000_000, 1),
        ("MGA", -1_990_000_000_000, -1),
        ("ISK", 12 * PICOS_PER_UNIT, 1200),
    ],
)
def test_amounts_are_in_units_that_stripe_uses(currency_code: str, picos: int, units: int) -> None:
    assert whole_units(picos, currency_code) == units
