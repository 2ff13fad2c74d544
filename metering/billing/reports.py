"""The month of a customer: what the ledger says it owes, line by line, and whether that is what it used.

Amounts come from the ledger, never from today's prices. `to_json` and `to_csv` are pure: the same report, the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.errors import InvalidValue, InvariantViolated
from metering.models import TokenKind
from metering.money import exact_text, round_to_minor_unit
from metering.operations import Outcome
from metering.tenants.tenants import find_organization

MONTH_FORM = re.compile(r"([2-9]\d{3})-(0[1-9]|1[0-2])", re.ASCII)
TOKEN_KIND_ORDER = list(TokenKind)

COMPLETED = (Outcome.STOP, Outcome.STOP_SEQUENCE, Outcome.LENGTH)
CANCELLED = (Outcome.CANCELLED, Outcome.DEADLINE)
LIMITED = (Outcome.QUOTA_EXHAUSTED, Outcome.COST_LIMIT, Outcome.SLOW_CONSUMER, Outcome.FILTERED)
FAILED = (Outcome.FAILED,)

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
)


@dataclass(frozen=True, slots=True)
class ReportLine:
    """Tokens of one kind, of one model, at one price. `cancelled_token_count` of the `token_count` are of cancelled requests."""

    model: str
    price_version: int
    token_kind: TokenKind
    request_count: int
    token_count: int
    cancelled_token_count: int
    unit_price_picos: int
    amount_picos: int


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
class MonthReport:
    """One calendar month (UTC) of one organization. Lines are sorted by model, price version and kind of token."""

    organization_name: str
    organization_id: uuid.UUID
    month: str
    currency_code: str
    lines: tuple[ReportLine, ...]
    request_counts: RequestCounts
    unrated_event_count: int
    reconciliation: Reconciliation

    @property
    def total_picos(self) -> int:
        """Sum of the lines, exact."""
        return sum(line.amount_picos for line in self.lines)

    @property
    def total_rounded_picos(self) -> int:
        """The total in whole minor units of the currency: rounded once, here."""
        return round_to_minor_unit(self.total_picos, self.currency_code)


# One statement, so that all numbers are of one moment: rating may go on meanwhile.
MONTH = text("""
WITH used AS (
    SELECT count(*) FILTER (WHERE part = 0) AS total_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:completed)) AS completed_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:cancelled)) AS cancelled_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:limited)) AS limited_count,
           count(*) FILTER (WHERE part = 0 AND outcome = ANY(:failed)) AS failed_count,
           coalesce(sum(input_token_count + billed_token_count), 0) AS usage_token_count,
           coalesce(sum(input_token_count + billed_token_count) FILTER (WHERE rated_at IS NULL), 0) AS unrated_token_count,
           count(*) FILTER (WHERE rated_at IS NULL) AS unrated_event_count
    FROM usage_events
    WHERE organization_id = :organization_id AND settled_at >= :begins AND settled_at < :ends
), posted AS (
    SELECT p.model, p.id AS price_version, p.currency_code, e.token_kind,
           count(DISTINCT u.hold_id) AS request_count,
           sum(e.token_count) AS token_count,
           coalesce(sum(e.token_count) FILTER (WHERE u.outcome = ANY(:cancelled)), 0) AS cancelled_token_count,
           CASE e.token_kind WHEN 'input' THEN p.input_picos_per_token
                             WHEN 'cached_input' THEN p.cached_input_picos_per_token
                             WHEN 'output' THEN p.output_picos_per_token END AS unit_price_picos,
           -sum(e.amount_picos) AS amount_picos
    FROM ledger_transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    JOIN price_versions p ON p.id = e.price_version_id
    JOIN usage_events u ON u.id = t.usage_event_id
    WHERE t.organization_id = :organization_id AND t.effective_at >= :begins AND t.effective_at < :ends
    GROUP BY p.id, e.token_kind
)
SELECT used.*, posted.* FROM used LEFT JOIN posted ON true
""")


async def month_report(session: AsyncSession, *, organization: str, month: str) -> MonthReport:
    """The report of an organization, given by name or id, for a month `YYYY-MM`. Raises: NotFound, InvalidValue."""
    begins, ends = month_bounds(month)
    owner = await find_organization(session, organization)
    parameters = {
        "organization_id": owner.id,
        "begins": begins,
        "ends": ends,
        "completed": list(COMPLETED),
        "cancelled": list(CANCELLED),
        "limited": list(LIMITED),
        "failed": list(FAILED),
    }
    rows = (await session.execute(MONTH, parameters)).all()
    lines = []
    for row in rows:
        if row.model is None:
            continue  # nothing is posted: the row is there for the counts
        if row.currency_code != owner.currency_code:
            raise InvariantViolated(
                f"organization {owner.name} has postings in {row.currency_code}: it is billed in {owner.currency_code}"
            )
        lines.append(
            ReportLine(
                model=row.model,
                price_version=row.price_version,
                token_kind=TokenKind(row.token_kind),
                request_count=row.request_count,
                token_count=int(row.token_count),
                cancelled_token_count=int(row.cancelled_token_count),
                unit_price_picos=row.unit_price_picos,
                amount_picos=int(row.amount_picos),
            )
        )
    lines.sort(key=lambda line: (line.model, line.price_version, TOKEN_KIND_ORDER.index(line.token_kind)))
    counts = rows[0]
    return MonthReport(
        organization_name=owner.name,
        organization_id=owner.id,
        month=month,
        currency_code=owner.currency_code,
        lines=tuple(lines),
        request_counts=RequestCounts(
            total_count=counts.total_count,
            completed_count=counts.completed_count,
            cancelled_count=counts.cancelled_count,
            limited_count=counts.limited_count,
            failed_count=counts.failed_count,
        ),
        unrated_event_count=counts.unrated_event_count,
        reconciliation=Reconciliation(
            usage_token_count=int(counts.usage_token_count),
            ledger_token_count=sum(line.token_count for line in lines),
            unrated_token_count=int(counts.unrated_token_count),
        ),
    )


def month_bounds(month: str) -> tuple[datetime, datetime]:
    """First moment of a month `YYYY-MM` and of the next, UTC. Raises: InvalidValue."""
    found = MONTH_FORM.fullmatch(month)
    if found is None or month == "9999-12":
        raise InvalidValue("month", f"{month!r} is no month: give it as YYYY-MM")
    year, number = int(found[1]), int(found[2])
    return datetime(year, number, 1, tzinfo=UTC), datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)


def to_json(report: MonthReport) -> str:
    """The whole report. Amounts are exact decimal strings in units of the currency."""
    document = {
        "organization_name": report.organization_name,
        "organization_id": str(report.organization_id),
        "month": report.month,
        "time_zone": "UTC",
        "currency_code": report.currency_code,
        "lines": [
            {
                "model": line.model,
                "price_version": line.price_version,
                "token_kind": line.token_kind,
                "request_count": line.request_count,
                "token_count": line.token_count,
                "cancelled_token_count": line.cancelled_token_count,
                "unit_price": exact_text(line.unit_price_picos, report.currency_code),
                "amount": exact_text(line.amount_picos, report.currency_code),
            }
            for line in report.lines
        ],
        "total": exact_text(report.total_picos, report.currency_code),
        "total_rounded": exact_text(report.total_rounded_picos, report.currency_code),
        "request_counts": asdict(report.request_counts),
        "unrated_event_count": report.unrated_event_count,
        "reconciliation": {**asdict(report.reconciliation), "balanced": report.reconciliation.balanced},
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def to_csv(report: MonthReport) -> str:
    """RFC 4180 with a header. Rows of type `usage` are the lines; `total` is their exact sum and `total_rounded` what is owed."""
    text_file = io.StringIO()
    writer = csv.DictWriter(text_file, CSV_COLUMNS, restval="", lineterminator="\r\n")
    common = {
        "organization_name": report.organization_name,
        "organization_id": str(report.organization_id),
        "month": report.month,
        "time_zone": "UTC",
        "currency_code": report.currency_code,
    }
    writer.writeheader()
    for line in report.lines:
        writer.writerow(
            common
            | {
                "record_type": "usage",
                "model": line.model,
                "price_version": line.price_version,
                "token_kind": line.token_kind.value,
                "request_count": line.request_count,
                "token_count": line.token_count,
                "cancelled_token_count": line.cancelled_token_count,
                "unit_price": exact_text(line.unit_price_picos, report.currency_code),
                "amount": exact_text(line.amount_picos, report.currency_code),
            }
        )
    for record_type, picos in (("total", report.total_picos), ("total_rounded", report.total_rounded_picos)):
        row = common | {"record_type": record_type, "amount": exact_text(picos, report.currency_code)}
        if record_type == "total":
            row["request_count"] = str(report.request_counts.total_count)
        writer.writerow(row)
    return text_file.getvalue()
