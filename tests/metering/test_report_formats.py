"""Documents of a month: equal bytes, exact and rounded amounts that add up."""

from __future__ import annotations

import csv
import io
import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.core.errors import InvalidValue
from metering.core.models import TokenKind
from metering.invoicing.invoices import Series, document_number, invoice_lines
from metering.invoicing.month_report import (
    Closed,
    CreditNoteIssued,
    MonthReport,
    PrepaidCredit,
    Reconciliation,
    ReportLine,
    RequestCounts,
    digests,
    to_csv,
    to_json,
)
from metering.plans.plans import LineKind, PlanLine

REPORT = MonthReport(
    organization_name="acme",
    organization_id=uuid.UUID(int=7),
    month="2026-11",
    currency_code="USD",
    lines=(
        ReportLine("demo", 1, TokenKind.INPUT, 3, 30_000, 100, 150_000, 4_500_000_000),
        ReportLine("demo", 1, TokenKind.OUTPUT, 2, 9_000, 0, 600_000, 5_400_000_001),
    ),
    request_counts=RequestCounts(3, 2, 1, 0, 0),
    unrated_event_count=0,
    reconciliation=Reconciliation(39_000, 39_000, 0),
)

FULL = replace(
    REPORT,
    lines=(
        *REPORT.lines,
        replace(REPORT.lines[0], late_month="2026-10", amount_picos=3_000_000_000),
    ),
    charges=(
        PlanLine(
            LineKind.ALLOWANCE, "free allowance", -4_500_000_000, "demo", TokenKind.INPUT, 30_000
        ),
        PlanLine(
            LineKind.ADJUSTMENT, "adjustment: an outage", -2_000_000_000, source_id=uuid.UUID(int=9)
        ),
        PlanLine(LineKind.CREDIT, "prepaid credit", -1_000_000_000, source_id=uuid.UUID(int=10)),
    ),
    carried_in_picos=4_000_000_000,
    credit=PrepaidCredit(granted_picos=0, expired_picos=5, remaining_picos=10**12),
    credit_notes=(
        CreditNoteIssued("CN-000001", "INV-000007", 2 * 10**10, 'outage, "the long one"'),
    ),
    closed=Closed(datetime(2026, 12, 1, 2, tzinfo=UTC), "wk_finance", "INV-000008", "ab" * 32),
)


def test_the_total_is_exact_and_rounded_once() -> None:
    cents = replace(REPORT, lines=(replace(REPORT.lines[0], amount_picos=4_000_000_000),) * 3)

    assert cents.total_picos == 12_000_000_000
    # Each line alone would be rounded to zero.
    assert cents.total_rounded_picos == 10_000_000_000


def test_csv_is_rfc_4180_with_exact_amounts() -> None:
    acme = "acme,00000000-0000-0000-0000-000000000007,2026-11,UTC"
    assert to_csv(REPORT).split("\r\n") == [
        "record_type,organization_name,organization_id,month,time_zone,model,price_version,token_kind,request_count,token_count,"
        "cancelled_token_count,unit_price,amount,currency_code,rounded_amount,late_month,tier,description,state,invoice_number,report_format",
        f"usage,{acme},demo,1,input,3,30000,100,0.00000015,0.0045,USD,0.00,,interactive,,open,,3",
        f"usage,{acme},demo,1,output,2,9000,0,0.0000006,0.005400000001,USD,0.01,,interactive,,open,,3",
        f"total,{acme},,,,3,,,,0.009900000001,USD,,,,,open,,3",
        f"carried_in,{acme},,,,,,,,0.00,USD,,,,,open,,3",
        f"carried_out,{acme},,,,,,,,0.000099999999,USD,,,,,open,,3",
        f"rounding,{acme},,,,,,,,,USD,0.00,,,,open,,3",
        f"total_rounded,{acme},,,,,,,,0.01,USD,0.01,,,tax not included,open,,3",
        "",
    ]


def test_a_closed_month_shows_late_usage_charges_carried_remainders_and_its_closer() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(FULL), newline="")))
    document = json.loads(to_json(FULL))

    assert [row["record_type"] for row in rows] == [
        *(
            "usage",
            "usage",
            "late_usage",
            "allowance",
            "adjustment",
            "credit",
            "total",
            "carried_in",
            "carried_out",
            "rounding",
        ),
        *("total_rounded", "credit_note", "prepaid_credit_expired", "prepaid_credit_remaining"),
    ]
    assert rows[2]["late_month"] == "2026-10"
    assert document["lines"][2]["late_month"] == "2026-10"
    assert document["lines"][0]["late_month"] is None
    assert {row["invoice_number"] for row in rows} == {"INV-000008"} == {document["invoice_number"]}
    assert document["state"] == "closed"
    assert document["closed_at"] == "2026-12-01T02:00:00Z"
    assert document["closed_by"] == "wk_finance"
    assert (document["total"], document["carried_in"]) == ("0.005400000001", "0.004")
    assert (document["total_rounded"], document["carried_out"]) == ("0.01", "-0.000599999999")
    assert rows[11]["amount"] == "-0.02"
    assert rows[11]["description"] == 'CN-000001 to INV-000007: outage, "the long one"'
    assert document["charges"][2] == {
        "kind": "credit",
        "description": "prepaid credit",
        "model": None,
        "token_kind": None,
        "token_count": None,
        "amount": "-0.001",
        "rounded_amount": "0.00",
        "source_id": str(uuid.UUID(int=10)),
    }


def test_a_format_that_is_not_known_is_refused_rather_than_guessed() -> None:
    for write in (to_json, to_csv, digests):
        with pytest.raises(InvalidValue, match="report_format"):
            write(replace(REPORT, format_version=4))


def test_any_change_changes_both_digests() -> None:
    first, second = digests(FULL), digests(replace(FULL, carried_in_picos=4_000_000_001))

    assert first == digests(replace(FULL))
    assert first.json_sha256 != second.json_sha256
    assert first.csv_sha256 != second.csv_sha256


def test_an_invoice_says_each_line_in_words_and_its_lines_are_the_total() -> None:
    lines = invoice_lines(FULL)

    assert [line.description for line in lines[:3]] == [
        "demo, input tokens, USD 0.15 per million (price 1)",
        "demo, output tokens, USD 0.60 per million (price 1)",
        "late usage of 2026-10: demo, input tokens, USD 0.15 per million (price 1)",
    ]
    assert [line.kind for line in lines[2:]] == [
        LineKind.LATE_USAGE,
        LineKind.ALLOWANCE,
        LineKind.ADJUSTMENT,
        LineKind.CREDIT,
    ]
    assert [line.usage_month for line in lines] == ["2026-11", "2026-11", "2026-10", "", "", ""]
    assert sum(line.amount_picos for line in lines) == FULL.total_rounded_picos
    assert sum(line.exact_picos for line in lines) == FULL.total_picos


@given(st.lists(st.integers(-(10**13), 10**13), max_size=6), st.integers(-5 * 10**9, 5 * 10**9))
def test_every_report_adds_up(amounts: list[int], carried: int) -> None:
    charges = tuple(PlanLine(LineKind.ADJUSTMENT, "adjustment", amount) for amount in amounts)
    report = replace(REPORT, charges=charges, carried_in_picos=carried)

    assert (
        report.total_rounded_picos + report.carried_out_picos
        == report.total_picos + report.carried_in_picos
    )
    assert sum(line.amount_picos for line in invoice_lines(report)) == report.total_rounded_picos


def test_numbers_of_documents_sort_as_text() -> None:
    numbers = [document_number(Series.INVOICE, ordinal) for ordinal in (1, 9, 10, 123_456)]

    assert numbers == ["INV-000001", "INV-000009", "INV-000010", "INV-123456"]
    assert document_number(Series.CREDIT_NOTE, 7) == "CN-000007"


def test_a_model_name_with_a_comma_stays_one_cell() -> None:
    odd = replace(REPORT, lines=(replace(REPORT.lines[0], model='a,"b"\r\nc'),))

    rows = list(csv.DictReader(io.StringIO(to_csv(odd), newline="")))

    assert rows[0]["model"] == 'a,"b"\r\nc'


def test_json_reports_the_same_and_both_are_the_same_bytes_each_time() -> None:
    document = json.loads(to_json(REPORT))

    assert [line["amount"] for line in document["lines"]] == ["0.0045", "0.005400000001"]
    assert (document["total"], document["total_rounded"]) == ("0.009900000001", "0.01")
    assert document["reconciliation"]["balanced"] is True
    assert (to_json(REPORT), to_csv(REPORT)) == (to_json(REPORT), to_csv(REPORT))
