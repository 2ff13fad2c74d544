"""What an invoice says, as plain values in the order in which a reader meets them. Knows the report, not the page.

`invoice_pdf.py` draws it. Pure: the same report and issuer give the same document. Amounts are picos throughout; texts of amounts
are made when it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metering.money import PICO_DIGITS

TOKENS_PER_PRICE = 1_000_000  # prices are compared per million tokens


@dataclass(frozen=True, slots=True)
class Issuer:
    """Who sends the invoice: what stands in its letterhead and at its foot. Without a name it is a statement, not an invoice.

    payment: how to pay, a line each. font, bold_font: TrueType files for names beyond Western European letters; None for Helvetica.
    """

    name: str = ""
    address: tuple[str, ...] = ()
    tax_id: str = ""
    contact: str = ""
    payment: tuple[str, ...] = ()
    font: Path | None = None
    bold_font: Path | None = None


@dataclass(frozen=True, slots=True)
class TokenLine:
    """Tokens of one kind at one price. billed_picos: what this line adds to the rounded total."""

    token_kind: str
    tier: str
    price_version: int
    unit_price_picos: int
    token_count: int
    amount_picos: int
    billed_picos: int

    @property
    def price_per_million_picos(self) -> int:
        """Exact, since a price is a whole number of picos per token."""
        return self.unit_price_picos * TOKENS_PER_PRICE


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """The lines of one model. late_month: the month of use, if it was closed when the usage was found."""

    model: str
    lines: tuple[TokenLine, ...]
    late_month: str = ""


@dataclass(frozen=True, slots=True)
class AmountLine:
    """An amount with its reason: a discount of the plan, an adjustment, an applied credit. detail stands below it, smaller.

    billed_picos: what it adds to the rounded total; None for what is no part of it.
    """

    description: str
    amount_picos: int
    billed_picos: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AmountSection:
    """Amounts of one sort with a heading."""

    heading: str
    lines: tuple[AmountLine, ...]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A row of the sums at the end. amount_picos: exact; None where `text` stands instead. strong: what is owed."""

    label: str
    amount_picos: int | None = None
    text: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class InvoiceDocument:
    """One invoice, draft or statement.

    mark: a few words that must not be overlooked, on every page; empty on a final invoice. facts: label and text, beside the
    customer. summary ends with what is owed. customer_lines: address, tax id and e-mail of the customer.
    """

    title: str
    mark: str
    reference: str
    issuer: Issuer
    customer_name: str
    customer_id: str
    currency_code: str
    facts: tuple[tuple[str, str], ...]
    usage: tuple[TokenGroup, ...]
    sections: tuple[AmountSection, ...]
    summary: tuple[SummaryRow, ...]
    notes: tuple[str, ...]
    customer_lines: tuple[str, ...] = ()


def grouped(text: str) -> str:
    """A decimal number as text with thousands separators before the point: `-1,234.5`."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, point, fraction = digits.partition(".")
    assert len(fraction) <= PICO_DIGITS
    return f"{sign}{int(whole):,}{point}{fraction}"


def shown_by_helvetica(character: str) -> bool:
    """Whether one of PDF's built-in fonts has it: the letters of Western Europe."""
    return character >= " " and character.encode("cp1252", errors="ignore") != b""
