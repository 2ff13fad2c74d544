"""Inspection of other processes and their CPU time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psycopg

from metering.store.db import psycopg_conninfo

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def claim_cores() -> tuple[int, int]:
    """Reserve a core for the api process; pin this process to the other one. Return both."""
    core, *_, other_core = sorted(os.sched_getaffinity(0)) * 2
    if core == other_core:
        print("there is only one core: client and database share it with the api process")
    os.sched_setaffinity(0, {other_core})
    return core, other_core


def children_of(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Return user and system time of processes with their ended children, in steps of `TICK_S`."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, status_fields(pid)[11:15]))
    return total * TICK_S


def postgres_pid(database_url: str) -> int:
    """Return the main process of a PostgreSQL server on this machine, parent of its connections."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        return int(status_fields(row[0])[1])


def status_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` from the state on, which is field 3 of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
