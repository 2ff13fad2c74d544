"""Manual corrections: proposed by one person, approved by another, posted once to the next invoiced
month.

An adjustment is a line of that invoice. A credit note refers to an issued invoice: a numbered
document of its own that refunds whole minor units and is kept beside the invoices. Posted and
issued amounts never change. Functions take a session and never commit.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, column, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change
from metering.core.errors import ApprovalRefused, InvalidValue, NotFound
from metering.core.models import insertion, record_of
from metering.core.money import exact_text, minor_unit, round_to_minor_unit
from metering.core.pages import LAST_ID, PAGE_SIZE, check_page_size, page_values, utc_time
from metering.core.pages import page_token as token_of
from metering.invoicing.invoices import Series, credited_picos, draw_number, find_invoice_row
from metering.ledger.ledger import (
    AccountKind,
    Posting,
    TransactionKind,
    month_of,
    month_text,
    post,
    posting_month,
    share_posting_locks,
)
from metering.ledger.rating import misstated_usage
from metering.plans.prepaid import refresh
from metering.store.db import database_now
from metering.tenants.four_eyes import check_two_persons
from metering.tenants.tenants import as_uuid, find_organization

# One line that the customer reads; its first character rules out spreadsheet formulas.
REASON_FORM = re.compile(r"\w[^\x00-\x1f\x7f-\x9f]{0,199}")
AMOUNT_MAX_PICOS = 10**24  # a trillion units: a larger amount is a mistake in the unit

# The first open month with any content, which is invoiced next; the present month if there is none.
# Unrated usage counts as content: if it is misstated, the adjustment may be the month's only line.
NEXT_INVOICED = text("""
SELECT min(month)
FROM (
    SELECT billing_month
    FROM ledger_transactions
    WHERE organization_id = :organization_id
    UNION ALL
    SELECT date_trunc('month', settled_at AT TIME ZONE 'UTC')::date
    FROM unrated_usage
    WHERE organization_id = :organization_id
) AS known (month)
WHERE month <= :present
  AND month > coalesce(
      (SELECT max(month)
       FROM billing_months
       WHERE organization_id = :organization_id AND state = 'closed'),
      '-infinity'
  )
""")


ADJUSTMENT_ROWS = """
SELECT a.*, i.number AS invoice_number,
       d.decided_by, d.decided_at, d.billing_month, d.credit_note_number,
       CASE
           WHEN d.approved IS NULL THEN 'proposed'
           WHEN d.approved THEN 'approved'
           ELSE 'rejected'
       END AS state
FROM adjustments a
LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id
LEFT JOIN invoices i ON i.id = a.invoice_id
"""
ONE = text(f"{ADJUSTMENT_ROWS} WHERE a.id = :id")
OF_NUMBER = text(f"{ADJUSTMENT_ROWS} WHERE d.credit_note_number = :number")
LISTED = text(f"""
{ADJUSTMENT_ROWS}
WHERE a.organization_id = :organization_id
  AND (NOT :undecided_only OR d.adjustment_id IS NULL)
  AND (a.created_at, a.id) < (CAST(:before AS timestamptz), :before_id)
ORDER BY a.created_at DESC, a.id DESC
LIMIT :row_count
""")
CREDIT_NOTES = text(f"""
{ADJUSTMENT_ROWS}
WHERE a.invoice_id = :invoice_id
ORDER BY a.created_at DESC, a.id DESC
""")
LOCK = text("SELECT * FROM adjustments WHERE id = :id FOR UPDATE")
LOCK_INVOICE = text("SELECT * FROM invoices WHERE id = :id FOR UPDATE")


class AdjustmentState(StrEnum):
    """State of an adjustment; `approved` and `rejected` are final."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class AdjustmentRecord:
    """An adjustment and its decision. `amount_picos` is added to what the customer owes."""

    id: uuid.UUID
    organization_id: uuid.UUID
    currency_code: str
    amount_picos: int
    reason: str
    invoice_number: str
    state: AdjustmentState
    author: str
    created_at: datetime
    decided_by: str = ""
    decided_at: datetime | None = None
    billing_month: str = ""
    credit_note_number: str = ""


async def create_adjustment(
    session: AsyncSession,
    *,
    organization: str,
    amount_picos: int,
    currency_code: str,
    reason: str,
    actor: str,
) -> AdjustmentRecord:
    """Propose to change the amount of a customer's next invoice. Raises: NotFound, InvalidValue.

    Zero is allowed only to correct misstated usage whose tokens cost nothing.
    """
    owner = await find_organization(session, organization)
    if abs(amount_picos) > AMOUNT_MAX_PICOS:
        maximum = exact_text(AMOUNT_MAX_PICOS, owner.currency_code)
        raise InvalidValue("amount", f"must be between -{maximum} and {maximum}: check the unit")
    if (
        not amount_picos
        and await misstated_usage(session, owner.id, datetime.max.replace(tzinfo=UTC)) is None
    ):
        raise InvalidValue(
            "amount", "must not be zero: positive to charge more, negative to charge less"
        )
    check_currency(currency_code, owner.currency_code)
    return await _propose(session, owner.id, None, amount_picos, owner.currency_code, reason, actor)


async def create_credit_note(
    session: AsyncSession,
    *,
    invoice_number: str,
    amount_picos: int,
    currency_code: str,
    reason: str,
    actor: str,
) -> AdjustmentRecord:
    """Propose to refund all or part of an invoice: `amount_picos`, more than 0.

    Raises: NotFound, InvalidValue.
    """
    invoice = await find_invoice_row(session, invoice_number)
    check_currency(currency_code, invoice.currency_code)
    if amount_picos <= 0 or amount_picos != round_to_minor_unit(
        amount_picos, invoice.currency_code
    ):
        smallest = exact_text(minor_unit(invoice.currency_code), invoice.currency_code)
        raise InvalidValue(
            "amount", f"must be a positive multiple of {smallest}: a credit note is paid out"
        )
    await check_credit_left(session, invoice, amount_picos)
    return await _propose(
        session,
        invoice.organization_id,
        invoice,
        -amount_picos,
        invoice.currency_code,
        reason,
        actor,
    )


async def approve(
    session: AsyncSession,
    *,
    adjustment_id: str,
    actor: str,
    secret_hash: bytes = b"",
    now: datetime | None = None,
) -> AdjustmentRecord:
    """Approve another person's proposal and post it. The same approver may repeat the call.

    `secret_hash` is that of the secret the approver uses. `now` is the time of approval, by default
    the database's. Raises: NotFound; ApprovalRefused for the author or a decided proposal;
    InvalidValue if a credit note exceeds the part of its invoice that is still refundable.
    """
    row = await _locked(session, adjustment_id)
    record = await find_adjustment(session, row.id)
    if record.state is AdjustmentState.APPROVED and record.decided_by == actor:
        return record
    refuse_decided(record)
    await check_two_persons(
        session,
        author=record.author,
        approver=actor,
        proposed_at=record.created_at,
        what=f"adjustment {record.id}",
        secret_hash=secret_hash,
    )
    decided_at = now or await database_now(session)
    month = await _billing_month(session, row.organization_id, decided_at)
    decision = {
        "adjustment_id": row.id,
        "author": row.author,
        "approved": True,
        "decided_by": actor,
        "decided_at": decided_at,
        "billing_month": month,
    }
    if row.invoice_id is not None:
        invoice = (await session.execute(LOCK_INVOICE, {"id": row.invoice_id})).one()
        await check_credit_left(session, invoice, -int(row.amount_picos))
    await post(session, [_posting(record, month, decided_at)])
    # The limit of a prepaid customer has changed.
    await refresh(session, row.organization_id, actor=actor)
    if row.invoice_id is not None:
        decision["credit_note_ordinal"], decision["credit_note_number"] = await draw_number(
            session, Series.CREDIT_NOTE
        )
    await session.execute(insertion("adjustment_decisions", decision))
    return await _audited(session, row.id, actor, "adjustment.approve")


async def reject(
    session: AsyncSession, *, adjustment_id: str, actor: str, now: datetime | None = None
) -> AdjustmentRecord:
    """Reject a proposal permanently; its author may too. Raises: NotFound, ApprovalRefused."""
    row = await _locked(session, adjustment_id)
    record = await find_adjustment(session, row.id)
    if record.state is AdjustmentState.REJECTED:
        return record
    refuse_decided(record)
    values = {"adjustment_id": row.id, "author": row.author, "approved": False, "decided_by": actor}
    await session.execute(
        insertion("adjustment_decisions", values | ({} if now is None else {"decided_at": now}))
    )
    return await _audited(session, row.id, actor, "adjustment.reject")


async def find_adjustment(session: AsyncSession, adjustment_id: uuid.UUID) -> AdjustmentRecord:
    """Look up an adjustment by its id. Raises: NotFound."""
    row = (await session.execute(ONE, {"id": adjustment_id})).one_or_none()
    if row is None:
        raise NotFound("adjustment", str(adjustment_id))
    return _record(row)


async def find_credit_note(session: AsyncSession, number: str) -> AdjustmentRecord:
    """Look up an approved credit note by its number. Raises: NotFound."""
    row = (await session.execute(OF_NUMBER, {"number": number})).one_or_none()
    if row is None:
        raise NotFound("credit note", number)
    return _record(row)


async def list_adjustments(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    undecided_only: bool = False,
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[AdjustmentRecord], str]:
    """List a page of adjustments and credit notes, the latest first.

    Returns the token of the next page too. Raises: InvalidValue.
    """
    check_page_size(page_size)
    before: Sequence[object] = "infinity", LAST_ID
    if page_token:
        before = page_values(page_token, utc_time, uuid.UUID)
    filters = {
        "organization_id": organization_id,
        "undecided_only": undecided_only,
        "row_count": page_size + 1,
        **dict(zip(("before", "before_id"), before, strict=True)),
    }
    rows = (await session.execute(LISTED, filters)).all()
    shown = [_record(row) for row in rows[:page_size]]
    following = token_of(shown[-1].created_at, shown[-1].id) if len(rows) > page_size else ""
    return shown, following


async def credit_notes_of(session: AsyncSession, invoice_id: uuid.UUID) -> list[AdjustmentRecord]:
    """List the adjustments and credit notes of an invoice, the latest first."""
    rows = await session.execute(CREDIT_NOTES, {"invoice_id": invoice_id})
    return [_record(row) for row in rows]


def check_currency(code: str, expected: str) -> None:
    """Raise InvalidValue unless the code is empty or the expected currency."""
    if code not in ("", expected):
        raise InvalidValue(
            "amount.currency_code",
            f"must be {expected}, the currency of the organization, got {code}",
        )


async def check_credit_left(session: AsyncSession, invoice: Row[Any], amount_picos: int) -> None:
    """Raise InvalidValue if the amount exceeds the part of an invoice not refunded yet."""
    left = int(invoice.total_picos) - await credited_picos(session, invoice.id)
    if amount_picos > left:
        total, rest = (
            exact_text(picos, invoice.currency_code)
            for picos in (int(invoice.total_picos), max(left, 0))
        )
        raise InvalidValue(
            "amount",
            f"must be at most {rest}: invoice {invoice.number} is {total}, of which {rest} is still"
            " refundable",
        )


def refuse_decided(record: AdjustmentRecord) -> None:
    """Raise ApprovalRefused if the proposal has been approved or rejected."""
    if record.state is not AdjustmentState.PROPOSED:
        raise ApprovalRefused(
            f"This adjustment was {record.state} by {record.decided_by}. Propose a new one."
        )


async def _propose(
    session: AsyncSession,
    organization_id: uuid.UUID,
    invoice: Row[Any] | None,
    amount_picos: int,
    currency_code: str,
    reason: str,
    actor: str,
) -> AdjustmentRecord:
    if REASON_FORM.fullmatch(reason) is None:
        raise InvalidValue(
            "reason",
            "must have 1 to 200 characters on one line and begin with a letter or a digit: the"
            " customer reads it",
        )
    values = {
        "organization_id": organization_id,
        "invoice_id": None if invoice is None else invoice.id,
        "currency_code": currency_code,
        "amount_picos": Decimal(amount_picos),
        "reason": reason,
        "author": actor,
    }
    adjustment_id: uuid.UUID = (
        await session.execute(insertion("adjustments", values).returning(column("id")))
    ).scalar_one()
    return await _audited(session, adjustment_id, actor, "adjustment.create")


async def _audited(
    session: AsyncSession, adjustment_id: uuid.UUID, actor: str, action: str
) -> AdjustmentRecord:
    """Write the change to the audit log and return the current record."""
    record = await find_adjustment(session, adjustment_id)
    after = {
        "organization_id": str(record.organization_id),
        "amount": exact_text(record.amount_picos, record.currency_code),
        "currency_code": record.currency_code,
        "reason": record.reason,
        "invoice_number": record.invoice_number,
        "state": str(record.state),
        "author": record.author,
        "billing_month": record.billing_month,
        "credit_note_number": record.credit_note_number,
    }
    await record_change(session, actor, action, str(record.id), after=after)
    return record


async def _locked(session: AsyncSession, adjustment_id: str) -> Row[Any]:
    """Load an adjustment's row and lock it against concurrent decisions. Raises: NotFound."""
    key = as_uuid(adjustment_id)
    if key is None or (row := (await session.execute(LOCK, {"id": key})).one_or_none()) is None:
        raise NotFound("adjustment", adjustment_id)
    return row


async def _billing_month(session: AsyncSession, organization_id: uuid.UUID, now: datetime) -> date:
    """Find the month that is invoiced next, and keep it open until the transaction ends."""
    await share_posting_locks(session, [organization_id])
    present = month_of(now.date())
    until_now = {"organization_id": organization_id, "present": present}
    next_month: date | None = await session.scalar(NEXT_INVOICED, until_now)
    return await posting_month(session, organization_id, next_month or present)


def _posting(record: AdjustmentRecord, month: date, decided_at: datetime) -> Posting:
    about = f"credit note to {record.invoice_number}" if record.invoice_number else "adjustment"
    return Posting(
        kind=TransactionKind.ADJUSTMENT,
        organization_id=record.organization_id,
        currency_code=record.currency_code,
        billing_month=month,
        effective_at=decided_at,
        description=f"{about}: {record.reason}",
        source_id=record.id,
        entries=(
            (AccountKind.RECEIVABLE, record.amount_picos),
            (AccountKind.ADJUSTMENT, -record.amount_picos),
        ),
    )


def _record(row: Row[Any]) -> AdjustmentRecord:
    month = "" if row.billing_month is None else month_text(row.billing_month)
    return record_of(
        AdjustmentRecord, row, invoice_number=row.invoice_number or "", billing_month=month
    )
