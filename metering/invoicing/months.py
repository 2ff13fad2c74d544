"""The months of a customer: where each stands, and whether a closed one is still what its close froze.

Reads only. Verification makes the report again from the ledger and compares four things: the documents with their digests, the
receipts with their root, the invoice's lines with the report's, and what the month posted to the customer's account with what was
invoiced.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import MonthOpen
from metering.core.models import Organization
from metering.core.money import exact_text
from metering.invoicing.invoices import MonthClosing, invoice_lines, invoice_of_month, read_lines
from metering.invoicing.month_reading import LONG_READ_S, read_month, read_patiently
from metering.invoicing.month_report import Digests, MonthReport, digests
from metering.ledger.ledger import month_bounds, month_of, month_text
from metering.ledger.models import AccountKind, MonthState
from metering.receipts.months import month_root
from metering.store.db import patience

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


OWED = text(f"""
SELECT coalesce(sum(e.amount_picos), 0) FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
JOIN ledger_accounts c ON c.id = e.account_id AND c.kind = '{AccountKind.RECEIVABLE}'
WHERE t.organization_id = :organization_id AND t.billing_month = :month
""")


@dataclass(frozen=True, slots=True)
class Verification:
    """What a month's report is today. differences: from its close, in words; none if it is reproduced."""

    report: MonthReport
    digests: Digests
    differences: tuple[str, ...]


async def changed_months(session: AsyncSession) -> AsyncIterator[tuple[str, str, str]]:
    """Of every closed month, what is not as it was closed: name of the organization, month, and what differs in words."""
    closed = select(MonthClosing.organization_id, MonthClosing.month).order_by(MonthClosing.month, MonthClosing.organization_id)
    for organization_id, month in (await session.execute(closed)).all():
        owner = await session.get_one(Organization, organization_id)
        for difference in (await verify_month(session, owner, month_text(month))).differences:
            yield owner.name, month_text(month), difference


async def verify_month(session: AsyncSession, organization: Organization, month: str) -> Verification:
    """Compare a month `YYYY-MM`. Raises: InvalidValue, MonthOpen."""
    first_day = month_of(month_bounds(month)[0].date())
    closing = await session.get(MonthClosing, (organization.id, first_day))
    if closing is None:
        raise MonthOpen(f"{month} of {organization.name} is not closed: there is nothing to compare it with")
    await read_patiently(session)
    with patience(LONG_READ_S):
        report = await read_month(session, organization, first_day)
    found = digests(report)
    differences: list[str] = []
    for name, now, then in (
        ("JSON", found.json_sha256, closing.json_sha256),
        ("CSV", found.csv_sha256, closing.csv_sha256),
    ):
        if now != then:
            differences.append(f"the report as {name} has the SHA-256 {now.hex()}, and had {then.hex()} at its close")
    invoice = await invoice_of_month(session, organization.id, first_day)
    lines = () if invoice is None else await read_lines(session, invoice.id)
    if lines != invoice_lines(report):
        differences.append("the lines of the invoice are not those of the report")
    root = (await month_root(session, organization.id, first_day)).hex()
    if closing.receipts_root and root != closing.receipts_root:
        differences.append(f"the root of the receipts is {root}, and was {closing.receipts_root} at the close")
    given_back = sum(note.amount_picos for note in report.credit_notes)
    owed = int((await session.execute(OWED, {"organization_id": organization.id, "month": first_day})).scalar_one())
    if owed != report.total_rounded_picos - given_back:
        told = exact_text(report.total_rounded_picos - given_back, report.currency_code)
        posted = exact_text(owed, report.currency_code)
        differences.append(f"the ledger has {posted} on the customer's account for the month, the invoice and credit notes {told}")
    return Verification(report, found, tuple(differences))
