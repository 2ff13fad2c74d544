"""A PostgreSQL server of a test's own: to stop, to kill, to freeze, and to start again on the same data."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from metering.store import embedded_postgres
from metering.store.embedded_postgres import EmbeddedPostgres
from tests.conftest import WITHOUT_DURABILITY
from tests.service import alive, children_of, wait_for

# What has been committed must still be there after a crash of the server's processes, which fsync does not decide.
SETTINGS = WITHOUT_DURABILITY | {"synchronous_commit": "on"}


def crash(server: EmbeddedPostgres) -> None:
    """As `kill -9` does to the postmaster."""
    pid = server.pid
    assert pid is not None
    children = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, children)), "the server's children to follow it")


def restart(server: EmbeddedPostgres) -> None:
    """Start it again on the same data."""
    embedded_postgres.start(server.data_dir, SETTINGS)


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
