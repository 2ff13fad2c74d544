"""Processes by their ids: whose child is whose, who is alive, and how a database server dies at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from metering.store.embedded_postgres import EmbeddedPostgres

DEATH_TIMEOUT_S = 30.0  # children of a killed server notice within a second
POLL_S = 0.01
PROC = Path("/proc")

# What has been committed must be there again after a crash of the server's processes, which fsync does not decide.
CRASH_SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on", "max_connections": "200"}


def parents() -> dict[int, int]:
    """Parent of every process that runs."""
    if PROC.is_dir():
        return {int(entry.name): parent for entry in PROC.iterdir() if entry.name.isdigit() and (parent := _parent_of(entry))}
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if state[0] not in "ZX"}


def children_of(pid: int) -> list[int]:
    """Processes whose parent it is."""
    return [child for child, parent in parents().items() if parent == pid]


def alive(pid: int) -> bool:
    """Whether a process runs."""
    if PROC.is_dir():
        return _parent_of(PROC / str(pid)) is not None
    return pid in parents()


def crash_postgres(server: EmbeddedPostgres) -> None:
    """As `kill -9` does to the postmaster; returns when its children have followed it. Does nothing if it does not run."""
    pid = server.pid
    if pid is None:
        return
    children = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while any(map(alive, children)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"children of the killed server {pid} are still there")
        time.sleep(POLL_S)


def _parent_of(entry: Path) -> int | None:
    """The parent that a directory of /proc tells; None for a process that is gone or dead."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)
