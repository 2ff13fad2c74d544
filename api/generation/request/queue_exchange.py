"""Task that exchanges reports of this process's queues with other processes, through PostgreSQL.

While a process has requests for engines that others use too, it writes its reports and reads those
of the others, in one statement in the background. A process without such requests, or without
other processes, writes nothing. The first request after that waits for the first exchange, which
takes about as long as its admission beside it, and for `LEVEL_WAIT_S` at most.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

import structlog

from api.queue.exchange import ALONE_INTERVAL_S, INTERVAL_S, SILENT_S, Exchange
from api.queue.fair_queue import FairQueue
from common.backoff import Backoff
from metering.control.queue_reports import LOST, QueueReports

LEVEL_WAIT_S = 0.1  # ten times an exchange; connecting takes some of it
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0

log = structlog.get_logger(__name__)


class QueueExchange:
    """Task that exchanges reports through PostgreSQL while there is something to report."""

    def __init__(self, database_url: str, process_id: uuid.UUID) -> None:
        """Exchange nothing before `become`."""
        self._exchange = Exchange({}, process_id)
        self._reports = QueueReports(database_url, process_id)
        self._work = asyncio.Event()
        self._process_count = 1

    def become(self, queues: Mapping[str, FairQueue]) -> None:
        """Exchange reports of these queues, by pool, from now on."""
        self._exchange.become(queues)
        for queue in queues.values():
            queue.on_live = self._note_work
        self._note_work()

    def note_processes(self, process_count: int) -> None:
        """Record how many api processes the database knows, this one included."""
        self._process_count = process_count
        self._note_work()

    def _note_work(self) -> None:
        if self._process_count < 2 or not self._exchange.has_work or self._work.is_set():
            return
        self._work.set()
        self._exchange.pause()
        asyncio.get_running_loop().call_later(LEVEL_WAIT_S, self._exchange.resume)

    async def run(self) -> None:
        """Exchange reports until cancelled. Never raises for an unavailable database."""
        backoff, is_failing = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S), False
        try:
            while True:
                if self._process_count < 2 or not self._exchange.has_work:
                    self._work.clear()
                    self._exchange.expire(0.0)  # reports would grow old while nothing is read
                    await self._work.wait()
                    continue
                try:
                    rows = await self._reports.exchange(
                        sorted(self._exchange.queues), self._exchange.report(), SILENT_S
                    )
                except LOST as error:
                    if not is_failing:
                        log.warning("queue_exchange_failed", cause=str(error) or repr(error))
                    is_failing = True
                    self._exchange.cut_off()
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                is_failing = False
                for _ in self._exchange.take(rows):
                    await asyncio.sleep(0)
                await asyncio.sleep(INTERVAL_S if rows else ALONE_INTERVAL_S)
        finally:
            await self._reports.close()
