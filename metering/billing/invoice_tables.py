"""The tables of an invoice: the lines of usage by model, the amounts beside them, and the sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reportlab.lib.units import mm
from reportlab.platypus import CondPageBreak, Flowable, KeepTogether, Paragraph, Spacer, Table

from metering.billing.invoice_document import AmountSection, InvoiceDocument, SummaryRow, TokenGroup, TokenLine, grouped
from metering.billing.invoice_type import GREY, INK, PADDED, PALE, RULE, WIDTH, Type, plain_table
from metering.money import exact_text

TOGETHER_LINES_MAX = 12  # lines of a model that stay on one page with its name; of more, each such part repeats the name
COLUMNS = (27, 18, 12, 22, 24, 24, 28, 19)  # millimetres; they fill the width


def lines(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """The table of usage: a heading per model with its sums, its lines below it, the head of the table on every page."""
    if not document.usage:
        yield type_.paragraph("No usage in this period.", 9, color=GREY)
        return
    places = decimal_places(document)
    heads = ("Tokens", "Tier", "Price", "Per million", "Per token", "Quantity", "Exact amount", "Amount")
    rows: list[list[Any]] = [
        [type_.paragraph(head, 7.5, bold=True, right=index > 2, color=GREY) for index, head in enumerate(heads)]
    ]
    look: list[tuple[Any, ...]] = [("LINEBELOW", (0, 0), (-1, 0), 0.8, INK), ("VALIGN", (0, 0), (-1, -1), "BOTTOM")]
    for group, part, of in parts(document.usage):
        begin = len(rows)
        with_sums = len(group.lines) > 1 and part == 0
        rows.append(sum_cells(heading(group, part), group.lines if with_sums else (), places, document.currency_code, type_))
        rows.extend(token_cells(line, places, document.currency_code, type_) for line in of)
        look += [("SPAN", (0, begin), (4, begin)), ("BACKGROUND", (0, begin), (-1, begin), PALE)]
        look += [("LINEBELOW", (0, begin + 1), (-1, len(rows) - 1), 0.25, RULE), ("NOSPLIT", (0, begin), (-1, len(rows) - 1))]
    every = [line for group in document.usage for line in group.lines]
    rows.append(sum_cells("All usage", every, places, document.currency_code, type_))
    look += [("SPAN", (0, -1), (4, -1)), ("LINEABOVE", (0, -1), (-1, -1), 0.8, INK), ("NOSPLIT", (0, -2), (-1, -1))]
    yield plain_table(rows, [each * mm for each in COLUMNS], [*PADDED, *look], repeat=1)
    yield Spacer(0, 5 * mm)


def sum_cells(name: str, of: Sequence[TokenLine], places: Places, currency: str, type_: Type) -> list[Any]:
    """A row with a name, and the sums of some lines if there are any."""
    sums = ["", "", ""]
    if of:
        billed = sum(line.billed_picos for line in of)
        sums = [f"{sum(line.token_count for line in of):,}", aligned(sum(line.amount_picos for line in of), places.amount)]
        sums.append(grouped(exact_text(billed, currency)))
    right = [type_.paragraph(each, 7.8, bold=True, right=True) for each in sums]
    return [type_.paragraph(name, 8.5, bold=True), "", "", "", "", *right]


def parts(usage: Sequence[TokenGroup]) -> Iterator[tuple[TokenGroup, int, tuple[TokenLine, ...]]]:
    """Each group in runs that fit a page, with the index of the run."""
    for group in usage:
        for part, start in enumerate(range(0, len(group.lines), TOGETHER_LINES_MAX)):
            yield group, part, group.lines[start : start + TOGETHER_LINES_MAX]


def heading(group: TokenGroup, part: int) -> str:
    """The model, and the month of use if that was another one."""
    late = f"Late usage of {group.late_month} · " if group.late_month else ""
    return f"{late}{group.model}{' (continued)' if part else ''}"


@dataclass(frozen=True, slots=True)
class Places:
    """Digits after the point in each column of exact numbers: as many as its finest number needs, so that points stand in line."""

    million: int
    token: int
    amount: int


def decimal_places(document: InvoiceDocument) -> Places:
    """What the lines of the usage need."""
    of = [line for group in document.usage for line in group.lines]
    amounts = [line.amount_picos for line in of]
    return Places(
        needed((line.price_per_million_picos for line in of), document.currency_code),
        needed((line.unit_price_picos for line in of), document.currency_code),
        needed([*amounts, sum(amounts)], document.currency_code),
    )


def needed(amounts: Iterable[int], currency: str) -> int:
    """Digits after the point of the finest of some amounts."""
    return max(len(exact_text(picos, currency).partition(".")[2]) for picos in amounts)


def aligned(picos: int, places: int) -> str:
    """An exact amount with so many digits after the point, which it does not exceed."""
    whole, _, fraction = exact_text(picos, "").partition(".")
    fraction = fraction.ljust(places, "0")[: max(places, len(fraction.rstrip("0")))]
    return grouped(f"{whole}.{fraction}" if fraction else whole)


def token_cells(line: TokenLine, places: Places, currency: str, type_: Type) -> list[Paragraph]:
    """The cells of one line."""
    cells = [
        line.token_kind.replace("_", " "),
        line.tier,
        f"v{line.price_version}",
        aligned(line.price_per_million_picos, places.million),
        aligned(line.unit_price_picos, places.token),
        f"{line.token_count:,}",
        aligned(line.amount_picos, places.amount),
        grouped(exact_text(line.billed_picos, currency)),
    ]
    return [type_.paragraph(each, 7.8, right=index > 2) for index, each in enumerate(cells)]


def sections(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Plan, adjustments, credits: each with its heading, which stays with its first lines."""
    for section in document.sections:
        yield CondPageBreak(24 * mm)
        yield section_table(section, document, type_)
        yield Spacer(0, 4 * mm)


def section_table(section: AmountSection, document: InvoiceDocument, type_: Type) -> Table:
    """Amounts with their reasons; the heading is repeated on the next page."""
    currency = document.currency_code
    rows: list[list[Any]] = [[type_.paragraph(section.heading, 8.5, bold=True), "", ""]]
    for line in section.lines:
        reason = [type_.paragraph(line.description, 8)]
        reason += [type_.paragraph(line.detail, 7, color=GREY)] if line.detail else []
        exact = type_.paragraph(grouped(exact_text(line.amount_picos, currency)), 7.8, right=True)
        billed = grouped(exact_text(line.billed_picos, currency)) if line.billed_picos is not None else ""
        rows.append([reason, exact, type_.paragraph(billed, 7.8, right=True)])
    look = [("BACKGROUND", (0, 0), (-1, 0), PALE), ("LINEBELOW", (0, 1), (-1, -1), 0.25, RULE), ("VALIGN", (0, 0), (-1, -1), "TOP")]
    last = COLUMNS[-1] * mm
    return plain_table(rows, (WIDTH - 34 * mm - last, 34 * mm, last), [*PADDED, *look], repeat=1)


def closing(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """The sums, what is owed last, then how to pay and the notes; the sums are never torn apart."""
    exact = [row.amount_picos for row in document.summary if row.amount_picos is not None and not row.strong]
    places = needed(exact, document.currency_code) if exact else 0
    rows = [summary_cells(row, places, document.currency_code, type_) for row in document.summary]
    look: list[tuple[Any, ...]] = [("VALIGN", (0, 0), (-1, -1), "BOTTOM")]
    for index, row in enumerate(document.summary):
        if row.strong:
            look += [("LINEABOVE", (1, index), (-1, index), 0.8, INK), ("BACKGROUND", (1, index), (-1, index), PALE)]
    yield KeepTogether([plain_table(rows, (WIDTH * 0.40, WIDTH * 0.36, WIDTH * 0.24), [*PADDED, *look])])
    yield Spacer(0, 6 * mm)
    if document.issuer.payment and not document.mark:
        how = [type_.paragraph("Payment", 8, bold=True), *(type_.paragraph(each, 8) for each in document.issuer.payment)]
        yield KeepTogether([*how, Spacer(0, 4 * mm)])
    for note in document.notes:
        yield type_.paragraph(note, 7.5, color=GREY)
        yield Spacer(0, 1.2 * mm)


def summary_cells(row: SummaryRow, places: int, currency: str, type_: Type) -> list[Any]:
    """The cells of one sum; what is owed has the digits of a coin, the sums before it one number of them."""
    size = 10.5 if row.strong else 8.5
    text = row.text
    if row.amount_picos is not None:
        text = grouped(exact_text(row.amount_picos, currency)) if row.strong else aligned(row.amount_picos, places)
    label = type_.paragraph(row.label, size, bold=row.strong)
    return ["", label, type_.paragraph(f"{currency} {text}" if row.strong else text, size, bold=row.strong, right=True)]
