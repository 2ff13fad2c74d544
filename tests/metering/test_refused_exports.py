"""Every refusal by Stripe comes to an end: the month is settled to the minor unit, or to the steps
of Stripe's amounts, and the rest is carried.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_UP
from typing import Any

import pytest

from metering.core.errors import InvalidValue
from metering.export.export_settings import stripe_settings
from metering.export.invoice_items import settle_months, whole_units
from metering.export.stripe_gateway import (
    AMOUNT_STEPS,
    NOT_BILLED,
    STRIPE_DIGITS,
    StripeGateway,
    in_steps,
    minor_unit_picos,
)
from metering.export.stripe_sync import Sync, export_status, resend
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from tests.metering.queries import execute, fetch_column
from tests.metering.test_month_items import NOW, Billed
from tests.metering.usage import Consumed, new_customer
from tests.stripe_double.server import StripeDouble, stripe_double

OCTOBER, NOVEMBER = (datetime(2025, month, 20, 12, 20, tzinfo=UTC) for month in (10, 11))
CURRENCIES = ("USD", "KWD", "JPY", "UGX", "MGA")


@pytest.fixture
def double() -> Iterator[StripeDouble]:
    with stripe_double(NOW.timestamp) as running:
        yield running


async def billed_in(
    currency_code: str, sessions: Sessions, double: StripeDouble
) -> tuple[Billed, ModelPrice]:
    """Return a customer with prices in this currency, known to Stripe since September 2025."""
    async with sessions.begin() as session:
        customer = await new_customer(session, "acme", currency_code)
    gateway = StripeGateway(stripe_settings(double.environment))
    billed = Billed(sessions, customer, currency_code=currency_code, double=double, gateway=gateway)
    # A token costs a part of the smallest amount and does not divide it.
    unit = minor_unit_picos(currency_code)
    price = await billed.price(
        datetime(2025, 1, 1, tzinfo=UTC), input_picos=unit // 700 * 10, output_picos=unit // 90
    )
    await Sync(sessions, gateway, False).run()
    await execute(
        sessions,
        "INSERT INTO export_progress (id, closed_until, scanned_until) VALUES (1,"
        " date_trunc('hour', now()), '2025-01-01')",
    )
    await execute(sessions, "UPDATE export_progress SET month_items_since = '2025-01-01'")
    return billed, price


def exported_minor(double: StripeDouble) -> int:
    """Return the sum of Stripe's final invoices, and of the items that wait for the next one."""
    account = double.account
    final = sum(
        int(each["total"]) for each in account.of("invoices").values() if each["status"] == "open"
    )
    waiting = [each for each in account.of("invoiceitems").values() if each["invoice"] is None]
    return final + sum(int(each["amount"]) for each in waiting)


async def ours_picos(billed: Billed) -> int:
    [total] = await billed.ask("SELECT coalesce(sum(total_picos), 0)::bigint FROM invoices")
    assert isinstance(total, int)
    return total


async def states(billed: Billed) -> set[str]:
    return set(await fetch_column(billed.sessions, "SELECT DISTINCT state FROM meter_batches"))


async def settled(billed: Billed) -> bool:
    """Settle until nothing changes; return whether no month is left."""
    assert billed.gateway is not None
    for _ in range(8):
        await settle_months(billed.sessions, billed.gateway)
    return not (await export_status(billed.sessions)).unsettled_months


def archive_meters(account: Any) -> None:
    account.of("billing/meters").clear()


def grow_old(account: Any) -> None:
    account.clock = (NOW + timedelta(days=90)).timestamp


def run_ahead(account: Any) -> None:
    account.clock = (OCTOBER - timedelta(days=40)).timestamp


REFUSALS = {"archived meters": archive_meters, "too old": grow_old, "in the future": run_ahead}


@pytest.mark.parametrize(
    ("refusal", "currency_code"),
    [*((each, "USD") for each in REFUSALS), *(("too old", each) for each in CURRENCIES[1:])],
)
async def test_usage_that_stripe_refuses_for_good_is_part_of_an_item(
    sessions: Sessions, double: StripeDouble, currency_code: str, refusal: str
) -> None:
    billed, price = await billed_in(currency_code, sessions, double)
    await billed.use(price, Consumed(345_678, 5_678, 34_567, settled_at=NOVEMBER))
    [draft] = billed.end_of(date(2025, 11, 1))
    meters = dict(double.account.of("billing/meters"))
    REFUSALS[refusal](double.account)
    await billed.deliver()
    assert await states(billed) == {"rejected"}
    double.account.of("billing/meters").update(meters)
    double.account.clock = NOW.timestamp
    await billed.close("2025-11")

    assert await settled(billed)

    assert draft["status"] == "open"
    step = AMOUNT_STEPS.get(currency_code, 1)
    rest = await ours_picos(billed) - exported_minor(double) * minor_unit_picos(currency_code)
    assert 0 <= rest < step * minor_unit_picos(currency_code)
    status = await export_status(sessions)
    assert status.needing_attention == ()
    assert await billed.unsettled("2025-11") == []
    [batch_id] = list(await billed.ask("SELECT (array_agg(id))[1] FROM meter_batches"))
    assert billed.gateway is not None
    with pytest.raises(InvalidValue, match="settled at Stripe by invoice items"):
        await resend(sessions, billed.gateway, batch_id)  # type: ignore[arg-type]


async def test_a_month_without_an_invoice_at_stripe_goes_on_the_next_one(
    sessions: Sessions, double: StripeDouble
) -> None:
    billed, price = await billed_in("USD", sessions, double)
    await billed.use(price, Consumed(345_678, 5_678, 34_567, settled_at=NOVEMBER))
    await billed.deliver()
    await billed.close("2025-11")  # its draft was deleted

    assert await settled(billed)
    [december] = billed.end_of(date(2025, 12, 1))

    assert december["total"] * minor_unit_picos("USD") == await ours_picos(billed) > 0


async def test_a_voided_invoice_is_not_rebilled(sessions: Sessions, double: StripeDouble) -> None:
    billed, price = await billed_in("USD", sessions, double)
    await billed.use(price, Consumed(345_678, 5_678, 34_567, settled_at=NOVEMBER))
    await billed.deliver()
    [draft] = billed.end_of(date(2025, 11, 1))
    double.account.finalize(draft["id"])
    draft["status"] = "void"
    await billed.close("2025-11")

    assert await settled(billed)

    assert double.account.of("invoiceitems") == {}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("currency_code", CURRENCIES)
async def test_over_months_of_any_refusals_all_invoices_come_to_ours_but_for_a_carried_rest(
    sessions: Sessions, double: StripeDouble, currency_code: str, seed: int
) -> None:
    chance = random.Random(f"{currency_code}{seed}")
    billed, price = await billed_in(currency_code, sessions, double)
    for month, at in ((date(2025, 10, 1), OCTOBER), (date(2025, 11, 1), NOVEMBER)):
        double.account.clock = (at + timedelta(days=13)).timestamp
        double.account.rounding = chance.choice([ROUND_DOWN, ROUND_HALF_UP])
        meters = dict(double.account.of("billing/meters"))
        await billed.use(price, Consumed(chance.randrange(10**6), 0, 7, settled_at=at))
        if chance.random() < 0.5:
            chance.choice(list(REFUSALS.values()))(double.account)
        await billed.deliver()
        double.account.of("billing/meters").update(meters)
        double.account.clock = (at + timedelta(days=13)).timestamp
        if chance.random() < 0.7:
            [draft] = billed.end_of(month)
            if chance.random() < 0.3:
                double.account.finalize(draft["id"])
        await billed.use(price, Consumed(1, 0, chance.randrange(10**4), settled_at=at))
        if chance.random() < 0.5:
            chance.choice(list(REFUSALS.values()))(double.account)
        await billed.deliver()
        double.account.of("billing/meters").update(meters)
        double.account.clock = (at + timedelta(days=13)).timestamp
        await billed.close(f"{month:%Y-%m}")
        assert await settled(billed), "nothing stays stuck"

    rest = await ours_picos(billed) - exported_minor(double) * minor_unit_picos(currency_code)
    step = AMOUNT_STEPS.get(currency_code, 1) * minor_unit_picos(currency_code)
    assert abs(rest) < step


def test_each_amount_is_one_that_stripe_takes() -> None:
    """Stripe: three decimals end in 0; ISK and UGX are written with two zeros."""
    amounts = (0, 1, 9, 10, 11, 99, 100, 12_345, -1, -11, -12_345)
    for currency_code, minor in itertools.product(set(STRIPE_DIGITS) - NOT_BILLED, amounts):
        step = {3: 10}.get(STRIPE_DIGITS[currency_code], 1)
        step = 100 if currency_code in ("ISK", "UGX") else step
        unit = minor_unit_picos(currency_code)

        amount = in_steps(whole_units(minor * unit, currency_code), currency_code)

        assert amount % step == 0, (currency_code, minor)
        assert abs(amount) <= abs(minor) + step, (currency_code, minor)
        assert in_steps(amount, currency_code) == amount, (currency_code, minor)
        assert abs(in_steps(minor, currency_code) - minor) < step, (currency_code, minor)
