"""Printed months add up: rows are read back from every format and added, as a person would."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pypdf import PdfReader
from weir_cli.months import invoice_table
from weir_cli.render import to_text
from weir_cli.tables import draft_table
from weir_client import Invoice as ShownInvoice
from weir_client import MonthReport as ShownReport
from weir_client import wire

from api.admin.billing_service import invoice_message, report_message
from infra import console_page
from metering.core.models import ServiceTier, TokenKind, record_of
from metering.core.money import minor_unit
from metering.invoicing.invoice_document import invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.invoices import Invoice, invoice_lines
from metering.invoicing.month_report import (
    Closed,
    MonthReport,
    Reconciliation,
    ReportLine,
    RequestCounts,
    to_csv,
    to_json,
)
from metering.plans.plans import LineKind, PlanLine
from tests.metering.closing_world import ISSUER
from tests.node import node_of

NUMBER = r"[-−]?[\d,]+(?:\.\d+)?"
TERMINAL_COLUMNS = 80
CLOSED = Closed(datetime(2026, 12, 1, 2, tzinfo=UTC), "wk_finance", "INV-000008")
EMPTY = MonthReport(
    organization_name="acme",
    organization_id=uuid.UUID(int=7),
    month="2026-11",
    currency_code="USD",
    lines=(),
    request_counts=RequestCounts(0, 0, 0, 0, 0),
    unrated_event_count=0,
    reconciliation=Reconciliation(0, 0, 0),
)

# Sums of small and large amounts, and of halves that are rounded up or down.
AMOUNTS = st.one_of(
    st.integers(0, 10**10),
    st.integers(0, 10**16),
    st.integers(0, 200).map(lambda halves: halves * 5 * 10**9),
)
LINES = st.builds(
    ReportLine,
    model=st.sampled_from(["demo", "large"]),
    price_version=st.integers(1, 3),
    token_kind=st.sampled_from(TokenKind),
    request_count=st.integers(1, 5),
    token_count=st.integers(1, 10**9),
    cancelled_token_count=st.just(0),
    unit_price_picos=st.integers(0, 10**6),
    amount_picos=AMOUNTS,
    late_month=st.sampled_from(["", "2026-10"]),
    tier=st.sampled_from(ServiceTier),
)
CHARGES = st.builds(
    lambda kind, picos, credited: PlanLine(
        kind, f"charge of {kind}", -picos if credited else picos
    ),
    st.sampled_from([kind for kind in LineKind if kind.is_charge]),
    AMOUNTS,
    st.booleans(),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """Columns of a printed month: the exact and the rounded rows, and the total below them."""

    exact: tuple[Decimal, ...]
    rounded: tuple[Decimal, ...]
    total: Decimal

    @property
    def faults(self) -> list[str]:
        columns = {"exact": self.exact, "rounded": self.rounded}
        return [
            f"the {name} rows {rows} are not {self.total}"
            for name, rows in columns.items()
            if sum(rows) != self.total
        ]


def number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("−", "-"))


@st.composite
def months(draw: st.DrawFn) -> MonthReport:
    """Draw a month, open or closed, in a currency of 0, 2, 3 or 4 decimals."""
    currency = draw(st.sampled_from(["USD", "JPY", "KWD", "CLF"]))
    half = minor_unit(currency) // 2
    report = replace(
        EMPTY,
        currency_code=currency,
        lines=tuple(draw(st.lists(LINES, max_size=6))),
        charges=tuple(draw(st.lists(CHARGES, max_size=4))),
        carried_in_picos=draw(st.integers(-half, half)),
    )
    is_closed = draw(st.booleans()) and report.is_billable
    return replace(report, closed=CLOSED if is_closed else None)


def in_csv(report: MonthReport) -> Shown:
    rows = list(csv.DictReader(io.StringIO(to_csv(report), newline="")))
    lines = [row for row in rows if row["record_type"] in set(LineKind) - {"rounding"}]
    by_type = {row["record_type"]: row for row in rows}
    owed = by_type["total_rounded"]
    assert number(by_type["total"]["amount"]) == sum(number(row["amount"]) for row in lines)
    return Shown(
        tuple(number(by_type[name]["amount"]) for name in ("total", "carried_in", "carried_out")),
        tuple(number(row["rounded_amount"]) for row in (*lines, by_type["rounding"])),
        number(owed["amount"]),
    )


def in_json(report: MonthReport) -> Shown:
    found = json.loads(to_json(report))
    lines = [*found["lines"], *found["charges"]]
    exact = (*(each["amount"] for each in lines), found["carried_in"])
    rounded = (*(each["rounded_amount"] for each in lines), found["rounding"])
    carried_out = -number(found["carried_out"])
    return Shown(
        (*map(number, exact), carried_out),
        tuple(map(number, rounded)),
        number(found["total_rounded"]),
    )


def on_terminal(report: MonthReport) -> Shown:
    """Read the table of the invoice, or of its draft, on a terminal."""
    if report.closed is None:
        drawn = draft_table(wire.read(ShownReport, report_message(report)))
    else:
        message = invoice_message(invoice_of(report), ())
        drawn = invoice_table(wire.read(ShownInvoice, message))
    text = to_text(drawn, TERMINAL_COLUMNS)
    assert max(map(len, text.splitlines())) <= TERMINAL_COLUMNS
    return columns_of(text, total="total", one_column={"rounding carried": 0, "rounding": 1})


def in_pdf(report: MonthReport) -> Shown:
    """Read the sums at the end, after comparing them with the lines above them."""
    reader = PdfReader(io.BytesIO(render_pdf(invoice_document(report, ISSUER))))
    pages = [page.extract_text(extraction_mode="layout") for page in reader.pages]
    text = re.sub(r"[A-Z]{3} (?=[-\d])", "", "\n".join(pages))
    *above, sums = re.split(r"(?m)^.*Exact amount +Amount *$", text)
    shown = columns_of(
        sums,
        total="Total",
        one_column={"Rounding carried": 0, "Rounding": 1},
        of=("Usage", "Late", "Plan", "Adjust", "Prepaid", "Rounding", "Total"),
    )
    names = ("charge", *(kind.value.replace("_", " ") for kind in TokenKind))
    lines = [row for part in above for row in rows_of(part) if row[0].startswith(names)]
    rounding = report.rounding_picos or report.carried_in_picos or report.carried_out_picos
    if not rounding:
        assert sum(number(row[1]) for row in lines) == shown.total
    return replace(shown, rounded=(*(number(row[2]) for row in lines), *roundings(sums)))


def roundings(text: str) -> Iterator[Decimal]:
    for found in re.finditer(rf"(?m)^ *Rounding +({NUMBER}) *$", text):
        yield number(found[1])


def rows_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield label, exact and rounded amount of each row that has both."""
    for line in text.splitlines():
        if found := re.match(rf" *(\S.*?) +({NUMBER}) +({NUMBER}) *$", line):
            yield found[1], found[2], found[3]


def columns_of(
    text: str, *, total: str, one_column: Mapping[str, int], of: tuple[str, ...] = ("",)
) -> Shown:
    """Read rows of two numbers, and rows with a number in one column, by their label."""
    columns: tuple[list[Decimal], list[Decimal]] = ([], [])
    totals = set()
    for line in text.splitlines():
        label = line.strip()
        if not label.startswith(of) or not (found := re.search(rf" ({NUMBER}) *$", line)):
            continue
        alone = [column for name, column in one_column.items() if label.startswith(name)]
        if alone:
            columns[alone[0]].append(number(found[1]))
        elif two := re.search(rf" ({NUMBER}) +({NUMBER}) *$", line):
            if label.startswith(total):
                totals |= {number(two[1]), number(two[2])}
                continue
            for column, amount in zip(columns, two.groups(), strict=True):
                column.append(number(amount))
    (owed,) = totals
    return Shown(tuple(columns[0]), tuple(columns[1]), owed)


def invoice_of(report: MonthReport) -> Invoice:
    """Return the invoice that the close of the month writes."""
    assert report.closed is not None
    return record_of(
        Invoice,
        report,
        number=report.closed.invoice_number,
        issued_at=report.closed.closed_at,
        issued_by=report.closed.closed_by,
        lines=invoice_lines(report),
        exact_picos=report.total_picos,
        total_picos=report.total_rounded_picos,
        credited_picos=0,
    )


class Console:
    """The module of the console's month page, in Node.js."""

    def __init__(self, script: Path) -> None:
        node = node_of(console_page.missing())
        self.process = subprocess.Popen(
            [node, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def show(self, report: MonthReport) -> Shown:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        message = json_format.MessageToJson(report_message(report), indent=None)
        self.process.stdin.write(message + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        lines = [*found["lines"], *found["charges"]]
        *sums, (_, total, rounded_total) = found["totals"]
        assert number(total) == number(rounded_total)
        parts = {item: (exact, rounded) for item, exact, rounded in sums}
        exact, rounded = parts.pop("Sum of the lines")
        for column, cell in enumerate((exact, rounded)):
            assert sum(number(line[column]) for line in lines) == number(cell)
        rest = parts.values()
        return Shown(
            (*(number(line[0]) for line in lines), *(number(each[0]) for each in rest if each[0])),
            (*(number(line[1]) for line in lines), *(number(each[1]) for each in rest if each[1])),
            number(total),
        )


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    node_of(console_page.missing())
    bundles = tmp_path_factory.mktemp("console")
    console_page.build_tests(bundles)
    console = Console(bundles / "shown.mjs")
    yield console
    console.process.communicate()


def shown_everywhere(report: MonthReport, console: Console) -> dict[str, Shown]:
    shown = {"PDF": in_pdf(report), "CSV": in_csv(report), "JSON": in_json(report)}
    if report.is_billable:
        shown["terminal"] = on_terminal(report)
    return shown | {"console": console.show(report)}


# Not shrunk: each month is drawn five times.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(report=months())
def test_each_format_adds_up_to_one_total(report: MonthReport, console: Console) -> None:
    shown = shown_everywhere(report, console)

    assert {name: each.faults for name, each in shown.items() if each.faults} == {}
    assert len({each.total for each in shown.values()}) == 1


@pytest.mark.parametrize("fault", ["carried_out_picos", "rounding_picos"])
def test_a_wrong_sign_fails(fault: str, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ReportLine("demo", 1, TokenKind.INPUT, 1, 1, 0, 1, 14 * 10**9)
    lines = tuple(replace(line, price_version=each) for each in range(1, 5))
    report = replace(EMPTY, lines=lines, carried_in_picos=3 * 10**9)
    right = getattr(MonthReport, fault)
    assert not any(each.faults for each in shown_everywhere(report, console).values())
    assert right.fget(report) != 0

    monkeypatch.setattr(MonthReport, fault, property(lambda self: -right.fget(self)))

    wrong = {name for name, each in shown_everywhere(report, console).items() if each.faults}
    assert wrong == {"PDF", "CSV", "JSON", "terminal", "console"}
