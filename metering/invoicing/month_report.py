"""Month report of a customer: usage, charges and the amount owed; as JSON and as CSV. Pure.

`months.py` reads it from the ledger, `invoices.py` makes an invoice of it. The same report gives
the same bytes, in the format version that it names.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from metering.core.errors import InvalidValue
from metering.core.models import ServiceTier, TokenKind
from metering.core.money import exact_text, round_parts, round_to_minor_unit, round_total
from metering.plans.plans import PlanLine
from metering.tenants.billing_profiles import BillingProfile

# A closed month keeps the format of its close. 1: before months could be closed. 2: the rounded
# amounts of the lines add up, so a line may differ from its own rounding.
REPORT_FORMAT, FORMAT_OF_PARTS = 3, 2
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")  # OWASP's list for CSV injection
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
TAX_NOTE = "tax not included"

CSV_COLUMNS = (
    "record_type",
    "organization_name",
    "organization_id",
    "month",
    "time_zone",
    "model",
    "price_version",
    "token_kind",
    "request_count",
    "token_count",
    "cancelled_token_count",
    "unit_price",
    "amount",
    "currency_code",
    "rounded_amount",
    "late_month",
    "tier",
    "description",
    "state",
    "invoice_number",
    "report_format",
)


@dataclass(frozen=True, slots=True)
class ReportLine:
    """Tokens of one kind, model and price; `cancelled_token_count` are of cancelled requests.

    `late_month` is the month of use, `YYYY-MM`, if it was closed before the usage was posted; else
    empty.
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
class RequestCounts:
    """Number of requests with usage in a month, in total and by outcome."""

    total_count: int
    completed_count: int
    cancelled_count: int
    limited_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Token counts, of all kinds, in usage events, in the ledger, and in unrated events."""

    usage_token_count: int
    ledger_token_count: int
    unrated_token_count: int

    @property
    def balanced(self) -> bool:
        """True if every used token is in the ledger or waits for rating."""
        return self.usage_token_count == self.ledger_token_count + self.unrated_token_count


@dataclass(frozen=True, slots=True)
class CreditNoteIssued:
    """Credit note of the month. The positive amount is refunded and in no invoice's total."""

    number: str
    invoice_number: str
    amount_picos: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrepaidCredit:
    """Prepaid credit of a month, in picos: granted, expired, and remaining at the month's end.

    `refunded_picos` is owed to a closed organization.
    """

    granted_picos: int = 0
    expired_picos: int = 0
    remaining_picos: int = 0
    refunded_picos: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """Close of a month. `invoice_number` and `receipts_root` are empty if there are none."""

    closed_at: datetime
    closed_by: str
    invoice_number: str
    receipts_root: str = ""


@dataclass(frozen=True, slots=True)
class MonthReport:
    """One calendar month (UTC) of an organization. For an open month, the invoice as of now.

    Lines are sorted by month of use, model, price and token kind. `carried_in_picos` is the
    rounding carried from previous months. `billing_profile` is the recipient of the documents, for
    a closed month as of the close.
    """

    organization_name: str
    organization_id: uuid.UUID
    month: str
    currency_code: str
    lines: tuple[ReportLine, ...]
    request_counts: RequestCounts
    unrated_event_count: int
    reconciliation: Reconciliation
    charges: tuple[PlanLine, ...] = ()
    carried_in_picos: int = 0
    credit: PrepaidCredit = PrepaidCredit()
    credit_notes: tuple[CreditNoteIssued, ...] = ()
    closed: Closed | None = None
    format_version: int = REPORT_FORMAT
    billing_profile: BillingProfile | None = None

    @property
    def state(self) -> str:
        """`closed`, or `open` while the numbers may change."""
        return "open" if self.closed is None else "closed"

    @property
    def is_billable(self) -> bool:
        """True if closing the month issues an invoice, even one of zero."""
        return bool(self.lines or self.charges)

    @property
    def total_picos(self) -> int:
        """Exact sum of lines and charges."""
        return sum(self.amounts_picos)

    @property
    def rounded_parts_picos(self) -> tuple[int, ...]:
        """Amounts of lines, then charges, each rounded to whole minor units by itself."""
        if self.format_version == FORMAT_OF_PARTS:
            return round_parts(self.amounts_picos, self.carried_in_picos, self.currency_code)
        return tuple(round_to_minor_unit(picos, self.currency_code) for picos in self.amounts_picos)

    @property
    def rounding_picos(self) -> int:
        """Difference between the total and the sum of the rounded lines and charges."""
        return self.total_rounded_picos - sum(self.rounded_parts_picos)

    @property
    def total_rounded_picos(self) -> int:
        """Amount owed, including carried rounding, rounded once to whole minor units."""
        return round_total(self.total_picos, self.carried_in_picos, self.currency_code)

    @property
    def carried_out_picos(self) -> int:
        """Rounding carried to the next month."""
        return self.total_picos + self.carried_in_picos - self.total_rounded_picos

    @property
    def amounts_picos(self) -> list[int]:
        """Exact amount of each line, then of each charge."""
        return [line.amount_picos for line in self.lines] + [
            charge.amount_picos for charge in self.charges
        ]


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 digests of a report as JSON and as CSV."""

    json_sha256: bytes
    csv_sha256: bytes


def digests(report: MonthReport) -> Digests:
    """Compute the digests of the report's JSON and CSV, in UTF-8."""
    json_sha256, csv_sha256 = (
        hashlib.sha256(text.encode()).digest() for text in (to_json(report), to_csv(report))
    )
    return Digests(json_sha256, csv_sha256)


def check_format(report: MonthReport) -> None:
    """Raise InvalidValue if this release does not know the report's format version."""
    if report.format_version not in (FORMAT_OF_PARTS, REPORT_FORMAT):
        raise InvalidValue(
            "report_format",
            f"version {report.format_version} is unknown to this release: use a later one",
        )


def to_json(report: MonthReport) -> str:
    """Serialize the report. Amounts are exact decimal strings in currency units."""
    check_format(report)
    parts = iter(report.rounded_parts_picos)
    document = {
        **identity(report),
        **closing_facts(report),
        "lines": [line_fields(report, line, next(parts)) for line in report.lines],
        "charges": [charge_fields(report, charge, next(parts)) for charge in report.charges],
        "total": _text(report, report.total_picos),
        "carried_in": _text(report, report.carried_in_picos),
        "carried_out": _text(report, report.carried_out_picos),
        **rounding_field(report),
        "total_rounded": _text(report, report.total_rounded_picos),
        "tax_note": TAX_NOTE,
        "prepaid_credit": {
            name.removesuffix("_picos"): _text(report, picos)
            for name, picos in asdict(report.credit).items()
            # Documents closed before there were refunds have no such field.
            if picos or name != "refunded_picos"
        },
        "credit_notes": [
            {
                "number": note.number,
                "invoice_number": note.invoice_number,
                "amount": _text(report, note.amount_picos),
                "reason": note.reason,
            }
            for note in report.credit_notes
        ],
        "request_counts": asdict(report.request_counts),
        "unrated_event_count": report.unrated_event_count,
        "reconciliation": {
            **asdict(report.reconciliation),
            "balanced": report.reconciliation.balanced,
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def rounding_field(report: MonthReport) -> dict[str, str]:
    """Build the rounding field; the earlier format has none, since its parts add up."""
    of_parts = report.format_version == FORMAT_OF_PARTS
    return {} if of_parts else {"rounding": _text(report, report.rounding_picos)}


def identity(report: MonthReport) -> dict[str, Any]:
    """Build the fields for format, organization, month, currency and state."""
    return {
        "report_format": report.format_version,
        "organization_name": report.organization_name,
        "organization_id": str(report.organization_id),
        "month": report.month,
        "time_zone": "UTC",
        "currency_code": report.currency_code,
        "state": report.state,
    }


def closing_facts(report: MonthReport) -> dict[str, str | None]:
    """Build the fields of the close: time, actor, invoice number, receipts root; null if open."""

    closed = report.closed
    return {
        "closed_at": None if closed is None else time_text(closed.closed_at),
        "closed_by": None if closed is None else closed.closed_by,
        "invoice_number": None if closed is None else closed.invoice_number or None,
        "receipts_root": None if closed is None else closed.receipts_root or None,
    }


def line_fields(report: MonthReport, line: ReportLine, rounded_picos: int) -> dict[str, Any]:
    return {
        "model": line.model,
        "price_version": line.price_version,
        "token_kind": line.token_kind.value,
        "request_count": line.request_count,
        "token_count": line.token_count,
        "cancelled_token_count": line.cancelled_token_count,
        "unit_price": _text(report, line.unit_price_picos),
        "amount": _text(report, line.amount_picos),
        "rounded_amount": _text(report, rounded_picos),
        "late_month": line.late_month or None,
        "tier": line.tier.value,
    }


def charge_fields(report: MonthReport, charge: PlanLine, rounded_picos: int) -> dict[str, Any]:
    return {
        "kind": charge.kind.value,
        "description": charge.description,
        "model": charge.model or None,
        "token_kind": None if charge.token_kind is None else charge.token_kind.value,
        "token_count": charge.token_count,
        "amount": _text(report, charge.amount_picos),
        "rounded_amount": _text(report, rounded_picos),
        "source_id": None if charge.source_id is None else str(charge.source_id),
    }


def csv_cell(value: str) -> str:
    """Quote a text that a spreadsheet would read as a formula: end users choose their names."""
    if not value.startswith(FORMULA_BEGINNINGS) or NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def to_csv(report: MonthReport) -> str:
    """Serialize as RFC 4180 CSV with a header: `usage` and `late_usage`, charges by kind, sums.

    Both amount columns add up to `total_rounded`, the amount owed: exact amounts by way of `total`,
    `carried_in` and `carried_out`, rounded ones by `rounding`. `credit_note` and `prepaid_credit_…`
    rows are informational and in no sum.
    """
    check_format(report)
    text_file = io.StringIO()
    writer = csv.DictWriter(text_file, CSV_COLUMNS, restval="", lineterminator="\r\n")
    common = identity(report) | {
        "invoice_number": "" if report.closed is None else report.closed.invoice_number
    }
    writer.writeheader()
    for row in _csv_rows(report):
        writer.writerow(
            common | {name: "" if value is None else value for name, value in row.items()}
        )
    return text_file.getvalue()


def _csv_rows(report: MonthReport) -> Iterator[dict[str, Any]]:
    parts = iter(report.rounded_parts_picos)
    for line in report.lines:
        yield {"record_type": "late_usage" if line.late_month else "usage"} | line_fields(
            report, line, next(parts)
        )
    for charge in report.charges:
        fields = charge_fields(report, charge, next(parts))
        yield {"record_type": fields.pop("kind")} | {
            name: value for name, value in fields.items() if name in CSV_COLUMNS
        }
    yield {
        "record_type": "total",
        "amount": _text(report, report.total_picos),
        "request_count": report.request_counts.total_count,
    }
    yield {"record_type": "carried_in", "amount": _text(report, report.carried_in_picos)}
    owed = {"amount": _text(report, report.total_rounded_picos), "description": TAX_NOTE}
    if report.format_version == FORMAT_OF_PARTS:
        yield {"record_type": "carried_out", "amount": _text(report, report.carried_out_picos)}
    else:
        yield {"record_type": "carried_out", "amount": _text(report, -report.carried_out_picos)}
        yield {"record_type": "rounding", "rounded_amount": _text(report, report.rounding_picos)}
        owed["rounded_amount"] = owed["amount"]
    yield {"record_type": "total_rounded", **owed}
    for note in report.credit_notes:
        yield {
            "record_type": "credit_note",
            "amount": _text(report, -note.amount_picos),
            "description": f"{note.number} to {note.invoice_number}: {note.reason}",
        }
    for name, picos in asdict(report.credit).items():
        if picos:
            yield {
                "record_type": f"prepaid_credit_{name.removesuffix('_picos')}",
                "amount": _text(report, picos),
            }


def time_text(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC with `Z`."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _text(report: MonthReport, picos: int) -> str:
    return exact_text(picos, report.currency_code)
