"""The parent's end of an engine host: the child process and the socket to it.

Owns both, and gives both back on every path. The child sees the socket's end when this process is gone, however it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator

from inference.host_protocol import (
    LENGTH_PREFIX,
    ToHost,
    ToParent,
    body_length,
    decode_to_parent,
    encode,
)

SOCKET_BUFFER_BYTES = 1 << 20  # bytes: several hundred step reports, so a busy parent does not stall the step loop at once
# Settings of the C library, read before main: they cannot be made inside the child. Each can be overridden from outside.
CHILD_ENVIRONMENT = {
    # Keep freed memory. Otherwise every large temporary is mapped afresh, and touching its pages costs more than computing:
    # decode attention at batch 50 takes 21 ms per layer instead of 5, the reference workload 25 s instead of 10.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    # Threads sleep at the end of a parallel loop. Spinning is faster on an idle machine (427 tokens/s alone, not 270), but as soon
    # as anything else runs, and the API process always does, a spinning thread waits for one that was taken off its core: measured
    # 5 tokens/s.
    "OMP_WAIT_POLICY": "PASSIVE",
}
REAP_TIMEOUT_S = 5.0  # seconds for the kernel to end a killed child; more means it hangs in a device


class HostProcess:
    """One running child. Made by `open_host`."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The child's exit status, negative for a signal; None while it lives or has not been waited for."""
        return self._process.returncode

    def send(self, message: ToHost) -> None:
        """Queue a message; never blocks. What is buffered is bounded by the sequences that the engine takes."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> ToParent | None:
        """The child's next message; None when it is gone. Raises `ProtocolBroken`."""
        try:
            prefix = await self._reader.readexactly(LENGTH_PREFIX.size)
            return decode_to_parent(await self._reader.readexactly(body_length(prefix)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def kill(self) -> None:
        """End the child at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait_gone(self, timeout_s: float) -> None:
        """Give the child time to exit by itself, then kill it."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()


@contextlib.asynccontextmanager
async def open_host() -> AsyncIterator[HostProcess]:
    """Start a child; on leaving it is dead and reaped, and the socket closed."""
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for end in (parent_end, child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        parent_end.setblocking(False)
        # stdout belongs to whoever reads this program's answers; the child's logs go to stderr.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.host",
            "--fd",
            str(child_end.fileno()),
            pass_fds=(child_end.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env=_child_environment(),
        )
    except BaseException:
        parent_end.close()  # a child that was started all the same reads the end of the stream and exits
        raise
    finally:
        child_end.close()
    try:
        reader, writer = await asyncio.open_unix_connection(sock=parent_end)
    except BaseException:
        parent_end.close()
        process.kill()
        await process.wait()
        raise
    host = HostProcess(process, reader, writer)
    try:
        yield host
    finally:
        writer.close()
        host.kill()
        await host.wait_gone(REAP_TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _child_environment() -> dict[str, str]:
    """Ours without `WEIR_*`: the child gets all it needs by message, and has no use for the keys to the database."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return CHILD_ENVIRONMENT | inherited
