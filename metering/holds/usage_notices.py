"""Tells the worker that there is usage to rate: a notification of the database, outside the settlements and at most every 100 ms.

It only hurries what is done anyway: the worker looks for unrated usage every second, so a notice that is lost costs that much.
"""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy import text

from metering.errors import StoreAway
from metering.store.db import Sessions

CHANNEL = "weir_usage"
NOTICE_INTERVAL_S = 0.1  # so a busy process costs the database ten tiny transactions a second, whatever it settles
NOTICE_TIMEOUT_S = 2.0  # a notice that takes longer is late for what it is for
NOTIFY = text(f"NOTIFY {CHANNEL}")

log = structlog.get_logger(__name__)


class UsageNotices:
    """One process's notices. `run` must be running for any to go out."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._due = asyncio.Event()

    def used(self) -> None:
        """Something was settled and is committed. Never blocks."""
        self._due.set()

    async def run(self) -> None:
        """Send what is due until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                async with asyncio.timeout(NOTICE_TIMEOUT_S), self._sessions.begin() as session:
                    await session.execute(NOTIFY)
            except (StoreAway, TimeoutError) as away:
                log.debug("usage_notice_lost", cause=str(away))
            await asyncio.sleep(NOTICE_INTERVAL_S)
