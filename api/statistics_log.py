"""What this process has let in and refused, and what waits in it, as one event of the log each minute in which anything happened.

Counts are since the start of the process, so that whoever collects logs can work out rates, also over a line that was lost.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from api.generation.process import Process

INTERVAL_S = 60.0  # an operator's graph needs no more, and a day of it is less than the log of one busy second

log = structlog.get_logger(__name__)


def statistics_of(process: Process) -> dict[str, Any]:
    """Admissions, refusals by limit (`dimension/subject`), each model's queue with what one more would wait, and replicas."""
    refusals = process.admission.holds.statistics().refusals
    return {
        "admitted_count": process.admission.admitted_count,
        "quota_refusals": {f"{dimension}/{subject}": count for (dimension, subject), count in sorted(refusals.items())},
        "live_request_count": len(process.running()),
        "queues": {
            model: {
                "waiting_count": queue.waiting_count,
                "waiting_count_peak": queue.waiting_count_peak,
                "refused_count": queue.refused_count,
                "promise_count": queue.promise_count,
                "engine_pending_count": queue.engine_pending_count,
                "longest_wait_s": None if queue.longest_wait_s is None else round(queue.longest_wait_s, 3),
            }
            for model, queue in ((model, queue.statistics()) for model, queue in process.queues.items())
        },
        "replicas": {
            report.name: {"state": report.state.value, "live_sequence_count": report.live_sequence_count}
            for _, report in process.router.reports()
        },
    }


async def log_statistics_regularly(process: Process, interval_s: float = INTERVAL_S) -> None:
    """Log what has changed, until cancelled."""
    before: dict[str, Any] = {}
    while True:
        await asyncio.sleep(interval_s)
        now = statistics_of(process)
        if now != before:
            log.info("admission_statistics", **now)
        before = now
