"""Notices that usage was committed, which wake billing workers through LISTEN and NOTIFY."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy import text

from metering.core.errors import DatabaseUnavailable
from metering.store.db import Sessions

CHANNEL = "weir_usage"
NOTIFY = text(f"NOTIFY {CHANNEL}")
NOTICE_INTERVAL_S = 0.1  # limits a busy process to ten small transactions per second
NOTICE_TIMEOUT_S = 2.0  # a later notice is useless: readers poll
log = structlog.get_logger(__name__)


class UsageNotices:
    """Sender of usage notices of one process. It sends only while `run` runs."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._due = asyncio.Event()

    def used(self) -> None:
        """Request a notice that usage was committed. Never blocks."""
        self._due.set()

    async def run(self) -> None:
        """Send requested notices until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                async with asyncio.timeout(NOTICE_TIMEOUT_S), self._sessions.begin() as session:
                    await session.execute(NOTIFY)
            except (DatabaseUnavailable, TimeoutError) as away:
                log.debug("usage_notice_lost", cause=str(away))
            await asyncio.sleep(NOTICE_INTERVAL_S)
