"""Receiver of webhooks on this machine, with answers set by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

OK = b"HTTP/1.1 204 No Content\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"
HANG = b""  # no answer on an open connection


@dataclass(frozen=True, slots=True)
class Received:
    """Received POST."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Receiver:
    """Webhook server. answers: to the next posts, then `OK`, or `endless`."""

    url: str = ""
    answers: list[bytes] = field(default_factory=list)
    endless: bytes = b""
    received: list[Received] = field(default_factory=list)
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # something was received
    taken_count: int = 0  # bytes sent of the endless part

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers["content-length"]))
            self.received.append(Received(head[0].split(" ")[1], headers, body))
            self.taken.set()
            answer = self.answers.pop(0) if self.answers else OK
            writer.write(answer)
            while answer and self.endless:
                writer.write(self.endless)
                await writer.drain()
                self.taken_count += len(self.endless)
            if answer == HANG:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    """Run a receiver during the block."""
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        made.url = f"http://127.0.0.1:{port}/alerts"
        yield made
