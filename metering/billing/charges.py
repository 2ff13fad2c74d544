"""What is charged and deducted beside a month's usage, while the month is open: its plan, adjustments, prepaid credit.

Of a closed month the lines of its invoice tell this. Functions take a session, read and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import date

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.credits import grants_of, usable_grants
from metering.billing.models import AccountKind, TransactionKind
from metering.billing.plan_admin import rules_in_force
from metering.billing.plans import MonthUsage, apply_credit, plan_lines
from metering.billing.reports import Charge, ChargeKind, CreditNoteIssued, PrepaidCredit, ReportLine
from metering.models import PriceVersion

# Postings by hand, but for those of credit notes, which are documents of their own.
ADJUSTMENTS = text(f"""
SELECT t.id, t.source_id, coalesce('adjustment: ' || a.reason, t.description) AS description, sum(e.amount_picos) AS amount_picos
FROM ledger_transactions t
JOIN ledger_entries e ON e.transaction_id = t.id
JOIN ledger_accounts c ON c.id = e.account_id AND c.kind = '{AccountKind.RECEIVABLE}'
LEFT JOIN adjustments a ON a.id = t.source_id
WHERE t.organization_id = :organization_id AND t.billing_month = :month AND t.kind = '{TransactionKind.ADJUSTMENT}'
  AND a.invoice_id IS NULL
GROUP BY t.id, a.id ORDER BY t.id
""")
CREDIT_NOTES = text("""
SELECT d.credit_note_number, i.number AS invoice_number, -a.amount_picos AS amount_picos, a.reason
FROM adjustment_decisions d JOIN adjustments a ON a.id = d.adjustment_id JOIN invoices i ON i.id = a.invoice_id
WHERE a.organization_id = :organization_id AND d.billing_month = :month AND d.credit_note_number IS NOT NULL
ORDER BY d.credit_note_ordinal
""")
CARRIED = text(f"""
SELECT coalesce(sum(e.amount_picos), 0) FROM ledger_accounts c JOIN ledger_entries e ON e.account_id = c.id
WHERE c.organization_id = :organization_id AND c.kind = '{AccountKind.ROUNDING}'
""")
PREPAID = text(f"""
SELECT -coalesce(sum(e.amount_picos), 0) AS left_picos,
       -coalesce(sum(e.amount_picos) FILTER (WHERE t.billing_month = :month AND t.kind = '{TransactionKind.CREDIT_GRANTED}'), 0)
           AS granted_picos,
       coalesce(sum(e.amount_picos) FILTER (WHERE t.billing_month = :month AND t.kind = '{TransactionKind.CREDIT_EXPIRED}'), 0)
           AS expired_picos
FROM ledger_accounts c JOIN ledger_entries e ON e.account_id = c.id JOIN ledger_transactions t ON t.id = e.transaction_id
WHERE c.organization_id = :organization_id AND c.kind = '{AccountKind.PREPAID_CREDIT}' AND t.billing_month <= :month
""")


async def draft_charges(
    session: AsyncSession, organization_id: uuid.UUID, month: date, lines: Sequence[ReportLine]
) -> tuple[Charge, ...]:
    """The charges as they are now, in the order of the invoice: plan, adjustments, then the credit that pays what is due."""
    charges = await plan_charges(session, organization_id, month, lines)
    charges += await adjustment_charges(session, organization_id, month)
    due_picos = sum(line.amount_picos for line in lines) + sum(charge.amount_picos for charge in charges)
    return (*charges, *await credit_charges(session, organization_id, month, due_picos))


async def plan_charges(session: AsyncSession, organization_id: uuid.UUID, month: date, lines: Sequence[ReportLine]) -> list[Charge]:
    """What the plan of the month makes of its usage, late usage included."""
    versions = select(PriceVersion).where(PriceVersion.id.in_({line.price_version for line in lines}))
    begins = {version.id: version.effective_at for version in await session.scalars(versions)}
    usage = [
        MonthUsage(
            model=line.model,
            price_version=line.price_version,
            tier=line.tier,
            token_kind=line.token_kind,
            token_count=line.token_count,
            unit_price_picos=line.unit_price_picos,
            effective_at=begins[line.price_version],
        )
        for line in lines
    ]
    rules = await rules_in_force(session, organization_id, month)
    return [
        Charge(
            ChargeKind(line.kind.value), line.description, line.amount_picos, line.model, line.token_kind, line.token_count or None
        )
        for line in plan_lines(rules, usage)
    ]


async def credit_charges(session: AsyncSession, organization_id: uuid.UUID, month: date, due_picos: int) -> list[Charge]:
    """What prepaid credit pays of an amount, a line per grant: those that end first, first."""
    reasons = {grant.id: grant.reason for grant in await grants_of(session, organization_id)}
    return [
        Charge(ChargeKind.CREDIT, f"prepaid credit: {reasons[spent.grant_id]}", -spent.amount_picos, source_id=spent.grant_id)
        for spent in apply_credit(await usable_grants(session, organization_id, month), due_picos)
    ]


async def adjustment_charges(session: AsyncSession, organization_id: uuid.UUID, month: date) -> list[Charge]:
    """What has been posted to the month by hand, in the order of posting."""
    rows = await session.execute(ADJUSTMENTS, {"organization_id": organization_id, "month": month})
    return [Charge(ChargeKind.ADJUSTMENT, row.description, int(row.amount_picos), source_id=row.source_id) for row in rows]


async def credit_notes_of(session: AsyncSession, organization_id: uuid.UUID, month: date) -> tuple[CreditNoteIssued, ...]:
    """The credit notes that were posted to a month, by number."""
    rows = await session.execute(CREDIT_NOTES, {"organization_id": organization_id, "month": month})
    return tuple(CreditNoteIssued(row.credit_note_number, row.invoice_number, int(row.amount_picos), row.reason) for row in rows)


async def carried_picos(session: AsyncSession, organization_id: uuid.UUID) -> int:
    """What rounding has left so far: the balance of the rounding account, which closes alone post to."""
    return int((await session.execute(CARRIED, {"organization_id": organization_id})).scalar_one())


async def prepaid_credit_of(session: AsyncSession, organization_id: uuid.UUID, month: date) -> PrepaidCredit:
    """Prepaid credit as posted: granted and expired in a month, and left at its end."""
    row = (await session.execute(PREPAID, {"organization_id": organization_id, "month": month})).one()
    return PrepaidCredit(int(row.granted_picos), int(row.expired_picos), int(row.left_picos))
