"""How much output of one request may be on its way or unread: the credit that its server is granted."""

from __future__ import annotations

import time

EVERYTHING = 2**40  # tokens: more than any request has. For those that need credit although this client wants to hold nothing back
GRANT_INTERVAL_S = 5.0  # a slow reader grants as often: far below what a server waits for credit (60 s), and hardly any frames


class Prefetch:
    """Keeps what was granted on this stream and has not arrived, together with what has arrived and was not read, at `limit`.

    It grants when half of that is free, or some of it and the last grant is a while ago.
    """

    def __init__(self, limit: int) -> None:
        """limit: output tokens, at least 1."""
        self.limit = limit
        self._outstanding = 0  # granted on this stream, not arrived
        self._unread = 0  # arrived, not read
        self._granted_at = time.monotonic()

    def begin(self, granted: int) -> None:
        """It goes to another stream, with so much credit: that of the one before is void, and with it what was on its way."""
        self._outstanding = granted
        self._granted_at = time.monotonic()

    def arrived(self, token_count: int) -> None:
        """So many tokens more."""
        self._outstanding -= token_count
        self._unread += token_count

    def read(self, token_count: int) -> None:
        """The caller has so many tokens more."""
        self._unread -= token_count

    def grant(self, *, at_once: bool = False) -> int:
        """Tokens to grant now; 0: none. at_once: all that there is room for."""
        room = self.limit - self._outstanding - self._unread
        is_due = at_once or 2 * room >= self.limit or time.monotonic() - self._granted_at >= GRANT_INTERVAL_S
        if room < 1 or not is_due:
            return 0
        self._outstanding += room
        self._granted_at = time.monotonic()
        return room
