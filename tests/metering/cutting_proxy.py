"""Proxy of PostgreSQL that cuts the connection at a chosen message, or discards all messages.

It parses the protocol's message borders, so that a test can cut at every point: before the server
has received a request, or after the server has run it and before the answer arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from metering.store.db import psycopg_conninfo

Side = Literal["client", "server"]


class CuttingProxy:
    """Proxy that forwards message by message, by default on the loopback."""

    def __init__(self, database_url: str, host: str = "127.0.0.1") -> None:
        self._upstream = conninfo_to_dict(psycopg_conninfo(database_url))
        self._database_url = database_url
        self._host = host
        self._port = 0
        self._cut: tuple[Side, int] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.deaf = False
        self.refusing = False
        self.cut_count = 0
        self.attempt_count = 0
        self.connection_count_peak = 0

    @property
    def url(self) -> str:
        """URL of the database through the proxy."""
        url = make_url(self._database_url).set(host=self._host, port=self._port)
        return url.set(query={"sslmode": "disable", "gssencmode": "disable"}).render_as_string(
            hide_password=False
        )

    def cut_before(self, side: Side, message_number: int) -> None:
        """Cut instead of forwarding this side's n-th message from now on, counted from 1."""
        self._cut = (side, message_number)

    def armed(self) -> bool:
        """Return whether the cut is still to come."""
        return self._cut is not None

    def disarm(self) -> None:
        """Forward everything."""
        self._cut = None

    def cut_now(self) -> None:
        """Cut every connection."""
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[CuttingProxy]:
        """Serve inside the block."""
        server = await asyncio.start_server(self._serve, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut_now()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempt_count += 1
        if self.refusing:
            writer.transport.abort()
            return
        host, port = str(self._upstream["host"]), self._upstream.get("port") or 5432
        if host.startswith("/"):
            to_server = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            to_server = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, to_server[1]}
        self.connection_count_peak = max(self.connection_count_peak, len(self._writers) // 2)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward("client", reader, to_server[1], first=True))
                tasks.create_task(self._forward("server", to_server[0], writer, first=False))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= {writer, to_server[1]}
            writer.transport.abort()
            to_server[1].transport.abort()

    async def _forward(
        self, side: Side, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, first: bool
    ) -> None:
        while True:
            # Only the start-up message has no type byte before its length.
            head = await reader.readexactly(4 if first else 5)
            message = head + await reader.readexactly(int.from_bytes(head[-4:]) - 4)
            first = False
            if self._cut is not None and self._cut[0] == side:
                self._cut = (side, self._cut[1] - 1)
                if not self._cut[1]:
                    self._cut = None
                    self.cut_count += 1
                    raise ConnectionAbortedError("cut by the test")
            if not self.deaf:
                writer.write(message)
                await writer.drain()
