"""Backlog over all processes: usage to rate, hours to export, overdue holds.

Operators poll it every few seconds: each number comes from a list or an index of pending rows, and
counting stops at a bound, so that a long backlog does not become longer by being measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import text

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
