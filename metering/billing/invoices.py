"""What an invoice and a credit note say: numbers, lines in words, totals. Pure; `closing.py` and `adjustments.py` write the rows.

An invoice is made of a month's report, line by line in its order. Each line has its exact amount, and beside it the whole minor
units that the customer pays for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from metering.billing.reports import ChargeKind, MonthReport, ReportLine
from metering.models import ServiceTier, TokenKind
from metering.money import exact_text

TOKENS_PER_PRICE = 10**6  # prices are told per million tokens, as they are set


class Series(StrEnum):
    """A row of numbers without gaps, by the prefix of its documents."""

    INVOICE = "INV"
    CREDIT_NOTE = "CN"


class InvoiceLineKind(StrEnum):
    """What a line is for: usage of the month or of an earlier one, or a charge (the rest, as in `ChargeKind`)."""

    USAGE = "usage"
    LATE_USAGE = "late_usage"
    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """One line. exact_picos: before rounding; amount_picos: in whole minor units, what the customer pays."""

    kind: InvoiceLineKind
    description: str
    exact_picos: int
    amount_picos: int
    model: str = ""
    price_version: int | None = None
    token_kind: TokenKind | None = None
    token_count: int | None = None
    unit_price_picos: int | None = None
    usage_month: str = ""
    source_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class Invoice:
    """What a customer owes for a month. Picos; total = exact + carried in - carried out, and the sum of the lines' amounts."""

    number: str
    organization_id: uuid.UUID
    organization_name: str
    month: str
    currency_code: str
    issued_at: datetime
    issued_by: str
    lines: tuple[InvoiceLine, ...]
    exact_picos: int
    carried_in_picos: int
    carried_out_picos: int
    total_picos: int
    credited_picos: int = 0


def document_number(series: Series, ordinal: int) -> str:
    """`INV-000001`: the ordinal has at least six digits, so that numbers sort as text for long enough."""
    return f"{series}-{ordinal:06d}"


def invoice_lines(report: MonthReport) -> tuple[InvoiceLine, ...]:
    """The lines of a month's invoice, in the order of the report."""
    return tuple(_lines(report))


def _lines(report: MonthReport) -> Iterator[InvoiceLine]:
    parts = iter(report.rounded_parts_picos)
    for line in report.lines:
        yield InvoiceLine(
            kind=InvoiceLineKind.LATE_USAGE if line.late_month else InvoiceLineKind.USAGE,
            description=usage_description(line, report.currency_code),
            exact_picos=line.amount_picos,
            amount_picos=next(parts),
            model=line.model,
            price_version=line.price_version,
            token_kind=line.token_kind,
            token_count=line.token_count,
            unit_price_picos=line.unit_price_picos,
            usage_month=line.late_month or report.month,
        )
    for charge in report.charges:
        yield InvoiceLine(
            kind=InvoiceLineKind(charge.kind.value),
            description=charge.description,
            exact_picos=charge.amount_picos,
            amount_picos=next(parts),
            model=charge.model,
            token_kind=charge.token_kind,
            token_count=charge.token_count,
            source_id=charge.source_id,
        )


def usage_description(line: ReportLine, currency_code: str) -> str:
    """A line of usage in words: `late usage of 2026-10: demo, output tokens, USD 0.60 per million (price 3)`."""
    late = f"late usage of {line.late_month}: " if line.late_month else ""
    price = exact_text(line.unit_price_picos * TOKENS_PER_PRICE, currency_code)
    tier = "" if line.tier is ServiceTier.INTERACTIVE else f"{line.tier} "
    words = f"{tier}{line.token_kind.replace('_', ' ')} tokens"
    return f"{late}{line.model}, {words}, {currency_code} {price} per million (price {line.price_version})"


def is_charge(kind: InvoiceLineKind) -> bool:
    """Whether a line stands beside the usage."""
    return kind.value in set(ChargeKind)
