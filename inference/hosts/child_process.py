"""The parent's end of a child process that is spoken to over a socket: an engine host, or the classifiers of the safety stage.

Owns both, and gives both back on every path. The child sees the socket's end when this process is gone, however it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from common.child_environment import inherited
from inference.hosts.host_protocol import LENGTH_PREFIX, body_length

SOCKET_BUFFER_BYTES = 1 << 20  # bytes: several hundred step reports, so a busy parent does not stall the step loop at once
REAP_TIMEOUT_S = 5.0  # seconds for the kernel to end a killed child; more means it hangs in a device


class ChildProcess:
    """One running child. Made by `open_child`; each kind adds what it says and hears."""

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

    def write(self, framed: bytes) -> None:
        """Queue an encoded message; never blocks. Its kind bounds what is buffered."""
        if not self._writer.is_closing():
            self._writer.write(framed)

    async def read(self) -> bytes | None:
        """The body of the child's next message; None when it is gone. Raises `ProtocolBroken`."""
        try:
            prefix = await self._reader.readexactly(LENGTH_PREFIX.size)
            return await self._reader.readexactly(body_length(prefix))
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

    async def give_back(self) -> None:
        """Close the socket, end the child and reap it."""
        self._writer.close()
        self.kill()
        await self.wait_gone(REAP_TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


Child = TypeVar("Child", bound=ChildProcess)


@contextlib.asynccontextmanager
async def open_child(kind: type[Child], module: str, environment: Mapping[str, str]) -> AsyncIterator[Child]:
    """Start `python -m module --fd N`; on leaving it is dead and reaped, and the socket closed.

    environment: defaults of variables that are read before main; whoever starts Weir may set them otherwise.
    """
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for end in (parent_end, child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        parent_end.setblocking(False)
        # stdout belongs to whoever reads this program's answers; the child's logs go to stderr.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            "--fd",
            str(child_end.fileno()),
            pass_fds=(child_end.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**environment, **inherited()},
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
    child = kind(process, reader, writer)
    try:
        yield child
    finally:
        await child.give_back()
