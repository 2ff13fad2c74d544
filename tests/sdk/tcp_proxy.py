"""TCP proxy that a test can shut, and whose connections it can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TcpProxy:
    """Proxy on loopback that forwards bytes at once."""

    def __init__(self, behind: str) -> None:
        """Start nothing. behind: `host:port` of the server."""
        self._host, _, port = behind.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.closed_count = 0  # this many further connections are closed at once
        self.come_count = 0
        self.cut_count = 0

    def cut(self) -> None:
        """Break every connection."""
        self.cut_count += 1
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TcpProxy]:
        """Run the proxy during the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.come_count += 1
        if self.closed_count:
            self.closed_count -= 1
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, there_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, there_writer))
                tasks.create_task(self._copy(there_reader, writer))
        except* OSError:
            pass
        finally:
            self._writers -= {writer, there_writer}
            writer.transport.abort()
            there_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        raise ConnectionAbortedError("one side has closed")
