"""The month of a customer as a value: what it used, what its plan, adjustments and credit make of that, and what it owes. Pure.

`month_reading.py` reads it from the ledger, `report_formats.py` writes it as JSON and CSV, `invoices.py` makes an invoice of it.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from metering.errors import InvalidValue
from metering.models import ServiceTier, TokenKind
from metering.money import round_parts
from metering.tenants.billing_profiles import BillingProfile

MONTH_FORM = re.compile(r"([2-9]\d{3})-(0[1-9]|1[0-2])", re.ASCII)
REPORT_FORMAT = 2  # 1: until months could be closed. A closed month is written in the format of its close, for ever
TAX_NOTE = "tax not included"


class ChargeKind(StrEnum):
    """What a line beside the usage is: of the plan, a correction, or prepaid credit that pays."""

    ALLOWANCE = "allowance"
    GRADUATED = "graduated"
    VOLUME = "volume"
    COMMITMENT = "commitment"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"


@dataclass(frozen=True, slots=True)
class ReportLine:
    """Tokens of one kind, of one model, at one price. `cancelled_token_count` of the `token_count` are of cancelled requests.

    late_month: the month `YYYY-MM` of the use, where that was closed before the usage was posted; else empty.
    """

    model: str
    price_version: int
    token_kind: TokenKind
    request_count: int
    token_count: int
    cancelled_token_count: int
    unit_price_picos: int
    amount_picos: int
    late_month: str = ""
    tier: ServiceTier = ServiceTier.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Charge:
    """A line beside the usage; what the customer pays less for is negative. source_id: of the adjustment or the credit grant."""

    kind: ChargeKind
    description: str
    amount_picos: int
    model: str = ""
    token_kind: TokenKind | None = None
    token_count: int | None = None
    source_id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests that used something, by how they ended."""

    total_count: int
    completed_count: int
    cancelled_count: int
    limited_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Tokens of all kinds: in usage events, in the ledger, and in events that are still to be rated."""

    usage_token_count: int
    ledger_token_count: int
    unrated_token_count: int

    @property
    def balanced(self) -> bool:
        """Whether every token used is in the ledger or about to be."""
        return self.usage_token_count == self.ledger_token_count + self.unrated_token_count


@dataclass(frozen=True, slots=True)
class CreditNoteIssued:
    """A credit note of the month. It stands beside the invoice: its amount, above zero, is given back and in no invoice's total."""

    number: str
    invoice_number: str
    amount_picos: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrepaidCredit:
    """Prepaid credit of the month in picos: granted and expired in it, and left at its end. What was spent is among the charges."""

    granted_picos: int = 0
    expired_picos: int = 0
    left_picos: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """How a month was closed. invoice_number: empty where there was nothing to invoice. receipts_root: of its receipts, if any."""

    closed_at: datetime
    closed_by: str
    invoice_number: str
    receipts_root: str = ""


@dataclass(frozen=True, slots=True)
class MonthReport:
    """One calendar month (UTC) of one organization. Lines are sorted by month of use, model, price version and kind of token.

    Of a month that is not closed it tells what the invoice would be now. carried_in_picos: what rounding left of the months before.
    billing_profile: addressee of the documents; of a closed month as it was at the close.
    """

    organization_name: str
    organization_id: uuid.UUID
    month: str
    currency_code: str
    lines: tuple[ReportLine, ...]
    request_counts: RequestCounts
    unrated_event_count: int
    reconciliation: Reconciliation
    charges: tuple[Charge, ...] = ()
    carried_in_picos: int = 0
    credit: PrepaidCredit = PrepaidCredit()
    credit_notes: tuple[CreditNoteIssued, ...] = ()
    closed: Closed | None = None
    format_version: int = REPORT_FORMAT
    billing_profile: BillingProfile | None = None

    @property
    def state(self) -> str:
        """`closed`, or `open`: its numbers may change."""
        return "open" if self.closed is None else "closed"

    @property
    def total_picos(self) -> int:
        """Sum of lines and charges, exact."""
        return sum(self._amounts())

    @property
    def rounded_parts_picos(self) -> tuple[int, ...]:
        """Each line, then each charge, in whole minor units; their sum is `total_rounded_picos`."""
        return round_parts(self._amounts(), self.carried_in_picos, self.currency_code)[0]

    @property
    def total_rounded_picos(self) -> int:
        """What is owed: the total and what was carried, in whole minor units of the currency, rounded once."""
        return sum(self.rounded_parts_picos)

    @property
    def carried_out_picos(self) -> int:
        """What the rounding leaves for the next month."""
        return round_parts(self._amounts(), self.carried_in_picos, self.currency_code)[1]

    def _amounts(self) -> list[int]:
        return [line.amount_picos for line in self.lines] + [charge.amount_picos for charge in self.charges]


def month_bounds(month: str) -> tuple[datetime, datetime]:
    """First moment of a month `YYYY-MM` and of the next, UTC. Raises: InvalidValue."""
    found = MONTH_FORM.fullmatch(month)
    if found is None or month == "9999-12":
        raise InvalidValue("month", f"{month[:64]!r} is not a month: give it as YYYY-MM")
    year, number = int(found[1]), int(found[2])
    return datetime(year, number, 1, tzinfo=UTC), datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
