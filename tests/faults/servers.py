"""A PostgreSQL server of a test's own: to stop, to kill, to freeze, and to start again on the same data."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from api.chaos.rounds import CRASH_SETTINGS
from common.processes import children_of
from metering.store import embedded_postgres
from metering.store.embedded_postgres import EmbeddedPostgres


def restart(server: EmbeddedPostgres) -> None:
    """Start it again on the same data."""
    embedded_postgres.start(server.data_dir, CRASH_SETTINGS)


@contextlib.contextmanager
def frozen(server: EmbeddedPostgres) -> Iterator[None]:
    """Every process of the server stands still for the block: it takes connections and answers nothing."""
    pid = server.pid
    assert pid is not None
    stopped = [pid, *children_of(pid)]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
