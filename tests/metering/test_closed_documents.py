"""Files and rows of closed months always equal the invoice."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from pypdf import PdfReader
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core.errors import InvariantViolated, MonthNotClosable
from metering.invoicing.documents import IssuedDocument, document_of_month
from metering.invoicing.invoice_document import Issuer, invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.invoices import Invoice, find_invoice_row, read_invoice
from metering.ledger.rating import rate_all_pending
from metering.reports.focus import focus_csv
from metering.reports.usage_reports import Grouping, Groups, UsageFilter, usage_page, usage_total
from metering.store.db import Sessions
from metering.tenants.billing_profiles import BillingProfile, set_billing_profile
from tests.metering import closing_world
from tests.metering.closing_world import ClosingWorld, draw_here
from tests.metering.focus_rules import broken_rules, read
from tests.metering.queries import execute, execute_unguarded
from tests.metering.usage import Consumed, Customer

OCTOBER, NOVEMBER = datetime(2025, 10, 7, 12, tzinfo=UTC), datetime(2025, 11, 3, 12, tzinfo=UTC)
ISSUER = Issuer("Weir Operations GmbH")


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Close October and November, with late usage of October and an adjustment."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC))
    await world.use(price, *(Consumed(100_000 + n, n, 40_000, "stop", OCTOBER) for n in range(5)))
    await world.close("2025-10")
    await world.use(
        price,
        Consumed(50_001, 3, 20_001, "stop", OCTOBER),
        Consumed(70_003, 5, 30_007, "cancelled", NOVEMBER),
    )
    await rate_all_pending(sessions)
    await world.adjust(-12_345_678_901)
    await world.close("2025-11")
    return world


async def files(world: ClosingWorld, month: str) -> tuple[str, bytes]:
    """Return FOCUS file and PDF of a month."""
    report = await world.report(month)
    async with world.sessions() as session:
        focus = "".join([piece async for piece in focus_csv(session, report, ISSUER.name)])
    return focus, render_pdf(invoice_document(report, ISSUER))


async def invoice_of(world: ClosingWorld, month: str) -> Invoice:
    closed = (await world.report(month)).closed
    assert closed is not None
    async with world.sessions() as session:
        return await read_invoice(session, await find_invoice_row(session, closed.invoice_number))


@pytest.mark.parametrize("month", ["2025-10", "2025-11"])
async def test_focus_and_pdf_say_what_the_invoice_says(world: ClosingWorld, month: str) -> None:
    invoice = await invoice_of(world, month)

    focus, pdf = await files(world, month)

    assert broken_rules(focus) == []
    assert sum(Decimal(row["BilledCost"]) for row in read(focus)) == Decimal(
        invoice.total_picos
    ).scaleb(-12)
    assert {row["InvoiceId"] for row in read(focus)} == {invoice.number}
    lines = [
        line.strip()
        for page in PdfReader(io.BytesIO(pdf)).pages
        for line in page.extract_text().splitlines()
    ]
    assert invoice.number in lines
    assert f"USD {Decimal(invoice.total_picos).scaleb(-12):.2f}" in lines


async def test_late_usage_and_adjustments_stand_where_they_are_charged(world: ClosingWorld) -> None:
    focus, pdf = await files(world, "2025-11")
    of = UsageFilter("2025-11", world.customer.organization_id)
    async with world.sessions() as session:
        days = (await usage_page(session, of, Groups((Grouping.DAY,)))).rows
        total = await usage_total(session, of)

    assert [(row.day, row.late) for row in days] == [
        (date(2025, 10, 7), True),
        (date(2025, 11, 3), False),
    ]
    assert total.amount_picos == sum(
        line.amount_picos for line in (await world.report("2025-11")).lines
    )
    text = PdfReader(io.BytesIO(pdf)).pages[0].extract_text()
    assert "Late usage of 2025-10 · demo" in text
    assert "-0.012345678901" in text
    assert {
        row["ChargePeriodStart"][:7] for row in read(focus) if row["ChargeClass"] == "Correction"
    } == {"2025-10", "2025-11"}


async def test_later_usage_changes_nothing_of_a_closed_month(world: ClosingWorld) -> None:
    before = await files(world, "2025-10"), await files(world, "2025-11")
    price = await world.price(datetime(2025, 2, 1, tzinfo=UTC), input_picos=999_999)

    await world.use(
        price,
        Consumed(9_999, 0, 9_999, "stop", OCTOBER),
        Consumed(9_999, 0, 9_999, "stop", NOVEMBER),
    )
    unrated = await files(world, "2025-10"), await files(world, "2025-11")
    await rate_all_pending(world.sessions)

    assert before == unrated == (await files(world, "2025-10"), await files(world, "2025-11"))


async def exported(world: ClosingWorld, month: str, issuer: Issuer) -> IssuedDocument:
    return await document_of_month(world.sessions, await world.report(month), issuer, draw_here)


async def test_the_document_of_a_closed_month_is_the_one_of_its_close(world: ClosingWorld) -> None:
    moved = Issuer("Weir SE", ("Neue Straße 1",), payment=("Other",), font=Path("gone.ttf"))
    before = await exported(world, "2025-10", ISSUER)

    async with world.sessions.begin() as session:
        await set_billing_profile(
            session,
            organization=world.customer.name,
            profile=BillingProfile(legal_name="Acme GmbH"),
            actor="ann",
        )

    assert before.issuer == closing_world.ISSUER
    for issuer in (moved, Issuer()):
        assert await exported(world, "2025-10", issuer) == before
    assert [each async for each in stored(world)] == ["2025-10", "2025-11"]
    with pytest.raises(DBAPIError, match="append-only"):
        await world.ask("DELETE FROM issued_documents RETURNING name")


async def stored(world: ClosingWorld) -> AsyncIterator[str]:
    async with world.sessions() as session:
        for name in await session.scalars(text("SELECT name FROM issued_documents ORDER BY name")):
            yield name


async def forget(world: ClosingWorld, change: str) -> None:
    """Change the kept documents as nothing but an intruder can."""
    await execute_unguarded(world.sessions, change)


async def test_a_changed_document_is_an_error_that_says_what_differs(world: ClosingWorld) -> None:
    before = await exported(world, "2025-10", ISSUER)

    await forget(world, "UPDATE issued_documents SET pdf = pdf || '!' WHERE name = '2025-10'")

    lines = rf"document 2025-10 .* was changed: .* and had {before.sha256} when it was issued"
    with pytest.raises(InvariantViolated, match=lines):
        await exported(world, "2025-10", ISSUER)
    (difference,) = (await world.verify("2025-10")).differences
    assert re.search(lines, difference)
    assert (await world.verify("2025-11")).differences == ()


async def test_a_month_of_an_earlier_release_keeps_its_export(world: ClosingWorld) -> None:
    await forget(world, "DELETE FROM issued_documents")
    later = Issuer("Weir SE", ("Neue Straße 1",), payment=("Other",))

    await execute(
        world.sessions,
        "INSERT INTO invoice_letterheads SELECT id, 'Printed', '{}', '', '', '{}'"
        " FROM invoices WHERE month = '2025-11-01'",
    )

    assert (await exported(world, "2025-10", Issuer())).issuer == Issuer()
    assert [each async for each in stored(world)] == []  # an invoice needs its issuer
    first = await exported(world, "2025-10", ISSUER)
    assert await exported(world, "2025-10", later) == first
    assert (await exported(world, "2025-11", later)).issuer == Issuer("Printed")
    assert (await exported(world, "2025-11", Issuer())).issuer == Issuer("Printed")


async def test_a_close_names_what_its_invoice_lacks(world: ClosingWorld) -> None:
    price = await world.price(datetime(2025, 3, 1, tzinfo=UTC))
    await world.use(price, Consumed(9_999, 0, 9_999, "stop", datetime(2025, 12, 3, tzinfo=UTC)))
    world.clock.now = datetime(2026, 2, 2, tzinfo=UTC)
    async with world.sessions.begin() as session:
        await set_billing_profile(
            session,
            organization=world.customer.name,
            profile=BillingProfile(legal_name="株式会社 Acme"),
            actor="ann",
        )
    world.issuer = Issuer("Weir Operations GmbH")

    with pytest.raises(MonthNotClosable) as refused:
        await world.close("2025-12")
    issuer, font = refused.value.obstacles
    async with world.sessions.begin() as session:
        await set_billing_profile(
            session,
            organization=world.customer.name,
            profile=BillingProfile(legal_name="Acme KK"),
            actor="ann",
        )
    world.issuer = closing_world.ISSUER
    closed = (await world.close("2025-12")).report.closed
    world.issuer = Issuer()
    empty = (await world.close("2026-01")).report.closed

    assert issuer.kind == "ISSUER_INCOMPLETE"
    assert "set WEIR_ISSUER_ADDRESS and WEIR_ISSUER_PAYMENT" in issuer.description
    assert font.kind == "TEXT_NOT_SHOWN"
    assert "株 (U+682A), 式 (U+5F0F), 会 (U+4F1A), 社 (U+793E)" in font.description
    assert world.customer.name in font.description
    assert closed is not None
    assert closed.invoice_number == "INV-000003"  # the refused close drew none
    assert empty is not None
    assert empty.invoice_number == ""
    statement = await exported(world, "2026-01", closing_world.ISSUER)
    assert "This is a statement" in PdfReader(io.BytesIO(statement.pdf)).pages[0].extract_text()
