"""The look of an invoice: its fonts and what they can show, its colours, and tables without needless lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

from reportlab.lib.colors import Color, HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFError, TTFont
from reportlab.platypus import Paragraph, Table

from metering.billing.invoice_document import Issuer, shown_by_helvetica
from metering.errors import InvalidValue

MARGIN = 18 * mm
WIDTH = A4[0] - 2 * MARGIN
INK, GREY, RULE, PALE = HexColor("#1a1a1a"), HexColor("#5f6368"), HexColor("#c8ccd0"), HexColor("#f1f3f4")
AMBER = HexColor("#a04b00")
PADDED = [
    ("TOPPADDING", (0, 0), (-1, -1), 2.2),
    ("BOTTOMPADDING", (0, 0), (-1, -1), 2.2),
    ("LEFTPADDING", (0, 0), (0, -1), 3),
    ("RIGHTPADDING", (-1, 0), (-1, -1), 3),
]


@dataclass(frozen=True, slots=True)
class Type:
    """The two faces of a document, and what they can show."""

    regular: str
    bold: str
    shows: Callable[[str], bool]

    def text(self, text: str) -> str:
        """Text for a paragraph: markup escaped, and a character that the font lacks written as its code point."""
        return escape("".join(each if self.shows(each) else f"[U+{ord(each):04X}]" for each in text))

    def style(self, size: float = 8.5, *, bold: bool = False, right: bool = False, color: Color = INK) -> ParagraphStyle:
        """Of a paragraph, sizes in points."""
        name = f"{self.regular}-{size}-{bold}-{right}-{color.hexval()}"
        font = self.bold if bold else self.regular
        align: Literal[0, 2] = 2 if right else 0  # TA_RIGHT, TA_LEFT
        return ParagraphStyle(name, fontName=font, fontSize=size, leading=size * 1.32, textColor=color, alignment=align)

    def paragraph(self, text: str, size: float = 8.5, *, bold: bool = False, right: bool = False, color: Color = INK) -> Paragraph:
        """A paragraph; long words are broken rather than let out of their column."""
        return Paragraph(self.text(text), self.style(size, bold=bold, right=right, color=color))


def load_type(issuer: Issuer) -> Type:
    """The issuer's fonts, or Helvetica. Raises: InvalidValue naming the file that is no TrueType font."""
    if issuer.font is None:
        return Type("Helvetica", "Helvetica-Bold", shown_by_helvetica)
    faces = {"WeirRegular": issuer.font, "WeirBold": issuer.bold_font or issuer.font}
    known: list[Mapping[int, int]] = []
    for name, path in faces.items():
        try:
            font = TTFont(name, str(path))
        except (TTFError, OSError) as error:
            raise InvalidValue("invoice_font", f"{path} cannot be used: {error}; give a TrueType file (.ttf)") from error
        pdfmetrics.registerFont(font)
        known.append(font.face.charToGlyph)
    return Type("WeirRegular", "WeirBold", lambda character: all(ord(character) in glyphs for glyphs in known))


def plain_table(
    rows: Sequence[Sequence[Any]], widths: Sequence[float], look: Sequence[tuple[Any, ...]], *, repeat: int = 0
) -> Table:
    """A table without padding but for what `look` says."""
    bare = [("LEFTPADDING", (0, 0), (-1, -1), 0), ("RIGHTPADDING", (0, 0), (-1, -1), 0)]
    bare += [("TOPPADDING", (0, 0), (-1, -1), 0), ("BOTTOMPADDING", (0, 0), (-1, -1), 0)]
    return Table(list(map(list, rows)), colWidths=list(widths), style=[*bare, *look], repeatRows=repeat, hAlign="LEFT")
