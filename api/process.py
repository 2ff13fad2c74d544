"""The api process as its operating system and its operators see it: limits, signals and log."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import logging
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO, cast

import structlog

from api.core.settings import Settings
from api.generation.request.registry import RequestRegistry
from common.logs import configure_logging, without_details

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Files other than client connections: journals, libraries, pipes, database, other processes.
OTHER_FILES = 1000
LARGE_BYTES = 64 * 2**10  # a piece of a message; other allocations of a request are far smaller
ARENAS_MAX = 2  # transport threads allocate pieces of messages and free those of other threads
# Parameters of mallopt in the GNU C library's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
INTERVAL_S = 60.0  # sufficient for graphs; a day of it is less than the log of a busy second

log = structlog.get_logger(__name__)


class Unfailing(io.TextIOBase):
    """Text stream that ignores failed writes, so that a full disk does not break logged work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def without_row_values(
    _: object, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Remove the values of rows from errors of the database; a processor of structlog."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = without_details(value)
    return event


def plain_traceback(out: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a traceback for a terminal, without values of rows."""
    out.write("\n" + without_details("".join(traceback.format_exception(*exc_info)).rstrip()))


def configure_logs(level: str) -> None:
    """Log events of this level and above, as text on a terminal and as JSON elsewhere."""
    minimum = LEVELS.get(level.lower(), logging.INFO)
    on_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=plain_traceback)
        if on_terminal
        else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if on_terminal else [structlog.processors.format_exc_info]),
            without_row_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing(sys.stderr))),
    )
    configure_logging(max(minimum, logging.WARNING))


def allow_open_files(settings: Settings) -> None:
    """Raise the soft limit of open files to what the connection limits require.

    Logs a warning if the system does not permit it.
    """
    required = settings.connections.count_max + settings.http.connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError) as error:  # macOS has another limit besides the one it reports
        log.warning("open_files_not_raised", open_file_count_max=soft, cause=str(error))
        return
    if allowed < required:
        remedy = (
            "let the system allow more, or lower WEIR_CONNECTIONS_MAX and WEIR_HTTP_CONNECTIONS_MAX"
        )
        log.warning(
            "open_files_too_few", open_file_count_max=allowed, required=required, remedy=remedy
        )


def return_freed_memory() -> None:
    """Configure glibc to return large free blocks to the operating system at once.

    By default it raises its threshold with each large block that is freed, up to 32 MiB, and keeps
    the memory of a burst of large messages. Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, ARENAS_MAX)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def statistics_of(registry: RequestRegistry) -> dict[str, Any]:
    """Collect the statistics for the log: admissions, refusals by limit (`dimension/subject`),
    queues with their expected waits, and replicas.
    """
    refusals = registry.admission.holds.statistics().refusals
    return {
        "admitted_count": registry.admission.admitted_count,
        "quota_refusals": {
            f"{dimension}/{subject}": count
            for (dimension, subject), count in sorted(refusals.items())
        },
        "live_request_count": len(registry.running()),
        "queues": {
            model: {
                "waiting_count": queue.waiting_count,
                "waiting_count_peak": queue.waiting_count_peak,
                "refused_count": queue.refused_count,
                "reservation_count": queue.reservation_count,
                "engine_pending_count": queue.engine_pending_count,
                "longest_wait_s": (
                    None if queue.longest_wait_s is None else round(queue.longest_wait_s, 3)
                ),
            }
            for model, queue in (
                (model, queue.statistics()) for model, queue in registry.queues.items()
            )
        },
        "replicas": {
            report.name: {
                "state": report.state.value,
                "live_sequence_count": report.live_sequence_count,
            }
            for _, report in registry.router.reports()
        },
    }


async def log_statistics_regularly(
    registry: RequestRegistry, interval_s: float = INTERVAL_S
) -> None:
    """Log the statistics every `interval_s` seconds if they have changed. Runs until cancelled."""
    before: dict[str, Any] = {}
    while True:
        await asyncio.sleep(interval_s)
        now = statistics_of(registry)
        if now != before:
            log.info("admission_statistics", **now)
        before = now


@contextlib.contextmanager
def stop_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set `stopping` on SIGTERM or SIGINT for the duration of the block."""
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    try:
        yield
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signal_number)
