"""Backlog over all processes: usage to rate, hours to export, overdue holds, and work that waits
for people.

Operators poll it every few seconds: each number comes from a list or an index of pending rows, and
counting stops at a bound, so that a long backlog does not become longer by being measured.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.store.db import Sessions
from metering.worker import APPLICATION

COUNTED_MAX = 10_000  # rows of each list: operators need no exact count beyond it
OVERDUE_AGE = "30 seconds"  # three rounds of the sweep
LATE_AFTER_S = 60.0  # age of unrated usage; a worker rates it within a second or two

# The columns are the fields of `Backlog`.
BACKLOG = text(f"""
SELECT u.unrated_event_count, u.unrated_age_s, h.hold_count, h.overdue_hold_count,
       b.unexported_batch_count, b.unexported_age_s,
       (
           SELECT count(*)
           FROM (SELECT FROM stripe_events WHERE handled_at IS NULL LIMIT {COUNTED_MAX}) AS s
       ) AS unhandled_event_count,
       coalesce((SELECT paused_until > now() FROM export_progress), false) AS export_is_paused,
       (
           SELECT count(*)
           FROM (SELECT FROM alert_deliveries WHERE state = 'pending' LIMIT {COUNTED_MAX}) AS d
       ) AS undelivered_alert_count,
       (
           SELECT count(*)
           FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = '{APPLICATION}'
       ) AS worker_count,
       (
           SELECT coalesce(jsonb_object_agg(source, incident_count), '{{}}')
           FROM worker_incidents
       ) AS worker_incidents
FROM (
    SELECT count(*) AS unrated_event_count,
           coalesce(extract(epoch FROM now() - min(settled_at)), 0)::float8 AS unrated_age_s
    FROM (SELECT settled_at FROM unrated_usage LIMIT {COUNTED_MAX}) AS w
) AS u,
(
    SELECT count(*) AS hold_count,
           count(*) FILTER (WHERE expires_at < clock_timestamp() - interval '{OVERDUE_AGE}')
               AS overdue_hold_count
    FROM (SELECT expires_at FROM holds WHERE state = 'held' LIMIT {COUNTED_MAX}) AS w
) AS h,
(
    SELECT count(*) AS unexported_batch_count,
           coalesce(extract(epoch FROM now() - min(created_at)), 0)::float8 AS unexported_age_s
    FROM (
        SELECT created_at
        FROM meter_batches
        WHERE state IN ('pending', 'sent')
        LIMIT {COUNTED_MAX}
    ) AS w
) AS b
""")

SHOWN_MAX = 20  # rows of each kind of work that waits for people
EXPORT_LATE_S = 7200.0  # an hour is exported within minutes after its end
MONTHS_BACK = 3  # of months that are looked at: a month is closed in the days after its end
# Each begins with kind, organization, subject, count, age in seconds, detail.
WEBHOOKS_FAILING = f"""
SELECT 'webhook_failing' AS kind, o.name, '' AS subject, w.failure_count::bigint AS number,
       extract(epoch FROM now() - d.since)::float8 AS age_s, coalesce(d.last_error, '') AS detail
FROM alert_webhooks w
JOIN organizations o ON o.id = w.organization_id
LEFT JOIN LATERAL (
    SELECT min(created_at) AS since,
           (array_agg(last_error ORDER BY attempted_at DESC)
               FILTER (WHERE last_error IS NOT NULL))[1] AS last_error
    FROM alert_deliveries
    WHERE organization_id = w.organization_id AND state = 'pending'
) AS d ON true
WHERE w.failure_count > 0
ORDER BY d.since
LIMIT {SHOWN_MAX}
"""
MONTHS_OPEN = f"""
SELECT 'month_open', min(o.name), to_char(used.month, 'YYYY-MM'), count(*),
       extract(
           epoch FROM now() - (used.month + interval '1 month') AT TIME ZONE 'UTC'
       )::float8, ''
FROM (
         SELECT o.id AS organization_id, m.month
         FROM generate_series(1, {MONTHS_BACK}) AS back,
              LATERAL (
                  SELECT CAST(
                      date_trunc('month', now(), 'UTC') AT TIME ZONE 'UTC'
                      - make_interval(months => back) AS date
                  ) AS month
              ) AS m,
              organizations o
         WHERE EXISTS (
             SELECT FROM ledger_transactions
             WHERE organization_id = o.id AND billing_month = m.month
         )
         UNION
         SELECT organization_id, CAST(date_trunc('month', settled_at, 'UTC') AS date)
         FROM (SELECT * FROM unrated_usage LIMIT {COUNTED_MAX}) AS u
     ) AS used
JOIN organizations o ON o.id = used.organization_id
WHERE used.month < CAST(date_trunc('month', now(), 'UTC') AT TIME ZONE 'UTC' AS date)
  AND NOT EXISTS (
      SELECT FROM billing_months
      WHERE organization_id = used.organization_id AND month = used.month AND state = 'closed'
  )
GROUP BY used.month
ORDER BY used.month
"""
ADJUSTMENTS_WAITING = f"""
SELECT 'adjustment_waiting', o.name, a.id::text, 1,
       extract(epoch FROM now() - a.created_at)::float8, a.reason
FROM adjustments a
JOIN organizations o ON o.id = a.organization_id
WHERE NOT EXISTS (SELECT FROM adjustment_decisions WHERE adjustment_id = a.id)
ORDER BY a.created_at
LIMIT {SHOWN_MAX}
"""
FOR_PEOPLE = text(
    " UNION ALL ".join(f"({each})" for each in (WEBHOOKS_FAILING, MONTHS_OPEN, ADJUSTMENTS_WAITING))
)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work that waits in the database, as of one query.

    Counts stop at `COUNTED_MAX`. Ages are in seconds, of the oldest row counted, or 0.
    `overdue_hold_count` counts expired holds that the sweep has missed, `unexported_batch_count`
    batches not known to be counted by the biller, `unhandled_event_count` events from Stripe,
    `worker_count` connected billing workers. `worker_incidents` counts incidents of all workers
    since the first start, by source.
    """

    unrated_event_count: int
    unrated_age_s: float
    hold_count: int
    overdue_hold_count: int
    unexported_batch_count: int
    unexported_age_s: float
    unhandled_event_count: int
    export_is_paused: bool
    undelivered_alert_count: int
    worker_count: int
    worker_incidents: Mapping[str, int]

    @property
    def billing_fault(self) -> str:
        """Reason why usage is not being billed; empty if it is."""
        if not self.worker_count:
            return "no billing worker is connected to the database"
        if self.unrated_age_s > LATE_AFTER_S:
            return f"usage has waited {self.unrated_age_s:.0f} s for the billing worker"
        return ""


async def read_backlog(sessions: Sessions) -> Backlog:
    """Query the backlog. Raises: DatabaseUnavailable."""
    async with sessions() as session:
        return Backlog(*(await session.execute(BACKLOG)).one())


class ConcernKind(enum.StrEnum):
    """Kind of a concern, as in `weir.v1.ConcernKind`."""

    WORKER_MISSING = "worker_missing"
    USAGE_UNBILLED = "usage_unbilled"
    HOLDS_OVERDUE = "holds_overdue"
    EXPORT_LATE = "export_late"
    WEBHOOK_FAILING = "webhook_failing"
    MONTH_OPEN = "month_open"
    ADJUSTMENT_WAITING = "adjustment_waiting"


@dataclass(frozen=True, slots=True)
class Concern:
    """Something that an operator should look at; the meaning of the fields depends on the kind."""

    kind: ConcernKind
    organization_name: str = ""
    subject: str = ""
    count: int = 0
    age_s: float | None = None
    detail: str = ""


def concerns_of(backlog: Backlog) -> list[Concern]:
    """Return the parts of a backlog that do not go away by themselves within a minute."""
    found = []
    if not backlog.worker_count:
        found.append(Concern(ConcernKind.WORKER_MISSING))
    if (age_s := backlog.unrated_age_s) > LATE_AFTER_S:
        found.append(
            Concern(ConcernKind.USAGE_UNBILLED, count=backlog.unrated_event_count, age_s=age_s)
        )
    if backlog.overdue_hold_count:
        found.append(Concern(ConcernKind.HOLDS_OVERDUE, count=backlog.overdue_hold_count))
    if (age_s := backlog.unexported_age_s) > EXPORT_LATE_S:
        found.append(
            Concern(ConcernKind.EXPORT_LATE, count=backlog.unexported_batch_count, age_s=age_s)
        )
    return found


async def read_concerns(session: AsyncSession) -> list[Concern]:
    """Find what an operator should look at. Raises: DatabaseUnavailable."""
    backlog = Backlog(*(await session.execute(BACKLOG)).one())
    rows = (await session.execute(FOR_PEOPLE)).all()
    return concerns_of(backlog) + [Concern(ConcernKind(kind), *rest) for kind, *rest in rows]
