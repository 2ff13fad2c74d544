"""Memory and GPUs of a machine, as its api processes have reserved them for engines.

A reservation is the lock on the `.users` file of a replica, which `sharing.py` describes: processes
that share an engine reserve its memory once, and the kernel releases the reservation of a process
that dies. Processes that wait for memory have a ticket each, a locked file, and are served in the
order of the tickets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from inference.workers.sharing import EngineDirectory, SharedReplica, try_lock, write

DECISION_LOCK = "memory.lock"  # held while a process decides
TICKET = "waiting-"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reservation of a replica. Without `is_used`, its worker waits for a process to come back."""

    memory_bytes: int
    gpus: tuple[str, ...]
    is_used: bool = True


@dataclass(frozen=True, slots=True)
class Ticket:
    """Place in the queue for memory, in order of `name`. `needs` are as in `Needs`."""

    name: str
    needs: Mapping[str, object]


class Reservations:
    """Reservations in a directory of engine workers. Nothing here waits; call it in `deciding`."""

    def __init__(self, directory: EngineDirectory) -> None:
        self._directory = directory
        self._tickets: dict[str, int] = {}  # own ones, with their open files

    @contextlib.contextmanager
    def deciding(self) -> Iterator[bool]:
        """Let no other process decide inside the block; yield False if one does so now."""
        fd = self._directory.open(DECISION_LOCK)
        try:
            yield try_lock(fd, alone=True)
        finally:
            os.close(fd)

    def of_others(self, own: Collection[str]) -> dict[str, Reservation]:
        """Read the reservations of replicas by their keys, except those with `own` keys.

        Those without a process are removed.
        """
        found = {}
        for name in self._directory.names():
            key, dot, kind = name.rpartition(".")
            if not dot or kind != "users" or key in own:
                continue
            is_used = self._directory.is_locked(name)
            if not is_used and not self._directory.is_locked(f"{key}.lock"):
                self._directory.remove(name)
                continue
            content = self._directory.read(name)
            memory_bytes, gpus = content.get("memory_bytes"), content.get("gpus")
            found[key] = Reservation(
                memory_bytes if isinstance(memory_bytes, int) else 0,
                tuple(map(str, gpus)) if isinstance(gpus, list) else (),
                is_used,
            )
        return found

    def end_unused(self, key: str) -> None:
        """End a worker that only waits for a process to come back."""
        replica = SharedReplica(self._directory, key)
        if replica.enter():
            try:
                if replica.is_last() and (pid := replica.worker_pid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            finally:
                replica.leave()

    def queue(self, needs: Mapping[str, object]) -> str:
        """Take a ticket, for a process that waits for memory; return its name."""
        name = f"{TICKET}{time.monotonic_ns():020d}-{os.getpid()}-{next(_numbers)}"
        fd = self._directory.open(name)
        if not try_lock(fd, alone=True):
            raise AssertionError("a new file is not locked")
        write(fd, needs)
        self._tickets[name] = fd
        return name

    def leave_queue(self, name: str) -> None:
        """Give a ticket back."""
        if (fd := self._tickets.pop(name, None)) is not None:
            self._directory.remove(name)
            os.close(fd)

    def first(self) -> Ticket | None:
        """Return the ticket that is next, of any process. Those of dead processes are removed."""
        for name in sorted(each for each in self._directory.names() if each.startswith(TICKET)):
            if name in self._tickets or self._directory.is_locked(name):
                return Ticket(name, self._directory.read(name))
            self._directory.remove(name)
        return None
