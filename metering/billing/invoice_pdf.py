"""Draws an `InvoiceDocument` as PDF: letterhead, table of lines with repeated head, sums, notes, page x of y.

The same document gives the same bytes: no clock, no random ids. Nothing is computed here but what a page needs. Run as a program it
reads a pickled document from the process that started it, and writes the file.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

from reportlab.lib.pagesizes import A4
from reportlab.lib.units import mm
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import BaseDocTemplate, Flowable, Frame, NextPageTemplate, PageTemplate, Spacer

from metering.billing.invoice_document import InvoiceDocument
from metering.billing.invoice_tables import closing, lines, sections
from metering.billing.invoice_type import AMBER, GREY, MARGIN, RULE, WIDTH, Type, load_type, plain_table

NICENESS = 10  # whoever waits for tokens goes first
HEAD = 10 * mm  # kept free on later pages for the running head
FOOT, BOTTOM = 10 * mm, 10 * mm  # for the foot of each page, and below it


def render_pdf(document: InvoiceDocument) -> bytes:
    """The document as PDF 1.4, A4. Raises: InvalidValue if a font of the issuer cannot be used."""
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
        invariant=1,  # no time of making and no random id in the file
        initialFontName=type_.regular,
    )
    first = Frame(MARGIN, BOTTOM + FOOT, WIDTH, A4[1] - MARGIN - BOTTOM - FOOT, 0, 0, 0, 0)
    later = Frame(MARGIN, BOTTOM + FOOT, WIDTH, A4[1] - MARGIN - BOTTOM - FOOT - HEAD, 0, 0, 0, 0)
    running = running_head(document, type_)
    template.addPageTemplates([PageTemplate("first", [first]), PageTemplate("later", [later], onPage=running)])
    story = [NextPageTemplate("later"), *letterhead(document, type_), *parties(document, type_), *lines(document, type_)]
    story += [*sections(document, type_), *closing(document, type_)]
    template.build(story, canvasmaker=numbered_canvas(document, type_))
    return target.getvalue()


def numbered_canvas(document: InvoiceDocument, type_: Type) -> type[Canvas]:
    """A canvas that holds its pages back until their number is known, and puts the foot under each."""

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
    """Who sends it, what must not be overlooked, and the page."""
    canvas.saveState()
    canvas.setStrokeColor(RULE)
    canvas.setLineWidth(0.5)
    canvas.line(MARGIN, BOTTOM + 6 * mm, A4[0] - MARGIN, BOTTOM + 6 * mm)
    left = type_.paragraph(" · ".join(filter(None, (document.issuer.name, document.reference))), 7.5, color=GREY)
    middle = type_.paragraph(document.mark, 7.5, bold=True, color=AMBER)
    right = type_.paragraph(page, 7.5, right=True, color=GREY)
    for part, x, width in ((left, 0.0, 0.45), (middle, 0.47, 0.33), (right, 0.8, 0.2)):
        height = part.wrap(WIDTH * width, FOOT)[1]
        part.drawOn(canvas, MARGIN + WIDTH * x, BOTTOM + 4.5 * mm - height)
    canvas.restoreState()


def running_head(document: InvoiceDocument, type_: Type) -> Callable[[Canvas, BaseDocTemplate], None]:
    """What stands above the table on later pages: whose it is and which."""

    def draw(canvas: Canvas, _: BaseDocTemplate) -> None:
        text = " · ".join(filter(None, (document.title, document.reference, document.customer_name, document.facts[0][1])))
        head = type_.paragraph(text, 8, color=GREY)
        height = head.wrap(WIDTH, HEAD)[1]
        head.drawOn(canvas, MARGIN, A4[1] - MARGIN - height)

    return draw


def letterhead(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """The issuer at the left, what this is at the right."""
    issuer = document.issuer
    left = [type_.paragraph(issuer.name, 13, bold=True)] if issuer.name else []
    left += [type_.paragraph(each, 8.5, color=GREY) for each in (*issuer.address, issuer.contact) if each]
    left += [type_.paragraph(f"Tax ID {issuer.tax_id}", 8.5, color=GREY)] if issuer.tax_id else []
    right = [type_.paragraph(document.title, 20, bold=True, right=True)]
    right += [type_.paragraph(document.reference, 10, right=True)] if document.reference else []
    right += [type_.paragraph(document.mark, 9, bold=True, right=True, color=AMBER)] if document.mark else []
    yield plain_table([[left, right]], (WIDTH * 0.55, WIDTH * 0.45), [("VALIGN", (0, 0), (-1, -1), "TOP")])
    yield Spacer(0, 9 * mm)


def parties(document: InvoiceDocument, type_: Type) -> Iterator[Flowable]:
    """The customer at the left, period, time zone and currency at the right."""
    customer = [
        type_.paragraph("Billed to", 7.5, color=GREY),
        type_.paragraph(document.customer_name, 11, bold=True),
        *(type_.paragraph(each, 8.5) for each in document.customer_lines),
        type_.paragraph(document.customer_id, 7.5, color=GREY),
    ]
    rows = [[type_.paragraph(label, 8, color=GREY), type_.paragraph(text, 8, right=True)] for label, text in document.facts]
    tight = [("TOPPADDING", (0, 0), (-1, -1), 1), ("BOTTOMPADDING", (0, 0), (-1, -1), 1), ("VALIGN", (0, 0), (-1, -1), "TOP")]
    facts = plain_table(rows, (WIDTH * 0.17, WIDTH * 0.31), tight)
    yield plain_table([[customer, facts]], (WIDTH * 0.52, WIDTH * 0.48), [("VALIGN", (0, 0), (-1, -1), "TOP")])
    yield Spacer(0, 7 * mm)


def main() -> None:
    """Draw for the process that started this one, at a priority below its own."""
    os.nice(NICENESS)
    document = pickle.load(sys.stdin.buffer)
    assert isinstance(document, InvoiceDocument)
    sys.stdout.buffer.write(render_pdf(document))


if __name__ == "__main__":
    main()
