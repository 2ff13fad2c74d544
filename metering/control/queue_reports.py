"""Reports of api processes about their queues, for the other processes before the same engines.

A row is one process's last report, an opaque value here. Its age is that of the database's clock,
so clocks of processes do not matter. Rows are worth nothing after some seconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import psycopg

from metering.store.db import (
    KEEPALIVES,
    BoundedConnection,
    patience,
    psycopg_conninfo,
)
from metering.store.refusals import AWAY

LOST = (*AWAY, OSError)
ANSWER_TIMEOUT_S = 1.0  # a statement takes a millisecond; a later report is as good as none
CONNECT_TIMEOUT_S = 2  # the minimum of libpq
FORGET_OLD = "DELETE FROM queue_reports WHERE written_at < clock_timestamp() - interval '1 minute'"
EXCHANGE = """
WITH written AS (
    INSERT INTO queue_reports (process_id, pools, report, written_at)
    VALUES (%(process_id)s, %(pools)s, %(report)s, clock_timestamp())
    ON CONFLICT (process_id) DO UPDATE
    SET pools = excluded.pools, report = excluded.report, written_at = excluded.written_at
)
SELECT process_id, report, extract(epoch FROM written_at)::float8,
       extract(epoch FROM clock_timestamp() - written_at)::float8
FROM queue_reports
WHERE process_id <> %(process_id)s
  AND pools && %(pools)s
  AND written_at > clock_timestamp() - make_interval(secs => %(silent_s)s)
"""


class QueueReportRow(NamedTuple):
    """Report of another process: `written_at` identifies it, `age_s` is by the database's clock."""

    process_id: uuid.UUID
    report: bytes
    written_at: float
    age_s: float


class QueueReports:
    """Connection on which one process exchanges its reports; opened at the first one."""

    def __init__(self, database_url: str, process_id: uuid.UUID) -> None:
        self._conninfo = psycopg_conninfo(database_url)
        self._process_id = process_id
        self._connection: BoundedConnection | None = None

    async def exchange(
        self, pools: Sequence[str], report: bytes, silent_s: float
    ) -> list[QueueReportRow]:
        """Write a report about these pools, and read those of other processes about any of them
        that are at most `silent_s` old.

        Raises one of `LOST` if the database does not answer in time; the next call reconnects.
        """
        values = {
            "process_id": self._process_id,
            "pools": list(pools),
            "report": report,
            "silent_s": silent_s,
        }
        try:
            with patience(ANSWER_TIMEOUT_S):
                if self._connection is None:
                    self._connection = await self._connect()
                cursor = await self._connection.execute(EXCHANGE, values, binary=True)
                return [QueueReportRow(*row) for row in await cursor.fetchall()]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection. Its row is deleted by a later process."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connect(self) -> BoundedConnection:
        connection = await BoundedConnection.connect(
            self._conninfo,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            **KEEPALIVES,
        )
        try:
            await connection.execute(FORGET_OLD)
        except psycopg.Error:
            await connection.close()
            raise
        return connection
