"""What the api processes of one database tell each other in passing: short texts that nothing depends on.

No row is written: a text reaches the processes that listen at that moment, and is lost to the others. Each process says something
at most once a second, however much it has to say, and nothing where there is nothing to say.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import psycopg

from metering.store.bounded_connection import BoundedConnection

CHANNEL = "weir_gossip"
BYTES_MAX = 7000  # of one text in UTF-8: PostgreSQL takes 8,000 less the rest of the message
INTERVAL_S = 1.0  # between two texts of one process


class Gossip(Protocol):
    """What one process has to say, and what it hears: from all, itself included."""

    def told(self) -> str:
        """What is new since the last time, at most `BYTES_MAX`; empty for nothing. What is given out here is gone."""
        ...

    def heard(self, text: str) -> None:
        """What another process has said. Never raises."""
        ...


class Teller:
    """Says what there is to say, over a connection that somebody else has."""

    def __init__(self, gossip: Gossip | None) -> None:
        """gossip: None for a process that neither tells nor listens."""
        self._gossip = gossip
        self._told_at = -math.inf  # a monotonic clock starts anywhere, also at zero

    async def listen(self, connection: BoundedConnection) -> None:
        """Let texts come over the connection from now on."""
        if self._gossip is not None:
            await connection.execute(f"LISTEN {CHANNEL}")

    async def tell(self, connection: BoundedConnection) -> None:
        """Say what is new, unless something was said just now."""
        if self._gossip is None or time.monotonic() - self._told_at < INTERVAL_S:
            return
        if text := self._gossip.told():
            self._told_at = time.monotonic()
            await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, text))

    def hear(self, notice: psycopg.Notify) -> bool:
        """Take a notification, if it is one of these."""
        if notice.channel != CHANNEL or self._gossip is None:
            return False
        self._gossip.heard(notice.payload)
        return True
