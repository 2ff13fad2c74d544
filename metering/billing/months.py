"""The months that are billed: which month takes a posting, and the lock that keeps a close and postings apart.

Whoever posts holds its organization's lane shared until the transaction ends, and whoever closes a month holds it alone: so nothing
comes into a month while it is being closed, nor after. Triggers take the same locks for whoever forgets to. A lane is a lock that
some organizations share, so that the locks of a batch are few, whatever number of customers is in it. Functions never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import date

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

LANE_COUNT = 64  # locks of one batch at most; a close holds up the postings of one organization in so many, beside its own
LANE_LOCK = 1_466_263_923  # first key of the advisory locks, beside that of the quotas; the second one is the lane's number
# The lane of `organization_id` in SQL; the triggers of the ledger say the same.
LANE_OF = f"get_byte(uuid_send({{organization_id}}), 15) % {LANE_COUNT}"

# The month of use, or the one after the last that is closed: months are closed in their order, each with what was left before it.
POSTING_MONTH = """
SELECT greatest(CAST({month} AS date), (SELECT CAST(max(b.month) + interval '1 month' AS date) FROM billing_months b
                                        WHERE b.organization_id = {organization_id} AND b.state = 'closed'))
"""
SHARE_LANES = text(f"SELECT pg_advisory_xact_lock_shared({LANE_LOCK}, lane) FROM unnest(CAST(:lanes AS int[])) AS lane")
TRY_LANES = text(f"""
SELECT coalesce(array_agg(lane) FILTER (WHERE pg_try_advisory_xact_lock_shared({LANE_LOCK}, lane)), '{{}}')
FROM generate_series(0, {LANE_COUNT - 1}) AS lane
""")
TAKE_LANE = text(f"SELECT pg_advisory_xact_lock({LANE_LOCK}, :lane)")
FIND_POSTING_MONTH = text(POSTING_MONTH.format(month="CAST(:month AS date)", organization_id="CAST(:organization_id AS uuid)"))


def lane_of(organization_id: uuid.UUID) -> int:
    """The number of the lock that this organization's postings share."""
    return organization_id.bytes[-1] % LANE_COUNT


def month_of(day: date) -> date:
    """The first day of its month."""
    return date(day.year, day.month, 1)


def month_after(month: date) -> date:
    """The first day of the next month."""
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def month_text(month: date) -> str:
    """`YYYY-MM`."""
    return f"{month:%Y-%m}"


async def share_lanes(session: AsyncSession, organization_ids: Collection[uuid.UUID]) -> None:
    """Keep the months of these organizations from being closed until the transaction ends; waits for a close that goes on."""
    await session.execute(SHARE_LANES, {"lanes": sorted({lane_of(each) for each in organization_ids})})


async def try_lanes(session: AsyncSession) -> list[int]:
    """The same for whatever organizations are not being closed at the moment: the lanes that are held now. Never waits."""
    lanes: list[int] = (await session.execute(TRY_LANES)).scalar_one()
    return lanes


async def take_lane(session: AsyncSession, organization_id: uuid.UUID) -> None:
    """Keep everybody else from posting to this organization until the transaction ends.

    For a close, before it reads what it closes; waits for postings that go on. What is read afterwards is complete.
    """
    await session.execute(TAKE_LANE, {"lane": lane_of(organization_id)})


async def posting_month(session: AsyncSession, organization_id: uuid.UUID, month: date) -> date:
    """The month that takes what happened in `month`: itself, or the first after it that is not closed. It stays so until commit.

    Months are given and told by their first day.
    """
    await share_lanes(session, (organization_id,))
    # A statement of its own: it sees whatever was closed while the lock was waited for.
    found = await session.execute(FIND_POSTING_MONTH, {"organization_id": organization_id, "month": month_of(month)})
    answer: date = found.scalar_one()
    return answer
