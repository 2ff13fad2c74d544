"""Usage after Stripe's invoice: one invoice item per token, despite failures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from metering.core.errors import InvalidValue
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import stripe_settings
from metering.export.invoice_items import invoice_late_usage, make_item
from metering.export.reconciliation import Stage, invoiced, local_differences, our_month
from metering.export.stripe_gateway import StripeGateway, minor_unit_picos
from metering.export.stripe_sync import resend
from metering.store.db import Sessions
from tests.metering.exported_usage import hours_ago, known_to_stripe
from tests.metering.queries import execute, fetch_rows, fetch_value
from tests.metering.usage import Acme, Consumed, Customer
from tests.stripe_double.server import StripeDouble

USED = Consumed(output_token_count=12_345_678, settled_at=hours_ago(3))  # 7.4074068 dollars
MORE = Consumed(output_token_count=10_000_000, settled_at=hours_ago(3))  # 6 dollars


@pytest.fixture
async def gateway(double: StripeDouble, acme: Acme) -> StripeGateway:
    """Yield a gateway to a Stripe that knows the customer."""
    async with acme.sessions.begin() as session:
        await known_to_stripe(session, double.account, acme.customer, acme.price)
    await form_batches(acme.sessions)
    await execute(
        acme.sessions, "UPDATE export_progress SET late_items_since = now() - interval '1 day'"
    )
    return StripeGateway(stripe_settings(double.environment))


async def deliver(acme: Acme, gateway: StripeGateway, used: Consumed) -> None:
    """Export usage of an hour that is over, so that Stripe counts it."""
    await acme.use_and_rate(used)
    await form_batches(acme.sessions)
    await deliver_pending(acme.sessions, gateway)


async def finalise(sessions: Sessions, customer: Customer, ago: timedelta) -> None:
    """Finalize the invoice of the usage's month."""
    begins = USED.settled_at.replace(day=1, hour=0, minute=0)
    await execute(
        sessions,
        """
            INSERT INTO stripe_invoices (id, organization_id, customer_id, currency_code,
                                         period_start, period_end, amount_due_minor,
                                         amount_paid_minor, finalized_at, last_event_at)
            VALUES ('in_1', :organization_id, 'cus_1', 'USD', :begins, :ends, 0, 0, :finalized_at,
                now())
            """,
        {
            "organization_id": customer.organization_id,
            "begins": begins,
            "ends": (begins + timedelta(days=31)).replace(day=1),
            "finalized_at": datetime.now(UTC) - ago,
        },
    )


def amounts(double: StripeDouble) -> list[int]:
    """Return the amounts of the items at Stripe, in cents."""
    return [item["amount"] for item in double.account.of("invoiceitems").values()]


async def late_tokens(sessions: Sessions) -> int:
    """Return the number of tokens that the reconciliation finds on no invoice."""
    async with sessions() as session:
        found = await local_differences(
            session, await our_month(session, f"{USED.settled_at:%Y-%m}")
        )
    return sum(each.token_count for each in found if each.stage is Stage.LATE)


async def test_late_usage_becomes_one_item_and_what_rounding_leaves_goes_into_the_next(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await finalise(acme.sessions, acme.customer, timedelta(hours=1))
    await deliver(acme, gateway, USED)
    before = await late_tokens(acme.sessions)

    created = [await invoice_late_usage(acme.sessions, gateway) for _ in range(2)]
    after = await late_tokens(acme.sessions)
    await deliver(acme, gateway, MORE)
    created.append(await invoice_late_usage(acme.sessions, gateway))

    assert (before, after) == (12_345_678, 0)
    assert created == [1, 0, 1]
    assert amounts(double) == [741, 600]
    first, _ = double.account.of("invoiceitems").values()
    assert first["description"].startswith("Late usage of ")
    assert first["description"].endswith(": 12,345,678 tokens")
    query = "SELECT exact_picos, carried_in_picos FROM stripe_late_items ORDER BY number"
    rows = [tuple(map(int, row)) for row in await fetch_rows(acme.sessions, query)]
    assert rows == [
        (7_407_406_800_000, 0),
        (6_000_000_000_000, 7_407_406_800_000 - 7_410_000_000_000),
    ]


async def test_an_item_whose_answer_was_lost_is_found_and_not_made_again(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await finalise(acme.sessions, acme.customer, timedelta(hours=1))
    await deliver(acme, gateway, USED)
    double.lose_items = 1
    refused = await invoice_late_usage(acme.sessions, gateway)
    double.answered.clear()  # as a day later
    [lost] = double.account.of("invoiceitems").values()

    created = await invoice_late_usage(acme.sessions, gateway)

    assert (refused, created) == (0, 1)
    assert amounts(double) == [741]
    assert await fetch_value(acme.sessions, "SELECT stripe_id FROM stripe_late_items") == lost["id"]


@pytest.mark.parametrize(
    ("finalised_ago", "items_since"),
    [(timedelta(minutes=2), "now() - interval '1 day'"), (timedelta(hours=1), "now()")],
    ids=["nobody knows which was first", "before there were such items"],
)
async def test_usage_that_may_be_invoiced_or_corrected_already_is_left_to_a_person(
    acme: Acme,
    double: StripeDouble,
    gateway: StripeGateway,
    finalised_ago: timedelta,
    items_since: str,
) -> None:
    await execute(acme.sessions, f"UPDATE export_progress SET late_items_since = {items_since}")
    await finalise(acme.sessions, acme.customer, finalised_ago)
    await deliver(acme, gateway, USED)

    created = await invoice_late_usage(acme.sessions, gateway)

    assert (created, amounts(double)) == (0, [])
    assert await late_tokens(acme.sessions) == 12_345_678


async def test_a_batch_invoiced_by_an_item_stays_unsent(acme: Acme, gateway: StripeGateway) -> None:
    await finalise(acme.sessions, acme.customer, timedelta(hours=1))
    await deliver(acme, gateway, USED)
    await invoice_late_usage(acme.sessions, gateway)
    batch_id = await fetch_value(acme.sessions, "SELECT id FROM meter_batches")

    with pytest.raises(InvalidValue, match="invoice it twice"):
        await resend(acme.sessions, gateway, batch_id)


async def test_usage_that_was_counted_in_time_is_on_the_invoice_and_gets_no_item(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await deliver(acme, gateway, USED)
    await finalise(acme.sessions, acme.customer, -timedelta(minutes=1))

    assert await invoice_late_usage(acme.sessions, gateway) == 0
    assert amounts(double) == []


async def test_invoices_whose_periods_overlap_make_one_item_and_those_of_other_periods_none(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    """A year's invoice that ends with this month, and one whose contract ends within it."""
    await finalise(acme.sessions, acme.customer, timedelta(hours=1))
    async with acme.sessions.begin() as session:
        for number, (begins, ends) in enumerate(
            (
                ("period_start - interval '330 days'", "period_end"),
                ("period_start", "period_end + interval '10 days'"),
            ),
            2,
        ):
            await session.execute(
                text(f"""
                INSERT INTO stripe_invoices (id, organization_id, customer_id, currency_code,
                                             period_start, period_end, amount_due_minor,
                                             amount_paid_minor, finalized_at, last_event_at)
                SELECT 'in_{number}', organization_id, customer_id, currency_code, {begins}, {ends},
                    0, 0, finalized_at, last_event_at
                FROM stripe_invoices WHERE id = 'in_1'
                """)
            )
    await deliver(acme, gateway, USED)

    created = [await invoice_late_usage(acme.sessions, gateway) for _ in range(2)]

    assert (created, amounts(double)) == ([1, 0], [741])


def at_stripe(double: StripeDouble, subscription: str, **values: object) -> None:
    """Create the usage month's invoice of one of the customer's subscriptions."""
    [customer_id] = double.account.of("customers")
    begins = USED.settled_at.replace(day=1, hour=0, minute=0)
    ends = (begins + timedelta(days=31)).replace(day=1)
    double.account.of("subscriptions")[subscription] = {
        "id": subscription,
        "customer": customer_id,
        "metadata": {"namespace": "weir"},
    }
    double.account.of("invoices")[f"in_{subscription}"] = {
        "id": f"in_{subscription}",
        "customer": customer_id,
        "created": int(ends.timestamp()),
        "period_start": int(begins.timestamp()),
        "period_end": int(ends.timestamp()),
        "parent": {"subscription_details": {"subscription": subscription}},
        **values,
    }


def final(ago: timedelta) -> dict[str, object]:
    """Return the state of an invoice that was finalized then."""
    return {
        "status": "open",
        "status_transitions": {"finalized_at": int((datetime.now(UTC) - ago).timestamp())},
    }


async def test_of_several_subscriptions_the_last_invoice_decides_whether_usage_is_late(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    """Usage between two of them is on the second one; an item would charge it again."""
    await finalise(acme.sessions, acme.customer, timedelta(hours=1))
    await deliver(acme, gateway, USED)
    at_stripe(double, "sub_1", **final(timedelta(hours=1)))
    at_stripe(double, "sub_2", status="draft")

    while_one_is_a_draft = await invoice_late_usage(acme.sessions, gateway)
    at_stripe(double, "sub_2", **final(-timedelta(seconds=30)))
    before_its_webhook_came = await invoice_late_usage(acme.sessions, gateway)

    assert (while_one_is_a_draft, before_its_webhook_came, amounts(double)) == (0, 0, [])
    at_stripe(double, "sub_2", **final(timedelta(minutes=30)))
    assert await invoice_late_usage(acme.sessions, gateway) == 1
    assert amounts(double) == [741]


@pytest.mark.parametrize(
    ("currency_code", "amount"),
    [("USD", 1235), ("ISK", 1200), ("MGA", 12), ("JPY", 12), ("KWD", 12340)],
)
async def test_items_are_in_the_units_that_stripe_counts_the_currency_in(
    sessions: Sessions, customer: Customer, currency_code: str, amount: int
) -> None:
    """Some differ from ISO 4217; amounts below the smallest unit are carried."""
    picos = 12_345_600_000_000
    late = SimpleNamespace(
        organization_id=customer.organization_id,
        currency_code=currency_code,
        period_start=USED.settled_at,
        period_end=USED.settled_at + timedelta(days=1),
        token_count=1,
        picos=picos,
        batch_ids=[],
    )
    async with sessions.begin() as session:
        await make_item(session, late)  # type: ignore[arg-type]
        await make_item(session, late)  # type: ignore[arg-type]
        rows = await session.execute(
            text("SELECT amount_minor, carried_in_picos FROM stripe_late_items ORDER BY number")
        )
        (first, nothing), (_, carried) = rows.all()

    assert first == amount
    assert nothing == 0
    assert carried == picos - amount * minor_unit_picos(currency_code)
    invoice = SimpleNamespace(
        organization_id=customer.organization_id,
        organization="acme",
        currency_code=currency_code,
        ids=["in_1"],
        finalized_at=USED.settled_at,
        amount_due_minor=amount,
        in_time_picos=amount * minor_unit_picos(currency_code),
        item_minor=0,
        late_picos=0,
        line_count=2,
    )
    assert not list(invoiced(invoice))  # type: ignore[arg-type]
