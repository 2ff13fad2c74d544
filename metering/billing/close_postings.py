"""What a close posts: the plan's lines, the credit that pays, and what rounding moves. Pure."""

from __future__ import annotations

import uuid
from datetime import date, timedelta

from metering.billing.ledger import AccountKey, Leg, Posting
from metering.billing.models import AccountKind, TransactionKind
from metering.billing.obstacles import month_end
from metering.billing.plans import CreditApplication
from metering.billing.reports import ChargeKind, MonthReport

# Lines of a plan that change what usage costs. Adjustments are posted when they are approved, not here.
DISCOUNTS = (ChargeKind.ALLOWANCE, ChargeKind.GRADUATED, ChargeKind.VOLUME)
INSTANT = timedelta(microseconds=1)


def spent_credit(draft: MonthReport) -> list[CreditApplication]:
    """What the month takes of which grant."""
    return [
        CreditApplication(each.source_id, -each.amount_picos)
        for each in draft.charges
        if each.kind is ChargeKind.CREDIT and each.source_id is not None
    ]


def close_postings(draft: MonthReport, month: date, invoice_id: uuid.UUID) -> list[Posting]:
    """What the close adds to the ledger: the plan's lines, the credit that pays, and what rounding moves."""
    discount, commitment, spent = (
        sum(each.amount_picos for each in draft.charges if each.kind in kinds)
        for kinds in (DISCOUNTS, (ChargeKind.COMMITMENT,), (ChargeKind.CREDIT,))
    )
    rounded = draft.total_rounded_picos - draft.total_picos
    moves = (
        (TransactionKind.PLAN, "plan", ((AccountKind.DISCOUNT, discount), (AccountKind.COMMITMENT, commitment))),
        (TransactionKind.CREDIT_APPLIED, "prepaid credit", ((AccountKind.PREPAID_CREDIT, spent),)),
        (TransactionKind.ROUNDING, "rounding", ((AccountKind.ROUNDING, rounded),)),
    )
    return [
        _posting(draft, month, invoice_id, kind, description, amounts)
        for kind, description, amounts in moves
        if any(picos for _, picos in amounts)
    ]


def _posting(
    draft: MonthReport,
    month: date,
    invoice_id: uuid.UUID,
    kind: TransactionKind,
    description: str,
    amounts: tuple[tuple[AccountKind, int], ...],
) -> Posting:
    """Amounts that the customer owes more, each against its account."""
    receivable, *others = (
        AccountKey(draft.organization_id, each, draft.currency_code) for each in (AccountKind.RECEIVABLE, *(a for a, _ in amounts))
    )
    total = sum(picos for _, picos in amounts)
    legs = [Leg(account, -picos) for account, (_, picos) in zip(others, amounts, strict=True) if picos]
    return Posting(
        kind=kind,
        organization_id=draft.organization_id,
        billing_month=month,
        effective_at=month_end(month) - INSTANT,
        description=f"{description} of {draft.month}",
        source_id=invoice_id,
        legs=(Leg(receivable, total), *legs),
    )
