"""Invoice as PDF: its texts on every page, and equal bytes each time."""

from __future__ import annotations

import io
import re
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import reportlab
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
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
from metering.plans.plans import LineKind, PlanLine
from metering.tenants.billing_profiles import BillingProfile

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
        PlanLine(
            LineKind.ALLOWANCE,
            "1,000 output tokens free",
            -600_001_000,
            "demo",
            TokenKind.OUTPUT,
            1_000,
        ),
        PlanLine(LineKind.ADJUSTMENT, "Outage on 2026-11-03", -1_000_000_000_000),
        PlanLine(LineKind.CREDIT, "Welcome credit", -2_000_000_000_000),
    ),
    carried_in_picos=3_000_000_000,
    credit=PrepaidCredit(5_000_000_000_000, 0, 3_000_000_000_000),
    credit_notes=(
        CreditNoteIssued("CN-000004", "INV-000031", 2_500_000_000_000, "double delivery"),
    ),
    closed=CLOSED,
)

# Costly and hostile texts: wide, missing in every font, combining, right to left, unbreakable.
ODD = (
    "株",
    "[",
    "<b>",
    "&",
    "e\u0301",
    "\u0301",
    "ש",
    "\u202e",
    "😀",
    "\ue000",
    "W",
    " ",
    "\x00",
    "\r",
    "\uffff",
)
TEXTS = st.one_of(
    st.text(max_size=256),
    st.lists(st.sampled_from(ODD), max_size=256).map("".join),
    st.builds(lambda each, count: each * count, st.sampled_from(ODD), st.integers(1, 256)),
)
FONTS = st.sampled_from([None, Path(reportlab.__file__).parent / "fonts" / "Vera.ttf"])


def pages_of(report: MonthReport, issuer: Issuer = ISSUER) -> list[str]:
    """Return the text of each page, a line per cell."""
    reader = PdfReader(io.BytesIO(render_pdf(invoice_document(report, issuer))))
    return [
        "\n".join(line.strip() for line in page.extract_text().splitlines())
        for page in reader.pages
    ]


def test_an_invoice_shows_issuer_customer_charges_and_amount() -> None:
    (page,) = pages_of(REPORT)

    page_lines = page.splitlines()
    for text in (
        "Invoice",
        "INV-000042",
        "Weir Operations GmbH",
        "Brückenstraße 12",
        "acme",
        str(uuid.UUID(int=7)),
    ):
        assert text in page_lines
    for text in (
        "2026-11-01 to 2026-11-30",
        "UTC",
        "2026-12-02",
        "Page 1 of 1",
        "IBAN DE02 1005",
        "Tax ID DE 123",
    ):
        assert text in page_lines
    assert "not included" in page_lines[page_lines.index("Tax") + 1 : page_lines.index("Tax") + 3]
    assert "USD 3.23" in page_lines
    assert "Late usage of 2026-10 · demo" in page_lines


def test_each_line_has_both_prices_the_quantity_and_both_amounts() -> None:
    page_lines = pages_of(REPORT)[0].splitlines()

    start = page_lines.index("batch")
    assert page_lines[start - 1 : start + 7] == [
        "output",
        "batch",
        "v2",
        "0.600001",
        "0.000000600001",
        "9,000",
        "0.005400009",
        "0.01",
    ]
    assert "41,450,133" in page_lines
    assert "6.217519950" in page_lines


def test_each_model_with_several_lines_has_its_sums() -> None:
    page_lines = pages_of(REPORT)[0].splitlines()

    demo = page_lines.index("demo")
    assert page_lines[demo + 1 : demo + 4] == ["41,459,133", "6.222919959", "6.23"]
    # A single line equals the sum.
    assert page_lines[page_lines.index("Late usage of 2026-10 · demo") + 1] == "input"
    every = page_lines.index("All usage")
    assert page_lines[every + 1 : every + 4] == ["41,460,133", "6.223069959", "6.23"]


def test_plan_adjustment_credit_and_remainders_lead_to_the_total() -> None:
    page_lines = pages_of(REPORT)[0].splitlines()

    summary = page_lines[
        page_lines.index("Credit notes of this month: refunded separately, not in the total") :
    ]
    rows = {
        label: (exact, billed)
        for label, exact, billed in zip(*[summary[n:] for n in range(3)], strict=False)
    }
    assert rows["Usage"] == ("6.222919959", "6.23")
    assert rows["Late usage of earlier months"] == ("0.000150000", "0.00")
    assert rows["Plan"] == ("-0.000600001", "0.00")
    assert rows["Adjustments"] == ("-1.000000000", "-1.00")
    assert rows["Prepaid credit"] == ("-2.000000000", "-2.00")
    assert rows["Rounding carried from earlier invoices"][0] == "0.003000000"
    assert rows["Rounding carried forward to the next invoice"][0] == "0.004530042"
    assert rows["Total"] == ("3.230000000", "USD 3.23")
    assert "double delivery" in summary


def test_lines_that_are_rounded_by_themselves_are_completed_by_the_rounding() -> None:
    lines = tuple(
        replace(REPORT.lines[0], model=f"model-{n}", amount_picos=4_000_000_000) for n in range(4)
    )

    page_lines = pages_of(replace(REPORT, lines=lines, charges=(), carried_in_picos=0))[
        -1
    ].splitlines()

    assert page_lines[page_lines.index("Usage") : page_lines.index("Usage") + 3] == [
        "Usage",
        "0.016",
        "0.00",
    ]
    assert page_lines[page_lines.index("Rounding") + 1] == "0.02"
    assert page_lines[page_lines.index("Total") + 1 : page_lines.index("Total") + 3] == [
        "0.020",
        "USD 0.02",
    ]


def test_a_month_of_an_earlier_release_keeps_its_rounding() -> None:
    lines = tuple(
        replace(REPORT.lines[0], model=f"model-{n}", amount_picos=4_000_000_000) for n in range(4)
    )
    old = replace(REPORT, lines=lines, charges=(), carried_in_picos=0, format_version=2)

    page_lines = pages_of(old)[-1].splitlines()

    assert old.rounded_parts_picos == (0, 10**10, 0, 10**10)
    assert page_lines[page_lines.index("Usage") : page_lines.index("Usage") + 3] == [
        "Usage",
        "0.016",
        "0.02",
    ]
    assert "Rounding" not in page_lines


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
    vera = Path(reportlab.__file__).parent / "fonts" / "Vera.ttf"
    (tmp_path / "bad.ttf").write_text("no font")

    document = invoice_document(REPORT, replace(ISSUER, font=vera))

    assert render_pdf(document) == render_pdf(document)
    assert "Brückenstraße 12" in pages_of(REPORT, replace(ISSUER, font=vera))[0]
    with pytest.raises(InvalidValue, match=r"bad\.ttf"):
        pages_of(REPORT, replace(ISSUER, font=tmp_path / "bad.ttf"))


# Not shrunk: a document takes long to draw, and the generated texts say enough.
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data(), st.integers(-(10**26), 10**26), st.integers(0, 40), FONTS)
def test_no_text_or_amount_makes_a_document_fail(
    data: st.DataObject, picos: int, line_count: int, font: Path | None
) -> None:
    def text() -> str:
        return data.draw(TEXTS)

    profile = BillingProfile(
        emails=(text(),),
        legal_name=text(),
        address_line1=text(),
        address_line2=text(),
        city=text(),
        postal_code=text(),
        state=text(),
        country="JP",
        tax_id=text(),
    )
    issuer = Issuer(text(), (text(),) * 10, text(), text(), (text(),) * 10, font)
    line = replace(REPORT.lines[0], model=text(), amount_picos=picos, unit_price_picos=abs(picos))
    charges = [
        PlanLine(LineKind.ADJUSTMENT, f"adjustment: {text()}", picos),
        PlanLine(LineKind.ALLOWANCE, text(), -picos, text(), TokenKind.OUTPUT, 2**62),
    ]
    note = replace(REPORT.credit_notes[0], reason=text())
    report = replace(
        REPORT,
        lines=tuple(replace(line, price_version=n) for n in range(line_count)),
        charges=tuple(charges),
        credit_notes=(note,) * 3,
        billing_profile=profile,
        closed=data.draw(st.sampled_from([None, CLOSED])),
    )

    assert "Total" in "\n".join(pages_of(report, issuer))


def test_a_long_name_that_no_font_shows_is_cut_with_an_ellipsis() -> None:
    profile = BillingProfile(legal_name="株式会社" * 64)

    page = pages_of(replace(REPORT, billing_profile=profile))[0]

    name = page[page.index("[U+682A]") : page.index("acme")]
    assert name.count("\n") == 4
    assert name.endswith("...\n")


def test_a_number_is_smaller_rather_than_broken_or_cut() -> None:
    huge = replace(REPORT.lines[0], amount_picos=-(10**26) - 1)

    page_lines = pages_of(replace(REPORT, lines=(huge,), charges=()))[0].splitlines()

    assert "-100,000,000,000,000.000000000001" in page_lines
    assert "-100,000,000,000,000.00" in page_lines
