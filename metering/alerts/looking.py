"""Finding what was crossed: the worker's periodic look at counters. What it finds it writes in the same statement, each once.

A limit is crossed in a window when `used` has come to a threshold of the limit in force; what running requests hold does not
count. Looked at are the present window, and those before it for as long as their counters are kept, by the limit that they ended
with: so a worker that was away finds later what it would have found. A window that ended before its limit was last changed is left
alone, since nobody knows any more what the limit was. Prepaid credit is crossed when no more than the threshold is left.

Nothing here is asked by admissions: it reads the rows that they write.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.models import QuotaDimension
from metering.quotas.quota_rules import ALERTING, DIMENSIONS, NO_WINDOW, Unit, window_end, window_start
from metering.store.db import Sessions

ALERTS_MAX = 5_000  # of one statement: somebody may give a threshold to very many limits at once
STATEMENTS_MAX = 10  # of one look; the next one goes on
DAYS_LOOKED_BACK = 2  # whole ones; older counters of days are deleted
MONTHS_LOOKED_BACK = 1
# What an enforced limit refuses does not fit in the rest, so that it is hardly ever used up to the last unit.
USED_UP_MILLI = 995

NEARLY = 0.0099  # of a threshold in percent: floats leave out what is far from it, and whole numbers decide
CREDIT = QuotaDimension.PREPAID_CREDIT_PICOS

LOOK = text(f"""
WITH windows AS (SELECT * FROM unnest(CAST(:dimensions AS text[]), CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[]))
                 AS w (dimension, starts_at, ends_at)),
limits AS MATERIALIZED (  -- with the value that was in force, or is; and how much must have been used for any of its alerts
    SELECT q.id, q.subject, q.subject_id, q.dimension, q.enforced, q.alert_at, w.starts_at, l.limit_value,
           CASE WHEN q.dimension = '{CREDIT}' THEN 0 ELSE l.limit_value::float8 * q.alert_at[1] * {NEARLY} END AS least
    FROM quotas q JOIN windows w ON w.dimension = q.dimension AND (w.ends_at > now() OR w.ends_at > q.changed_at)
    CROSS JOIN LATERAL (SELECT CASE WHEN q.raised_until >= least(w.ends_at, now())
                                    THEN q.raised_limit_value ELSE q.limit_value END) AS l (limit_value)
    WHERE q.alert_at <> '{{}}' AND q.deleted_at IS NULL AND NOT q.for_new_keys AND l.limit_value > 0
), near AS MATERIALIZED (
    SELECT l.*, c.used FROM limits l JOIN quota_counters c ON c.quota_id = l.id AND c.window_start = l.starts_at
    WHERE c.used >= l.least
), due AS (
    SELECT n.*, t.threshold FROM near n CROSS JOIN LATERAL unnest(n.alert_at) AS t (threshold)
    WHERE CASE WHEN n.dimension = '{CREDIT}' THEN n.limit_value - n.used <= t.threshold
               WHEN n.enforced AND t.threshold = 100 THEN n.used::numeric * 1000 >= n.limit_value::numeric * {USED_UP_MILLI}
               ELSE n.used::numeric * 100 >= n.limit_value::numeric * t.threshold END
      -- In the first seconds of a month the credit that begins with it is not there yet.
      AND (n.dimension <> '{CREDIT}' OR EXISTS (SELECT FROM prepaid_organizations p WHERE p.quota_id = n.id AND p.month >= :month))
      AND NOT EXISTS (SELECT FROM alerts a WHERE (a.quota_id, a.window_start, a.threshold, a.limit_value)
                                               = (n.id, n.starts_at, t.threshold, n.limit_value))
    LIMIT :limit
), fired AS (
    INSERT INTO alerts (organization_id, quota_id, window_start, threshold, limit_value, used, fired_at)
    SELECT coalesce(p.organization_id, d.subject_id), d.id, d.starts_at, d.threshold, d.limit_value, d.used, now()
    FROM due d LEFT JOIN api_keys k ON d.subject = 'api_key' AND k.id = d.subject_id
    LEFT JOIN projects p ON p.id = CASE d.subject WHEN 'project' THEN d.subject_id WHEN 'api_key' THEN k.project_id END
    ORDER BY d.id, d.starts_at, d.threshold  -- two workers take the same ones in the same order
    ON CONFLICT DO NOTHING RETURNING id, organization_id
), queued AS (
    INSERT INTO alert_deliveries (alert_id, organization_id, created_at)
    SELECT f.id, f.organization_id, now() FROM fired f JOIN alert_webhooks USING (organization_id)
)
SELECT count(*) FROM fired
""")


async def look_for_alerts(sessions: Sessions) -> int:
    """Write an alert for each crossing that has none yet; tells how many. Any number may look at once."""
    fired_count = 0
    for _ in range(STATEMENTS_MAX):
        async with sessions.begin() as session:
            now: datetime = (await session.scalars(select(func.now()))).one()
            found = await _look(session, now)
        fired_count += found
        if found < ALERTS_MAX:
            break
    return fired_count


async def _look(session: AsyncSession, now: datetime) -> int:
    windows = looked_at(now)
    parameters = {
        "dimensions": [str(dimension) for dimension, _, _ in windows],
        "starts": [starts_at for _, starts_at, _ in windows],
        "ends": [ends_at for _, _, ends_at in windows],
        "month": window_start(QuotaDimension.COST_PICOS_PER_MONTH, now).date(),
        "limit": ALERTS_MAX,
    }
    return int((await session.execute(LOOK, parameters)).scalar_one())


def looked_at(now: datetime) -> list[tuple[QuotaDimension, datetime, datetime]]:
    """The windows of each dimension that alerts, with their ends. Pure."""
    windows = [(QuotaDimension.PREPAID_CREDIT_PICOS, NO_WINDOW, datetime.max.replace(tzinfo=now.tzinfo))]
    for dimension in ALERTING:
        starts_at = window_start(dimension, now)
        for _ in range(1 + (DAYS_LOOKED_BACK if DIMENSIONS[dimension][1] is Unit.DAY else MONTHS_LOOKED_BACK)):
            ends_at = window_end(dimension, starts_at)
            assert ends_at is not None
            windows.append((dimension, starts_at, ends_at))
            starts_at = window_start(dimension, starts_at - timedelta(days=1))
    return windows
