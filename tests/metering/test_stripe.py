"""Stripe's objects, events and sums, with a protocol double and the real SDK."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import os
import re
import time
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import stripe
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner
from weir_cli.__main__ import app

from api.cli.stack import StackFailed, optional_children
from metering.celery_app import refuse_without_database
from metering.core.errors import AlreadyExists, BillingDetailsMissing, InvalidValue, StripeFailed
from metering.core.money import MINOR_DIGITS
from metering.export import stripe_inbox
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import (
    Collection,
    StripeSettings,
    WebhookSettings,
    export_settings,
    stripe_settings,
    webhook_settings,
)
from metering.export.reconciliation import our_month, stripe_counts
from metering.export.stripe_gateway import StripeGateway, stripe_digits, unit_amount_decimal
from metering.export.stripe_inbox import (
    BODY_MAX_BYTES,
    INVOICE_TIMES,
    PATH,
    handle_events,
    parsed_event,
    webhook_server,
)
from metering.export.stripe_sync import Sync, export_status, payment_method_page, resend, settle
from metering.pricing.prices import ModelPrice, withdraw_price
from metering.store.db import Sessions
from metering.tenants.billing_profiles import BillingProfile, set_billing_profile
from metering.tenants.tenants import create_organization
from tests.growth import HOLD_MAX_S, Call, as_in_service, check_growth, check_hold
from tests.metering.exported_usage import check_delivered, hours_ago, states
from tests.metering.invariants import check_export
from tests.metering.queries import execute, fetch_column, fetch_row, fetch_value
from tests.metering.usage import Acme, Consumed, new_customer, new_price, rates_of
from tests.stripe_double.account import MISSING_EMAIL
from tests.stripe_double.form import SCHEMA
from tests.stripe_double.server import KEY, SECRET, StripeDouble, signature

BILLED = frozenset(MINOR_DIGITS) - {"CLF", "IQD", "LYD", "UYI", "UYW"}

LOWER = rates_of(100_000, 10_000, 500_000)
TO_EVENTS = b"POST /stripe/events HTTP/1.1\r\nHost: here\r\n"
NO_ANSWER = 0  # status for a sender that has disconnected
ODD_EVENTS = {
    "NUL in the type": b'{"id":"evt_1","type":"a\\u0000b"}',
    "NUL in the payload": b'{"id":"evt_1","type":"a","x":"\\u0000"}',
    "NUL as a key": b'{"id":"evt_1","type":"a","\\u0000":1}',
    "lone surrogate in the id": b'{"id":"evt_1\\ud800","type":"x"}',
    "lone surrogate in the payload": b'{"id":"evt_1","type":"x","a":"\\udfff"}',
    "NaN": b'{"id":"evt_1","type":"x","a":NaN}',
    "Infinity": b'{"id":"evt_1","type":"x","a":-Infinity}',
    "number too large for a float": b'{"id":"evt_1","type":"x","a":1e999}',
    "number of 5,000 digits": b'{"id":"evt_1","type":"x","a":' + b"9" * 5000 + b"}",
    "200,000 brackets": b"[" * 200_000,
    "200,000 levels": b'{"id":"evt_1","type":"x","a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "list": b"[]",
    "text": b'"x"',
    "no id": b'{"type":"x"}',
    "id that is not a text": b'{"id":null,"type":"x"}',
    "type that is not a text": b'{"id":"evt_1","type":["x"]}',
    "no UTF-8": b"\xff\xfe",
    "empty": b"",
}
ODD_SIGNATURES = (
    b"t=%d,v1=\xc3\xa9",
    b"t=%d,v1=\xff",
    b"\xe2\x98\x83=%d",
    b"t=\xd9\xa1%d,v1=00",
    b"t=%d" + b"0" * 5000 + b",v1=00",
    b"t=%d,v1=" + b"=," * 3000,
    b"%d",
)


async def delivered(acme: Acme, gateway: StripeGateway) -> list[uuid.UUID]:
    """Deliver usage of an hour to Stripe; return the batches' ids."""
    await Sync(acme.sessions, gateway, False).run()
    await acme.use_and_rate(Consumed(100, 30, 20, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    await deliver_pending(acme.sessions, gateway)
    return list(
        await fetch_column(acme.sessions, "SELECT id FROM meter_batches ORDER BY token_kind")
    )


def month_of_usage() -> str:
    """Return the month of `delivered`."""
    return f"{hours_ago(3):%Y-%m}"


@pytest.mark.parametrize(
    ("picos", "currency", "amount"),
    [
        (150_000, "USD", "0.000015"),
        (1, "USD", "0.0000000001"),
        (0, "USD", "0"),
        (10**13, "EUR", "1000"),
        (1, "JPY", "0.000000000001"),
        (1_500, "KWD", "0.0000015"),
        (150_000, "MGA", "0.00000015"),
    ],
)
def test_a_price_is_written_in_stripes_minor_unit(picos: int, currency: str, amount: str) -> None:
    assert unit_amount_decimal(picos, currency) == amount


@given(picos=st.integers(0, 10**13), currency=st.sampled_from(sorted(BILLED)))
def test_no_pico_of_a_price_is_lost_at_stripe(picos: int, currency: str) -> None:
    assert (
        Decimal(unit_amount_decimal(picos, currency)).scaleb(12 - stripe_digits(currency)) == picos
    )


@pytest.mark.parametrize("currency", ["CLF", "IQD", "XTS"])
def test_a_currency_that_stripe_does_not_bill_is_refused(currency: str) -> None:
    with pytest.raises(InvalidValue, match="Stripe does not bill"):
        unit_amount_decimal(1, currency)


def test_the_double_knows_the_version_of_the_api_that_the_sdk_speaks() -> None:
    """After an SDK update the double's schema must be generated again."""
    assert SCHEMA["api_version"] == stripe.api_version


def test_no_secret_shows_and_no_bad_setting_passes() -> None:
    secret = {
        "WEIR_EXPORT": "stripe",
        "STRIPE_API_KEY": "sk_live_abc",
        "WEIR_STRIPE_WEBHOOK_SECRET": "whsec_abc",
    }
    assert "abc" not in repr(export_settings(secret)) + repr(webhook_settings(secret))
    assert stripe_settings(secret).account == "live"
    for name, value in [
        ("WEIR_EXPORT", "everywhere"),
        ("STRIPE_API_KEY", "pk_test_x"),
        ("WEIR_STRIPE_API_BASE", "http://elsewhere.example"),
        ("WEIR_STRIPE_NAMESPACE", "A b"),
        ("WEIR_STRIPE_COLLECTION", "by force"),
    ]:
        with pytest.raises(InvalidValue, match=name):
            export_settings({**secret, name: value})


def test_nothing_starts_with_a_bad_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", "postgresql:///weir")
    monkeypatch.setenv("WEIR_EXPORT", "stripe")
    monkeypatch.setenv("STRIPE_API_KEY", "sk_live")

    with pytest.raises(SystemExit, match="STRIPE_API_KEY: must be a secret"):
        refuse_without_database()
    with pytest.raises(StackFailed, match="STRIPE_API_KEY: must be a secret"):
        optional_children(os.environ, tmp_path)
    assert [
        each.name for each in optional_children({"WEIR_STRIPE_WEBHOOK_SECRET": "whsec_x"}, tmp_path)
    ] == ["endpoint for Stripe's events"]
    assert optional_children({}, tmp_path) == []


async def test_a_sync_creates_what_is_missing_once_and_finds_it_again(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    planned = await Sync(acme.sessions, gateway, True).run()
    before = sum(map(len, double.account.objects.values()))

    created = await Sync(acme.sessions, gateway, False).run()
    again = await Sync(acme.sessions, gateway, False).run()
    await execute(acme.sessions, "DELETE FROM stripe_objects")
    forgotten = await Sync(acme.sessions, gateway, False).run()

    (subscription,) = double.account.of("subscriptions").values()
    amounts = {
        each["lookup_key"]: each["unit_amount_decimal"]
        for each in double.account.of("prices").values()
    }
    version = acme.price.prices.version
    assert before == 0
    assert len(planned) == len(created) == 1 + 1 + 3 + 3 + 1
    assert (again, forgotten) == ([], [])
    assert amounts == {
        f"weir_{version}_input": "0.000015",
        f"weir_{version}_cached_input": "0.0000015",
        f"weir_{version}_output": "0.00006",
    }
    assert subscription["collection_method"] == "send_invoice"


async def nameless(sessions: Sessions, name: str) -> None:
    """Create an organization without a billing profile."""
    async with sessions.begin() as session:
        await create_organization(session, name=name, actor="test")


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_sync_names_customers_without_an_address_and_sends_nothing(
    dry_run: bool, acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await nameless(acme.sessions, "bolt")
    await nameless(acme.sessions, "crane")

    with pytest.raises(BillingDetailsMissing) as refused:
        await Sync(acme.sessions, gateway, dry_run).run()

    assert [each.split(" ")[0] for each in refused.value.missing] == ["bolt", "crane"]
    assert all(
        f"weir org billing {name} --email" in str(refused.value) for name in ("bolt", "crane")
    )
    assert double.calls == {}


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--json"]])
async def test_the_command_says_what_is_missing_and_fails(
    arguments: list[str],
    sessions: Sessions,
    price: ModelPrice,
    double: StripeDouble,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await nameless(sessions, "bolt")
    for name, value in {**double.environment, "WEIR_DATABASE_URL": database_url}.items():
        monkeypatch.setenv(name, value)

    reported = await asyncio.to_thread(CliRunner().invoke, app, ["stripe", "sync", *arguments])

    assert reported.exit_code == 1
    assert "bolt has no billing e-mail address" in reported.output
    assert double.calls == {}


@pytest.mark.parametrize(
    ("collection", "days_until_due"), [(Collection.SEND_INVOICE, 30), (Collection.CHARGE, None)]
)
async def test_a_new_account_is_set_up_in_either_way_of_collection(
    collection: Collection, days_until_due: int | None, acme: Acme, double: StripeDouble
) -> None:
    if collection is Collection.CHARGE:
        await nameless(acme.sessions, "bolt")  # charging needs no e-mail address
    gateway = StripeGateway(StripeSettings(KEY, api_base=double.url, collection=collection))

    sync = Sync(acme.sessions, gateway, False)
    await sync.run()

    subscriptions = list(double.account.of("subscriptions").values())
    assert {each["collection_method"] for each in subscriptions} == {str(collection)}
    assert {each.get("days_until_due") for each in subscriptions} == {days_until_due}
    emails = {each["name"]: each.get("email") for each in double.account.of("customers").values()}
    assert emails["acme"] == "billing@acme.example"
    assert sync.without_payment_method == (
        [] if collection is Collection.SEND_INVOICE else ["acme", "bolt"]
    )


async def test_the_double_refuses_to_send_invoices_without_an_address_as_stripe_does(
    double: StripeDouble, gateway: StripeGateway
) -> None:
    customer = (await gateway.call("post", "/v1/customers", name="bolt"))["id"]
    sent = {"customer": customer, "collection_method": "send_invoice", "items": []}

    with pytest.raises(StripeFailed, match=re.escape(MISSING_EMAIL)):
        await gateway.call("post", "/v1/subscriptions", **sent, days_until_due=30)
    await gateway.call("post", f"/v1/customers/{customer}", email="billing@bolt.example")
    with pytest.raises(StripeFailed, match="days_until_due"):
        await gateway.call("post", "/v1/subscriptions", **sent)
    with pytest.raises(StripeFailed, match="days_until_due"):
        await gateway.call(
            "post", "/v1/subscriptions", customer=customer, items=[], days_until_due=30
        )


async def set_profile(sessions: Sessions, profile: BillingProfile) -> None:
    """Set the billing profile of `acme`."""
    async with sessions.begin() as session:
        await set_billing_profile(session, organization="acme", profile=profile, actor="test")


async def test_a_customer_at_stripe_follows_its_billing_profile(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await Sync(acme.sessions, gateway, False).run()
    whole = BillingProfile(
        emails=("bills@acme.example", "cfo@acme.example"),
        legal_name="Acme GmbH",
        address_line1="Lindenstraße 1",
        city="Berlin",
        country="DE",
        language="de",
    )
    await set_profile(acme.sessions, whole)

    stale = (await export_status(acme.sessions)).changed_profiles
    planned = Sync(acme.sessions, gateway, True)
    await planned.run()
    (at_stripe,) = double.account.of("customers").values()
    before = dict(at_stripe)
    changed = Sync(acme.sessions, gateway, False)
    await changed.run()
    again = Sync(acme.sessions, gateway, False)
    await again.run()

    assert stale == ("acme",)
    assert (
        planned.updated
        == changed.updated
        == ["customer acme: name, email, address, preferred_locales"]
    )
    assert before["email"] == "billing@acme.example"
    assert at_stripe["name"] == "Acme GmbH"
    assert at_stripe["email"] == "bills@acme.example"
    assert at_stripe["preferred_locales"] == ["de"]
    assert {part: text for part, text in at_stripe["address"].items() if text} == {
        "line1": "Lindenstraße 1",
        "city": "Berlin",
        "country": "DE",
    }
    assert (again.created, again.updated) == ([], [])
    assert (await export_status(acme.sessions)).changed_profiles == ()

    await set_profile(acme.sessions, BillingProfile(emails=("bills@acme.example",)))
    await Sync(acme.sessions, gateway, False).run()
    last = Sync(acme.sessions, gateway, False)
    await last.run()
    assert (at_stripe["name"], at_stripe["address"], last.updated) == ("acme", "", [])


async def test_without_a_profile_what_was_entered_at_stripe_is_left_alone(
    sessions: Sessions, price: ModelPrice, double: StripeDouble
) -> None:
    await nameless(sessions, "bolt")
    gateway = StripeGateway(StripeSettings(KEY, api_base=double.url, collection=Collection.CHARGE))
    await Sync(sessions, gateway, False).run()
    (at_stripe,) = double.account.of("customers").values()
    await gateway.call("post", f"/v1/customers/{at_stripe['id']}", email="by-hand@bolt.example")

    again = Sync(sessions, gateway, False)
    await again.run()

    assert (at_stripe["email"], again.updated) == ("by-hand@bolt.example", [])


async def test_customers_that_cannot_be_charged_are_named_until_there_is_a_payment_method(
    acme: Acme, double: StripeDouble
) -> None:
    gateway = StripeGateway(StripeSettings(KEY, api_base=double.url, collection=Collection.CHARGE))
    first, second = Sync(acme.sessions, gateway, False), Sync(acme.sessions, gateway, False)
    await first.run()
    waiting = (await export_status(acme.sessions)).without_payment_method
    page = await payment_method_page(acme.sessions, gateway, "acme")
    (at_stripe,) = double.account.of("customers").values()
    await gateway.call(
        "post",
        f"/v1/customers/{at_stripe['id']}",
        invoice_settings={"default_payment_method": "pm_1"},
    )
    await second.run()

    assert first.without_payment_method == list(waiting) == ["acme"]
    assert page.startswith("https://")
    assert second.without_payment_method == []
    assert (await export_status(acme.sessions)).without_payment_method == ()


async def test_a_new_price_gets_its_own_meters_and_subscriptions_hold_no_more_than_stripe_allows(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await Sync(acme.sessions, gateway, False).run()
    async with acme.sessions.begin() as session:
        for number in range(6):
            await new_price(session, f"model-{number}")

    await Sync(acme.sessions, gateway, False).run()
    again = await Sync(acme.sessions, gateway, False).run()

    items = list(double.account.of("subscription_items").values())
    per_subscription = sorted(
        len(list(group))
        for _, group in itertools.groupby(sorted(each["subscription"] for each in items))
    )
    assert len({each["price"]["id"] for each in items}) == len(items) == 21
    assert per_subscription == [1, 20]
    assert again == []


async def test_a_customers_own_price_is_in_no_other_subscription(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    """Each version and kind has one meter; a withdrawal needs none."""
    async with acme.sessions.begin() as session:
        await new_customer(session, "other")
        own = await new_price(session, organization="acme", **LOWER, batch_multiplier_milli=500)
        ended = await new_price(session, "ended", organization="acme", **LOWER)
    async with acme.sessions.begin() as session:
        await withdraw_price(session, model="ended", organization="acme", actor="test")

    await Sync(acme.sessions, gateway, False).run()

    names = {each["id"]: each["name"] for each in double.account.of("customers").values()}
    subscriptions = {
        each["id"]: names[each["customer"]] for each in double.account.of("subscriptions").values()
    }
    versions = {
        each["id"]: int(each["lookup_key"].split("_")[1])
        for each in double.account.of("prices").values()
    }
    held: dict[str, set[int]] = {"acme": set(), "other": set()}
    for item in double.account.of("subscription_items").values():
        held[subscriptions[item["subscription"]]].add(versions[item["price"]["id"]])
    listed, first = acme.price.prices.version, own.prices.version
    assert held == {"acme": {listed, first, first + 1}, "other": {listed}}
    nicknames = {
        each["lookup_key"]: each["nickname"] for each in double.account.of("prices").values()
    }
    assert (
        nicknames[f"weir_{first + 1}_output"]
        == f"demo, batch output tokens (price version {first + 1})"
    )
    assert f"weir_{ended.prices.version}_output" not in nicknames


async def test_a_price_that_differs_at_stripe_is_reported_and_not_used(
    acme: Acme, double: StripeDouble, gateway: StripeGateway
) -> None:
    await Sync(acme.sessions, gateway, False).run()
    next(iter(double.account.of("prices").values()))["unit_amount_decimal"] = "0.000016"

    with pytest.raises(AlreadyExists, match=r"0\.000016 usd"):
        await Sync(acme.sessions, gateway, False).run()


async def test_sums_agree_until_an_event_is_missing_and_the_command_says_so(
    acme: Acme,
    double: StripeDouble,
    gateway: StripeGateway,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await delivered(acme, gateway)
    for name, value in {**double.environment, "WEIR_DATABASE_URL": database_url}.items():
        monkeypatch.setenv(name, value)
    command = ["reconcile", month_of_usage(), "--against-stripe", "--json"]

    agreed = await asyncio.to_thread(CliRunner().invoke, app, command)
    double.account.meter_events.pop()
    differs = await asyncio.to_thread(CliRunner().invoke, app, command)
    async with acme.sessions() as session:
        ours = await our_month(session, month_of_usage())
    counts = await stripe_counts(acme.sessions, gateway, ours)
    table = await asyncio.to_thread(CliRunner().invoke, app, command[:-1])

    assert (agreed.exit_code, json.loads(agreed.stdout)["balanced"]) == (0, True)
    assert (differs.exit_code, json.loads(differs.stdout)["balanced"]) == (1, False)
    assert json.loads(agreed.stdout)["differences"] == []
    assert [each["stage"] for each in json.loads(differs.stdout)["differences"]] == [
        "biller's own count"
    ]
    uncounted = [each.due - count for each, count in zip(ours.sums, counts, strict=True)]
    assert sorted(uncounted)[:2] == [0, 0]
    assert any(uncounted)
    assert table.exit_code == 1
    assert "acme" in table.stdout


async def test_a_delivered_batch_is_cancelled_within_a_day_and_its_tokens_are_sent_again(
    acme: Acme, double: StripeDouble, gateway: StripeGateway, database_url: str
) -> None:
    _, batch, _ = await delivered(acme, gateway)

    await resend(acme.sessions, gateway, batch)
    taken_back = len(double.account.meter_events)
    await deliver_pending(acme.sessions, gateway)

    assert taken_back == 2
    assert await states(acme.sessions) == {"delivered": 3, "cancelled": 1}
    check_export(database_url)
    check_delivered(database_url, double.account)


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_cancellation_whose_answer_is_lost_is_repeated_or_left_to_a_person(
    forgotten: bool, acme: Acme, double: StripeDouble, gateway: StripeGateway, database_url: str
) -> None:
    batch, *_ = await delivered(acme, gateway)
    double.lose_cancellations = 1
    with pytest.raises(StripeFailed, match="not cancelled"):
        await resend(acme.sessions, gateway, batch)
    in_between = await states(acme.sessions)
    if forgotten:
        double.answered.clear()

    if forgotten:
        with pytest.raises(StripeFailed, match="No meter event"):
            await resend(acme.sessions, gateway, batch)
        assert await states(acme.sessions) == {"delivered": 2, "parked": 1}
        await settle(acme.sessions, batch, counted=False)
    else:
        await resend(acme.sessions, gateway, batch)
    await deliver_pending(acme.sessions, gateway)

    assert in_between == {"delivered": 2, "cancelling": 1}
    assert await states(acme.sessions) == {"delivered": 3, "cancelled": 1}
    check_export(database_url)
    check_delivered(database_url, double.account)


async def test_after_a_day_a_batch_stays_with_a_remedy(acme: Acme, gateway: StripeGateway) -> None:
    batch, *_ = await delivered(acme, gateway)
    await execute(
        acme.sessions, "UPDATE meter_batches SET delivered_at = now() - interval '24 hours'"
    )

    with pytest.raises(InvalidValue, match="credit the customer"):
        await resend(acme.sessions, gateway, batch)

    assert await states(acme.sessions) == {"delivered": 3}


@pytest.mark.parametrize("counted", [True, False])
async def test_doubt_about_a_parked_batch_is_settled_by_a_person(
    counted: bool, acme: Acme, gateway: StripeGateway, database_url: str
) -> None:
    await acme.use_and_rate(Consumed(0, 0, 20, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    async with acme.sessions.begin() as session:
        await session.execute(text("UPDATE meter_batches SET state = 'sent', sent_at = now()"))
        await session.execute(text("UPDATE meter_batches SET state = 'parked'"))
        batch = await session.scalar(text("SELECT id FROM meter_batches"))

    await settle(acme.sessions, batch, counted=counted)

    assert await states(acme.sessions) == (
        {"delivered": 1} if counted else {"cancelled": 1, "pending": 1}
    )
    check_export(database_url)


async def test_a_report_of_meter_errors_rejects_the_batches_that_it_names(
    acme: Acme, double: StripeDouble, gateway: StripeGateway, database_url: str
) -> None:
    await Sync(acme.sessions, gateway, False).run()
    (stripe_id,) = double.account.of("customers")
    gone = double.account.of("customers").pop(stripe_id)
    batch, *_ = await delivered_without_sync(acme, gateway)
    notice = double.account.report_errors()

    answers = [await post(acme.sessions, notice) for _ in range(2)]
    handled = [await handle_events(acme.sessions, gateway) for _ in range(2)]
    rejected = await states(acme.sessions)
    double.account.of("customers")[stripe_id] = gone
    await resend(acme.sessions, gateway, batch)
    await deliver_pending(acme.sessions, gateway)

    assert [status for status, _ in answers] == [200, 200]
    assert handled == [1, 0]
    assert rejected == {"rejected": 3}
    assert await states(acme.sessions) == {"rejected": 2, "cancelled": 1, "delivered": 1}
    check_export(database_url)
    check_delivered(database_url, double.account)


async def delivered_without_sync(acme: Acme, gateway: StripeGateway) -> list[uuid.UUID]:
    """Deliver like `delivered`, with objects that Stripe already has."""
    await acme.use_and_rate(Consumed(100, 30, 20, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    await deliver_pending(acme.sessions, gateway)
    return list(
        await fetch_column(acme.sessions, "SELECT id FROM meter_batches ORDER BY token_kind")
    )


async def raw_post(sessions: Sessions, request: bytes) -> tuple[int, str]:
    """Send raw bytes to the endpoint; return status and body of its answer."""
    async with webhook_server(
        sessions, WebhookSettings(("whsec_of_another_destination", SECRET), listen_port=0)
    ) as address:
        port = int(address.removesuffix(PATH).rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        if request.endswith(b"EOF"):
            writer.write_eof()
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    if not answer:
        return NO_ANSWER, ""
    return int(answer.split(" ")[1]), answer.rpartition("\r\n\r\n")[2].strip()


async def post(
    sessions: Sessions, event: dict[str, Any], secret: str = SECRET, age_s: int = 0
) -> tuple[int, str]:
    """Return the endpoint's answer to an event."""
    body = json.dumps(event).encode()
    signed = signature(body, int(time.time()) - age_s, secret)
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: here\r\nStripe-Signature: {signed}\r\nContent-Length:"
        f" {len(body)}\r\n\r\n"
    )
    return await raw_post(sessions, head.encode() + body)


async def test_an_event_is_stored_once_and_only_if_signed_lately(sessions: Sessions) -> None:
    event = invoice_event("invoice.paid", 1_790_000_000)

    answers = [
        await post(sessions, event, "whsec_other"),
        await post(sessions, event, age_s=301),
        await post(sessions, event),
        await post(sessions, event),
    ]

    stored = await fetch_value(sessions, "SELECT count(*) FROM stripe_events")
    assert [status for status, _ in answers] == [400, 400, 200, 200]
    assert [word for _, word in answers[2:]] == ["stored", "known"]
    assert stored == 1
    with pytest.raises(DBAPIError, match="never changes"):
        await execute(sessions, "UPDATE stripe_events SET type = 'x'")


@pytest.mark.parametrize("case", ODD_EVENTS)
async def test_a_signed_but_odd_event_is_refused_once_and_for_all(
    case: str, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    """Stripe repeats an event for days after a 500."""
    body = ODD_EVENTS[case]
    now = int(time.time())
    content = f"{now}.".encode() + body
    signed = f"t={now},v1={hmac.new(SECRET.encode(), content, 'sha256').hexdigest()}"
    head = f"Stripe-Signature: {signed}\r\nContent-Length: {len(body)}\r\n\r\n"

    status, word = await raw_post(sessions, TO_EVENTS + head.encode() + body)

    # A body that is not UTF-8 cannot be signed.
    field = "Stripe-Signature" if case == "no UTF-8" else "body"
    assert (status, word.partition(":")[0]) == (400, field)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("header", ODD_SIGNATURES)
async def test_a_signature_of_any_bytes_is_refused_without_a_traceback(
    header: bytes, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    signature = header % int(time.time())
    head = TO_EVENTS + b"Stripe-Signature: " + signature + b"\r\nContent-Length: 2\r\n\r\n{}"

    status, word = await raw_post(sessions, head)

    assert (status, word.partition(":")[0]) == (400, "Stripe-Signature")
    assert "Traceback" not in caplog.text


def event_of(size: int, unit: bytes) -> bytes:
    return b'{"id":"evt_1","type":"x","a":[' + b",".join([unit] * (size // (len(unit) + 1))) + b"]}"


@pytest.mark.parametrize(
    "unit", [b"[]", b"{}", b'"a"', b'{"a":1}', b"1.5e9", b"[" * 500 + b"]" * 500]
)
async def test_time_grows_with_the_bytes_of_an_event(unit: bytes) -> None:
    def prepare(size: int) -> Call:
        body = event_of(size, unit)
        header = signature(body, int(time.time()), SECRET)
        return lambda: parsed_event(body, header, [SECRET])

    with as_in_service():
        check_growth(f"event of {unit[:9]!r}", prepare, 2**18)
        # Only Stripe can sign such an event, and the process of the webhook serves no one else.
        check_hold(f"event of {unit[:9]!r}", prepare(BODY_MAX_BYTES - 100), 2 * HOLD_MAX_S)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /stripe/events HTTP/1.1\r\nHost: here\r\n\r\n", 405),
        (b"POST /elsewhere HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\n\r\nx", 404),
        (b"POST /stripe/events HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (TO_EVENTS + b"\r\n", 411),
        (TO_EVENTS + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", 411),
        (TO_EVENTS + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
        (TO_EVENTS + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx", 400),
        (TO_EVENTS + b"Content-Length: %d\r\n\r\n" % (BODY_MAX_BYTES + 1), 413),
        (TO_EVENTS + b"Content-Length: " + b"9" * 99 + b"\r\n\r\n", 400),
        (TO_EVENTS + b"X: " + b"a" * 20_000 + b"\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (TO_EVENTS + b"Content-Length: 9\r\n\r\nEOF", NO_ANSWER),
        (TO_EVENTS + b"Content-Length: 2\r\n\r\n{}", 400),
    ],
)
async def test_invalid_events_get_a_status_and_are_not_stored(
    request_bytes: bytes, status: int, sessions: Sessions
) -> None:
    assert (await raw_post(sessions, request_bytes))[0] == status

    assert await fetch_value(sessions, "SELECT count(*) FROM stripe_events") == 0


def invoice_event(kind: str, created: int, paid: int = 0) -> dict[str, Any]:
    """Return a Stripe event about an invoice."""
    invoice = {
        "id": "in_1",
        "customer": "cus_1",
        "currency": "usd",
        "period_start": 1_788_000_000,
        "period_end": 1_790_000_000,
    }
    amounts = {"amount_due": 1_000, "amount_paid": paid}
    return {
        "id": f"evt_{kind}_{created}",
        "type": kind,
        "created": created,
        "data": {"object": invoice | amounts},
    }


async def test_events_of_an_invoice_end_the_same_in_every_order(
    sessions: Sessions, gateway: StripeGateway
) -> None:
    events = [
        invoice_event("invoice.finalized", 1_790_000_000),
        invoice_event("invoice.payment_failed", 1_790_000_100),
        invoice_event("invoice.paid", 1_790_000_200, paid=1_000),
    ]
    ends = set()
    for number, order in enumerate(itertools.permutations(events)):
        for event in order:
            body = json.loads(json.dumps(event).replace("in_1", f"in_{number}"))
            await post(sessions, body | {"id": f"{body['id']}_{number}"})
            await handle_events(sessions, gateway)
        columns = ", ".join(
            [
                *(INVOICE_TIMES[each["type"]] for each in events),
                "amount_due_minor",
                "amount_paid_minor",
                "last_event_at",
            ]
        )
        row = await fetch_row(
            sessions, f"SELECT {columns} FROM stripe_invoices WHERE id = 'in_{number}'"
        )
        ends.add(tuple(row))

    assert len(ends) == 1
    assert None not in next(iter(ends))


async def test_an_event_of_another_shape_waits_and_holds_up_no_other(
    sessions: Sessions, gateway: StripeGateway
) -> None:
    await post(sessions, {"id": "evt_1", "type": "invoice.paid", "created": 1, "data": {}})
    await post(sessions, invoice_event("invoice.paid", 1_790_000_000))
    await post(sessions, {"id": "evt_2", "type": "plan.created"})

    assert await handle_events(sessions, gateway) == 2


async def test_the_status_names_customers_unknown_to_stripe(
    acme: Acme, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with acme.sessions.begin() as session:
        await new_customer(session, "idle")
    await acme.use_and_rate(Consumed(0, 0, 20, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)

    reported = await asyncio.to_thread(CliRunner().invoke, app, ["stripe", "status", "--json"])

    assert json.loads(reported.stdout)["unknown_organizations"] == ["acme"]


async def test_senders_that_never_finish_keep_no_event_away(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that has been silent for longest is closed."""
    monkeypatch.setattr(stripe_inbox, "CONNECTIONS_MAX", 8)
    events = stripe_inbox.EventServer(sessions, ["whsec"])
    server = await asyncio.get_running_loop().create_server(events, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    async with server:
        silent = [await asyncio.open_connection(host, port) for _ in range(8)]
        async with asyncio.timeout(60):
            while len(events.connections) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(TO_EVENTS + b"Content-Length: 2\r\n\r\n{}")
        answer = await reader.read()
        first_end = await silent[0][0].read()
        for _, each in [*silent, (reader, writer)]:
            each.close()

    assert answer.startswith(b"HTTP/1.1 400 "), "it is read, and not signed"
    assert first_end == b""
