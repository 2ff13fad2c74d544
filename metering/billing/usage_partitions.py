"""The partitions of the usage events, one per month (UTC), made ahead of their time: a month begins without anybody noticing.

The work is done by functions in the database, since migrations do it, too. What finds no partition lands in the default one, where
it counts like all others; it is moved as soon as its month is made. Nothing is made for a month that is far ahead of the database's
clock: rows of such a month were written under a clock that was wrong, and a person must look.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

log = logging.getLogger(__name__)

MONTHS_AHEAD = 3  # so long no worker may run before the first row lands in the default partition
LOCK_TIMEOUT = "2s"  # making one waits for whoever reads all months, and others wait behind: better try again an hour later

CREATE = text("SELECT to_char(month, 'YYYY-MM') FROM create_usage_partitions(:months_ahead) AS month")
STRAY = text("""
SELECT to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM') AS month, count(*) AS event_count
FROM usage_events_default GROUP BY 1 ORDER BY 1
""")


@dataclass(frozen=True, slots=True)
class UsagePartitions:
    """What `keep_ahead` did. created: months, as `YYYY-MM`. stray: usage events still in the default partition, by month."""

    created: tuple[str, ...]
    stray: dict[str, int]


async def keep_ahead(session: AsyncSession) -> UsagePartitions:
    """Make the partitions of this month and the next ones, and of months before that have rows in the default partition.

    Logs what it makes, and what it leaves as an error. Raises: sqlalchemy.exc.OperationalError where a lock is not had in time.
    """
    await session.execute(text("SELECT set_config('lock_timeout', :timeout, true)"), {"timeout": LOCK_TIMEOUT})
    created = tuple((await session.execute(CREATE, {"months_ahead": MONTHS_AHEAD})).scalars())
    stray = {row.month: row.event_count for row in await session.execute(STRAY)}
    if created:
        log.info("partitions of usage events made for %s", ", ".join(created))
    if stray:
        found = ", ".join(f"{count} of {month}" for month, count in stray.items())
        log.error("usage events are dated far ahead of the database's clock, and stay in usage_events_default: %s", found)
    return UsagePartitions(created, stray)
