"""From rated usage to batches of tokens per customer, price version, kind and hour: the first half of the stage posted → exported.

What is missing is worked out, never remembered: a new part is what the usage events of an hour add up to, less the parts that
exist. The part's number is unique, so two who work it out at once write it once. Functions take a session and never commit.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.months import LANE_LOCK
from metering.billing.pricing import TOKENS_BY_KIND
from metering.export.derived_ids import derived_id
from metering.store.bounded_connection import patience
from metering.store.db import Sessions

CLOSE_DELAY = timedelta(
    minutes=2
)  # after an hour's end: most of what was settled in it is rated by then, so most hours have one part
BACK_TO = timedelta(days=35)  # how far the first run looks back: a biller takes nothing that is older
CLOSE_AT_ONCE = timedelta(hours=1)  # in one statement, also while catching up: a day of a busy service takes longer than it may
CLOSE_BUDGET_S = 20.0  # per run: bounds the first one, which has 35 days before it; the next one goes on
FORM_S = 30.0  # for an hour of some ten million events; such a statement keeps nobody waiting
LONG_STATEMENTS = text(f"SET LOCAL statement_timeout = '{FORM_S:.0f}s'")
# `rated_at` is when its transaction began; it is visible when that commits, which a task's time limit puts a minute later at most.
SCAN_MARGIN = timedelta(seconds=150)

# The quantity is not part of it: see `derived_ids.py`.
BATCH_ID = derived_id(
    "'meter batch'", "organization_id", "price_version_id", "token_kind", "extract(epoch FROM hour)::bigint", "parts.count"
)
# By way of the organizations, since the events' index begins with theirs.
FORM = text(f"""
WITH used AS (
    SELECT organization_id, price_version_id, kind.token_kind, date_trunc('hour', settled_at, 'UTC') AS hour,
           sum(kind.token_count) AS token_count
    FROM organizations o JOIN usage_events ON organization_id = o.id, {TOKENS_BY_KIND}
    WHERE rated_at IS NOT NULL AND settled_at >= :begins AND settled_at < :ends
      AND (CAST(:organization_id AS uuid) IS NULL OR o.id = :organization_id)
    GROUP BY 1, 2, 3, 4
)
INSERT INTO meter_batches (id, organization_id, price_version_id, token_kind, hour, part, token_count)
SELECT {BATCH_ID},
       organization_id, price_version_id, token_kind, hour, parts.count, used.token_count - parts.token_count
FROM used, LATERAL (
    SELECT count(*) AS count, coalesce(sum(b.token_count) FILTER (WHERE b.state <> 'cancelled'), 0) AS token_count
    FROM meter_batches b
    WHERE (b.organization_id, b.price_version_id, b.token_kind, b.hour)
        = (used.organization_id, used.price_version_id, used.token_kind, used.hour)
) parts
WHERE used.token_count > parts.token_count
ON CONFLICT (organization_id, price_version_id, token_kind, hour, part) DO NOTHING
""")
# The first hour of a stretch in which anything was used that is rated: what is rated later is late, here as everywhere.
FIRST_USED = text("""
SELECT date_trunc('hour', min(used.settled_at), 'UTC')
FROM organizations o, LATERAL (
    SELECT settled_at FROM usage_events
    WHERE organization_id = o.id AND rated_at IS NOT NULL AND settled_at >= :begins AND settled_at < :ends
    ORDER BY settled_at LIMIT 1
) AS used
""")
BEGIN = text("""
INSERT INTO export_progress (id, closed_until, scanned_until)
VALUES (1, date_trunc('hour', now() - :back_to, 'UTC'), now()) ON CONFLICT DO NOTHING
""")
# Whoever finds the row locked leaves the work to the one that has it.
STANDING = text("""
SELECT closed_until, scanned_until, date_trunc('hour', now() - :close_delay, 'UTC') AS closable_until, now() AS now
FROM export_progress FOR UPDATE SKIP LOCKED
""")
LATE = text("""
SELECT DISTINCT organization_id, date_trunc('hour', settled_at, 'UTC') AS hour FROM usage_events
WHERE rated_at >= :since AND settled_at < :closed_until ORDER BY 2, 1
""")
# A close rates as well, in a transaction that may last for longer than the margin.
CLOSING = text(f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = {LANE_LOCK} AND objsubid = 2 AND granted
               AND mode = 'ExclusiveLock' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
""")


@dataclass(frozen=True, slots=True)
class _Standing:
    closed_until: datetime
    scanned_until: datetime
    closable_until: datetime
    now: datetime


async def form_batches(sessions: Sessions) -> int:
    """Make the batches of all hours that are over, and of late usage; tells how many. Safe to run anywhere, at any time."""
    formed = 0
    async with sessions.begin() as session:
        await session.execute(BEGIN, {"back_to": BACK_TO})
    deadline = time.monotonic() + CLOSE_BUDGET_S
    with patience(FORM_S + 2):
        while time.monotonic() < deadline:
            async with sessions.begin() as session:
                standing = await _standing(session)
                if standing is None or standing.closed_until >= standing.closable_until:
                    break
                stretch = {"begins": standing.closed_until, "ends": standing.closable_until}
                begins = await session.scalar(FIRST_USED, stretch) or standing.closable_until
                ends = min(begins + CLOSE_AT_ONCE, standing.closable_until)
                formed += await form(session, begins, ends)
                await session.execute(text("UPDATE export_progress SET closed_until = :ends"), {"ends": ends})
        async with sessions.begin() as session:
            if (standing := await _standing(session)) is not None:
                formed += await _form_late(session, standing)
    return formed


async def form(session: AsyncSession, begins: datetime, ends: datetime, organization_id: uuid.UUID | None = None) -> int:
    """Make what is missing of the hours in a range; tells how many parts. Of one organization only if it is given."""
    parameters = {"begins": begins, "ends": ends, "organization_id": organization_id}
    result = await session.execute(FORM, parameters)
    return int(getattr(result, "rowcount", 0))


async def _form_late(session: AsyncSession, standing: _Standing) -> int:
    closing = await session.scalar(CLOSING)  # beforehand: what a close commits after this is looked for again, or begins later
    parameters = {"since": standing.scanned_until - SCAN_MARGIN, "closed_until": standing.closed_until}
    late = (await session.execute(LATE, parameters)).all()
    formed = 0
    for organization_id, hour in late:
        formed += await form(session, hour, hour + timedelta(hours=1), organization_id)
    if not closing:
        await session.execute(text("UPDATE export_progress SET scanned_until = :now"), {"now": standing.now})
    return formed


async def _standing(session: AsyncSession) -> _Standing | None:
    await session.execute(LONG_STATEMENTS)
    row = (await session.execute(STANDING, {"close_delay": CLOSE_DELAY})).one_or_none()
    return None if row is None else _Standing(*row)
