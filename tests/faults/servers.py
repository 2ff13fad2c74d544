"""PostgreSQL servers that a test stops, kills, freezes and restarts on the same data."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from chaos.rounds import CRASH_SETTINGS
from common.processes import children_of
from metering.store import embedded_postgres
from metering.store.embedded_postgres import EmbeddedPostgres


def restart(server: EmbeddedPostgres) -> None:
    """Start the server again on the same data."""
    embedded_postgres.start(server.data_dir, CRASH_SETTINGS)


@contextlib.contextmanager
def frozen(server: EmbeddedPostgres) -> Iterator[None]:
    """Suspend every process of the server during the block: it accepts connections only."""
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
