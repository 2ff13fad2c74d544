"""Whether a closed month is still what it was: its report is made again from the ledger and compared with what the close froze.

Reads only. Four things are compared: the documents with their digests, the receipts with their root, the invoice's lines with the
report's, and what the month posted to the customer's account with what was invoiced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.invoice_models import MonthClosing
from metering.billing.invoice_rows import invoice_of_month, read_lines
from metering.billing.invoices import invoice_lines
from metering.billing.models import AccountKind
from metering.billing.month_reading import LONG_READ_S, read_month, read_patiently
from metering.billing.months import month_of, month_text
from metering.billing.report_formats import Digests, digests
from metering.billing.reports import MonthReport, month_bounds
from metering.errors import MonthOpen
from metering.models import Organization
from metering.money import exact_text
from metering.receipts.months import month_root
from metering.store.bounded_connection import patience

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
