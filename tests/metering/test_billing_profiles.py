"""Billing profiles: validation, replacement, and the copies in closed months."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pypdf import PdfReader
from sqlalchemy import text

from metering.core.errors import InvalidValue, NotFound
from metering.invoicing.invoice_document import Issuer, invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.store.db import Sessions
from metering.tenants.billing_profiles import (
    BillingProfile,
    billing_profile,
    checked_profile,
    set_billing_profile,
)
from tests.metering.closing_world import ClosingWorld
from tests.metering.queries import execute
from tests.metering.usage import Consumed, Customer

PROFILE = BillingProfile(
    emails=("billing@acme.example", "cfo@acme.example"),
    legal_name="Acme Hotels GmbH",
    address_line1="Lindenstraße 1",
    address_line2="3. Stock",
    city="Berlin",
    postal_code="10969",
    state="BE",
    country="DE",
    tax_id="DE123456789",
    language="de",
)
OCTOBER = datetime(2025, 10, 7, 12, tzinfo=UTC)


async def change(sessions: Sessions, profile: BillingProfile, organization: str = "acme") -> None:
    """Set a profile."""
    async with sessions.begin() as session:
        await set_billing_profile(session, organization=organization, profile=profile, actor="ann")


@pytest.mark.parametrize(
    "email",
    [
        *(
            "",
            "acme.example",
            "@acme.example",
            "a@",
            "a@localhost",
            "a b@acme.example",
            "a@acme..example",
        ),
        *(
            "a..b@acme.example",
            ".a@acme.example",
            "a@-acme.example",
            "a@acme.example\n",
            "a@acme.example, b@acme.example",
        ),
        *(
            "Ann <a@acme.example>",
            "a@acme.e",
            "\x00a@acme.example",
            "ä@acme.example",
            "a@acme.example\u202e",
        ),
        *("a" * 65 + "@acme.example", "a@" + "b." * 130 + "example"),
    ],
)
def test_invalid_email_addresses_are_refused(email: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        checked_profile(BillingProfile(emails=(email,)))
    assert refused.value.field == "emails"


@pytest.mark.parametrize(
    "email",
    ["a@acme.example", "first.last+bills@sub.acme-hotels.co.uk", "o'hara@xn--mnchen-3ya.example"],
)
def test_usual_email_addresses_are_taken(email: str) -> None:
    assert checked_profile(BillingProfile(emails=(email,))).email == email


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"emails": tuple(f"a{n}@acme.example" for n in range(11))}, "emails"),
        ({"emails": ("a@acme.example", "A@acme.example")}, "emails"),
        ({"legal_name": "x" * 257}, "legal_name"),
        ({"legal_name": "Acme\nHotels"}, "legal_name"),
        ({"legal_name": "Acme\x1b[31m"}, "legal_name"),
        ({"legal_name": " Acme"}, "legal_name"),
        ({"legal_name": "Acme\u202eGmbH"}, "legal_name"),
        ({"address_line1": "x" * 201}, "address_line1"),
        ({"address_line1": ""}, "address_line1"),
        ({"postal_code": "1" * 21}, "postal_code"),
        ({"country": ""}, "country"),
        ({"country": "de"}, "country"),
        ({"country": "UK"}, "country"),
        ({"country": "XX" * 1000}, "country"),
        ({"tax_id": "\x00"}, "tax_id"),
        ({"language": "German"}, "language"),
        ({"language": "de_DE"}, "language"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        checked_profile(replace(PROFILE, **changes))
    assert refused.value.field == field
    assert len(str(refused.value)) < 400


async def test_a_profile_replaces_the_one_before_and_the_audit_log_keeps_both(
    sessions: Sessions, customer: Customer
) -> None:
    await change(sessions, PROFILE)
    await change(sessions, PROFILE)  # changes nothing
    await change(sessions, BillingProfile(emails=("a@acme.example",)))

    async with sessions() as session:
        query = text(
            "SELECT actor, before, after FROM audit_log WHERE action = 'billing_profile.set' AND"
            " actor = 'ann' ORDER BY id"
        )
        entries = (await session.execute(query)).all()
        standing = await billing_profile(session, customer.organization_id)
    assert standing == BillingProfile(emails=("a@acme.example",))
    assert [entry.after["legal_name"] for entry in entries] == ["Acme Hotels GmbH", ""]
    assert entries[1].before == PROFILE.as_json()


async def test_a_refused_profile_changes_nothing(sessions: Sessions, customer: Customer) -> None:
    await change(sessions, PROFILE)
    with pytest.raises(InvalidValue, match="country"):
        await change(sessions, replace(PROFILE, country="XX"))
    with pytest.raises(NotFound):
        await change(sessions, PROFILE, "nobody")

    async with sessions() as session:
        assert await billing_profile(session, customer.organization_id) == PROFILE


async def pdf(world: ClosingWorld, month: str) -> bytes:
    """Return the PDF of a month's invoice."""
    return render_pdf(invoice_document(await world.report(month), Issuer("Weir Operations GmbH")))


def lines_of(file: bytes) -> list[str]:
    """Return the lines of a document."""
    return [
        line.strip()
        for page in PdfReader(io.BytesIO(file)).pages
        for line in page.extract_text().splitlines()
    ]


async def test_closed_months_keep_their_profile(sessions: Sessions, customer: Customer) -> None:
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC))
    await world.use(price, Consumed(100_000, 0, 40_000, "stop", OCTOBER))
    await change(sessions, PROFILE)
    draft = await pdf(world, "2025-10")
    await world.close("2025-10")
    closed = await pdf(world, "2025-10")

    await change(
        sessions,
        replace(PROFILE, legal_name="Acme SE", city="Hamburg", emails=("new@acme.example",)),
    )

    assert await pdf(world, "2025-10") == closed
    addressed = [
        "Acme Hotels GmbH",
        "Lindenstraße 1",
        "3. Stock",
        "10969 Berlin BE",
        "DE",
        "Tax ID DE123456789",
    ]
    assert [line for line in lines_of(closed) if line in addressed] == addressed
    assert [line for line in lines_of(draft) if line in addressed] == addressed
    assert "billing@acme.example" in lines_of(closed)
    assert "Acme SE" in lines_of(await pdf(world, "2025-11"))


async def test_a_month_that_was_closed_without_a_profile_is_addressed_to_the_organization(
    sessions: Sessions, customer: Customer
) -> None:
    await execute(sessions, "DELETE FROM billing_profiles")
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC))
    await world.use(price, Consumed(100_000, 0, 40_000, "stop", OCTOBER))
    await world.close("2025-10")
    before = await pdf(world, "2025-10")

    await change(sessions, PROFILE)

    assert await pdf(world, "2025-10") == before
    assert "acme" in lines_of(before)
    assert "Acme Hotels GmbH" not in lines_of(before)
