"""Closing a month of a customer: open → closing → closed, once and for good, whoever does it and however often it is interrupted.

All that a close writes is one transaction, which holds the customer's lane alone (`months.py`): nothing is posted to the month
meanwhile, and after it nothing can be. Killed anywhere, it leaves a month that is open or closing, and the same call goes on. Two
at once take turns, and the second finds it closed.

Before it commits, a close reads the report again, as anybody will read it later, and compares the bytes.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal

from sqlalchemy import func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.charges import prepaid_credit_of
from metering.billing.close_postings import INSTANT, close_postings, spent_credit
from metering.billing.credits import expire, spend
from metering.billing.document_series import draw_number
from metering.billing.invoice_models import MonthClosing
from metering.billing.invoice_rows import write_invoice
from metering.billing.invoices import Series
from metering.billing.ledger import post
from metering.billing.misstated import correct, misstated_usage
from metering.billing.models import BillingMonth, MonthState
from metering.billing.month_reading import LONG_READ_S, read_month, read_patiently
from metering.billing.months import month_of, take_lane
from metering.billing.obstacles import GRACE, Obstacle, find_obstacles, month_end
from metering.billing.prepaid import refresh
from metering.billing.rating import rate_all_pending, rate_customer
from metering.billing.report_formats import digests
from metering.billing.reports import Closed, MonthReport, month_bounds
from metering.errors import InvariantViolated, MonthNotClosable
from metering.models import Organization
from metering.money import exact_text
from metering.receipts.months import receipt_month, seal_month
from metering.store.bounded_connection import patience
from metering.store.db import Sessions
from metering.tenants.audit import record_change
from metering.tenants.tenants import find_organization

Clock = Callable[[AsyncSession], Awaitable[datetime]]


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """What is to be closed, by whom. month: its first day. leave_running: although requests that were admitted in it still run.

    before_first: although it is before the customer's first month, so that the empty ones up to that have to be closed too.
    correcting: the id of an approved adjustment of what misstated usage costs, or empty.
    """

    organization_id: uuid.UUID
    month: date
    actor: str
    leave_running: bool = False
    clock: Clock | None = None
    grace: timedelta = GRACE
    before_first: bool = False
    correcting: str = ""

    async def now(self, session: AsyncSession) -> datetime:
        """The moment of the close: the database's, unless a clock was given."""
        return await (self.clock or database_clock)(session)


@dataclass(frozen=True, slots=True)
class CloseResult:
    """The report as it is for ever, and whether the month had been closed before."""

    report: MonthReport
    already_closed: bool


async def database_clock(session: AsyncSession) -> datetime:
    """When the transaction began, by the database's clock."""
    return (await session.scalars(select(func.now()))).one()


async def close_month(
    sessions: Sessions,
    *,
    organization: str,
    month: str,
    actor: str,
    leave_running: bool = False,
    before_first: bool = False,
    correcting: str = "",
    clock: Clock | None = None,
    grace: timedelta = GRACE,
) -> CloseResult:
    """Close a month `YYYY-MM` of an organization, given by name or id, and issue its invoice if there is anything to invoice.

    Rates first what is pending. Raises: NotFound, InvalidValue; MonthNotClosable with everything that stands in the way.
    """
    request = await _request(sessions, organization, month, actor, leave_running, clock, grace, before_first, correcting)
    await _rate(sessions)
    with patience(LONG_READ_S):
        async with sessions.begin() as session:
            await _refuse_obstacles(session, request)
            if not await _is_closed(session, request):  # else there is nothing to mark, and months after it may be closed as well
                await _mark_closing(session, request)
                await seal_month(session, request.organization_id, request.month)
        async with sessions.begin() as session:
            return await _close(session, request)


async def check_month(
    sessions: Sessions,
    *,
    organization: str,
    month: str,
    leave_running: bool = False,
    before_first: bool = False,
    correcting: str = "",
    clock: Clock | None = None,
    grace: timedelta = GRACE,
) -> list[Obstacle]:
    """What would stand in the way of a close now; nothing for a closed month. Rates what is pending, as the worker always does.

    Raises: NotFound, InvalidValue.
    """
    request = await _request(sessions, organization, month, "", leave_running, clock, grace, before_first, correcting)
    await _rate(sessions)
    with patience(LONG_READ_S):
        async with sessions.begin() as session:
            return await _obstacles(session, request)


async def _request(
    sessions: Sessions,
    organization: str,
    month: str,
    actor: str,
    leave_running: bool,
    clock: Clock | None,
    grace: timedelta,
    before_first: bool,
    correcting: str,
) -> CloseRequest:
    first_day = month_of(month_bounds(month)[0].date())
    async with sessions() as session:
        owner = await find_organization(session, organization)
    return CloseRequest(owner.id, first_day, actor, leave_running, clock, grace, before_first, correcting)


async def _rate(sessions: Sessions) -> None:
    with contextlib.suppress(InvariantViolated):  # misstated events, of whomever: the obstacles name those of this customer
        await rate_all_pending(sessions)


async def _is_closed(session: AsyncSession, request: CloseRequest) -> bool:
    row = await session.get(BillingMonth, (request.organization_id, request.month))
    return row is not None and row.state == MonthState.CLOSED


async def _obstacles(session: AsyncSession, request: CloseRequest) -> list[Obstacle]:
    """What stands in the way once the customer's usage is rated; nothing for a closed month. Has its lane alone from here on."""
    await read_patiently(session)
    await take_lane(session, request.organization_id)
    if await _is_closed(session, request):
        return []
    all_rated = await rate_customer(session, request.organization_id)
    return await find_obstacles(
        session,
        request.organization_id,
        request.month,
        now=await request.now(session),
        grace=request.grace,
        leave_running=request.leave_running,
        before_first=request.before_first,
        correcting=request.correcting,
        all_rated=all_rated,
    )


async def _refuse_obstacles(session: AsyncSession, request: CloseRequest) -> None:
    if found := await _obstacles(session, request):
        raise MonthNotClosable(found)


async def _mark_closing(session: AsyncSession, request: CloseRequest) -> None:
    """Say who closes it and since when. Whoever began, stays."""
    begun = {"state": MonthState.CLOSING, "closing_at": await request.now(session), "closing_by": request.actor}
    statement = upsert(BillingMonth).values(organization_id=request.organization_id, month=request.month, **begun)
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=["organization_id", "month"], set_=begun, where=BillingMonth.state == MonthState.OPEN
        )
    )


async def _close(session: AsyncSession, request: CloseRequest) -> CloseResult:
    """The transaction that closes it. Alone with the organization's ledger from its first statement to its commit."""
    await _refuse_obstacles(session, request)
    owner = await session.get_one(Organization, request.organization_id)
    if await _is_closed(session, request):
        return CloseResult(await read_month(session, owner, request.month), already_closed=True)
    if request.correcting and (found := await misstated_usage(session, owner.id, month_end(request.month))) is not None:
        await correct(session, owner.id, found, request.correcting, request.actor)
    now = await request.now(session)
    draft = await read_month(session, owner, request.month, to_close=True)
    invoice_id = uuid.uuid4()
    await post(session, close_postings(draft, request.month, invoice_id))
    await spend(session, request.month, spent_credit(draft))
    await expire(session, owner.id, request.month, at=month_end(request.month) - INSTANT)
    receipts = await receipt_month(session, owner.id, request.month)
    closed = Closed(now, request.actor, "", receipts.root.hex() if receipts.receipt_count else "")
    if draft.lines or draft.charges:
        ordinal, number = await draw_number(session, Series.INVOICE)
        closed = replace(closed, invoice_number=number)
        await write_invoice(
            session,
            draft,
            invoice_id=invoice_id,
            month=request.month,
            ordinal=ordinal,
            number=number,
            issued_at=now,
            issued_by=request.actor,
        )
    credit = await prepaid_credit_of(session, owner.id, request.month)
    report = replace(draft, credit=credit, closed=closed)
    await _freeze(session, request, report, now)
    await refresh(session, owner.id, actor=request.actor)  # of one that pays in advance, the limit is that of what is left
    if await read_month(session, owner, request.month) != report:
        raise InvariantViolated(f"the report of {report.month} of {owner.name} cannot be reproduced: the month is not closed")
    return CloseResult(report, already_closed=False)


async def _freeze(session: AsyncSession, request: CloseRequest, report: MonthReport, now: datetime) -> None:
    """Write down what a later reading needs and compares, and close the month."""
    digest = digests(report)
    facts = {
        "organization_id": request.organization_id,
        "month": request.month,
        "organization_name": report.organization_name,
        "currency_code": report.currency_code,
        "carried_in_picos": Decimal(report.carried_in_picos),
        "report_format": report.format_version,
        "json_sha256": digest.json_sha256,
        "csv_sha256": digest.csv_sha256,
        "receipts_root": "" if report.closed is None else report.closed.receipts_root,
        "billing_profile": None if report.billing_profile is None else report.billing_profile.as_json(),
    }
    await session.execute(insert(MonthClosing).values(facts))
    closed = {"state": MonthState.CLOSED, "closed_at": now, "closed_by": request.actor}
    key = (BillingMonth.organization_id == request.organization_id, BillingMonth.month == request.month)
    await session.execute(update(BillingMonth).where(*key).values(closed).execution_options(synchronize_session=False))
    after = {
        "organization_id": str(report.organization_id),
        "month": report.month,
        "invoice_number": "" if report.closed is None else report.closed.invoice_number,
        "total": exact_text(report.total_rounded_picos, report.currency_code),
        "currency_code": report.currency_code,
        "json_sha256": digest.json_sha256.hex(),
        "csv_sha256": digest.csv_sha256.hex(),
    }
    subject = f"{report.organization_id}/{report.month}"
    await record_change(session, actor=request.actor, action="month.close", subject_id=subject, before=None, after=after)
