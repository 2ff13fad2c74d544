"""Connections of an engine worker to the api processes that use it.

Must not import torch, like `child.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass

UNSENT_BYTES_MAX = 64 << 20  # of a connection beside others: its process has not read for seconds
WRITABLE_POLL_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Owner:
    """Sequence of a connection, under the number that its API process gave it."""

    connection: Connection
    number: int


class Connection:
    """Connection to one api process. One thread reads; any thread sends."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.received = bytearray()
        self.numbers: dict[int, int] = {}  # of running sequences: its own, and the worker's
        self.is_admitted = False  # it wants the model that this worker has
        self.is_leaving = False  # closed when its sequences have ended
        self.is_over = False  # read to its end, or dropped; the watching thread closes it
        self.hung_up = False  # its process has closed it or ended
        self.reported_at_s = -math.inf
        self.is_stale = False  # it has not received the last statistics
        self.cached: list[int] = []  # hashes of cached blocks for its next report
        self._unsent = bytearray()
        self._sending = threading.Lock()

    @property
    def is_gone(self) -> bool:
        """True if nothing can be sent any more."""
        return self.is_over or self.hung_up

    @property
    def unsent_byte_count(self) -> int:
        """Number of bytes that the socket has not taken yet."""
        return len(self._unsent)

    def send(self, data: bytes) -> None:
        """Send as much as the socket takes, and keep the rest for `flush`. Never blocks."""
        with self._sending:
            if not self._unsent:
                data = data[self._send(data) :]
            self._unsent += data

    def flush(self) -> None:
        """Send as much of the rest as the socket takes. Never blocks."""
        with self._sending:
            while sent := self._send(self._unsent):
                del self._unsent[:sent]

    def drain(self) -> None:
        """Wait until the socket takes data or for a short time, and send the rest."""
        writable = select.poll()
        writable.register(self.socket, select.POLLOUT)
        writable.poll(WRITABLE_POLL_S * 1000)
        self.flush()

    @property
    def has_left(self) -> bool:
        """True if its process needs nothing more, and has been sent everything."""
        return self.is_leaving and not self.numbers and not self._unsent and not self.is_gone

    def hang_up(self) -> None:
        """Send no more. The reading thread then reads the end."""
        self.hung_up = True
        with contextlib.suppress(OSError):  # closed by the other end
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Send and read no more. The watching thread closes the socket."""
        self.hang_up()
        self.is_over = True

    def _send(self, data: bytes | bytearray) -> int:
        if not data or self.is_gone:
            return len(data)
        try:
            return self.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:  # the end, which the watching thread reports
            return len(data)


def is_own(end: socket.socket) -> bool:
    """Return whether a process of this user has opened the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the directory is private
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
