"""Guard of `weir up`: the process in the terminal, which starts the supervisor and replaces it when
it is killed.

The supervisor (`stack.py`) starts the parts of Weir and restarts them. Each of the two can be
killed, and the parts go on: a new supervisor adopts them, and a supervisor without a guard becomes
the guard by `exec`, so that the parts keep their parent. Both hold the lock of the home directory,
and no other `weir up` can come between. The guard only waits, and imports no module of the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weir_cli.render import note

from api.core.endpoint import make_private
from common.backoff import Backoff

ROLE = "WEIR_UP_ROLE"  # environment variable: tells a process of `weir up` what it is
LOCK_FILE = ".up.lock"  # in the home directory, with the id of the supervisor
RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX = 0.1, 30.0
STABLE_AFTER_S = 60.0  # of uptime, after which the delay begins again with the shortest


class AlreadyRunning(Exception):
    """Another `weir up` holds the lock of the home directory."""


@dataclass(frozen=True, slots=True)
class Role:
    """Role of this process in a running `weir up`, with inherited file descriptors.

    `guard_fd` is a pipe that closes when the guard dies, -1 in the guard itself. `adopts` tells
    whether parts of Weir may be running already.
    """

    lock_fd: int
    guard_fd: int
    adopts: bool

    @classmethod
    def taken(cls) -> Role | None:
        """Take the role out of the environment; None if a person started the process."""
        words = os.environ.pop(ROLE, "").split()
        return cls(int(words[0]), int(words[1]), words[2] == "1") if words else None

    def environment(self) -> dict[str, str]:
        """Build the environment that gives a child process this role."""
        return {**os.environ, ROLE: f"{self.lock_fd} {self.guard_fd} {self.adopts:d}"}

    def lose_guard(self) -> None:
        """Replace this process by a guard, since its own was killed. Does not return."""
        note(
            "`weir up` was killed and goes on in the background as process"
            f" {os.getpid()}: stop it with `weir down`"
        )
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(command[0], command, Role(self.lock_fd, -1, adopts=True).environment())

    def supervises(self) -> None:
        """Write this process's id into the lock file: it stops when it gets a signal."""
        record(self.lock_fd)


def lock_home(home: Path) -> int:
    """Lock the home directory and return the descriptor, which child processes do not inherit.

    The lock ends with the last process that has the descriptor. A second stack would start a second
    worker, and would stop the first one's PostgreSQL. Raises: AlreadyRunning.
    """
    make_private(home)
    lock_fd = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock_fd, 20).decode(errors="replace")
        os.close(lock_fd)
        by_id = f" or `kill {pid}`" if pid else ""
        raise AlreadyRunning(
            f"`weir up` is already running in {home}: use it from other terminals, stop it with"
            f" Ctrl-C, `weir down`{by_id}, or choose another directory with --home and another port"
            " with --listen"
        ) from None
    record(lock_fd)
    return lock_fd


def record(lock_fd: int) -> None:
    """Write this process's id into the lock file, for `weir down`."""
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, str(os.getpid()).encode(), 0)


def stop_signals() -> list[signal.Signals]:
    """Choose the signals that end `weir up`. Under `nohup`, a closed terminal does not end it."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignores else [signal.SIGHUP])]


class Guard:
    """Process that starts a supervisor, and another one whenever it is killed."""

    def __init__(self, home: Path, role: Role | None, end_left: Callable[[Path], None]) -> None:
        """Lock the home directory, unless `role` has inherited the lock. Raises: AlreadyRunning.

        `end_left` ends the processes that a killed supervisor left there.
        """
        self._home = home
        self._end_left = end_left
        self._lock_fd = lock_home(home) if role is None else role.lock_fd
        self._adopts = role is not None
        self._stopping = threading.Event()
        self._pid: int | None = None
        os.set_inheritable(self._lock_fd, True)

    def run(self) -> int:
        """Keep a supervisor running until one ends by itself, and return its exit status.

        After a signal that killed it, everything that it left is ended.
        """
        for number in stop_signals():
            signal.signal(number, lambda number, _: self._stop(number))
        backoff = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX)
        while True:
            began_at = time.monotonic()
            status = self._supervised()
            if status == 0 or (status > 0 and not self._adopts):
                return status
            if time.monotonic() - began_at > STABLE_AFTER_S:
                backoff.reset()
            delay_s = backoff.next_s()
            if not self._stopping.is_set():
                note(
                    f"the supervisor of `weir up` ended with status {status}; starting another in"
                    f" {delay_s:g} s"
                )
            if self._stopping.wait(delay_s):
                self._end_left(self._home)
                return 1
            self._adopts = True

    def _supervised(self) -> int:
        """Run one supervisor and return its exit status."""
        theirs, ours = os.pipe()
        os.set_inheritable(theirs, True)
        command = [sys.executable, *sys.orig_argv[1:]]
        role = Role(self._lock_fd, theirs, self._adopts)
        self._pid = os.spawnve(os.P_NOWAIT, command[0], command, role.environment())
        os.close(theirs)
        if self._stopping.is_set():
            self._stop(signal.SIGTERM)
        while True:
            ended, status = os.wait()  # also parts whose parent was killed
            if ended == self._pid:
                self._pid = None
                os.close(ours)
                return os.waitstatus_to_exitcode(status)

    def _stop(self, number: int) -> None:
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            if self._pid is not None:
                os.kill(self._pid, number)
