"""Credit granted to the server: limit of the output in flight or unread."""

from __future__ import annotations

import time

EVERYTHING = 2**40  # tokens, above any request's, for requests that need credit but no limit
# Seconds, for a slow reader: far below a server's stall time (60 s), with few frames.
GRANT_INTERVAL_S = 5.0


class Prefetch:
    """Keeps tokens granted but not received, plus tokens received but unread, at `limit`.

    Grants when half of it is free, or when some of it is free and the last grant is old enough.
    """

    def __init__(self, limit: int) -> None:
        """limit: output tokens, at least 1."""
        self.limit = limit
        self._outstanding = 0  # granted on this stream, not arrived
        self._unread = 0  # arrived, not read
        self._granted_at = time.monotonic()

    def begin(self, granted: int) -> None:
        """Move to another stream with this credit; the credit of the previous stream is void."""
        self._outstanding = granted
        self._granted_at = time.monotonic()

    def arrived(self, token_count: int) -> None:
        """Record that this many tokens have arrived."""
        self._outstanding -= token_count
        self._unread += token_count

    def read(self, token_count: int) -> None:
        """Record that the caller has read this many tokens."""
        self._unread -= token_count

    def grant(self, *, at_once: bool = False) -> int:
        """Return the tokens to grant now, or 0. at_once: grant all free tokens."""
        room = self.limit - self._outstanding - self._unread
        is_due = (
            at_once
            or 2 * room >= self.limit
            or time.monotonic() - self._granted_at >= GRANT_INTERVAL_S
        )
        if room < 1 or not is_due:
            return 0
        self._outstanding += room
        self._granted_at = time.monotonic()
        return room
