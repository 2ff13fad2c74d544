"""Processes for tests, forked from one that has imported their modules to save 1 to 2 s of CPU.

`python -m tests.forks FD MODULE...` imports modules and forks a child for each connection to its
socket. The request names the module to run as with `python -m`, arguments, environment and files;
the answers are the child's pid and later its exit status. A server has one thread and ends with its
standard input. `Server` starts it on first use, for all processes of a test run: each would spend
10 s of CPU on servers of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
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
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As they are before a test patches them.
INTERPRETER, ENVIRONMENT = sys.executable, dict(os.environ)
SHARED = "PYTEST_WEIR_FORKS"  # names the directory of the servers of this test run
POLL_S = 0.005
REQUEST_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 1 << 16
FILE_COUNT_MAX = 8


class Forked:
    """Forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        """Wrap a process. answer: the server's answer so far: pid, maybe also exit status."""
        self._connection = connection
        self._status = b""
        self._returncode: int | None = None
        pid, _, self._status = answer.partition(b"\n")
        self.pid = int(pid)

    def __del__(self) -> None:
        """Close the connection, since the exit status is no longer needed."""
        self._connection.close()

    @property
    def returncode(self) -> int | None:
        """Exit status, as from `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self._returncode is None:
            with contextlib.suppress(BlockingIOError):
                received = self._connection.recv(ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)
                assert received, "the server of forked processes has ended"
                self._status += received
            if self._status.endswith(b"\n"):
                self._returncode = int(self._status)
                self._connection.close()
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class ForkedChild(Forked):
    """Forked process with the methods of `asyncio.subprocess.Process`."""

    async def wait(self) -> int:  # type: ignore[override]
        """Wait for the end and return the exit status."""
        while (status := self.poll()) is None:  # noqa: ASYNC110  # waits for another process
            await asyncio.sleep(POLL_S)
        return status


class Server:
    """Server that forks processes of one kind in this test run."""

    def __init__(
        self, *modules: str, environment: Callable[[], Mapping[str, str]] = lambda: ENVIRONMENT
    ) -> None:
        """Start nothing. modules: imported before the first fork. environment: of the server."""
        self._modules = modules
        self._environment = environment
        self._path: str | None = None

    @property
    def path(self) -> str:
        """Path of its socket. The first process of the run that asks for it starts the server."""
        if self._path is None:
            environment = self._environment()
            kind = json.dumps([self._modules, decisive(environment)], sort_keys=True)
            path = f"{shared_directory()}/{hashlib.sha256(kind.encode()).hexdigest()[:16]}"
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(path):
                    self._launch(path, environment)
            self._path = path
        return self._path

    def _launch(self, path: str, environment: Mapping[str, str]) -> None:
        with (
            socket.socket(socket.AF_UNIX) as listener,
            open(alive_file(Path(path).parent)) as alive,
        ):
            listener.bind(path)
            listener.listen(128)
            process = subprocess.Popen(
                [INTERPRETER, "-m", "tests.forks", str(listener.fileno()), *self._modules],
                stdin=alive,
                env=environment,
                pass_fds=(listener.fileno(),),
            )
        process.wait()  # the server is its child, and no descendant of this process any more

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Forked | None:
        """Fork a process that appends its output to `log`.

        Return None if its environment differs from the server's in more than settings of Weir: it
        needs a new interpreter. command: `[sys.executable, "-m", ...]`, as for `subprocess.Popen`.
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
        """Return the running processes that were forked for another one."""
        if self._path is None:
            return []
        with send(self._path, {}, children_of=pid, module=module) as connection:
            return [int(child) for child in connection.recv(ANSWER_BYTES_MAX).split()]


@functools.cache
def shared_directory() -> Path:
    """Return the directory of the servers of this test run.

    The first process of the run creates it, tells its children, and holds a pipe open that is the
    standard input of all servers, so they end with it.
    """
    if (shared := os.environ.get(SHARED)) is not None:
        return Path(shared)
    directory = Path(tempfile.mkdtemp(prefix="weir-forks-"))
    os.mkfifo(alive_file(directory))
    os.open(alive_file(directory), os.O_RDWR)
    atexit.register(shutil.rmtree, directory)
    os.environ[SHARED] = str(directory)
    return directory


def alive_file(directory: Path) -> Path:
    """Return the named pipe that the first process of a test run holds open."""
    return directory / "alive"


def send(path: str, files: Mapping[int, int], **request: object) -> socket.socket:
    """Send a request; return the connection for its answer. files: by descriptor in the child."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    message = json.dumps({**request, "files": list(files)}).encode() + b"\n"
    sent = socket.send_fds(connection, [message], list(files.values()))
    if message[sent:]:
        connection.sendall(message[sent:])
    return connection


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a request and its files."""
    message, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, FILE_COUNT_MAX)
    while not message.endswith(b"\n"):
        more = connection.recv(REQUEST_BYTES_MAX)
        assert more, "a request ended early"
        message += more
    return json.loads(message), files


def decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports may depend on: no settings of Weir, tests, pytest or a
    shell.
    """
    ignored = (
        "WEIR_",
        "PYTEST_",
        *("OTEL_EXPORTER_OTLP_", "OTEL_RESOURCE_ATTRIBUTES", "TORCHINDUCTOR_CACHE_DIR"),
        "TOKENIZERS_PARALLELISM",
        "TENSORRT_DOUBLE",
        *("PWD", "OLDPWD", "SHLVL", "_"),
    )
    chosen = [
        key for key in environment if key.startswith("WEIR_NATIVE") or not key.startswith(ignored)
    ]
    return {key: environment[key] for key in chosen}


@dataclass(frozen=True, slots=True)
class Child:
    """Running child of a server. connection: gets its exit status. owner: its api process."""

    connection: socket.socket
    module: str
    owner: int | None


def serve(listener: socket.socket, environment: Mapping[str, str]) -> dict[str, Any]:
    """Fork a child for each request and return the request in it; exit when standard input ends.

    environment: variables that imports may depend on.
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
            report_ends(children)
        if 0 in ready:
            sys.exit(0)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        request, files = receive(connection)
        if "children_of" in request:
            owner, module = request["children_of"], request["module"]
            send_numbers(
                connection,
                *(
                    pid
                    for pid, child in children.items()
                    if child.owner == owner and module in child.module
                ),
            )
            connection.close()
        elif decisive(request["environment"]) != environment:
            connection.close()
        elif pid := os.fork():
            children[pid] = Child(connection, request["module"], request.get("owner"))
            send_numbers(connection, pid)
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


def report_ends(children: dict[int, Child]) -> None:
    """Send the exit status of every ended child, in the form of `Popen.returncode`."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid).connection as connection:
            send_numbers(connection, os.waitstatus_to_exitcode(status))


def send_numbers(connection: socket.socket, *numbers: int) -> None:
    """Send numbers; ignore a client that is gone."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(" ".join(map(str, numbers)).encode() + b"\n")


def take_files(targets: Sequence[int], files: Sequence[int]) -> None:
    """Give files the descriptors that the request names."""
    unused = max(*targets, *files) + 1  # move them out of the way first
    for target, moved in [
        (target, fcntl.fcntl(file, fcntl.F_DUPFD, unused))
        for target, file in zip(targets, files, strict=True)
    ]:
        os.dup2(moved, target)
        os.close(moved)
    for file in set(files) - set(targets):
        os.close(file)


def main() -> None:
    """Run a server; in each child, run the requested module."""
    fd, *modules = sys.argv[1:]
    if os.fork():  # no test sees servers, which all workers share, among its descendants
        os._exit(0)
    environment = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    set_by_imports = {
        key: value for key, value in os.environ.items() if environment.get(key) != value
    }
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it visits
    with socket.socket(fileno=int(fd)) as listener:
        request = serve(listener, decisive(environment))
    os.environ.clear()
    os.environ.update(set_by_imports | request["environment"])
    os.chdir(request.get("directory", "."))
    sys.argv[1:] = request["arguments"]
    status: object = None
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    end(status)


def end(status: object) -> None:
    """End the process as the interpreter does, but destroy no object, which would copy its page.

    status: of `SystemExit`.
    """
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
