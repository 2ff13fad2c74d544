"""How many streams each connection has open: beyond its share a new one is refused with a reason, and a time to come again."""

from __future__ import annotations

import contextlib
from collections import Counter

from api.errors import Overloaded


class OpenStreams:
    """Counts of one process, by connection."""

    def __init__(self, per_connection_max: int) -> None:
        self._per_connection_max = per_connection_max
        self._counts: Counter[str] = Counter()

    @property
    def open_count(self) -> int:
        """Of all connections."""
        return self._counts.total()

    def take(self, peer: str) -> contextlib.ExitStack:
        """Count a stream until the stack is left. peer: the connection, as gRPC names it. Raises: Overloaded."""
        if self._counts[peer] >= self._per_connection_max:
            raise Overloaded(
                f"this connection has {self._per_connection_max} streams open, as many as it may: "
                "close some, or send several requests over one stream"
            )
        self._counts[peer] += 1
        taken = contextlib.ExitStack()
        taken.callback(self._give_back, peer)
        return taken

    def _give_back(self, peer: str) -> None:
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
