"""Month close of a customer: open → closing → closed, exactly once, however often it is
interrupted.

A close writes everything in one transaction, which holds the customer's posting lock exclusively
(`ledger.py`): nothing is posted to the month meanwhile or afterwards. A killed close leaves the
month open or closing, and the same call continues it. Of two concurrent closes the second waits and
finds the month closed. Before it commits, a close reads the report again, as readers will later,
and compares the bytes.

Obstacles prevent a close; each names its remedy. A close posts the plan's lines, the credit
applied, and the rounding, and keeps the month's document as drawn.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TypedDict, Unpack

from psycopg.types.json import Jsonb
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change
from metering.core.errors import InvariantViolated, MonthNotClosable, Obstacle, ObstacleKind
from metering.core.models import Organization, insertion
from metering.core.money import exact_text
from metering.invoicing.documents import (
    Draw,
    Drawer,
    characters_not_shown,
    issue_month,
)
from metering.invoicing.invoice_document import Issuer
from metering.invoicing.invoices import write_invoice
from metering.invoicing.month_report import Closed, MonthReport, digests
from metering.invoicing.months import LONG_READ_S, allow_long_reads, prepaid_credit_of, read_month
from metering.invoicing.resale import freeze_statements
from metering.ledger.ledger import (
    CLOSED_AND_OPEN,
    AccountKind,
    MonthState,
    Posting,
    TransactionKind,
    month_bounds,
    month_end,
    month_text,
    post,
    take_posting_lock,
)
from metering.ledger.rating import (
    correct,
    correction_refusal,
    misstated_usage,
    rate_all_pending,
    rate_customer,
    unratable_usage,
)
from metering.plans.plans import CreditApplication, LineKind
from metering.plans.prepaid import expire, refresh, spend
from metering.receipts.months import receipt_month, seal_month
from metering.store.db import Sessions, database_now, patience
from metering.tenants.billing_profiles import BillingProfile, billing_profile
from metering.tenants.tenants import find_organization

# Wait after the month's end until running requests have ended, and clocks agree on the month.
GRACE = timedelta(hours=1)
NAMED_MAX = 10  # ids named in a description

# A hold whose request id is its own id was pre-authorized for an outage: no request runs under it.
RUNNING = text("""
SELECT request_id
FROM holds
WHERE state = 'held'
  AND organization_id = :organization_id
  AND admitted_at < :ends
  AND request_id <> id
ORDER BY admitted_at
""")

# A month without a row is open.
STATE = text(
    "SELECT state FROM billing_months WHERE organization_id = :organization_id AND month = :month"
)
BEGIN = text(f"""
INSERT INTO billing_months AS known (organization_id, month, state, closing_at, closing_by)
VALUES (:organization_id, :month, '{MonthState.CLOSING}', :at, :by)
ON CONFLICT (organization_id, month) DO UPDATE
SET state = excluded.state,
    closing_at = excluded.closing_at,
    closing_by = excluded.closing_by
WHERE known.state = '{MonthState.OPEN}'
""")
CLOSE = text(f"""
UPDATE billing_months
SET state = '{MonthState.CLOSED}', closed_at = :at, closed_by = :by
WHERE organization_id = :organization_id AND month = :month
""")

# Plan lines that change the cost of usage. Adjustments are posted on approval, not here.
DISCOUNTS = (LineKind.ALLOWANCE, LineKind.GRADUATED, LineKind.VOLUME)
INSTANT = timedelta(microseconds=1)


async def find_obstacles(
    session: AsyncSession, request: CloseRequest, *, all_rated: bool
) -> list[Obstacle]:
    """Find the obstacles to closing a month. `all_rated` is True if no usage waits for rating.

    Usage that arrives after the close is not an obstacle: it is late usage.
    """
    organization_id, month, now = request.organization_id, request.month, await request.now(session)
    ends = month_end(month)
    obstacles: list[Obstacle] = []
    if now < (begins := ends + request.grace):
        reason = (
            f"{month_text(month)} can be closed from {begins:%Y-%m-%d %H:%M} UTC on; it is"
            f" {now:%Y-%m-%d %H:%M} now"
        )
        obstacles.append(Obstacle(ObstacleKind.MONTH_NOT_OVER, reason))
    parameters = request.key | {"ends": ends}
    months = (await session.execute(CLOSED_AND_OPEN, parameters)).one()
    if months.last_closed is not None and months.last_closed >= month:
        reason = (
            f"{month_text(months.last_closed)} and all earlier months are closed: late usage is in"
            " the month after it"
        )
        obstacles.append(Obstacle(ObstacleKind.LATER_MONTH_CLOSED, reason))
    elif months.first_open is not None and months.first_open < month:
        reason = (
            f"{month_text(months.first_open)} is not closed: close months in order, including those"
            " without usage"
        )
        obstacles.append(Obstacle(ObstacleKind.EARLIER_MONTH_OPEN, reason))
    elif (
        months.last_closed is None
        and months.first_open is not None
        and months.first_open > month
        and not request.before_first
    ):
        obstacles.append(_before_first(month, months.first_open))
    obstacles += await _misstated(session, organization_id, ends, request.correcting)
    if not all_rated:
        reason = (
            "more usage waits for rating than one close rates: let the worker catch up, and try"
            " again"
        )
        obstacles.append(Obstacle(ObstacleKind.USAGE_UNRATED, reason))
    if unratable := [str(each) for each in await unratable_usage(session, organization_id, ends)]:
        reason = (
            f"{len(unratable)} usage events cannot be rated: {named(unratable)}; their prices are"
            " missing or in another currency than the customer's: run `weir fsck` for details"
        )
        obstacles.append(Obstacle(ObstacleKind.USAGE_UNRATED, reason))
    if not request.leave_running:
        running = [str(each) for each in (await session.execute(RUNNING, parameters)).scalars()]
        if running:
            obstacles.append(
                Obstacle(
                    ObstacleKind.REQUESTS_RUNNING,
                    f"{len(running)} requests admitted before the month's end are still running:"
                    f" {named(running)}; wait, end them (`weir requests kill`, `weir requests"
                    " stuck`), or leave them to the month of their end (--leave-running)",
                )
            )
    return obstacles + await _document_obstacles(session, request)


async def _document_obstacles(session: AsyncSession, request: CloseRequest) -> list[Obstacle]:
    """Find obstacles to the month's document: an incomplete issuer, a character without a font."""
    owner = await session.get_one(Organization, request.organization_id)
    obstacles = []
    missing = request.issuer.missing
    if missing and (await read_month(session, owner, request.month, to_close=True)).is_billable:
        reason = (
            f"the invoice has no complete issuer: set {' and '.join(missing)} where the API server"
            " starts, and restart it"
        )
        obstacles.append(Obstacle(ObstacleKind.ISSUER_INCOMPLETE, reason))
    profile = await billing_profile(session, owner.id) or BillingProfile()
    addressee = (profile.legal_name, *profile.lines)
    if characters := await characters_not_shown(addressee, request.issuer):
        shown = [f"{each} (U+{ord(each):04X})" for each in characters]
        reason = (
            f"no font shows {named(shown)} of the billing profile of {owner.name}: set"
            " WEIR_INVOICE_FONT to a TrueType file that has these characters, or write the profile"
            " in other letters (`weir org billing`)"
        )
        obstacles.append(Obstacle(ObstacleKind.TEXT_NOT_SHOWN, reason))
    return obstacles


def _before_first(month: date, first: date) -> Obstacle:
    """Build the obstacle for a month before the customer's first, which is probably a typo."""
    empty = (first.year - month.year) * 12 + first.month - month.month
    counted = "1 empty month" if empty == 1 else f"{empty} empty months"
    reason = (
        f"{month_text(month)} is before the customer's first month, {month_text(first)}: closing it"
        f" would be final, and {counted}, from this one on, would have to be closed before that"
        " one; confirm with --before-first"
    )
    return Obstacle(ObstacleKind.MONTH_BEFORE_FIRST, reason)


async def _misstated(
    session: AsyncSession, organization_id: uuid.UUID, ends: datetime, correcting: str
) -> list[Obstacle]:
    usage = await misstated_usage(session, organization_id, ends)
    if usage is None:
        return []
    refused = (
        await correction_refusal(session, organization_id, usage, correcting) if correcting else ""
    )
    if correcting and not refused:
        return []
    reason = (
        f"{len(usage.ids)} usage events have a cost that differs from their tokens:"
        f" {named([str(each) for each in usage.ids])}"
    )
    remedy = (
        (f"{refused}; " if refused else "")
        + f"find the cause; then charge {usage.cost_of_tokens}, the cost of the tokens, by an"
        " adjustment that another person approves"
    )
    return [
        Obstacle(
            ObstacleKind.USAGE_MISSTATED,
            f"{reason}; {remedy}, and close with --corrected-by ADJUSTMENT",
        )
    ]


def named(ids: list[str]) -> str:
    """Format the first ids and the number of further ones."""
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more


def spent_credit(draft: MonthReport) -> list[CreditApplication]:
    return [
        CreditApplication(each.source_id, -each.amount_picos)
        for each in draft.charges
        if each.kind is LineKind.CREDIT and each.source_id is not None
    ]


def close_postings(draft: MonthReport, month: date, invoice_id: uuid.UUID) -> list[Posting]:
    """Build the ledger postings of a close: plan lines, applied credit, and rounding."""
    discount, commitment, spent = (
        sum(each.amount_picos for each in draft.charges if each.kind in kinds)
        for kinds in (DISCOUNTS, (LineKind.COMMITMENT,), (LineKind.CREDIT,))
    )
    rounded = draft.total_rounded_picos - draft.total_picos
    moves = (
        (
            TransactionKind.PLAN,
            "plan",
            ((AccountKind.DISCOUNT, discount), (AccountKind.COMMITMENT, commitment)),
        ),
        (TransactionKind.CREDIT_APPLIED, "prepaid credit", ((AccountKind.PREPAID_CREDIT, spent),)),
        (TransactionKind.ROUNDING, "rounding", ((AccountKind.ROUNDING, rounded),)),
    )
    return [
        Posting(
            kind=kind,
            organization_id=draft.organization_id,
            currency_code=draft.currency_code,
            billing_month=month,
            effective_at=month_end(month) - INSTANT,
            description=f"{description} of {draft.month}",
            source_id=invoice_id,
            # Additional amounts owed, each against its account.
            entries=(
                (AccountKind.RECEIVABLE, sum(picos for _, picos in amounts)),
                *((each, -picos) for each, picos in amounts if picos),
            ),
        )
        for kind, description, amounts in moves
        if any(picos for _, picos in amounts)
    ]


Clock = Callable[[AsyncSession], Awaitable[datetime]]


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """A month to close, by its first day, and the person who closes it.

    `leave_running` ignores running requests that were admitted in the month. `before_first` allows
    a month before the customer's first; all months between must then be closed too. `correcting` is
    the id of an approved adjustment for misstated usage, or empty. `issuer` is printed on the
    document, which `draw` renders as PDF.
    """

    organization_id: uuid.UUID
    month: date
    actor: str
    leave_running: bool = False
    clock: Clock | None = None
    grace: timedelta = GRACE
    before_first: bool = False
    correcting: str = ""
    issuer: Issuer = field(default_factory=Issuer)
    draw: Draw = field(default_factory=lambda: Drawer().draw)

    @property
    def key(self) -> dict[str, object]:
        """Organization and month as query parameters."""
        return {"organization_id": self.organization_id, "month": self.month}

    async def now(self, session: AsyncSession) -> datetime:
        """Return the time of the close: the database's, unless a clock is set."""
        return await (self.clock or database_now)(session)


@dataclass(frozen=True, slots=True)
class CloseResult:
    """Final report of a month. `already_closed` is True if an earlier call closed it."""

    report: MonthReport
    already_closed: bool


class CloseTerms(TypedDict, total=False):
    """Options of a close, explained at `CloseRequest`."""

    leave_running: bool
    before_first: bool
    correcting: str
    clock: Clock | None
    grace: timedelta
    issuer: Issuer
    draw: Draw


async def close_month(
    sessions: Sessions, *, organization: str, month: str, actor: str, **terms: Unpack[CloseTerms]
) -> CloseResult:
    """Rate pending usage, close a month `YYYY-MM`, and issue its invoice unless it is empty.

    `organization` is a name or id. Raises: NotFound; InvalidValue; MonthNotClosable with all
    obstacles.
    """
    request = await _request(sessions, organization, month, actor, **terms)
    await _rate(sessions)
    with patience(LONG_READ_S):
        async with sessions.begin() as session:
            await _refuse_obstacles(session, request)
            if not await _is_closed(session, request):  # a closed month needs no mark
                await _mark_closing(session, request)
                await seal_month(session, request.organization_id, request.month)
        async with sessions.begin() as session:
            return await _close(session, request)


async def check_month(
    sessions: Sessions, *, organization: str, month: str, **terms: Unpack[CloseTerms]
) -> list[Obstacle]:
    """Rate pending usage and find the obstacles to closing a month; none if it is closed.

    Raises: NotFound, InvalidValue.
    """
    request = await _request(sessions, organization, month, "", **terms)
    await _rate(sessions)
    with patience(LONG_READ_S):
        async with sessions.begin() as session:
            return await _obstacles(session, request)


async def _request(
    sessions: Sessions, organization: str, month: str, actor: str, **terms: Unpack[CloseTerms]
) -> CloseRequest:
    first_day = month_bounds(month)[0].date()
    async with sessions() as session:
        owner = await find_organization(session, organization)
    return CloseRequest(owner.id, first_day, actor, **terms)


async def _rate(sessions: Sessions) -> None:
    # Misstated events of any customer; the obstacles name this one's.
    with contextlib.suppress(InvariantViolated):
        await rate_all_pending(sessions)


async def _is_closed(session: AsyncSession, request: CloseRequest) -> bool:
    return bool(await session.scalar(STATE, request.key) == MonthState.CLOSED)


async def _obstacles(session: AsyncSession, request: CloseRequest) -> list[Obstacle]:
    """Lock the customer's ledger, rate its usage, and find obstacles; none for a closed month."""
    await allow_long_reads(session)
    await take_posting_lock(session, request.organization_id)
    if await _is_closed(session, request):
        return []
    all_rated = await rate_customer(session, request.organization_id)
    return await find_obstacles(session, request, all_rated=all_rated)


async def _refuse_obstacles(session: AsyncSession, request: CloseRequest) -> None:
    if obstacles := await _obstacles(session, request):
        raise MonthNotClosable(obstacles)


async def _mark_closing(session: AsyncSession, request: CloseRequest) -> None:
    """Record when and by whom the close was started, unless it is recorded already."""
    begun = {"at": await request.now(session), "by": request.actor}
    await session.execute(BEGIN, begun | request.key)


async def _close(session: AsyncSession, request: CloseRequest) -> CloseResult:
    """Close the month. The organization's ledger stays locked until the transaction ends."""
    await _refuse_obstacles(session, request)
    owner = await session.get_one(Organization, request.organization_id)
    if await _is_closed(session, request):
        return CloseResult(await read_month(session, owner, request.month), already_closed=True)
    if (
        request.correcting
        and (usage := await misstated_usage(session, owner.id, month_end(request.month)))
        is not None
    ):
        await correct(session, owner.id, usage, request.correcting, request.actor)
    now = await request.now(session)
    draft = await read_month(session, owner, request.month, to_close=True)
    invoice_id = uuid.uuid4()
    await post(session, close_postings(draft, request.month, invoice_id))
    await spend(session, request.month, spent_credit(draft))
    await expire(session, owner.id, request.month, at=month_end(request.month) - INSTANT)
    receipts = await receipt_month(session, owner.id, request.month)
    root = receipts.root.hex() if receipts.receipt_count else ""
    number = ""
    if draft.is_billable:
        number = await write_invoice(session, draft, invoice_id, request.month, now, request.actor)
    credit = await prepaid_credit_of(session, owner.id, request.month)
    report = replace(draft, credit=credit, closed=Closed(now, request.actor, number, root))
    document = await issue_month(session, report, request.issuer, request.draw)
    await freeze_statements(session, owner.id, request.month, owner.currency_code)
    await _freeze(session, request, report, document.sha256, now)
    # A prepaid customer's limit is its remaining credit.
    await refresh(session, owner.id, actor=request.actor)
    if await read_month(session, owner, request.month) != report:
        raise InvariantViolated(
            f"the report of {report.month} of {owner.name} cannot be reproduced: the month is not"
            " closed"
        )
    return CloseResult(report, already_closed=False)


async def _freeze(
    session: AsyncSession,
    request: CloseRequest,
    report: MonthReport,
    pdf_sha256: str,
    now: datetime,
) -> None:
    """Store the facts and digests that later reads need, and mark the month as closed."""
    digest = digests(report)
    facts = request.key | {
        "organization_name": report.organization_name,
        "currency_code": report.currency_code,
        "carried_in_picos": Decimal(report.carried_in_picos),
        "report_format": report.format_version,
        "json_sha256": digest.json_sha256,
        "csv_sha256": digest.csv_sha256,
        "receipts_root": "" if report.closed is None else report.closed.receipts_root,
        "billing_profile": (
            None if report.billing_profile is None else Jsonb(report.billing_profile.as_json())
        ),
    }
    await session.execute(insertion("month_closings", facts))
    await session.execute(CLOSE, request.key | {"at": now, "by": request.actor})
    after = {
        "organization_id": str(report.organization_id),
        "month": report.month,
        "invoice_number": "" if report.closed is None else report.closed.invoice_number,
        "total": exact_text(report.total_rounded_picos, report.currency_code),
        "currency_code": report.currency_code,
        "json_sha256": digest.json_sha256.hex(),
        "csv_sha256": digest.csv_sha256.hex(),
        "pdf_sha256": pdf_sha256,
    }
    subject = f"{report.organization_id}/{report.month}"
    await record_change(session, request.actor, "month.close", subject, after=after)
