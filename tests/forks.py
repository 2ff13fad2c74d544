"""Processes for tests, forked from one that has imported their modules: in a new interpreter that takes one to two seconds of CPU.

`python -m tests.forks FD MODULE...` imports the modules and then forks a child for each connection to its socket. The request names
the module to run as `python -m` would, arguments, environment and files; the answers are the child's pid and later its exit status.
A server has one thread and ends with its standard input. `Server` starts it when a process is first asked for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERPRETER, ENVIRONMENT = sys.executable, dict(os.environ)  # as they are before a test patches them
POLL_S = 0.005
REQUEST_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 1 << 16
FILE_COUNT_MAX = 8


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        """answer: the beginning of what the server says: the pid, or all of it."""
        self._connection = connection
        self._status = b""
        self._returncode: int | None = None
        pid, _, self._status = answer.partition(b"\n")
        self.pid = int(pid)

    def __del__(self) -> None:
        """The end of a process that nobody waits for is not told."""
        self._connection.close()

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        if self._returncode is None:
            with contextlib.suppress(BlockingIOError):
                told = self._connection.recv(ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)
                assert told, "the server of forked processes has ended"
                self._status += told
            if self._status.endswith(b"\n"):
                self._returncode = int(self._status)
                self._connection.close()
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class ForkedChild(Forked):
    """The same with the methods of `asyncio.subprocess.Process`."""

    async def wait(self) -> int:  # type: ignore[override]
        """Wait for the end."""
        while (status := self.poll()) is None:  # noqa: ASYNC110  # what ends is another process
            await asyncio.sleep(POLL_S)
        return status


class Server:
    """The parent of processes of one kind in this test run."""

    def __init__(self, *modules: str, environment: Callable[[], Mapping[str, str]] = lambda: ENVIRONMENT) -> None:
        """modules: imported before the first process is forked. environment: of the server; imports may depend on it."""
        self._modules = modules
        self._environment = environment
        self._path: str | None = None

    @property
    def path(self) -> str:
        """Its socket. Starts the server at the first call."""
        if self._path is None:
            directory = tempfile.mkdtemp(prefix="weir-forks-")
            path = f"{directory}/socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(128)
                process = subprocess.Popen(
                    [INTERPRETER, "-m", "tests.forks", str(listener.fileno()), *self._modules],
                    stdin=subprocess.PIPE,
                    env=self._environment(),
                    pass_fds=(listener.fileno(),),
                )
            assert process.stdin is not None
            atexit.register(shutil.rmtree, directory)
            atexit.register(process.wait)
            atexit.register(process.stdin.close)  # runs before the two above, and ends the server
            self._path = path
        return self._path

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked | None:
        """A process that appends its output to `log`.

        None if its environment differs from that of the server in more than settings of Weir: it takes a new interpreter.
        command: as `subprocess.Popen` takes it, `[sys.executable, "-m", ...]`.
        """
        assert command[:2] == [sys.executable, "-m"]
        with open(os.devnull) as null, log.open("ab") as out:
            connection = send(
                self.path,
                {0: null.fileno(), 1: out.fileno(), 2: out.fileno()},
                module=command[2],
                arguments=command[3:],
                environment=dict(environment),
            )
        if answer := connection.recv(ANSWER_BYTES_MAX):
            return Forked(connection, answer)
        connection.close()
        return None

    def children_of(self, pid: int, module: str) -> list[int]:
        """Running processes that were started on behalf of another one."""
        if self._path is None:
            return []
        with send(self._path, {}, children_of=pid, module=module) as connection:
            return [int(child) for child in connection.recv(ANSWER_BYTES_MAX).split()]


def send(path: str, files: Mapping[int, int], **request: object) -> socket.socket:
    """Send a request; the connection on which its answer comes. files: ours by their number in the child."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    message = json.dumps({**request, "files": list(files)}).encode() + b"\n"
    sent = socket.send_fds(connection, [message], list(files.values()))
    if message[sent:]:
        connection.sendall(message[sent:])
    return connection


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and its files."""
    message, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, FILE_COUNT_MAX)
    while not message.endswith(b"\n"):
        more = connection.recv(REQUEST_BYTES_MAX)
        assert more, "a request has no end"
        message += more
    return json.loads(message), files


def decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that imports may depend on: not settings of Weir and its tests, pytest's own, and what imports set."""
    others = ("WEIR_", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM", "TENSORRT_DOUBLE")
    chosen = [key for key in environment if key.startswith("WEIR_NATIVE") or not key.startswith(others)]
    return {key: environment[key] for key in chosen}


@dataclass(frozen=True, slots=True)
class Child:
    """A running child of the server. connection: where its end is told. owner: the pid of the process on whose behalf it runs."""

    connection: socket.socket
    module: str
    owner: int | None


def serve(listener: socket.socket, environment: Mapping[str, str]) -> dict[str, Any]:
    """Fork a child for each request, in which this returns the request; the server itself ends with its standard input.

    environment: what imports could depend on.
    """
    children: dict[int, Child] = {}
    woken, waker = os.pipe()
    watched: list[int | socket.socket] = [0, woken, listener]
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select(watched, [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            tell_ends(children)
        if 0 in ready:
            sys.exit(0)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        request, files = receive(connection)
        if "children_of" in request:
            wanted = (request["children_of"], request["module"])
            tell(connection, *(pid for pid, child in children.items() if child.owner == wanted[0] and wanted[1] in child.module))
            connection.close()
        elif decisive(request["environment"]) != environment:
            connection.close()
        elif pid := os.fork():
            children[pid] = Child(connection, request["module"], request.get("owner"))
            tell(connection, pid)
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (listener, connection, *(child.connection for child in children.values())):
                other.close()
            os.close(woken)
            os.close(waker)
            take_files(request["files"], files)
            return request
        for file in files:
            os.close(file)


def tell_ends(children: dict[int, Child]) -> None:
    """Tell of every child that has ended its status, as `Popen.returncode` gives it."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid).connection as connection:
            tell(connection, os.waitstatus_to_exitcode(status))


def tell(connection: socket.socket, *numbers: int) -> None:
    """Send numbers; whoever asked may be gone."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(" ".join(map(str, numbers)).encode() + b"\n")


def take_files(targets: Sequence[int], files: Sequence[int]) -> None:
    """Give files the numbers that the request says."""
    unused = max(*targets, *files) + 1  # first out of the way of each other
    for target, moved in [(target, fcntl.fcntl(file, fcntl.F_DUPFD, unused)) for target, file in zip(targets, files, strict=True)]:
        os.dup2(moved, target)
        os.close(moved)
    for file in set(files) - set(targets):
        os.close(file)


def main() -> None:
    """Be a server, and then each of its children."""
    fd, *modules = sys.argv[1:]
    given = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    set_by_imports = {key: value for key, value in os.environ.items() if given.get(key) != value}
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at
    with socket.socket(fileno=int(fd)) as listener:
        request = serve(listener, decisive(given))
    os.environ.clear()
    os.environ.update(set_by_imports | request["environment"])
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
