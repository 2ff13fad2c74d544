"""Worker processes with a socket: start, messages, supervision, end; spare workers for fast starts.

Owns the process and the socket, and releases both on every path. The child sees the socket's end
when this process dies for any reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import cast

from common.child_environment import inherited
from common.processes import started_with
from inference.workers.protocol import (
    Message,
    MessageDecoder,
    Pulse,
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
LOOK_S = 0.5  # between two looks of a watchdog
LOOK_LATE_S = 0.5  # of a look that judges nothing
PULSE_LOST_S = 3.0  # three pulses
# A stalled step is longer than both. Steps aim at 0.1 s; a long prefill on a slow CPU, or another
# process on its cores, makes one ten times longer than its predecessors at most.
STEP_S_MIN, STEP_FACTOR = 5.0, 10.0
# Environment variable of a child with a value of its own, which all processes started by it inherit
FAMILY = "WEIR_WORKER_FAMILY"
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

    log_fd: its stderr; None for that of this process. python: as in `open_host`.
    """
    return await asyncio.create_subprocess_exec(
        *(python or sys.executable, "-m", module, "--fd", str(fd)),
        pass_fds=(fd,),
        stdin=asyncio.subprocess.DEVNULL,
        # Stdout carries output of this program; logs go to stderr.
        stdout=asyncio.subprocess.DEVNULL,
        stderr=log_fd,
        env=environment,
    )


# Source of worker processes, such as `open_host`.
HostOpener = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager["HostProcess"]]


class LogTail(asyncio.Protocol):
    """Copies a child's log to stderr and keeps the end of it."""

    def __init__(self) -> None:
        self.tail = b""

    def data_received(self, data: bytes) -> None:
        """Implement `asyncio.Protocol`."""
        self.tail = (self.tail + data)[-LOG_TAIL_BYTES:]
        with contextlib.suppress(OSError):  # nothing reads this process's stderr
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, data)


class HostProcess(asyncio.Protocol):
    """Running child and the parent's end of its socket. Created by `open_host`."""

    def __init__(
        self, process: asyncio.subprocess.Process, family: str, log: LogTail | None = None
    ) -> None:
        """Wrap a process. family: its value of `FAMILY`. log: None if it is not kept."""
        self._process = process
        self._family = family
        self._log = log
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
        """Its value of the environment variable `FAMILY`, which its children inherit."""
        return self._family

    @property
    def exit_status(self) -> int | None:
        """Exit status of the child, negative for a signal; None until it is reaped."""
        return self._process.returncode

    def log_lines(self, count: int) -> list[str]:
        """Return the last lines that the child logged; none if its log is not kept."""
        tail = b"" if self._log is None else self._log.tail
        return tail.decode(errors="replace").splitlines()[-count:]

    def send(self, message: Message) -> None:
        """Queue a message. Never blocks; the number of the engine's sequences bounds the buffer."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    async def receive(self, decoder: MessageDecoder = COMMON_MESSAGES) -> Message | None:
        """Wait for the next message and return it; None after the end. Raises: ProtocolBroken."""
        while not self._bodies:
            if self._gone.is_set():
                if self._fault is not None:
                    raise self._fault
                return None
            self._news.clear()
            await self._news.wait()
        return decoder.decode(self._bodies.popleft())

    async def follow(self, decoder: MessageDecoder, take: Callable[[Message], None]) -> None:
        """Call `take` with each message in an event-loop callback until the child ends.

        Raises: ProtocolBroken, and exceptions of `take`.
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

    def kill(self) -> None:
        """Kill the child."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait_gone(self, timeout_s: float) -> None:
        """Wait for the child to exit; kill it after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()

    async def give_back(self) -> None:
        """Close the socket, kill the child, reap it, and end all processes that it started."""
        self._transport.close()
        self.kill()
        await self.wait_gone(REAP_TIMEOUT_S)
        await self._gone.wait()
        await end_family(self._family)

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
async def open_host(
    module: str, environment: Mapping[str, str], *, keeps_log: bool = False, python: str = ""
) -> AsyncIterator[HostProcess]:
    """Start `python -m module --fd N`; on exit, kill and reap it and close the socket.

    environment: defaults of variables that are read before main; inherited variables override
    them, but not `CUDA_VISIBLE_DEVICES`. keeps_log: whether the end of its log is kept, for
    `HostProcess.log_lines`. python: an interpreter that has the packages of the module, and Weir;
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
) -> AsyncIterator[HostProcess]:
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for end in (parent_end, child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        parent_end.setblocking(False)
        process = await start_process(module, child_end.fileno(), variables, log_fd, python)
    except BaseException:
        parent_end.close()  # a child that was started nevertheless reads the end and exits
        raise
    finally:
        child_end.close()
    try:
        loop = asyncio.get_running_loop()
        _, host = await loop.create_unix_connection(
            lambda: HostProcess(process, family, log), sock=parent_end
        )
    except BaseException:
        parent_end.close()
        process.kill()
        await process.wait()
        raise
    try:
        yield host
    finally:
        await host.give_back()


def overdue(pulse: Pulse) -> str:
    """Return why the current step takes too long; empty if it does not."""
    if pulse.step_s <= max(STEP_S_MIN, STEP_FACTOR * pulse.usual_s):
        return ""
    return f"a step has run for {pulse.step_s:.0f} s, the longest recent one {pulse.usual_s:.2g} s"


class Watchdog:
    """Watchdog timer of a worker. Used on one event loop.

    A worker is stalled, which ends with its next progress, if its pulse is absent for some seconds,
    or if a step takes many times longer than usual ones. It hangs if it is silent beyond the
    timeout. Workers without a pulse are only found hanging.
    """

    def __init__(
        self,
        timeout_s: float,
        on_silence: Callable[[float], None],
        on_stall: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create it disarmed.

        on_silence: gets the silence in seconds and judges it. on_stall: gets the reason of a stall,
        or an empty text once there is none.
        """
        self._timeout_s = timeout_s
        self._on_silence, self._on_stall = on_silence, on_stall
        self._heard_at_s = -math.inf
        self._pulse: tuple[float, Pulse] | None = None  # the last one, and when it came
        self._timer: asyncio.TimerHandle | None = None
        self._look_every_s = min(timeout_s / 4, LOOK_S)

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_at_s = asyncio.get_running_loop().time()

    def pulse(self, pulse: Pulse) -> None:
        """Note a pulse."""
        self._pulse = asyncio.get_running_loop().time(), pulse

    @property
    def is_alive(self) -> bool:
        """False if pulses have been absent for the timeout."""
        limit_s = self._timeout_s + PULSE_LOST_S
        return self._pulse is None or self._now_s() - self._pulse[0] <= limit_s

    def arm(self) -> None:
        """Start watching; counts as a sign of life."""
        self.heard()
        self._schedule()

    def disarm(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pulse = None
        self._on_stall("")

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)

    def _look(self) -> None:
        assert self._timer is not None, "only an armed watchdog looks"
        now_s = self._now_s()
        # After a block of this loop, messages may wait that it has not read yet.
        if now_s - self._timer.when() < LOOK_LATE_S:
            self._on_stall(self._stall(now_s))
            silence_s = now_s - self._heard_at_s
            if silence_s > self._timeout_s:
                self._on_silence(silence_s)
        self._schedule()

    def _stall(self, now_s: float) -> str:
        """Return why the worker is stalled; empty if it is not."""
        if self._pulse is None:
            return ""
        pulse_at_s, pulse = self._pulse
        silence_s = now_s - max(pulse_at_s, self._heard_at_s)
        if silence_s > PULSE_LOST_S:
            return f"no sign of life for {silence_s:.0f} s"
        return overdue(pulse)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


class SpareWorkers:
    """Pool of started workers without a model. Only `serve` runs in the background."""

    def __init__(self, count: int = 0) -> None:
        """Start nothing; `serve` does. count: spares to keep; 0: start workers on demand."""
        self.count = count
        self._ready: deque[tuple[HostProcess, contextlib.AsyncExitStack]] = deque()
        self._changed = asyncio.Event()

    @property
    def ready_count(self) -> int:
        """Number of spares that can be taken now."""
        return sum(host.exit_status is None for host, _ in self._ready)

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
        """End all spares, or all but `count`."""
        while len(self._ready) > count:
            await self._ready.popleft()[1].aclose()

    @contextlib.asynccontextmanager
    async def open(self, module: str, environment: Mapping[str, str]) -> AsyncIterator[HostProcess]:
        """Open a worker as `open_host` does, using a spare of this kind if there is one."""
        taken = self._take() if (module, environment) == (SPARE_MODULE, CHILD_ENVIRONMENT) else None
        if taken is None:
            async with open_host(module, environment) as host:
                yield host
            return
        host, stack = taken
        async with stack:
            yield host

    def _take(self) -> tuple[HostProcess, contextlib.AsyncExitStack] | None:
        alive = next((spare for spare in self._ready if spare[0].exit_status is None), None)
        if alive is not None:
            self._ready.remove(alive)
            self._changed.set()
        return alive

    async def add(self) -> bool:
        """Start a spare; return whether that worked."""
        stack = contextlib.AsyncExitStack()
        try:
            host = await stack.enter_async_context(open_host(SPARE_MODULE, CHILD_ENVIRONMENT))
        except OSError as error:
            _log.warning("spare engine worker could not be started: %s", error)
            return False
        self._ready.append((host, stack))
        return True

    async def _drop_dead(self) -> None:
        for spare in [spare for spare in self._ready if spare[0].exit_status is not None]:
            self._ready.remove(spare)
            await spare[1].aclose()
