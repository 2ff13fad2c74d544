"""PDF rendering of an `InvoiceDocument`: letterhead, table with repeated head, sums, notes, page x
of y.

The same document gives the same bytes: no clock, no random ids. Only pagination is computed here.
Any text fits: words wrap, a text longer than its lines is cut with an ellipsis, and a number stays
on one line in a smaller size. Run as a program it reads a pickled document from its parent process
and writes the file.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

from reportlab.lib.colors import Color, HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.pdfmetrics import stringWidth
from reportlab.pdfbase.ttfonts import TTFError, TTFont
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import (
    BaseDocTemplate,
    CondPageBreak,
    Flowable,
    Frame,
    KeepTogether,
    NextPageTemplate,
    PageTemplate,
    Paragraph,
    Spacer,
    Table,
)

from metering.core.errors import InvalidValue
from metering.core.money import exact_text
from metering.invoicing.invoice_document import (
    AmountLine,
    InvoiceDocument,
    Issuer,
    SummaryRow,
    TokenGroup,
    grouped,
    shown_by_helvetica,
)
from metering.invoicing.invoices import TOKENS_PER_PRICE
from metering.invoicing.month_report import ReportLine

MARGIN = 18 * mm
WIDTH = A4[0] - 2 * MARGIN
INK, GREY, RULE, PALE = (
    HexColor("#1a1a1a"),
    HexColor("#5f6368"),
    HexColor("#c8ccd0"),
    HexColor("#f1f3f4"),
)
AMBER = HexColor("#a04b00")
LINES_MAX, REASON_LINES_MAX = 4, 12  # in a text; in a reason that a person wrote
LINE_SIZE = 7.8  # points of the text in the lines
CELL_PADDING = 3  # of the first and the last column
PADDED = [
    ("TOPPADDING", (0, 0), (-1, -1), 2.2),
    ("BOTTOMPADDING", (0, 0), (-1, -1), 2.2),
    ("LEFTPADDING", (0, 0), (0, -1), CELL_PADDING),
    ("RIGHTPADDING", (-1, 0), (-1, -1), CELL_PADDING),
]

# Lines of a model kept on one page with its name; each further part repeats the name.
TOGETHER_LINES_MAX = 12
TABLE_ROWS_MAX = 200  # of one table: dividing one among pages takes the square of its rows
COLUMNS = (27, 18, 12, 22, 24, 24, 28, 19)  # millimetres; they fill the width
SUMMARY_COLUMNS = (0.18, 0.40, 0.20, 0.22)  # parts of the width
NOTE_LINES_MAX = 20  # more than our own sentences have
NICENESS = 10  # requests for tokens take precedence
HEAD = 10 * mm  # reserved on later pages for the running head


class Words(Paragraph):
    """Paragraph of at most `lines_max` lines; longer text is cut and ends with an ellipsis."""

    markup_of: Callable[[str], str] | None = None  # None in the parts of a paragraph on two pages
    source = ""
    lines_max = LINES_MAX

    def wrap(self, available_width: float, available_height: float) -> tuple[float, float]:
        size = super().wrap(available_width, available_height)
        if self.markup_of is None or self._line_count() <= self.lines_max:
            return size
        fits, too_long = 0, len(self.source)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            size = self._wrap_cut(middle, available_width, available_height)
            fits, too_long = (
                (middle, too_long) if self._line_count() <= self.lines_max else (fits, middle)
            )
        return self._wrap_cut(fits, available_width, available_height)

    def _wrap_cut(self, length: int, width: float, height: float) -> tuple[float, float]:
        assert self.markup_of is not None
        cut = self.markup_of(f"{self.source[:length].rstrip()}...")
        self.__init__(cut, self.style)  # type: ignore[misc]
        return super().wrap(width, height)

    def _line_count(self) -> int:
        return len(self.blPara.lines)  # type: ignore[attr-defined]  # the stubs lack it


class Figure(Paragraph):
    """Number on one line, set smaller where its column is too narrow."""

    def wrap(self, available_width: float, available_height: float) -> tuple[float, float]:
        style = self.style
        width = stringWidth(self.getPlainText(), style.fontName, style.fontSize)
        if width > available_width:
            smaller = style.fontSize * available_width / width * 0.99
            self.__init__(  # type: ignore[misc]
                escape(self.getPlainText()),
                ParagraphStyle(f"{style.name}-{smaller}", style, fontSize=smaller),
            )
        return super().wrap(available_width, available_height)


@dataclass(frozen=True, slots=True)
class Type:
    """Regular and bold typeface of a document, and a test of the characters they have."""

    regular: str
    bold: str
    shows: Callable[[str], bool]

    def text(self, text: str) -> str:
        """Escape paragraph markup, and replace characters that the font lacks by code points."""
        return escape(
            "".join(each if self.shows(each) else f"[U+{ord(each):04X}]" for each in text)
        )

    def paragraph(
        self,
        text: str,
        size: float = 8.5,
        *,
        bold: bool = False,
        right: bool = False,
        color: Color = INK,
        lines_max: int = LINES_MAX,
    ) -> Paragraph:
        """Build a paragraph of `size` points. Long words are broken to fit their column."""
        made = Words(self.text(text), self._style(size, bold, right, color))
        made.markup_of, made.source, made.lines_max = self.text, text, lines_max
        return made

    def figure(self, text: str, size: float = LINE_SIZE, *, bold: bool = False) -> Paragraph:
        """Build a right-aligned number of at most `size` points."""
        return Figure(self.text(text), self._style(size, bold, True, INK))

    def cell(self, text: str, width: float) -> str | Paragraph:
        """Build a table cell: plain text if it fits, which is much faster, else a paragraph."""
        fits = stringWidth(text, self.regular, LINE_SIZE) < width - CELL_PADDING
        return text if fits else self.figure(text)

    def _style(self, size: float, bold: bool, right: bool, color: Color) -> ParagraphStyle:
        align: Literal[0, 2] = 2 if right else 0  # TA_RIGHT, TA_LEFT
        return ParagraphStyle(
            f"{self.regular}-{size}-{bold}-{right}-{color.hexval()}",
            fontName=self.bold if bold else self.regular,
            fontSize=size,
            leading=size * 1.32,
            textColor=color,
            alignment=align,
        )


def load_type(issuer: Issuer) -> Type:
    """Load the issuer's fonts, or Helvetica. Raises: InvalidValue for files other than TrueType."""
    if issuer.font is None:
        return Type("Helvetica", "Helvetica-Bold", shown_by_helvetica)
    faces = {"WeirRegular": issuer.font, "WeirBold": issuer.bold_font or issuer.font}
    known: list[Mapping[int, int]] = []
    for name, path in faces.items():
        try:
            font = TTFont(name, str(path))
        except (TTFError, OSError) as error:
            raise InvalidValue(
                "invoice_font", f"{path} cannot be used: {error}; give a TrueType file (.ttf)"
            ) from error
        pdfmetrics.registerFont(font)
        known.append(font.face.charToGlyph)
    return Type(
        "WeirRegular",
        "WeirBold",
        lambda character: (
            character.isprintable() and all(ord(character) in glyphs for glyphs in known)
        ),
    )


def plain_table(
    rows: Sequence[Sequence[Any]],
    widths: Sequence[float],
    style: Sequence[tuple[Any, ...]],
    *,
    repeat: int = 0,
) -> Table:
    """Build a table without padding except where `style` sets it."""
    bare = [("LEFTPADDING", (0, 0), (-1, -1), 0), ("RIGHTPADDING", (0, 0), (-1, -1), 0)]
    bare += [("TOPPADDING", (0, 0), (-1, -1), 0), ("BOTTOMPADDING", (0, 0), (-1, -1), 0)]
    return Table(
        list(map(list, rows)),
        colWidths=list(widths),
        style=[*bare, *style],
        repeatRows=repeat,
        hAlign="LEFT",
    )


def lines(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Yield the table of usage by model, with sums. Its head repeats on every page."""
    if document.usage is None:
        return
    if not document.usage:
        yield type_.paragraph("No usage in this period.", 9, color=GREY)
        return
    decimals = decimal_places(document)
    heads = (
        "Tokens",
        "Tier",
        "Price",
        "Per million",
        "Per token",
        "Quantity",
        "Exact amount",
        "Amount",
    )
    head = [
        type_.paragraph(head, 7.5, bold=True, right=index > 2, color=GREY)
        for index, head in enumerate(heads)
    ]
    every = [each for group in document.usage for each in group.lines]
    left = list(parts(document.usage))
    while left:
        rows: list[list[Any]] = [head]
        style: list[tuple[Any, ...]] = [
            ("LINEBELOW", (0, 0), (-1, 0), 0.8, INK),
            ("VALIGN", (0, 0), (-1, -1), "BOTTOM"),
            ("FONT", (0, 0), (-1, -1), type_.regular, LINE_SIZE, LINE_SIZE * 1.32),
            ("TEXTCOLOR", (0, 0), (-1, -1), INK),
            ("ALIGN", (3, 0), (-1, -1), "RIGHT"),
        ]
        while left and len(rows) < TABLE_ROWS_MAX:
            group, part, of = left.pop(0)
            begin = len(rows)
            summed = group.lines if len(group.lines) > 1 and part == 0 else ()
            name = heading(group, part)
            rows.append(sum_cells(name, summed, decimals, document.currency_code, type_))
            rows.extend(
                token_cells(line, billed, decimals, document.currency_code, type_)
                for line, billed in of
            )
            style += [
                ("SPAN", (0, begin), (4, begin)),
                ("BACKGROUND", (0, begin), (-1, begin), PALE),
                ("LINEBELOW", (0, begin + 1), (-1, len(rows) - 1), 0.25, RULE),
                ("NOSPLIT", (0, begin), (-1, len(rows) - 1)),
            ]
        if not left:
            rows.append(sum_cells("All usage", every, decimals, document.currency_code, type_))
            style += [
                ("SPAN", (0, -1), (4, -1)),
                ("LINEABOVE", (0, -1), (-1, -1), 0.8, INK),
                ("NOSPLIT", (0, -2), (-1, -1)),
            ]
        yield plain_table(rows, [each * mm for each in COLUMNS], [*PADDED, *style], repeat=1)
        yield CondPageBreak(A4[1]) if left else Spacer(0, 5 * mm)


def sum_cells(
    name: str, of: Sequence[tuple[ReportLine, int]], decimals: Positions, currency: str, type_: Type
) -> list[Any]:
    sums = ["", "", ""]
    if of:
        billed = sum(billed for _, billed in of)
        sums = [
            f"{sum(line.token_count for line, _ in of):,}",
            aligned(sum(line.amount_picos for line, _ in of), decimals.amount),
        ]
        sums.append(grouped(exact_text(billed, currency)))
    right = [type_.figure(each, bold=True) for each in sums]
    label = type_.paragraph(name, 8.5, bold=True, lines_max=REASON_LINES_MAX)
    return [label, "", "", "", "", *right]


def parts(
    usage: Sequence[TokenGroup],
) -> Iterator[tuple[TokenGroup, int, tuple[tuple[ReportLine, int], ...]]]:
    """Split each group into runs of lines that fit a page; yield them with the run's index."""
    for group in usage:
        for part, start in enumerate(range(0, len(group.lines), TOGETHER_LINES_MAX)):
            yield group, part, group.lines[start : start + TOGETHER_LINES_MAX]


def heading(group: TokenGroup, part: int) -> str:
    """Build a group's heading: the model and, for late usage, the month of use."""
    late = f"Late usage of {group.late_month} · " if group.late_month else ""
    return f"{late}{group.model}{' (continued)' if part else ''}"


@dataclass(frozen=True, slots=True)
class Positions:
    """Decimal places in each column of exact amounts, as many as its finest amount needs."""

    million: int
    token: int
    amount: int


def decimal_places(document: InvoiceDocument) -> Positions:
    """Compute the decimal places that the usage lines need."""
    of = [line for group in document.usage or () for line, _ in group.lines]
    amounts = [line.amount_picos for line in of]
    return Positions(
        needed((line.unit_price_picos * TOKENS_PER_PRICE for line in of), document.currency_code),
        needed((line.unit_price_picos for line in of), document.currency_code),
        needed([*amounts, sum(amounts)], document.currency_code),
    )


def needed(amounts: Iterable[int], currency: str) -> int:
    """Return the number of decimal places of the finest amount."""
    return max(len(exact_text(picos, currency).partition(".")[2]) for picos in amounts)


def aligned(picos: int, decimals: int) -> str:
    """Format an exact amount, padded with zeros to `decimals` places."""
    whole, _, fraction = exact_text(picos, "").partition(".")
    fraction = fraction.ljust(decimals, "0")[: max(decimals, len(fraction.rstrip("0")))]
    return grouped(f"{whole}.{fraction}" if fraction else whole)


def token_cells(
    line: ReportLine, billed_picos: int, decimals: Positions, currency: str, type_: Type
) -> list[str | Paragraph]:
    cells = [
        line.token_kind.replace("_", " "),
        line.tier.value,
        f"v{line.price_version}",
        aligned(line.unit_price_picos * TOKENS_PER_PRICE, decimals.million),
        aligned(line.unit_price_picos, decimals.token),
        f"{line.token_count:,}",
        aligned(line.amount_picos, decimals.amount),
        grouped(exact_text(billed_picos, currency)),
    ]
    return [type_.cell(each, width * mm) for each, width in zip(cells, COLUMNS, strict=True)]


def sections(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Yield plan, adjustments and credits, each with a heading that stays with its first lines."""
    for heading, amounts in document.sections:
        yield CondPageBreak(24 * mm)
        yield section_table(heading, amounts, document.currency_code, type_)
        yield Spacer(0, 4 * mm)


def section_table(heading: str, amounts: Sequence[AmountLine], currency: str, type_: Type) -> Table:
    """Build a table of amounts and reasons. Its heading repeats on the next page."""
    rows: list[list[Any]] = [[type_.paragraph(heading, 8.5, bold=True), "", ""]]
    for line in amounts:
        reason = [type_.paragraph(line.description, 8, lines_max=REASON_LINES_MAX)]
        reason += (
            [type_.paragraph(line.detail, 7, color=GREY, lines_max=REASON_LINES_MAX)]
            if line.detail
            else []
        )
        exact = type_.figure(grouped(exact_text(line.amount_picos, currency)))
        billed = (
            grouped(exact_text(line.billed_picos, currency))
            if line.billed_picos is not None
            else ""
        )
        rows.append([reason, exact, type_.figure(billed)])
    style = [
        ("BACKGROUND", (0, 0), (-1, 0), PALE),
        ("LINEBELOW", (0, 1), (-1, -1), 0.25, RULE),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    last = COLUMNS[-1] * mm
    return plain_table(rows, (WIDTH - 34 * mm - last, 34 * mm, last), [*PADDED, *style], repeat=1)


def closing(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Yield the sums on one page, then payment instructions and notes."""
    exact = [row.exact_picos for row in document.summary if row.exact_picos is not None]
    decimals = needed(exact, document.currency_code)
    heads = [
        type_.paragraph(head, 7.5, bold=True, right=True, color=GREY)
        for head in ("Exact amount", "Amount")
    ]
    rows = [
        ["", "", *heads],
        *(summary_cells(row, decimals, document.currency_code, type_) for row in document.summary),
    ]
    style: list[tuple[Any, ...]] = [
        ("VALIGN", (0, 0), (-1, -1), "BOTTOM"),
        ("TOPPADDING", (0, 0), (-1, -1), 1),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 1),
    ]
    for index, row in enumerate(document.summary, 1):
        if row.strong:
            style += [
                ("LINEABOVE", (1, index), (-1, index), 0.8, INK),
                ("BACKGROUND", (1, index), (-1, index), PALE),
            ]
    yield KeepTogether(
        [plain_table(rows, [WIDTH * each for each in SUMMARY_COLUMNS], [*PADDED, *style])]
    )
    yield Spacer(0, 6 * mm)
    if document.issuer.payment and not document.mark:
        how = [
            type_.paragraph("Payment", 8, bold=True),
            *(type_.paragraph(each, 8) for each in document.issuer.payment),
        ]
        yield KeepTogether([*how, Spacer(0, 4 * mm)])
    for note in document.notes:
        yield type_.paragraph(note, 7.5, color=GREY, lines_max=NOTE_LINES_MAX)
        yield Spacer(0, 1.2 * mm)


def summary_cells(row: SummaryRow, decimals: int, currency: str, type_: Type) -> list[Any]:
    """Build the cells of a summary row: exact and rounded amount, or text."""
    size = 10.5 if row.strong else 8.5
    exact = "" if row.exact_picos is None else aligned(row.exact_picos, decimals)
    billed = row.text
    if row.billed_picos is not None:
        billed = grouped(exact_text(row.billed_picos, currency))
    return [
        "",
        type_.paragraph(row.label, size, bold=row.strong),
        type_.figure(exact, 8.5),
        type_.figure(f"{currency} {billed}" if row.strong else billed, size, bold=row.strong),
    ]


FOOT, BOTTOM = 10 * mm, 10 * mm  # height of the foot, and the margin below it


def render_pdf(document: InvoiceDocument) -> bytes:
    """Render the document as PDF 1.4, A4. Raises: InvalidValue for an unusable font."""
    type_ = load_type(document.issuer)
    target = io.BytesIO()
    template = BaseDocTemplate(
        target,
        pagesize=A4,
        leftMargin=MARGIN,
        rightMargin=MARGIN,
        title=f"{document.title} {document.reference}".strip(),
        author=document.issuer.name,
        subject=f"{document.customer_name}, {document.currency_code}",
        creator="Weir",
        invariant=1,  # no creation time and no random id in the file
        initialFontName=type_.regular,
    )
    first = Frame(MARGIN, BOTTOM + FOOT, WIDTH, A4[1] - MARGIN - BOTTOM - FOOT, 0, 0, 0, 0)
    later = Frame(MARGIN, BOTTOM + FOOT, WIDTH, A4[1] - MARGIN - BOTTOM - FOOT - HEAD, 0, 0, 0, 0)
    running = running_head(document, type_)
    template.addPageTemplates(
        [PageTemplate("first", [first]), PageTemplate("later", [later], onPage=running)]
    )
    story = [
        NextPageTemplate("later"),
        *letterhead(document, type_),
        *parties(document, type_),
        *lines(document, type_),
    ]
    story += [*sections(document, type_), *closing(document, type_)]
    template.build(story, canvasmaker=numbered_canvas(document, type_))
    return target.getvalue()


def numbered_canvas(document: InvoiceDocument, type_: Type) -> type[Canvas]:
    """Build a canvas class that draws page numbers once the page count is known."""

    class Numbered(Canvas):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._held: list[dict[str, Any]] = []

        def showPage(self) -> None:
            self._held.append(dict(self.__dict__))
            self._startPage()  # type: ignore[attr-defined]  # the stubs lack it

        def save(self) -> None:
            for number, page in enumerate(self._held, 1):
                self.__dict__.update(page)
                draw_foot(self, document, type_, f"Page {number} of {len(self._held)}")
                super().showPage()
            super().save()

    return Numbered


def draw_foot(canvas: Canvas, document: InvoiceDocument, type_: Type, page: str) -> None:
    """Draw the issuer, the mark and the page number."""
    canvas.saveState()
    canvas.setStrokeColor(RULE)
    canvas.setLineWidth(0.5)
    canvas.line(MARGIN, BOTTOM + 6 * mm, A4[0] - MARGIN, BOTTOM + 6 * mm)
    left = type_.paragraph(
        " · ".join(filter(None, (document.issuer.name, document.reference))),
        7.5,
        color=GREY,
        lines_max=2,
    )
    middle = type_.paragraph(document.mark, 7.5, bold=True, color=AMBER)
    right = type_.paragraph(page, 7.5, right=True, color=GREY)
    for part, x, width in ((left, 0.0, 0.45), (middle, 0.47, 0.33), (right, 0.8, 0.2)):
        height = part.wrap(WIDTH * width, FOOT)[1]
        part.drawOn(canvas, MARGIN + WIDTH * x, BOTTOM + 4.5 * mm - height)
    canvas.restoreState()


def running_head(
    document: InvoiceDocument, type_: Type
) -> Callable[[Canvas, BaseDocTemplate], None]:
    """Build a function that draws title, reference, customer and period on later pages."""

    def draw(canvas: Canvas, _: BaseDocTemplate) -> None:
        text = " · ".join(
            filter(
                None,
                (document.title, document.reference, document.customer_name, document.facts[0][1]),
            )
        )
        head = type_.paragraph(text, 8, color=GREY, lines_max=2)
        height = head.wrap(WIDTH, HEAD)[1]
        head.drawOn(canvas, MARGIN, A4[1] - MARGIN - height)

    return draw


def letterhead(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Yield the issuer at the left and the title at the right."""
    issuer = document.issuer
    left = [type_.paragraph(issuer.name, 13, bold=True)] if issuer.name else []
    left += [
        type_.paragraph(each, 8.5, color=GREY) for each in (*issuer.address, issuer.contact) if each
    ]
    left += [type_.paragraph(f"Tax ID {issuer.tax_id}", 8.5, color=GREY)] if issuer.tax_id else []
    right = [type_.paragraph(document.title, 20, bold=True, right=True)]
    right += [type_.paragraph(document.reference, 10, right=True)] if document.reference else []
    right += (
        [type_.paragraph(document.mark, 9, bold=True, right=True, color=AMBER)]
        if document.mark
        else []
    )
    yield plain_table(
        [[left, right]], (WIDTH * 0.55, WIDTH * 0.45), [("VALIGN", (0, 0), (-1, -1), "TOP")]
    )
    yield Spacer(0, 9 * mm)


def parties(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """Yield the customer at the left, and period, time zone and currency at the right."""
    customer = [
        type_.paragraph("Billed to", 7.5, color=GREY),
        type_.paragraph(document.customer_name, 11, bold=True),
        *(type_.paragraph(each, 8.5) for each in document.customer_lines),
        type_.paragraph(document.customer_id, 7.5, color=GREY),
    ]
    rows = [
        [type_.paragraph(label, 8, color=GREY), type_.paragraph(text, 8, right=True)]
        for label, text in document.facts
    ]
    tight = [
        ("TOPPADDING", (0, 0), (-1, -1), 1),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 1),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    facts = plain_table(rows, (WIDTH * 0.17, WIDTH * 0.31), tight)
    yield plain_table(
        [[customer, facts]], (WIDTH * 0.52, WIDTH * 0.48), [("VALIGN", (0, 0), (-1, -1), "TOP")]
    )
    yield Spacer(0, 7 * mm)


def main() -> None:
    """Render the document on standard input to a PDF on standard output, at low priority."""
    os.nice(NICENESS)
    document = pickle.load(sys.stdin.buffer)
    assert isinstance(document, InvoiceDocument)
    sys.stdout.buffer.write(render_pdf(document))


if __name__ == "__main__":
    main()
