"""Payment events of Stripe: equal states in any order, one alert each."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner
from weir_cli.__main__ import app

from metering.alerts import webhooks
from metering.alerts.alerts import ListedAlert, list_alerts
from metering.alerts.webhooks import body_of, deliver_alerts
from metering.export.invoice_payments import InvoicePayment, payments_by_month
from metering.export.stripe_gateway import StripeGateway
from metering.export.stripe_inbox import handle_events, store_event
from metering.export.stripe_sync import export_status
from metering.store.db import Sessions
from tests.metering.queries import execute
from tests.metering.usage import Customer, new_customer
from tests.metering.webhook_double import receiver
from tests.stripe_double.server import SECRET, signature

OCTOBER = int(datetime(2026, 10, 1, tzinfo=UTC).timestamp())
NOVEMBER = int(datetime(2026, 11, 1, tzinfo=UTC).timestamp())
URL = "https://invoice.stripe.com/i/test_1"


@pytest.fixture
async def billed(sessions: Sessions, customer: Customer) -> Customer:
    """Customer that Stripe knows as `cus_1`."""
    await at_stripe(sessions, customer, "cus_1")
    return customer


async def at_stripe(sessions: Sessions, customer: Customer, stripe_id: str) -> None:
    """Create the customer at Stripe."""
    row = {"ref": str(customer.organization_id), "stripe_id": stripe_id}
    await execute(
        sessions,
        "INSERT INTO stripe_objects (account, kind, ref, stripe_id) VALUES ('test',"
        " 'customer', :ref, :stripe_id)",
        row,
    )


def event(
    kind: str,
    after_s: int,
    *,
    id: str = "in_1",
    due: int = 1_234,
    paid: int = 0,
    customer: str = "cus_1",
) -> dict[str, Any]:
    """Return a Stripe event about an invoice of October."""
    invoice = {
        "id": id,
        "customer": customer,
        "currency": "usd",
        "period_start": OCTOBER,
        "period_end": NOVEMBER,
    }
    more = {
        "amount_due": due,
        "amount_paid": paid,
        "number": "ACME-0001",
        "hosted_invoice_url": URL,
    }
    created = NOVEMBER + after_s
    return {
        "id": f"evt_{uuid.uuid4().hex}",
        "type": f"invoice.{kind}",
        "created": created,
        "data": {"object": invoice | more},
    }


FINALIZED, FAILED, FAILED_AGAIN, PAID = (
    event("finalized", 10),
    event("payment_failed", 20),
    event("payment_failed", 25),
    event("paid", 30, paid=1_234),
)
OVERDUE, VOIDED, WRITTEN_OFF = (
    event("overdue", 40),
    event("voided", 50),
    event("marked_uncollectible", 50),
)


async def emit(sessions: Sessions, gateway: StripeGateway, *events: dict[str, Any]) -> None:
    """Deliver and process events one after the other."""
    for each in events:
        body = json.dumps(each).encode()
        await store_event(sessions, body, signature(body, int(time.time())), [SECRET])
        await handle_events(sessions, gateway)


async def payment(
    sessions: Sessions, customer: Customer, stripe_invoice_id: str = "in_1"
) -> InvoicePayment:
    """Return the payment state of an invoice of October."""
    async with sessions() as session:
        found = await payments_by_month(session, customer.organization_id)
    return next(each for each in found["2026-10"] if each.stripe_invoice_id == stripe_invoice_id)


async def alerts(sessions: Sessions) -> list[ListedAlert]:
    """Return all alerts, the oldest first."""
    async with sessions() as session:
        found, _ = await list_alerts(session, organization_id=None)
    return found[::-1]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([FINALIZED], "open"),
        ([FINALIZED, FAILED], "failed"),
        ([FINALIZED, FAILED, FAILED_AGAIN, PAID], "paid"),
        ([FINALIZED, OVERDUE], "overdue"),
        ([FINALIZED, FAILED, OVERDUE], "failed"),
        ([FINALIZED, FAILED, VOIDED], "void"),
        ([FINALIZED, FAILED, WRITTEN_OFF], "uncollectible"),
        ([FINALIZED, WRITTEN_OFF, PAID], "paid"),
    ],
)
async def test_the_state_is_the_same_in_every_order_and_after_repetitions(
    events: Sequence[dict[str, Any]],
    state: str,
    sessions: Sessions,
    billed: Customer,
    gateway: StripeGateway,
) -> None:
    for number, order in enumerate(itertools.permutations(events)):
        renamed = [json.loads(json.dumps(each).replace("in_1", f"in_{number}")) for each in order]
        unique = [each | {"id": f"{each['id']}_{number}"} for each in renamed]
        await emit(sessions, gateway, *unique, *unique)
        found = await payment(sessions, billed, f"in_{number}")
        assert (found.state, found.amount_due_picos, found.hosted_url) == (
            state,
            12_340_000_000_000,
            URL,
        ), order


async def test_each_kind_alerts_once_however_often_and_late_it_is_reported(
    sessions: Sessions, billed: Customer, gateway: StripeGateway
) -> None:
    again = FAILED | {"id": "evt_again"}
    await emit(sessions, gateway, FINALIZED, FAILED, FAILED, again, FAILED_AGAIN)
    failed = await alerts(sessions)
    await emit(
        sessions, gateway, PAID, PAID | {"id": "evt_paid_again"}, FAILED_AGAIN | {"id": "evt_late"}
    )

    assert [each.kind for each in failed] == ["invoice_payment_failed"]
    assert [each.kind for each in await alerts(sessions)] == [
        "invoice_payment_failed",
        "invoice_paid",
    ]


async def test_a_failure_reported_after_the_payment_sends_no_alert(
    sessions: Sessions, billed: Customer, gateway: StripeGateway
) -> None:
    await emit(sessions, gateway, PAID, FAILED)

    assert [each.kind for each in await alerts(sessions)] == ["invoice_paid"]
    assert (await payment(sessions, billed)).state == "paid"


async def test_an_invoice_of_zero_and_an_unknown_one_send_no_alert(
    sessions: Sessions, billed: Customer, gateway: StripeGateway
) -> None:
    await emit(
        sessions,
        gateway,
        event("paid", 1, due=0),
        event("paid", 1, id="in_2", customer="cus_stranger", paid=5),
    )

    assert await alerts(sessions) == []


async def test_a_webhook_gets_each_alert_and_every_attempt_says_the_same(
    sessions: Sessions, billed: Customer, gateway: StripeGateway
) -> None:
    async with receiver() as there:
        async with sessions.begin() as session:
            await webhooks.set_webhook(
                session, organization="acme", url=there.url, private=True, actor="test"
            )
        await emit(sessions, gateway, FINALIZED, FAILED)
        [waiting] = await alerts(sessions)
        before = body_of(waiting)
        await emit(sessions, gateway, event("payment_failed", 60, due=999))
        assert body_of((await alerts(sessions))[0]) == before
        await emit(sessions, gateway, PAID)
        delivered = await deliver_alerts(sessions, private=True, budget_s=60)

    posted = {body["type"]: body for body in (json.loads(each.body) for each in there.received)}
    assert len(delivered.delivered) == 2
    assert posted.keys() == {"invoice_payment_failed", "invoice_paid"}
    failed = posted["invoice_payment_failed"]
    assert (
        failed["text"] == "The invoice of acme for 2026-10 could not be charged: 12.34 USD are due."
    )
    assert failed["invoice"] == {
        "stripe_id": "in_1",
        "stripe_number": "ACME-0001",
        "month": "2026-10",
        "currency": "USD",
        "amount_due_picos": "12340000000000",
        "amount_paid_picos": "0",
        "hosted_url": URL,
    }
    assert posted["invoice_paid"]["text"] == "The invoice of acme for 2026-10 is paid: 12.34 USD."


async def test_an_organization_sees_its_own_payments_alone(
    sessions: Sessions, billed: Customer, gateway: StripeGateway
) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "bolt")
    await at_stripe(sessions, other, "cus_2")
    await emit(
        sessions, gateway, FINALIZED, event("paid", 1, id="in_2", customer="cus_2", paid=1_234)
    )

    async with sessions() as session:
        ours = await payments_by_month(session, billed.organization_id)
        theirs = await payments_by_month(session, other.organization_id)
    assert [each.stripe_invoice_id for each in ours["2026-10"]] == ["in_1"]
    assert [each.stripe_invoice_id for each in theirs["2026-10"]] == ["in_2"]


async def test_the_status_names_what_is_not_paid(
    sessions: Sessions,
    billed: Customer,
    gateway: StripeGateway,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await emit(sessions, gateway, FINALIZED, FAILED)
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)

    reported = await asyncio.to_thread(CliRunner().invoke, app, ["stripe", "status"])
    as_json = await asyncio.to_thread(CliRunner().invoke, app, ["stripe", "status", "--json"])
    await emit(sessions, gateway, PAID)

    assert f"acme  2026-10  12.34 USD  payment failed: {URL}" in reported.stdout
    assert json.loads(as_json.stdout)["unpaid_invoices"][0]["state"] == "failed"
    assert (await export_status(sessions)).unpaid_invoices == ()
