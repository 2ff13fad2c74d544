"""What keeps a month from being closed, each with its remedy. Functions take a session, read and never commit."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.misstated import misstated_usage, unratable_usage, why_not
from metering.billing.months import month_after, month_text

GRACE = timedelta(hours=1)  # after the month's end: what began in it has ended by then, and clocks that differ agree on the month
NAMED_MAX = 10  # ids that a description names

# A hold that has its own id as request id was taken in advance for an outage: nothing runs under it.
RUNNING = text("""
SELECT request_id FROM holds
WHERE state = 'held' AND organization_id = :organization_id AND admitted_at < :ends AND request_id <> id ORDER BY admitted_at
""")
# The first month that should have been closed before: the one after the last closed, or the first with anything in it.
BEFORE = text("""
SELECT max(month) AS last_closed, coalesce(
    CAST(max(month) + interval '1 month' AS date),
    (SELECT min(month) FROM (
        SELECT billing_month FROM ledger_transactions WHERE organization_id = :organization_id
        UNION ALL SELECT first_month FROM plan_assignments WHERE organization_id = :organization_id AND plan_version_id IS NOT NULL
    ) AS used (month))) AS first_open
FROM billing_months WHERE organization_id = :organization_id AND state = 'closed'
""")


class ObstacleKind(StrEnum):
    """What stands in the way."""

    MONTH_NOT_OVER = "MONTH_NOT_OVER"
    EARLIER_MONTH_OPEN = "EARLIER_MONTH_OPEN"
    LATER_MONTH_CLOSED = "LATER_MONTH_CLOSED"
    MONTH_BEFORE_FIRST = "MONTH_BEFORE_FIRST"
    USAGE_MISSTATED = "USAGE_MISSTATED"
    USAGE_UNRATED = "USAGE_UNRATED"
    REQUESTS_RUNNING = "REQUESTS_RUNNING"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One thing that stands in the way, in words with the remedy."""

    kind: ObstacleKind
    description: str


async def find_obstacles(
    session: AsyncSession,
    organization_id: uuid.UUID,
    month: date,
    *,
    now: datetime,
    grace: timedelta,
    leave_running: bool,
    before_first: bool,
    correcting: str,
    all_rated: bool,
) -> list[Obstacle]:
    """All that stands in the way of closing a month, by its first day. now: the moment of the close.

    leave_running: although requests of it still run. before_first: although it is before the customer's first month. correcting:
    the id of an adjustment for misstated usage, or empty. all_rated: no backlog of usage is left. What has come since is not in the
    way: it is late usage.
    """
    ends = month_end(month)
    found: list[Obstacle] = []
    if now < ends + grace:
        found.append(
            Obstacle(
                ObstacleKind.MONTH_NOT_OVER,
                f"{month_text(month)} can be closed from {ends + grace:%Y-%m-%d %H:%M} UTC on; it is {now:%Y-%m-%d %H:%M} now",
            )
        )
    parameters = {"organization_id": organization_id, "ends": ends, "month": month}
    before = (await session.execute(BEFORE, parameters)).one()
    if before.last_closed is not None and before.last_closed >= month:
        told = f"{month_text(before.last_closed)} is closed, and with it all before: what comes late is in the month after it"
        found.append(Obstacle(ObstacleKind.LATER_MONTH_CLOSED, told))
    elif before.first_open is not None and before.first_open < month:
        told = f"{month_text(before.first_open)} is not closed: months are closed in their order, also those without usage"
        found.append(Obstacle(ObstacleKind.EARLIER_MONTH_OPEN, told))
    elif before.last_closed is None and before.first_open is not None and before.first_open > month and not before_first:
        found.append(_before_first(month, before.first_open))
    found += await _misstated(session, organization_id, ends, correcting)
    if not all_rated:
        told = "more usage waits for the ledger than one close rates: let the worker catch up, and try again"
        found.append(Obstacle(ObstacleKind.USAGE_UNRATED, told))
    if unratable := [str(each) for each in await unratable_usage(session, organization_id, ends)]:
        told = f"{len(unratable)} usage events cannot be rated: {named(unratable)}; their prices are in another currency than"
        found.append(
            Obstacle(ObstacleKind.USAGE_UNRATED, f"{told} the customer, or they are lost: `weir fsck` tells what is wrong")
        )
    if not leave_running:
        running = [str(each) for each in (await session.execute(RUNNING, parameters)).scalars()]
        if running:
            found.append(
                Obstacle(
                    ObstacleKind.REQUESTS_RUNNING,
                    f"{len(running)} requests that were admitted before the month's end still run: {named(running)}; wait, end "
                    "them (`weir requests kill`, `weir requests stuck`), or leave them to the month of their end (--leave-running)",
                )
            )
    return found


async def first_open_month(session: AsyncSession, organization_id: uuid.UUID) -> date | None:
    """The month that has to be closed next, by its first day; None for a customer that nothing was posted to yet."""
    found: date | None = (await session.execute(BEFORE, {"organization_id": organization_id})).one().first_open
    return found


def _before_first(month: date, first: date) -> Obstacle:
    """What a mistyped year would do."""
    empty = (first.year - month.year) * 12 + first.month - month.month
    told = (
        f"{month_text(month)} is before the customer's first month, {month_text(first)}: closing it would be for good, and {empty} "
        "empty months, from this one on, would have to be closed before that one can be; say so if you want that (--before-first)"
    )
    return Obstacle(ObstacleKind.MONTH_BEFORE_FIRST, told)


async def _misstated(session: AsyncSession, organization_id: uuid.UUID, ends: datetime, correcting: str) -> list[Obstacle]:
    found = await misstated_usage(session, organization_id, ends)
    if found is None:
        return []
    refused = await why_not(session, organization_id, found, correcting) if correcting else ""
    if correcting and not refused:
        return []
    told = f"{len(found.ids)} usage events do not cost what their tokens cost: {named([str(each) for each in found.ids])}"
    remedy = (
        f"{refused}; " if refused else ""
    ) + f"find out why; then have {found.right_cost}, which the tokens cost, charged by an adjustment that somebody else approves"
    return [Obstacle(ObstacleKind.USAGE_MISSTATED, f"{told}; {remedy}, and close with --corrected-by ADJUSTMENT")]


def month_end(month: date) -> datetime:
    """The first moment after a month, UTC."""
    following = month_after(month)
    return datetime(following.year, following.month, 1, tzinfo=UTC)


def named(ids: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more
