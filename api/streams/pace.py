"""Pace of the frames and HTTP requests of an API key and of its organization: more of them are read more slowly.

It counts processor time and not frames: a cancel takes 10 µs, an attach that looks into the books half a millisecond. It refuses
nothing. Requests that are let in are not counted, but for what makes one dearer to read than an ordinary one is: quotas, permits
and the queue bound those. Of requests that are refused the preparation of their prompts is counted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from api.errors import TooManyCalls
from metering.operations import Owner

BURST_S = 0.5  # of work at any speed: a client that comes back attaches to a thousand requests at once
MESSAGE_COST_S = 40e-6  # of the transport for each message, which nobody here can measure
CALL_COST_S = 700e-6  # of a call that answers once, from its connection to its answer
CALL_WAIT_S_MAX = 2.0  # for the turn of such a call: one that would wait longer is refused
LOOKUP_COST_S = 500e-6  # of an attach to what does not run here: its way through the books, and perhaps to another process
REFUSAL_COST_S = 300e-6  # of a request that has begun and was refused: by its model, the books, or the queue
START_FREE_S = 300e-6  # of reading a request that is let in: an ordinary one takes less
WAIT_S_MIN = 0.005  # less is saved up: timers are no finer than a millisecond, and small messages would wait for that each
# All streams wait through what holds the event loop in one piece: beyond a slice's time it costs its key more than the same time in
# small pieces, up to a factor.
STALL_S = 0.002
STALL_FACTOR_MAX = 8.0
KEYS_MAX = 20_000  # keys and organizations; beyond it those that owe nothing are forgotten
ORGANIZATION_SHARES = 2.0  # of a key, for all keys of an organization: one that floods leaves the other half to the rest


@dataclass(slots=True)
class Turns:
    """The streams of one key that wait: all but the first for those before them."""

    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0


class FramePace:
    """How long each API key has to wait until its next frames are worked off, in one process."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: of the event loop's time, for the frames of one key."""
        self._share = share
        self._clock = clock
        # By API key and by organization: when all that it has spent will have been waited for.
        self._free_at: dict[uuid.UUID, float] = {}
        self._turns: dict[uuid.UUID, Turns] = {}

    def spent(self, owner: Owner, cost_s: float) -> None:
        """So much more time was spent on frames of this key."""
        now = self._clock()
        of_organization = min(ORGANIZATION_SHARES * self._share, 1.0)
        for each, share in ((owner.api_key_id, self._share), (owner.organization_id, of_organization)):
            earliest = now - BURST_S / share
            self._free_at[each] = max(self._free_at.get(each, earliest), earliest) + cost_s / share
        if len(self._free_at) > KEYS_MAX:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}

    def held(self, owner: Owner, cost_s: float) -> None:
        """The event loop was held for so long, in one piece, for this key."""
        self.spent(owner, cost_s * min(max(cost_s / STALL_S, 1.0), STALL_FACTOR_MAX))

    @contextlib.contextmanager
    def spending(self, owner: Owner, free_s: float = 0.0) -> Iterator[None]:
        """Count the processor time of a block that does not await, beyond `free_s`."""
        began_at = time.thread_time()
        try:
            yield
        finally:
            if (cost_s := time.thread_time() - began_at - free_s) > 0:
                self.held(owner, cost_s)

    def wait_s(self, owner: Owner) -> float:
        """For so long nothing more of this key is to be worked off."""
        free_at = max(self._free_at.get(each, -math.inf) for each in (owner.api_key_id, owner.organization_id))
        return max(free_at - self._clock(), 0.0)

    async def turn_to_call(self, owner: Owner) -> None:
        """Wait for the turn of a call that answers once, and count what it costs. Raises: TooManyCalls."""
        turns = self._turns.get(owner.api_key_id)
        ahead_s = self.wait_s(owner) + (turns.waiting_count * CALL_COST_S / self._share if turns is not None else 0.0)
        if ahead_s > CALL_WAIT_S_MAX:
            raise TooManyCalls(ahead_s)
        await self.turn(owner)
        self.spent(owner, CALL_COST_S)

    async def turn(self, owner: Owner) -> bool:
        """Wait until the next slice of this key may be worked off; whether that was not at once.

        Streams take turns. Without that each new one would have its first slice at once, and all that wait would wake together.
        """
        key_id = owner.api_key_id
        if key_id not in self._turns and self.wait_s(owner) < WAIT_S_MIN:
            return False
        turns = self._turns.setdefault(key_id, Turns())
        turns.waiting_count += 1
        try:
            async with turns.first:  # let go with the return: whoever is next runs when the slice of this one is over
                await asyncio.sleep(self.wait_s(owner))
        finally:
            turns.waiting_count -= 1
            if not turns.waiting_count:
                del self._turns[key_id]
        return True
