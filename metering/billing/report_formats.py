"""A month report as JSON and as CSV. Pure: the same report, the same bytes, in the format version that the report names."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from metering.billing.reports import REPORT_FORMAT, TAX_NOTE, Charge, MonthReport, ReportLine
from metering.errors import InvalidValue
from metering.money import exact_text

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
class Digests:
    """SHA-256 of a report's two documents."""

    json_sha256: bytes
    csv_sha256: bytes


def digests(report: MonthReport) -> Digests:
    """Of the report as it is written now, as UTF-8."""
    json_sha256, csv_sha256 = (hashlib.sha256(text.encode()).digest() for text in (to_json(report), to_csv(report)))
    return Digests(json_sha256, csv_sha256)


def check_format(report: MonthReport) -> None:
    """Raises: InvalidValue for a version that is not known here."""
    if report.format_version != REPORT_FORMAT:
        raise InvalidValue("report_format", f"version {report.format_version} is not known to this release: use a later one")


def to_json(report: MonthReport) -> str:
    """The whole report. Amounts are exact decimal strings in units of the currency."""
    check_format(report)
    parts = iter(report.rounded_parts_picos)
    document = {
        "report_format": report.format_version,
        "organization_name": report.organization_name,
        "organization_id": str(report.organization_id),
        "month": report.month,
        "time_zone": "UTC",
        "currency_code": report.currency_code,
        "state": report.state,
        **closing_facts(report),
        "lines": [line_fields(report, line, next(parts)) for line in report.lines],
        "charges": [charge_fields(report, charge, next(parts)) for charge in report.charges],
        "total": _text(report, report.total_picos),
        "carried_in": _text(report, report.carried_in_picos),
        "carried_out": _text(report, report.carried_out_picos),
        "total_rounded": _text(report, report.total_rounded_picos),
        "tax_note": TAX_NOTE,
        "prepaid_credit": {
            "granted": _text(report, report.credit.granted_picos),
            "expired": _text(report, report.credit.expired_picos),
            "left": _text(report, report.credit.left_picos),
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
        "reconciliation": {**asdict(report.reconciliation), "balanced": report.reconciliation.balanced},
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def closing_facts(report: MonthReport) -> dict[str, str | None]:
    """Who closed it and when, and what number the invoice has; all null of a month that is not closed."""
    closed = report.closed
    return {
        "closed_at": None if closed is None else time_text(closed.closed_at),
        "closed_by": None if closed is None else closed.closed_by,
        "invoice_number": None if closed is None else closed.invoice_number or None,
        "receipts_root": None if closed is None else closed.receipts_root or None,
    }


def line_fields(report: MonthReport, line: ReportLine, rounded_picos: int) -> dict[str, Any]:
    """A line of usage."""
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


def charge_fields(report: MonthReport, charge: Charge, rounded_picos: int) -> dict[str, Any]:
    """A line beside the usage."""
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


def to_csv(report: MonthReport) -> str:
    """RFC 4180 with a header. Rows `usage` and `late_usage` are the lines, then come the charges by their kind, then the sums.

    `total` is the exact sum, `carried_in` and `carried_out` what rounding takes over and passes on, `total_rounded` what is owed.
    `credit_note` and `prepaid_credit_…` tell what stands beside the invoice. Nothing else is to be added up.
    """
    check_format(report)
    text_file = io.StringIO()
    writer = csv.DictWriter(text_file, CSV_COLUMNS, restval="", lineterminator="\r\n")
    common = {
        "organization_name": report.organization_name,
        "organization_id": str(report.organization_id),
        "month": report.month,
        "time_zone": "UTC",
        "currency_code": report.currency_code,
        "state": report.state,
        "invoice_number": "" if report.closed is None else report.closed.invoice_number,
        "report_format": report.format_version,
    }
    writer.writeheader()
    for row in _csv_rows(report):
        writer.writerow(common | {name: "" if value is None else value for name, value in row.items()})
    return text_file.getvalue()


def _csv_rows(report: MonthReport) -> Iterator[dict[str, Any]]:
    parts = iter(report.rounded_parts_picos)
    for line in report.lines:
        yield {"record_type": "late_usage" if line.late_month else "usage"} | line_fields(report, line, next(parts))
    for charge in report.charges:
        fields = charge_fields(report, charge, next(parts))
        yield {"record_type": fields.pop("kind")} | {name: value for name, value in fields.items() if name in CSV_COLUMNS}
    yield {
        "record_type": "total",
        "amount": _text(report, report.total_picos),
        "request_count": report.request_counts.total_count,
    }
    yield {"record_type": "carried_in", "amount": _text(report, report.carried_in_picos)}
    yield {"record_type": "carried_out", "amount": _text(report, report.carried_out_picos)}
    yield {
        "record_type": "total_rounded",
        "amount": _text(report, report.total_rounded_picos),
        "description": TAX_NOTE,
    }
    for note in report.credit_notes:
        yield {
            "record_type": "credit_note",
            "amount": _text(report, -note.amount_picos),
            "description": f"{note.number} to {note.invoice_number}: {note.reason}",
        }
    for name, picos in asdict(report.credit).items():
        if picos:
            yield {"record_type": f"prepaid_credit_{name.removesuffix('_picos')}", "amount": _text(report, picos)}


def time_text(moment: datetime) -> str:
    """ISO 8601 in UTC with `Z`."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _text(report: MonthReport, picos: int) -> str:
    return exact_text(picos, report.currency_code)
