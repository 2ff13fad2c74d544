"""Files and rows of closed months always equal the invoice."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from pypdf import PdfReader
from sqlalchemy.exc import DBAPIError

from metering.invoicing.invoice_document import Issuer, invoice_document, letterhead_of
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.invoices import Invoice, find_invoice_row, read_invoice
from metering.ledger.rating import rate_all_pending
from metering.reports.focus import focus_csv
from metering.reports.usage_reports import Grouping, UsageFilter, usage_page, usage_total
from metering.store.db import Sessions
from tests.metering.books import Consumed, Customer
from tests.metering.closing_world import ClosingWorld
from tests.metering.focus_rules import broken_rules, read

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
    said = [
        line.strip()
        for page in PdfReader(io.BytesIO(pdf)).pages
        for line in page.extract_text().splitlines()
    ]
    assert invoice.number in said
    assert f"USD {Decimal(invoice.total_picos).scaleb(-12):.2f}" in said


async def test_late_usage_and_adjustments_stand_where_they_are_charged(world: ClosingWorld) -> None:
    focus, pdf = await files(world, "2025-11")
    of = UsageFilter("2025-11", world.customer.organization_id)
    async with world.sessions() as session:
        days = (await usage_page(session, of, (Grouping.DAY,))).rows
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


async def test_an_invoice_keeps_the_letterhead_of_its_first_document(world: ClosingWorld) -> None:
    owner, moved = (
        world.customer.organization_id,
        Issuer("Weir SE", ("Neue Straße 1",), font=Path("other.ttf")),
    )

    async def letterhead(month: str, issuer: Issuer) -> Issuer:
        async with world.sessions.begin() as session:
            return await letterhead_of(session, owner, month, issuer)

    assert await letterhead("2025-10", Issuer()) == Issuer()  # nothing to keep yet
    assert await letterhead("2025-10", ISSUER) == ISSUER
    assert await letterhead("2025-10", moved) == replace(ISSUER, font=moved.font)
    assert await letterhead("2025-10", Issuer()) == ISSUER
    assert await letterhead("2025-11", moved) == moved
    assert await letterhead("2025-12", ISSUER) == ISSUER  # no invoice, nothing kept
    assert await letterhead("2025-12", moved) == moved
    with pytest.raises(DBAPIError, match="append-only"):
        await world.ask("DELETE FROM invoice_letterheads RETURNING name")
