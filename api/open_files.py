"""How many files this process may have open: each connection is one, and what it may not open when its time comes is a journal."""

from __future__ import annotations

import resource

import structlog

from api.settings import Settings

OTHERS = 1000  # files that are no client's connection: journals, libraries, pipes to engines, the database, other processes

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
