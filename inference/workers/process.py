"""Worker processes with a socket: start, messages, end; spare workers for fast starts.

Owns the process and the socket, and releases both on every path. The child sees the socket's end
when this process dies for any reason. A worker that is shared (`sharing.py`) is only ended by its
last user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, cast

from common.processes import inherited, started_with
from inference.workers.protocol import (
    FAMILY,
    Joined,
    Listen,
    Message,
    MessageDecoder,
    decoder_to_parent,
    encode,
    split,
)

SOCKET_BUFFER_BYTES = 1 << 20  # several hundred step reports, so that a busy parent stalls no step
# Limit for the kernel to end a killed child; a longer time means that it hangs in a device.
REAP_TIMEOUT_S = 5.0
# Limit for the kernel to end the processes that a child started: freeing GPU memory takes seconds.
FAMILY_TIMEOUT_S = 30.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4096
_log = logging.getLogger("weir.inference.workers")
# Environment variables that C libraries read before main, so the child cannot set them. The
# inherited environment overrides each.
CHILD_ENVIRONMENT = {
    # Keep freed memory. Otherwise each large temporary is mapped anew, and touching its pages costs
    # more than computing: decode attention at batch 50 takes 21 ms per layer instead of 5, the
    # reference workload 25 s instead of 10.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    # Threads sleep after a parallel loop. Spinning is faster on an idle machine (427 instead of 270
    # tokens/s). With another process running, and the API process always is, spinning threads wait
    # for one that lost its core: measured 5 tokens/s.
    "OMP_WAIT_POLICY": "PASSIVE",
}
COMMON_MESSAGES = decoder_to_parent()
SPARE_MODULE = "inference.adapters.torch_worker"
REPLACE_AFTER_S = 5.0  # after a spare was taken: the load of its model has priority
# After a failed start: the next engine that starts a worker reports the reason.
RETRY_AFTER_S = 30.0


async def start_process(
    module: str,
    fd: int,
    environment: Mapping[str, str],
    log_fd: int | None = None,
    python: str = "",
) -> asyncio.subprocess.Process:
    """Start `python -m module --fd N` with this environment; it inherits the socket.

    Its stderr is `log_fd`, or this process's if None. For `python` see `open_worker`.
    """
    return await asyncio.create_subprocess_exec(
        *(python or sys.executable, "-m", module, "--fd", str(fd)),
        pass_fds=(fd,),
        stdin=asyncio.subprocess.DEVNULL,
        # Stdout carries output of this program; logs go to stderr.
        stdout=asyncio.subprocess.DEVNULL,
        stderr=log_fd,
        env=environment,
        # If others use it, it outlives this process and the signals to its session.
        start_new_session=True,
    )


# Source of worker processes, such as `open_worker`.
WorkerOpener = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager["WorkerProcess"]]
# Turns an opener into one that shares its workers, such as `SharedReplica.opener`.
Sharing = Callable[[WorkerOpener], WorkerOpener]


class LogTail(asyncio.Protocol):
    """Copier of a child's log to stderr, which keeps the last lines."""

    def __init__(self) -> None:
        self.tail = b""

    def data_received(self, data: bytes) -> None:
        """Implement `asyncio.Protocol`."""
        self.tail = (self.tail + data)[-LOG_TAIL_BYTES:]
        with contextlib.suppress(OSError):  # nothing reads this process's stderr
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, data)


class Users(Protocol):
    """Interface of a shared replica for its worker process, see `SharedReplica`."""

    def is_last(self) -> bool:
        """Return whether no other process uses the replica."""

    def worker_pid(self) -> int:
        """Return the process id of the worker; 0 without one."""


class OtherProcess:
    """Worker that another process started, with the methods of `asyncio.subprocess.Process` that
    are used here. Its exit status cannot be known.
    """

    returncode: int | None = None

    def __init__(self) -> None:
        """Know nothing of the process before `identify`."""
        self.pid = 0
        self._fd: int | None = None

    def identify(self, pid: int) -> None:
        """Watch the process, while its connection or its lock shows that it runs."""
        with contextlib.suppress(OSError):  # it has just ended
            self._fd = os.pidfd_open(pid)
        self.pid = pid

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self._fd is not None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process ends, if it is known."""
        if self._fd is not None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._fd)
        return 0

    def close(self) -> None:
        """Stop watching the process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class WorkerProcess(asyncio.Protocol):
    """Running worker, with this process's end of its socket. Created by `open_worker`, or for a
    worker that runs already by `SharedReplica.open`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process | OtherProcess,
        family: str,
        log: LogTail | None = None,
        *,
        users: Users | None = None,
    ) -> None:
        """Wrap a process. `family` is its value of `FAMILY`; `log` is None if no log is kept.
        `users` is None if this process alone uses it.
        """
        self._process = process
        self._family = family
        self._log = log
        self._users = users
        self._is_last: bool | None = None  # unknown before it is asked for
        self.is_unneeded = False  # the engine is closed; its last user ends the worker
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._bodies: deque[bytes] = deque()  # messages not received yet
        self._follower: tuple[MessageDecoder, Callable[[Message], None]] | None = None
        self._news = asyncio.Event()  # a queued message, or the end
        self._gone = asyncio.Event()
        self._fault: Exception | None = None  # error of the protocol or the message handler

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def family(self) -> str:
        """Value of the child's environment variable `FAMILY`, which its own children inherit."""
        return self._family

    @property
    def exit_status(self) -> int | None:
        """Exit status of the child, negative for a signal; None until it is reaped."""
        return self._process.returncode

    def log_lines(self, count: int) -> list[str]:
        """Return the last lines that the child logged; empty if its log is not kept."""
        tail = b"" if self._log is None else self._log.tail
        return tail.decode(errors="replace").splitlines()[-count:]

    def send(self, message: Message) -> None:
        """Queue a message. Never blocks: the engine's limit of sequences bounds the buffer."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    async def receive(self, decoder: MessageDecoder = COMMON_MESSAGES) -> Message | None:
        """Wait for the next message; None after the end. Raises ProtocolBroken for invalid data."""
        while not self._bodies:
            if self._gone.is_set():
                if self._fault is not None:
                    raise self._fault
                return None
            self._news.clear()
            await self._news.wait()
        return decoder.decode(self._bodies.popleft())

    async def follow(self, decoder: MessageDecoder, take: Callable[[Message], None]) -> None:
        """Call `take` with each message, in an event-loop callback, until the child ends.

        Raises ProtocolBroken, and exceptions of `take`.
        """
        while self._bodies:
            take(decoder.decode(self._bodies.popleft()))
        self._follower = decoder, take
        try:
            await self._gone.wait()
        finally:
            self._follower = None
        if self._fault is not None:
            raise self._fault

    @property
    def is_shared(self) -> bool:
        """True if other processes can use the worker too."""
        return self._users is not None

    @property
    def is_joining(self) -> bool:
        """True until a worker that another process started has accepted the connection."""
        return isinstance(self._process, OtherProcess) and not self._process.pid

    def joined(self, message: Joined) -> None:
        """Record which process has accepted the connection."""
        if isinstance(self._process, OtherProcess):
            self._process.identify(message.pid)
            self._family = message.family

    def share(self, users: Users, *files: int) -> None:
        """Let the worker serve other processes too, before any other message. See `Listen`."""
        self._users = users
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as end:
            socket.send_fds(end, [encode(Listen())], files)

    def kill(self) -> None:
        """Kill the worker, even if others use it, without waiting for its end."""
        if self.is_joining and self._users is not None and (pid := self._users.worker_pid()):
            self.joined(Joined(pid, ""))
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def leave(self) -> None:
        """End the use of the worker at once: kill it, or close the connection if it is shared."""
        self.is_unneeded = True
        if self._users is None:
            self.kill()
        else:
            self._transport.abort()

    async def wait_gone(self, timeout_s: float) -> None:
        """Wait for the worker to exit, and kill it after `timeout_s` seconds if it may be ended.

        One that is left to others is not waited for.
        """
        if self.is_unneeded and not self._may_end():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            if not self._may_end():
                return
            self.kill()
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()

    async def give_back(self) -> None:
        """Close the socket. If the worker may be ended, kill it, reap it, and end all processes
        that it started.
        """
        if self._users is None:
            self._transport.close()
        else:
            self._transport.abort()  # a worker that does not read would hold it open
        if self._may_end():
            self.kill()
            await self.wait_gone(REAP_TIMEOUT_S)
        await self._gone.wait()
        if self._family and self._may_end():
            await end_family(self._family)
        if isinstance(self._process, OtherProcess):
            self._process.close()

    def _may_end(self) -> bool:
        """Return whether the worker is this process's to end: no other one uses it."""
        if self._users is None:
            return True
        if self._is_last is None and self.is_unneeded:
            self._is_last = self._users.is_last()
        return self._is_last is True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Implement `asyncio.Protocol`."""
        self._received += data
        try:
            bodies = split(self._received)
            if self._follower is None:
                self._bodies += bodies
                self._news.set()
            else:
                decoder, take = self._follower
                for body in bodies:
                    take(decoder.decode(body))
        except Exception as error:  # raised later by `receive` or `follow`
            self._fault = error
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement `asyncio.Protocol`."""
        self._gone.set()
        self._news.set()


async def end_family(family: str) -> None:
    """Kill all processes of a family and wait until they are gone.

    Workers of MPI outlive the process that started them, in sessions of their own, with its GPU
    memory: the next load would run out of it. Logs the ids of those that do not end.
    """
    deadline_s = asyncio.get_running_loop().time() + FAMILY_TIMEOUT_S
    while left := await asyncio.to_thread(started_with, FAMILY, family):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if asyncio.get_running_loop().time() > deadline_s:
            _log.error("processes of an ended engine worker do not end: %s", left)
            return
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def open_worker(
    module: str, environment: Mapping[str, str], *, keeps_log: bool = False, python: str = ""
) -> AsyncIterator[WorkerProcess]:
    """Start `python -m module --fd N`. On exit, kill and reap it and close the socket.

    `environment` has defaults of variables that are read before main: inherited variables override
    them, but not `CUDA_VISIBLE_DEVICES`. With `keeps_log`, the end of its log is kept for
    `WorkerProcess.log_lines`. `python` is an interpreter that has the module's packages and Weir;
    empty for that of this process.
    """
    family = secrets.token_hex(8)
    own = {name: environment[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in environment}
    variables = {**environment, **inherited(), **own, FAMILY: family}
    async with contextlib.AsyncExitStack() as stack:
        log, log_fd = None, None
        if keeps_log:
            log, log_fd = await stack.enter_async_context(_open_log())
        opened = _open_process(module, variables, family, log, log_fd, python)
        yield await stack.enter_async_context(opened)


def set_buffers(end: socket.socket) -> None:
    """Set the size of a socket's buffer for a busy reader."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


@contextlib.asynccontextmanager
async def _open_log() -> AsyncIterator[tuple[LogTail, int]]:
    read_fd, write_fd = os.pipe()
    transport, log = await asyncio.get_running_loop().connect_read_pipe(
        LogTail, os.fdopen(read_fd, "rb", 0)
    )
    try:
        yield log, write_fd
    finally:
        os.close(write_fd)
        transport.close()


@contextlib.asynccontextmanager
async def _open_process(
    module: str,
    variables: Mapping[str, str],
    family: str,
    log: LogTail | None,
    log_fd: int | None,
    python: str,
) -> AsyncIterator[WorkerProcess]:
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for end in (parent_end, child_end):
            set_buffers(end)
        parent_end.setblocking(False)
        process = await start_process(module, child_end.fileno(), variables, log_fd, python)
    except BaseException:
        parent_end.close()  # a child that was started nevertheless reads the end and exits
        raise
    finally:
        child_end.close()
    try:
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_unix_connection(
            lambda: WorkerProcess(process, family, log), sock=parent_end
        )
    except BaseException:
        parent_end.close()
        process.kill()
        await process.wait()
        raise
    try:
        yield worker
    finally:
        await worker.give_back()


class SpareWorkers:
    """Pool of started workers without a model. Only its `serve` runs in the background."""

    def __init__(self, count: int = 0) -> None:
        """Create the pool; `serve` keeps `count` spares in it. With 0, workers start on demand."""
        self.count = count
        self._ready: deque[tuple[WorkerProcess, contextlib.AsyncExitStack]] = deque()
        self._changed = asyncio.Event()

    @property
    def ready_count(self) -> int:
        """Number of spares that can be taken now."""
        return sum(worker.exit_status is None for worker, _ in self._ready)

    async def serve(self) -> None:
        """Keep `count` spares until cancelled; then end the remaining ones."""
        try:
            while True:
                await self._drop_dead()
                if len(self._ready) > self.count:  # added for the start
                    await asyncio.sleep(REPLACE_AFTER_S)
                    await self.close(self.count)
                elif len(self._ready) == self.count:
                    self._changed.clear()
                    await self._changed.wait()
                    await asyncio.sleep(REPLACE_AFTER_S)
                elif not await self.add():
                    await asyncio.sleep(RETRY_AFTER_S)
        finally:
            await self.close()

    async def close(self, count: int = 0) -> None:
        """End all spares but `count`."""
        while len(self._ready) > count:
            await self._ready.popleft()[1].aclose()

    @contextlib.asynccontextmanager
    async def open(
        self, module: str, environment: Mapping[str, str]
    ) -> AsyncIterator[WorkerProcess]:
        """Open a worker like `open_worker`, using a spare of this kind if there is one."""
        taken = self._take() if (module, environment) == (SPARE_MODULE, CHILD_ENVIRONMENT) else None
        if taken is None:
            async with open_worker(module, environment) as worker:
                yield worker
            return
        worker, stack = taken
        async with stack:
            yield worker

    def _take(self) -> tuple[WorkerProcess, contextlib.AsyncExitStack] | None:
        alive = next((spare for spare in self._ready if spare[0].exit_status is None), None)
        if alive is not None:
            self._ready.remove(alive)
            self._changed.set()
        return alive

    async def add(self) -> bool:
        """Start a spare; return whether it started."""
        stack = contextlib.AsyncExitStack()
        try:
            worker = await stack.enter_async_context(open_worker(SPARE_MODULE, CHILD_ENVIRONMENT))
        except OSError as error:
            _log.warning("spare engine worker could not be started: %s", error)
            return False
        self._ready.append((worker, stack))
        return True

    async def _drop_dead(self) -> None:
        for spare in [spare for spare in self._ready if spare[0].exit_status is not None]:
            self._ready.remove(spare)
            await spare[1].aclose()
