"""How fast the frames and HTTP requests of one API key are worked off: whoever sends more is read more slowly, and slows nobody.

It counts processor time and not frames: a cancel takes 10 µs, an attach that looks into the books half a millisecond. It refuses
nothing. Requests that are let in are not counted, but for what makes one dearer to read than an ordinary one is: quotas, permits
and the queue bound those. Of requests that are refused the preparation of their prompts is counted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BURST_S = 0.5  # of work at any speed: a client that comes back attaches to a thousand requests at once
MESSAGE_COST_S = 40e-6  # of the transport for each message, which nobody here can measure
LOOKUP_COST_S = 500e-6  # of an attach to what does not run here: its way through the books, and perhaps to another process
REFUSAL_COST_S = 300e-6  # of a request that has begun and was refused: by its model, the books, or the queue
START_FREE_S = 300e-6  # of reading a request that is let in: an ordinary one takes less
WAIT_S_MIN = 0.005  # less is saved up: timers are no finer than a millisecond, and small messages would wait for that each
KEYS_MAX = 10_000  # beyond it those that owe nothing are forgotten


@dataclass(slots=True)
class Turns:
    """The streams of one key that wait: all but the first for those before them."""

    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0


class FramePace:
    """What the frames of each key still have to wait for, in one process."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: of the event loop's time, for the frames of one key."""
        self._share = share
        self._clock = clock
        self._free_at: dict[uuid.UUID, float] = {}  # when all that a key has spent will have been waited for
        self._turns: dict[uuid.UUID, Turns] = {}

    def spent(self, key_id: uuid.UUID, cost_s: float) -> None:
        """So much more time was spent on frames of this key."""
        now = self._clock()
        free_at = max(self._free_at.get(key_id, 0.0), now - BURST_S / self._share)
        self._free_at[key_id] = free_at + cost_s / self._share
        if len(self._free_at) > KEYS_MAX:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}

    @contextlib.contextmanager
    def spending(self, key_id: uuid.UUID, free_s: float = 0.0) -> Iterator[None]:
        """Count the processor time of a block that does not await, beyond `free_s`."""
        began_at = time.thread_time()
        try:
            yield
        finally:
            if (cost_s := time.thread_time() - began_at - free_s) > 0:
                self.spent(key_id, cost_s)

    def wait_s(self, key_id: uuid.UUID) -> float:
        """For so long nothing more of this key is to be worked off."""
        return max(self._free_at.get(key_id, 0.0) - self._clock(), 0.0)

    async def turn(self, key_id: uuid.UUID) -> bool:
        """Wait until the next slice of this key may be worked off; whether that was not at once.

        Streams take turns. Without that each new one would have its first slice at once, and all that wait would wake together.
        """
        if key_id not in self._turns and self.wait_s(key_id) < WAIT_S_MIN:
            return False
        turns = self._turns.setdefault(key_id, Turns())
        turns.waiting_count += 1
        try:
            async with turns.first:  # let go with the return: whoever is next runs when the slice of this one is over
                await asyncio.sleep(self.wait_s(key_id))
        finally:
            turns.waiting_count -= 1
            if not turns.waiting_count:
                del self._turns[key_id]
        return True
