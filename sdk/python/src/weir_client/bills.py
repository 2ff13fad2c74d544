"""Values of months, invoices and corrections."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.plain import Value


class MonthState(StrEnum):
    """State of a month. CLOSED is final."""

    UNSPECIFIED = "unspecified"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class AdjustmentState(StrEnum):
    """State of an adjustment or a credit note."""

    UNSPECIFIED = "unspecified"
    PROPOSED = "proposed"
    APPROVED = "approved"
    REJECTED = "rejected"


class DocumentFormat(StrEnum):
    """File format of a month's report."""

    JSON = "json"
    CSV = "csv"


class PaymentState(StrEnum):
    """Payment state of an invoice at Stripe. PAID is final."""

    UNSPECIFIED = "unspecified"
    OPEN = "open"
    FAILED = "failed"
    OVERDUE = "overdue"
    PAID = "paid"
    VOID = "void"
    UNCOLLECTIBLE = "uncollectible"


@dataclass(frozen=True, slots=True)
class InvoicePayment(Value):
    """Invoice at Stripe, as reported by its events. Unknown texts are empty, unknown times None."""

    stripe_invoice_id: str
    stripe_number: str
    state: PaymentState
    amount_due: Money
    amount_paid: Money
    hosted_url: str  # Stripe's payment page
    finalize_time: datetime | None
    pay_time: datetime | None
    failure_time: datetime | None  # when the latest attempt to charge it failed


@dataclass(frozen=True, slots=True)
class Month(Value):
    """Month of one organization. SHA-256 digests are in hexadecimal, and empty before the close."""

    organization_name: str
    organization_id: str
    month: str  # YYYY-MM
    state: MonthState
    closing_time: datetime | None
    closing_by: str
    close_time: datetime | None
    closed_by: str
    invoice_number: str  # empty where there is nothing to invoice
    total: Money | None  # total of the invoice
    json_sha256: str
    csv_sha256: str
    report_format: int
    receipts_root: str
    payments: tuple[InvoicePayment, ...] = ()  # state of Stripe's invoices for the month
    pdf_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Obstacle(Value):
    """Reason why a month cannot be closed. `kind` is stable, such as `MONTH_NOT_OVER`."""

    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class ClosedMonth(Value):
    """Result of closing a month. `obstacles` is filled only with `validate_only`."""

    month: Month
    obstacles: tuple[Obstacle, ...]
    already_closed: bool


@dataclass(frozen=True, slots=True)
class MonthVerification(Value):
    """Result of recomputing a closed month from the ledger. `differences` lists deviations."""

    month: Month
    json_sha256: str
    csv_sha256: str
    reproduced: bool
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MonthCharge(Value):
    """Charge other than usage: allowance, graduated, volume, commitment, adjustment or credit."""

    kind: str
    description: str
    amount: Money  # before rounding
    rounded_amount: Money
    model: str
    token_count: int
    source_id: str


@dataclass(frozen=True, slots=True)
class PrepaidCredit(Value):
    """Prepaid credit of an organization in a month."""

    granted: Money
    expired: Money
    remaining: Money


@dataclass(frozen=True, slots=True)
class CreditNoteSummary(Value):
    """Credit note in the report of its month. It does not change the total of any invoice."""

    number: str
    invoice_number: str
    amount: Money
    reason: str


@dataclass(frozen=True, slots=True)
class InvoiceLine(Value):
    """Line of an invoice: `amount` is charged, `exact_amount` is the amount before rounding.

    A line of kind `rounding` makes the lines add up to the total; its exact amount is zero.
    """

    kind: str
    description: str
    exact_amount: Money
    amount: Money
    model: str
    price_version: int
    token_kind: str
    token_count: int
    unit_price_picos: int
    usage_month: str
    source_id: str


@dataclass(frozen=True, slots=True)
class Adjustment(Value):
    """Manual correction: a line of the next invoice, or a credit note for `invoice_number`."""

    adjustment_id: str
    organization_id: str
    amount: Money  # positive: owed by the customer; negative: credited
    reason: str
    invoice_number: str
    state: AdjustmentState
    author: str
    create_time: datetime | None
    decided_by: str
    decide_time: datetime | None
    billing_month: str  # YYYY-MM in which it was posted
    credit_note_number: str


@dataclass(frozen=True, slots=True)
class Invoice(Value):
    """Invoice of a month. The amounts of its lines add up to `total`."""

    number: str
    organization_id: str
    organization_name: str
    month: str
    issue_time: datetime | None
    issued_by: str
    lines: tuple[InvoiceLine, ...]
    exact_total: Money
    carried_in: Money
    carried_out: Money
    total: Money
    credited: Money
    tax_note: str
    credit_notes: tuple[Adjustment, ...] = ()
    payments: tuple[InvoicePayment, ...] = ()  # state of Stripe's invoices for the month
