"""Ids of holds: they begin with the time, so that the rows of now stand side by side in every index on them.

An id that is random all over lands on another page of each index, which has to be read, changed and written to the log by itself.
These are of version 7 of RFC 9562.
"""

from __future__ import annotations

import os
import time
import uuid

NANOSECONDS = 1_000_000  # in a millisecond
VERSION_AND_VARIANT = 7 << 76 | 2 << 62


def new_hold_id() -> uuid.UUID:
    """Milliseconds since 1970, what is over of them in 4096ths, and 62 random bits."""
    milliseconds, rest = divmod(time.time_ns(), NANOSECONDS)
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(int=milliseconds << 80 | VERSION_AND_VARIANT | (rest << 12) // NANOSECONDS << 64 | random)
