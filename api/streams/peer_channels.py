"""Connections to the other api processes: one to each, for as long as something goes over it and a little longer.

A process that has ended never comes back under the same certificate: without that end each restart of a peer would leave one here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from api.streams.peers import Identity, Peer

IDLE_S = 60.0  # a connection that nobody uses is kept so long: shaking hands anew costs some ms
IDLE_COUNT_MAX = 32  # connections that nobody uses; of some 100 kB each, with TLS


@dataclass(slots=True, eq=False)
class Connection:
    """One of them. idle: the timer that closes it while nobody uses it."""

    channel: grpc.aio.Channel
    use_count: int = 0
    idle: asyncio.TimerHandle | None = None


class PeerChannels:
    """All of this process."""

    def __init__(self, tasks: asyncio.TaskGroup, identity: Identity | None = None, *, idle_s: float = IDLE_S) -> None:
        """tasks: those of the process. identity: presented to peers. idle_s: how long an unused connection is kept."""
        self._tasks = tasks
        self._identity = identity
        self._idle_s = idle_s
        self._connections: dict[Peer, Connection] = {}
        self._idle: dict[Peer, Connection] = {}  # those that nobody uses; the one that is idle for longest stands first

    def __len__(self) -> int:
        return len(self._connections)

    @contextlib.contextmanager
    def use(self, peer: Peer) -> Iterator[grpc.aio.Channel]:
        """The connection to a process, open for as long as the block lasts."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = Connection(peer.channel(self._identity))
        connection.use_count += 1
        self._idle.pop(peer, None)
        if connection.idle is not None:
            connection.idle.cancel()
            connection.idle = None
        try:
            yield connection.channel
        finally:
            connection.use_count -= 1
            if not connection.use_count and self._connections.get(peer) is connection:
                self._rest(peer, connection)

    def _rest(self, peer: Peer, connection: Connection) -> None:
        """Nobody uses it any more: close it later, or where there are too many of them the one that rests for longest."""
        connection.idle = asyncio.get_running_loop().call_later(self._idle_s, self._drop, peer)
        self._idle[peer] = connection
        if len(self._idle) > IDLE_COUNT_MAX:
            self._drop(next(iter(self._idle)))

    def _drop(self, peer: Peer) -> None:
        connection = self._idle.pop(peer)
        del self._connections[peer]
        if connection.idle is not None:
            connection.idle.cancel()
        self._tasks.create_task(connection.channel.close(), name="closing of a peer's channel")

    async def close(self) -> None:
        """Close all of them, as this process ends."""
        connections = list(self._connections.values())
        self._connections.clear()
        self._idle.clear()
        for connection in connections:
            if connection.idle is not None:
                connection.idle.cancel()
            await connection.channel.close()
