"""Which months a customer has, and where each stands. Functions take a session, read and never commit."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.models import MonthState
from metering.billing.months import month_of, month_text
from metering.billing.reports import month_bounds
from metering.models import Organization

# From the first month with anything in it to the present one. A month before a closed one is closed with it.
MONTHS = text("""
WITH known AS (
    SELECT min(month) AS first, max(month) AS last FROM (
        SELECT billing_month AS month FROM ledger_transactions WHERE organization_id = :organization_id
        UNION ALL SELECT first_month FROM plan_assignments WHERE organization_id = :organization_id AND first_month <= now()
        UNION ALL SELECT month FROM billing_months WHERE organization_id = :organization_id
        UNION ALL SELECT CAST(date_trunc('month', settled_at, 'UTC') AS date) FROM unrated_usage
        WHERE organization_id = :organization_id
        UNION ALL SELECT CAST(date_trunc('month', now(), 'UTC') AS date)
    ) months
)
SELECT CAST(each.month AS date) AS month, b.state, b.closing_at, b.closing_by, b.closed_at, b.closed_by, c.organization_name,
       c.report_format, c.json_sha256, c.csv_sha256, c.receipts_root, i.number, i.total_picos
FROM known, generate_series(coalesce(CAST(:only AS date), known.first), coalesce(CAST(:only AS date), known.last),
                            interval '1 month') AS each (month)
LEFT JOIN billing_months b ON b.organization_id = :organization_id AND b.month = each.month
LEFT JOIN month_closings c ON c.organization_id = :organization_id AND c.month = each.month
LEFT JOIN invoices i ON i.organization_id = :organization_id AND i.month = each.month
ORDER BY 1 DESC
""")


@dataclass(frozen=True, slots=True)
class MonthEntry:
    """Where one month stands. Digests in hexadecimal. total_picos: of the invoice; None where there is none."""

    organization_id: uuid.UUID
    organization_name: str
    currency_code: str
    month: str
    state: MonthState
    closing_at: datetime | None
    closing_by: str
    closed_at: datetime | None
    closed_by: str
    invoice_number: str
    total_picos: int | None
    json_sha256: str
    csv_sha256: str
    report_format: int
    receipts_root: str


async def list_months(session: AsyncSession, organization: Organization) -> list[MonthEntry]:
    """All of an organization's, the latest first."""
    return await _read(session, organization, None)


async def month_entry(session: AsyncSession, organization: Organization, month: str) -> MonthEntry:
    """One month `YYYY-MM`, whether there is anything in it or not. Raises: InvalidValue."""
    return (await _read(session, organization, month_of(month_bounds(month)[0].date())))[0]


async def _read(session: AsyncSession, organization: Organization, only: date | None) -> list[MonthEntry]:
    rows = await session.execute(MONTHS, {"organization_id": organization.id, "only": only})
    return [
        MonthEntry(
            organization_id=organization.id,
            organization_name=row.organization_name or organization.name,
            currency_code=organization.currency_code,
            month=month_text(row.month),
            state=MonthState(row.state or MonthState.OPEN),
            closing_at=row.closing_at,
            closing_by=row.closing_by or "",
            closed_at=row.closed_at,
            closed_by=row.closed_by or "",
            invoice_number=row.number or "",
            total_picos=None if row.total_picos is None else int(row.total_picos),
            json_sha256="" if row.json_sha256 is None else row.json_sha256.hex(),
            csv_sha256="" if row.csv_sha256 is None else row.csv_sha256.hex(),
            report_format=row.report_format or 0,
            receipts_root=row.receipts_root or "",
        )
        for row in rows
    ]
