"""Incidents of the workers, counted in the database: a worker has no page for metrics, and the api processes read it there."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import psycopg

from common.incidents import INCIDENT_COUNTS
from metering.store.db import connection_options, psycopg_conninfo

CONNECT_TIMEOUT_S = 2
ADD = """
INSERT INTO worker_incidents AS known (source, incident_count) VALUES (%s, %s)
ON CONFLICT (source) DO UPDATE SET incident_count = known.incident_count + excluded.incident_count, last_at = now()
"""

log = logging.getLogger(__name__)
_recorded: dict[str, int] = {}  # of `INCIDENT_COUNTS`, what the database has


def record_worker_incidents(environment: Mapping[str, str]) -> None:
    """Add what has happened since the last call, at first 0 of each source: alerts look for growth.

    Where the database is away, the next call adds it.
    """
    counts = dict(INCIDENT_COUNTS)
    new = {source: count - _recorded.get(source, 0) for source, count in counts.items() if count != _recorded.get(source)}
    if not new:
        return
    try:
        conninfo = psycopg_conninfo(environment["WEIR_DATABASE_URL"])
        with psycopg.connect(conninfo, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()) as connection:
            for source, count in sorted(new.items()):
                connection.execute(ADD, (source, count))
    except psycopg.Error as error:
        log.warning("incidents are not counted in the database yet: %s", str(error).partition("\n")[0])
        return
    _recorded.update(counts)
