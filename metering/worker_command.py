"""How to start the background worker. One place says it for `weir up`, for containers and for tests."""

from __future__ import annotations

import sys

READY_FILE = "WEIR_READY_FILE"  # the environment's variable for a file that a worker writes its pid to once it takes tasks


def worker_command() -> list[str]:
    """Command line of one worker that also sends the scheduled tasks. It reads its settings from the environment.

    Any number of them may run: a task that runs twice does no harm, and each clock stands in for the others. SIGTERM ends it within
    three seconds; kill -9 leaves no process behind and loses nothing.
    """
    return [
        *(sys.executable, "-m", "celery", "--quiet", "--app=metering.celery_app", "worker"),
        "--clock",
        "--pool=solo",  # the work is waiting for PostgreSQL; more processes would wait as well
        "--loglevel=WARNING",
        # Workers need to know nothing of each other.
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]
