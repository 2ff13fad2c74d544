"""Process that repeatedly exports the current hour to the file of `WEIR_EXPORT_FILE`.

The worker exports an hour once it is over, and a run of `weir chaos` is shorter. Usage later in the
hour becomes a further part of it, as late usage always does, so this is the export of the product,
only sooner.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psycopg
from sqlalchemy import text

from metering.core.errors import DatabaseUnavailable
from metering.export.deliveries import deliver_pending, form, form_batches
from metering.export.exporting import FileExporter
from metering.store.db import create_engine, create_sessions

EVERY_S = 0.2
CONNECTION_COUNT = 3
# Includes the hour before, which may have ended since the last export.
RUNNING_HOURS = text(
    "SELECT date_trunc('hour', now(), 'UTC') - interval '1 hour', date_trunc('hour', now(), 'UTC')"
    " + interval '1 hour'"
)


async def export_for_ever(database_url: str, path: Path) -> None:
    """Export the part of the hour that is missing, again and again, until the process is killed."""
    sessions = create_sessions(create_engine(database_url, pool_size=CONNECTION_COUNT))
    exporter = FileExporter(path)
    while True:
        try:
            await form_batches(sessions)
            async with sessions.begin() as session:
                begins, ends = (await session.execute(RUNNING_HOURS)).one()
                await form(session, begins, ends)
            await deliver_pending(sessions, exporter)
        except* (DatabaseUnavailable, psycopg.OperationalError):
            print("the database is away", flush=True)
        await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(
        export_for_ever(os.environ["WEIR_DATABASE_URL"], Path(os.environ["WEIR_EXPORT_FILE"]))
    )
