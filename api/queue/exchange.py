"""Exchange between the queues of all api processes before the same engines.

Pure: reports are encoded and absorbed here; `api/generation/request/queue_exchange.py` carries
them. Whatever is stale is bounded: reports are at most `INTERVAL_S` old, and those of a process
that ends or is cut off count for `SILENT_S`. A process that was silent for longer, or has just
started, is new to the others: it takes their level, and service before that is not made up for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from api.queue.fair_queue import FairQueue, QueueReport

INTERVAL_S = 0.2  # between two reports: five small statements a second, and few requests
ALONE_INTERVAL_S = 0.5  # while no other process has requests: below `SILENT_S`
SILENT_S = 2.0  # ten intervals: a busy event loop or database delays some
RATE_MEMORY = 10  # exchanges in the mean growth of a level: two seconds

Reports = dict[str, QueueReport]  # by pool

log = structlog.get_logger(__name__)


class ReportRow(Protocol):
    """Report of another process: `written_at` identifies it, `age_s` is in seconds."""

    @property
    def process_id(self) -> uuid.UUID: ...
    @property
    def report(self) -> bytes: ...
    @property
    def written_at(self) -> float: ...
    @property
    def age_s(self) -> float: ...


class Exchange:
    """Reports of a process's queues, and those of other processes. Without tasks."""

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
        # When the level of a pool was measured, the level, and its growth per second
        self._levels: dict[str, tuple[float, float, float]] = {}
        # By how much the level of a pool was raised since the last exchange, because one failed
        self._raised: dict[str, float] = {}
        # When a report of a process about a pool last came
        self._heard_at: dict[tuple[uuid.UUID, str], float] = {}
        self.queues: Mapping[str, FairQueue] = {}
        self.become(queues)

    def become(self, queues: Mapping[str, FairQueue]) -> None:
        """Exchange reports of these queues from now on. Those left out are their process's own."""
        for pool, queue in self.queues.items():
            if queues.get(pool) is not queue:
                self._levels.pop(pool, None)
                self._raised.pop(pool, None)
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

    def take(self, rows: Sequence[ReportRow]) -> Iterator[None]:
        """Absorb the present reports of all other processes; those without one have ended.

        Yields after each, so that other tasks can run between two.
        """
        self._lower()
        for row in rows:
            if self._written_at.get(row.process_id) != row.written_at:
                self._written_at[row.process_id] = row.written_at
                self._absorb(row)
                yield
        self._forget(set(self._written_at) - {row.process_id for row in rows})
        self._note_levels(is_connected=True)
        self._apply()

    def pause(self) -> None:
        """Dispatch nothing before the next exchange, or `resume`: a process without requests reads
        no reports, so it knows the level of long ago, and its requests would precede all others.
        """
        for queue in self.queues.values():
            queue.is_paused = True

    def resume(self) -> None:
        """Dispatch what waits since a pause, if no exchange has ended it."""
        if any(queue.is_paused for queue in self.queues.values()):
            self._apply()

    def expire(self, silent_s: float = SILENT_S) -> None:
        """Drop the reports of processes that were not heard of for `silent_s`."""
        known_from = self._clock() - silent_s
        heard = {process for (process, _), at in self._heard_at.items() if at > known_from}
        self._forget(set(self._written_at) - heard)
        self._apply()

    def cut_off(self) -> None:
        """Go on after a failed exchange: levels grow as before, as those of other processes do.

        Otherwise engines that order by rank would prefer the requests of this process. The next
        exchange tells what the others have really served, and replaces this growth.
        """
        self._note_levels(is_connected=False)
        self.expire()

    def _note_levels(self, *, is_connected: bool) -> None:
        """Measure how fast levels grow, or let them grow at the measured rate."""
        now = self._clock()
        for pool, queue in self.queues.items():
            line = queue.interactive.line
            present = line.level() if (height := line.height()) is None else height
            before_at, before, rate = self._levels.get(pool, (now, present, 0.0))
            elapsed_s, gain = now - before_at, present - before
            if is_connected and elapsed_s > 0:
                rate += (max(gain, 0.0) / elapsed_s - rate) / RATE_MEMORY
            elif 0 <= gain < rate * elapsed_s:  # it falls if the tenant on top leaves
                units = rate * elapsed_s - gain
                line.rise(units)
                self._raised[pool] = self._raised.get(pool, 0.0) + units
                present = before + rate * elapsed_s
            self._levels[pool] = now, present, rate

    def _lower(self) -> None:
        """Take back the growth since an exchange failed: the reports have the same service."""
        for pool, units in self._raised.items():
            self.queues[pool].interactive.line.rise(-units)
            measured_at, level, rate = self._levels[pool]
            self._levels[pool] = measured_at, level - units, rate
        self._raised.clear()

    def _absorb(self, row: ReportRow) -> None:
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
