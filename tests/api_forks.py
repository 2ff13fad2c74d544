"""Starts api processes by forking one that has imported everything: a new interpreter takes two seconds of CPU for its imports.

`python -m tests.api_forks` is the parent of these processes, one for each test run. It reads a request per line from its
standard input, forks, and writes the pid and later the exit status of each child. The child runs `api.__main__.main` like any
other api process, with the environment and the log of its request. `Forks` is the client and hands out `Popen`-like objects.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POLL_S = 0.005


class ForkedApi:
    """One api process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit status as last polled."""
        return self._forks.exit_status(self.pid)

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._forks.exit_status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("api", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """The parent of the api processes of this test run, started by the first of them."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._exits: dict[int, int] = {}
        self._lock = threading.Lock()

    def start(self, environment: Mapping[str, str], log: Path) -> ForkedApi | None:
        """A new api process that appends to `log`.

        None if its environment differs from that of the parent in more than settings of Weir: imports may depend on that.
        """
        with self._lock:
            if self._parent is None:
                self._parent = self._start_parent()
            if foreign(environment) != self._environment:
                return None
            assert self._parent.stdin is not None
            self._parent.stdin.write(json.dumps({"environment": dict(environment), "log": str(log)}).encode() + b"\n")
            self._parent.stdin.flush()
            while True:
                message = self._read()
                if "forked" in message:
                    self._exits.pop(message["forked"], None)  # the kernel may have given a pid again
                    return ForkedApi(self, message["forked"])

    def exit_status(self, pid: int) -> int | None:
        """As `Popen.poll`."""
        with self._lock:
            assert self._parent is not None
            assert self._parent.stdout is not None
            while select.select([self._parent.stdout], [], [], 0)[0]:
                self._read()
            return self._exits.get(pid)

    def _start_parent(self) -> subprocess.Popen[bytes]:
        self._environment = foreign(os.environ)
        command = [sys.executable, "-m", "tests.api_forks"]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        atexit.register(parent.wait)
        assert parent.stdin is not None
        atexit.register(parent.stdin.close)  # runs before the line above, and ends the parent
        return parent

    def _read(self) -> dict[str, Any]:
        """One message of the parent; ends of processes are remembered."""
        assert self._parent is not None
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "the parent of the api processes has ended"
        message: dict[str, Any] = json.loads(line)
        if "ended" in message:
            self._exits[message["ended"]] = message["status"]
        return message


def foreign(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not settings of Weir, and not pytest's own."""
    return {key: value for key, value in environment.items() if not key.startswith(("WEIR_", "PYTEST_"))}


def serve_forks() -> None:
    """Fork a child for each request, in which this returns; the parent ends with its standard input."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread = b""
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            tell_ends()
        if sys.stdin.fileno() in ready:
            received = os.read(sys.stdin.fileno(), 1 << 16)
            if not received:
                sys.exit(0)
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(waker)
                    become(request)
                    return
                tell({"forked": pid})


def tell_ends() -> None:
    """Report every child that has ended, with its status as `Popen.returncode` gives it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        tell({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def tell(message: Mapping[str, object]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


def become(request: Mapping[str, Any]) -> None:
    """Take the environment and the log of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


if __name__ == "__main__":
    from api.__main__ import main

    serve_forks()
    main()
