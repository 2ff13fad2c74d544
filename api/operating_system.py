"""What this process asks of the operating system and the C library: open files, and freed memory back.

Each connection is an open file, and what cannot be opened when its time comes is a journal.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource

import structlog

from api.core.settings import Settings

OTHERS = 1000  # files that are no client's connection: journals, libraries, pipes to engines, the database, other processes

# Of malloc.h of the GNU C library.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 64 * 2**10  # a piece of a message; what a request needs otherwise is far smaller
ARENAS_MAX = 2  # threads of the transport take pieces of messages, and give them back from others

log = structlog.get_logger(__name__)


def allow_open_files(settings: Settings) -> None:
    """Raise what the system lets this process open to what its bounds on connections need, as far as it may be raised."""
    wanted = settings.connections_max + settings.http_connections_max + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError) as error:  # macOS has a bound of its own beside the one that it tells
        log.warning("open_files_not_raised", open_file_count_max=soft, cause=str(error))
        return
    if allowed < wanted:
        remedy = "let the system allow more, or lower WEIR_CONNECTIONS_MAX and WEIR_HTTP_CONNECTIONS_MAX"
        log.warning("open_files_too_few", open_file_count_max=allowed, wanted=wanted, remedy=remedy)


def return_freed_memory() -> None:
    """Give large blocks back to the operating system at once: a burst of messages of megabytes is not kept for the next one.

    Without that the library raises its threshold with each large block that is freed, up to 32 MiB. Other C libraries have no such
    settings, and keep what they keep.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, ARENAS_MAX)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
