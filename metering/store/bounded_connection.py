"""A psycopg connection that waits for no answer longer than it may, whatever the server or the network does.

The server's own time limits do not help where the server is frozen or the network swallows everything, and cancelling a call makes
psycopg ask that same server to cancel, with a patience of its own. So the socket is shut down: whoever waits on it is told at once
that the connection is gone, and the server hears the same as soon as it hears anything.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Self

import psycopg

ANSWER_TIMEOUT_S = 12.0  # above the server's own statement timeout, which comes first where the server is well
KEEPALIVES: dict[str, Any] = {  # a peer that is gone without a word is found within half a minute; ignored on Unix sockets
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# Every other value of an operator's waits for the server's own disk at least, and some for standbys: they are left alone.
COMMIT_DURABLY = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"

_patience_s: ContextVar[float] = ContextVar("patience_s", default=ANSWER_TIMEOUT_S)


@contextmanager
def patience(answer_timeout_s: float) -> Iterator[None]:
    """Wait for each answer so long at most, inside the block: where a caller waits who has less time than a report takes."""
    before = _patience_s.set(answer_timeout_s)
    try:
        yield
    finally:
        _patience_s.reset(before)


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Raises psycopg.OperationalError where an answer takes longer than `ANSWER_TIMEOUT_S`; the connection is then closed.

    What it commits is on the server's disk: `synchronous_commit = off` of a server, database or role does not hold here.
    """

    @classmethod
    async def connect(cls, *args: Any, **parameters: Any) -> Self:
        """Connect, and demand durable commits. Raises: psycopg.OperationalError."""
        try:
            connection = await super().connect(*args, **parameters)
        except BaseException as error:
            # The error's frames hold the socket of an attempt that is cancelled: it would be open until a garbage collection.
            traceback.clear_frames(error.__traceback__)
            raise
        try:
            await connection.execute(COMMIT_DURABLY)
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """See psycopg: every exchange with the server goes through here."""
        timer = asyncio.get_running_loop().call_later(_patience_s.get(), self.abort)
        try:
            return await super().wait(gen, *args, **kwargs)
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Shut the socket down under whoever waits for it. Does nothing on a connection that is closed."""
        with suppress(psycopg.OperationalError, OSError), socket.socket(fileno=os.dup(self.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)
