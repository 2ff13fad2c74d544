"""Invoice as PDF: its texts on every page, and equal bytes each time."""

from __future__ import annotations

import io
import itertools
import re
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pypdf import PdfReader

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, TokenKind
from metering.invoicing.invoice_document import DRAFT, UNBALANCED, Issuer, invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.month_report import (
    Closed,
    CreditNoteIssued,
    MonthReport,
    PrepaidCredit,
    Reconciliation,
    ReportLine,
    RequestCounts,
)
from metering.plans.plans import Charge, LineKind

ISSUER = Issuer(
    "Weir Operations GmbH",
    ("Brückenstraße 12", "10179 Berlin"),
    "DE 123",
    "billing@weir.example",
    ("IBAN DE02 1005",),
)
CLOSED = Closed(datetime(2026, 12, 2, 9, tzinfo=UTC), "key weir_ab12cd", "INV-000042")
REPORT = MonthReport(
    organization_name="acme",
    organization_id=uuid.UUID(int=7),
    month="2026-11",
    currency_code="USD",
    lines=(
        ReportLine("demo", 1, TokenKind.INPUT, 3, 41_450_133, 100, 150_000, 41_450_133 * 150_000),
        ReportLine(
            "demo",
            2,
            TokenKind.OUTPUT,
            2,
            9_000,
            0,
            600_001,
            9_000 * 600_001,
            tier=ServiceTier.BATCH,
        ),
        ReportLine(
            "demo", 1, TokenKind.INPUT, 1, 1_000, 0, 150_000, 150_000_000, late_month="2026-10"
        ),
    ),
    request_counts=RequestCounts(1_203, 1_190, 8, 3, 2),
    unrated_event_count=0,
    reconciliation=Reconciliation(50_000, 50_000, 0),
    charges=(
        Charge(
            LineKind.ALLOWANCE,
            "1,000 output tokens free",
            -600_001_000,
            "demo",
            TokenKind.OUTPUT,
            1_000,
        ),
        Charge(LineKind.ADJUSTMENT, "Outage on 2026-11-03", -1_000_000_000_000),
        Charge(LineKind.CREDIT, "Welcome credit", -2_000_000_000_000),
    ),
    carried_in_picos=3_000_000_000,
    credit=PrepaidCredit(5_000_000_000_000, 0, 3_000_000_000_000),
    credit_notes=(
        CreditNoteIssued("CN-000004", "INV-000031", 2_500_000_000_000, "double delivery"),
    ),
    closed=CLOSED,
)


def pages_of(report: MonthReport, issuer: Issuer = ISSUER) -> list[str]:
    """Return the text of each page, a line per cell."""
    reader = PdfReader(io.BytesIO(render_pdf(invoice_document(report, issuer))))
    return [
        "\n".join(line.strip() for line in page.extract_text().splitlines())
        for page in reader.pages
    ]


def test_an_invoice_shows_issuer_customer_charges_and_amount() -> None:
    (page,) = pages_of(REPORT)

    said = page.splitlines()
    for text in (
        "Invoice",
        "INV-000042",
        "Weir Operations GmbH",
        "Brückenstraße 12",
        "acme",
        str(uuid.UUID(int=7)),
    ):
        assert text in said
    for text in (
        "2026-11-01 to 2026-11-30",
        "UTC",
        "2026-12-02",
        "Page 1 of 1",
        "IBAN DE02 1005",
        "Tax ID DE 123",
    ):
        assert text in said
    assert "not included" in said[said.index("Tax") + 1]
    assert "USD 3.23" in said
    assert "Late usage of 2026-10 · demo" in said


def test_each_line_has_both_prices_the_quantity_and_both_amounts() -> None:
    said = pages_of(REPORT)[0].splitlines()

    start = said.index("batch")
    assert said[start - 1 : start + 7] == [
        "output",
        "batch",
        "v2",
        "0.600001",
        "0.000000600001",
        "9,000",
        "0.005400009",
        "0.01",
    ]
    assert "41,450,133" in said
    assert "6.217519950" in said


def test_each_model_with_several_lines_has_its_sums() -> None:
    said = pages_of(REPORT)[0].splitlines()

    demo = said.index("demo")
    assert said[demo + 1 : demo + 4] == ["41,459,133", "6.222919959", "6.23"]
    # A single line equals the sum.
    assert said[said.index("Late usage of 2026-10 · demo") + 1] == "input"
    every = said.index("All usage")
    assert said[every + 1 : every + 4] == ["41,460,133", "6.223069959", "6.23"]


def test_plan_adjustment_credit_and_remainders_lead_to_the_total() -> None:
    said = pages_of(REPORT)[0].splitlines()

    summary = said[
        said.index("Credit notes of this month: paid back apart, not part of the total") :
    ]
    rows = dict(itertools.pairwise(summary))
    assert rows["Usage"] == "6.222919959"
    assert rows["Late usage of earlier months"] == "0.000150000"
    assert rows["Plan"] == "-0.000600001"
    assert rows["Adjustments"] == "-1.000000000"
    assert rows["Prepaid credit"] == "-2.000000000"
    assert rows["Carried over from rounding earlier invoices"] == "0.003000000"
    assert rows["Carried over to the next invoice by rounding"] == "0.004530042"
    assert rows["Total"] == "USD 3.23"
    assert "double delivery" in summary


def test_the_same_report_is_the_same_bytes() -> None:
    document = invoice_document(REPORT, ISSUER)

    assert render_pdf(document) == render_pdf(document)
    assert render_pdf(document) != render_pdf(replace(document, reference="INV-000043"))


def test_a_draft_says_so_on_every_page_and_asks_for_no_money() -> None:
    many = replace(
        REPORT,
        lines=tuple(replace(REPORT.lines[0], model=f"model-{n}") for n in range(60)),
        closed=None,
    )

    pages = pages_of(many)

    assert len(pages) > 2
    for number, page in enumerate(pages, 1):
        assert DRAFT in page
        assert f"Page {number} of {len(pages)}" in page
    assert "Draft invoice" in pages[0]
    assert not any("IBAN" in page for page in pages)
    assert all("Per million" in page for page in pages[:-1])  # the head of the table is repeated


def test_a_model_with_many_prices_keeps_its_name_on_the_next_page() -> None:
    lines = tuple(replace(REPORT.lines[0], price_version=n, model="a-model") for n in range(90))

    pages = pages_of(replace(REPORT, lines=lines))

    assert len(pages) > 1
    assert "a-model (continued)" in pages[1]
    assert sum(len(re.findall(r"^v\d+$", page, re.M)) for page in pages) == 90


def test_without_an_issuer_it_is_a_statement_without_placeholders() -> None:
    (page,) = pages_of(REPORT, Issuer())

    assert "Statement" in page.splitlines()
    assert "Invoice" not in page.splitlines()
    assert "WEIR_ISSUER_NAME" in page
    assert "INV-000042" in page


def test_a_month_that_does_not_add_up_is_not_to_be_sent() -> None:
    (page,) = pages_of(replace(REPORT, reconciliation=Reconciliation(50_001, 50_000, 0)))

    assert page.count(UNBALANCED) == 2
    assert "50,001 tokens used" in page
    assert "IBAN" not in page


def test_an_empty_month_is_a_document_too() -> None:
    empty = replace(
        REPORT,
        lines=(),
        charges=(),
        carried_in_picos=0,
        credit_notes=(),
        closed=replace(CLOSED, invoice_number=""),
    )

    (page,) = pages_of(empty)

    assert "No usage in this period." in page
    assert "none: nothing to invoice" in page
    assert "USD 0.00" in page


def test_long_names_are_broken_and_lose_nothing() -> None:
    name = "-".join(f"part{n}" for n in range(60))

    (page,) = pages_of(replace(REPORT, lines=(replace(REPORT.lines[0], model=name),)))

    assert name in page.replace("\n", "")


def test_characters_missing_in_helvetica_are_code_points_and_markup_is_text() -> None:
    (page,) = pages_of(replace(REPORT, lines=(replace(REPORT.lines[0], model="模型<b>&x"),)))

    assert "[U+6A21][U+578B]<b>&x" in page


def test_a_font_of_the_operator_shows_other_letters_and_a_bad_one_is_named(tmp_path: Path) -> None:
    import reportlab

    vera = Path(reportlab.__file__).parent / "fonts" / "Vera.ttf"
    (tmp_path / "bad.ttf").write_text("no font")

    document = invoice_document(REPORT, replace(ISSUER, font=vera))

    assert render_pdf(document) == render_pdf(document)
    assert "Brückenstraße 12" in pages_of(REPORT, replace(ISSUER, font=vera))[0]
    with pytest.raises(InvalidValue, match=r"bad\.ttf"):
        pages_of(REPORT, replace(ISSUER, font=tmp_path / "bad.ttf"))
