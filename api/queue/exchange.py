"""Exchange between the queues of all api processes before the same engines.

While a process has requests for engines that others use too, it writes the reports of its queues to
PostgreSQL every `INTERVAL_S` and reads those of the others, in one statement in the background. A
process without such requests, or without other processes, writes nothing. Nothing that a request
waits for happens here.

Whatever is stale is bounded: reports are at most `INTERVAL_S` old, and those of a process that ends
or is cut off count for `SILENT_S`. A process that was silent for longer, or has just started, is
new to the others: it takes their level, and what it served meanwhile is not made up for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import structlog

from api.queue.fair_queue import FairQueue, QueueReport
from common.backoff import Backoff
from metering.control.queue_reports import LOST, QueueReportRow, QueueReports

INTERVAL_S = 0.2  # an eighth of the shortest promised wait that clients notice; 5 statements/s
ALONE_INTERVAL_S = 0.5  # while no other process has requests: below `SILENT_S`
SILENT_S = 1.0  # five intervals: a busy event loop or database delays one or two
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0

Reports = dict[str, QueueReport]  # by pool

log = structlog.get_logger(__name__)


class Exchange:
    """Reports of a process's queues to others, and what it has of theirs. Without tasks."""

    def __init__(
        self,
        queues: Mapping[str, FairQueue],
        process_id: uuid.UUID,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queues` are those before shared engines, by pool. `clock` is that of the queues."""
        self._process_id = process_id
        self._clock = clock
        self._reported: set[str] = set()  # pools with requests at the last report
        self._written_at: dict[uuid.UUID, float] = {}  # of the last report of each process
        # When a report of a process about a pool last came
        self._heard_at: dict[tuple[uuid.UUID, str], float] = {}
        self.queues: Mapping[str, FairQueue] = {}
        self.become(queues)

    def become(self, queues: Mapping[str, FairQueue]) -> None:
        """Exchange reports of these queues from now on. Those left out are their process's own."""
        for pool, queue in self.queues.items():
            if queues.get(pool) is not queue:
                for process_id in self._written_at:
                    queue.forget(process_id)
                queue.exchanged()
        self.queues = queues
        for queue in queues.values():
            queue.process_id = self._process_id

    @property
    def has_work(self) -> bool:
        """True if a queue has requests, or the others do not know yet that it has none."""
        return bool(self._reported) or any(queue.live_count for queue in self.queues.values())

    def report(self) -> bytes:
        """Encode the reports of all queues with requests, and of those that have just ended."""
        busy = {pool for pool, queue in self.queues.items() if queue.live_count}
        ended = self._reported & self.queues.keys()
        reports = {pool: self.queues[pool].report() for pool in busy | ended}
        self._reported = busy
        return msgspec.msgpack.encode(reports)

    def take(self, rows: Sequence[QueueReportRow]) -> Iterator[None]:
        """Absorb the present reports of all other processes; those without one have ended.

        Yields after each, so that other tasks can run between two.
        """
        for row in rows:
            if self._written_at.get(row.process_id) != row.written_at:
                self._written_at[row.process_id] = row.written_at
                self._absorb(row)
                yield
        self._forget(set(self._written_at) - {row.process_id for row in rows})
        self._apply()

    def expire(self, silent_s: float = SILENT_S) -> None:
        """Drop the reports of processes that were not heard of for `silent_s`."""
        known_from = self._clock() - silent_s
        heard = {process for (process, _), at in self._heard_at.items() if at > known_from}
        self._forget(set(self._written_at) - heard)
        self._apply()

    def _absorb(self, row: QueueReportRow) -> None:
        now = self._clock()
        try:
            reports = msgspec.msgpack.decode(row.report, type=Reports)
        except msgspec.DecodeError as error:  # of another release, during an upgrade
            log.warning("queue_report_unreadable", process=row.process_id, cause=str(error))
            reports = {}
        for pool, queue in self.queues.items():
            if (report := reports.get(pool)) is None:
                queue.forget(row.process_id)
                continue
            heard_at = self._heard_at.get((row.process_id, pool))
            is_new = heard_at is None or now - heard_at > SILENT_S
            queue.absorb(row.process_id, report, row.age_s, is_new=is_new)
            self._heard_at[row.process_id, pool] = now

    def _forget(self, process_ids: set[uuid.UUID]) -> None:
        for process_id in process_ids:
            del self._written_at[process_id]
            for pool, queue in self.queues.items():
                queue.forget(process_id)
                self._heard_at.pop((process_id, pool), None)

    def _apply(self) -> None:
        for queue in self.queues.values():
            queue.exchanged()


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
        if self._process_count > 1:
            self._work.set()

    async def run(self) -> None:
        """Exchange reports until cancelled. Never raises for an unavailable database."""
        backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S)
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
                except LOST:
                    self._exchange.expire()
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                for _ in self._exchange.take(rows):
                    await asyncio.sleep(0)
                await asyncio.sleep(INTERVAL_S if rows else ALONE_INTERVAL_S)
        finally:
            await self._reports.close()
