"""A psycopg connection that waits for no answer longer than it may, whatever the server or the network does.

The server's own time limits do not help where the server is frozen or the network swallows everything, and cancelling a call makes
psycopg ask that same server to cancel, with a patience of its own. So the socket is shut down: whoever waits on it is told at once
that the connection is gone, and the server hears the same as soon as it hears anything.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

import psycopg

ANSWER_TIMEOUT_S = 12.0  # above the server's own statement timeout, which comes first where the server is well
KEEPALIVES: dict[str, Any] = {  # a peer that is gone without a word is found within half a minute; ignored on Unix sockets
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Raises psycopg.OperationalError where an answer takes longer than `answer_timeout_s`; the connection is then closed."""

    answer_timeout_s = ANSWER_TIMEOUT_S

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """See psycopg: every exchange with the server goes through here."""
        timer = asyncio.get_running_loop().call_later(self.answer_timeout_s, self.abort)
        try:
            return await super().wait(gen, *args, **kwargs)
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Shut the socket down under whoever waits for it. Does nothing on a connection that is closed."""
        with suppress(psycopg.OperationalError, OSError), socket.socket(fileno=os.dup(self.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)
