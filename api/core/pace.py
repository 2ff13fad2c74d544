"""Pace of the frames, calls and HTTP requests of an API key and its organization, or of an address without a key.

It counts processor time and not frames: a cancel takes 10 µs, an attach that looks into the books half a millisecond. Requests that
are let in are not counted, but for what makes one dearer to read than an ordinary one is: quotas, permits and the queue bound
those. Of requests that are refused the preparation of their prompts is counted too.

Who has used up its share of the event loop waits for its turn, and so does its next call. While the event loop is late for
everybody, all shares shrink together: what is counted here is not worth a late token.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from api.core.addresses import address_of
from api.core.errors import TooManyCalls
from metering.quotas.quota_rules import Owner

BURST_S = 0.1  # of work at any speed: a client that comes back attaches to some hundred requests at once
MESSAGE_COST_S = 40e-6  # of the transport for each message, which nobody here can measure
BYTE_COST_S = 1.5e-9  # of the transport for each byte of a message or body
CALL_COST_S = 700e-6  # of a call that answers once, from its connection to its answer; counted before it is answered
CALL_OVERHEAD_S = 400e-6  # of the part of it that the transport computes, which nobody here can measure
CALL_WAIT_S_MAX = 2.0  # for the turn of such a call: one that would wait longer on an idle process is refused
REFUSAL_WAIT_S_MAX = 5.0  # for a refusal: who floods has that many fewer calls to make
REFUSALS_WAITING_MAX = 1500  # of one payer; one more is refused at once
LOOKUP_COST_S = 500e-6  # of an attach to what does not run here: its way through the books, and perhaps to another process
REFUSAL_COST_S = 300e-6  # of a request that has begun and was refused: by its model, the books, or the queue
START_FREE_S = 300e-6  # of reading a request that is let in: an ordinary one takes less
WAIT_S_MIN = 0.005  # less is saved up: timers are no finer than a millisecond, and small messages would wait for that each
# All streams wait through what holds the event loop in one piece: beyond a slice's time it costs its key more than the same time in
# small pieces, up to a factor.
STALL_S = 0.001
STALL_FACTOR_MAX = 64.0
KEYS_MAX = 20_000  # keys and organizations; beyond it those that owe nothing are forgotten
ORGANIZATION_SHARES = 2.0  # of a key, for all keys of an organization: one that floods leaves the other half to the rest
ADDRESS_SHARES = 0.4  # of a key, for what comes from one address without a good key
# The event loop is late for everybody when a timer is. Each time that it is seen late all shares shrink, otherwise they grow back.
LATE_S = 0.0025
SHRINK, GROW = 0.7, 1.03
ROOM_MIN = 0.1
Value = TypeVar("Value")
Payer = Owner | str  # an API key with its organization, or an address


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
        self.room = 1.0  # what there is of each share now, between `ROOM_MIN` and 1
        # A clock that goes as fast as there is room: so what is given back is what was counted, whatever room there was then.
        self._now, self._looked_at = 0.0, clock()
        # By the number of an API key or organization, or by address: when, on that clock, what it has spent will have been
        # waited for.
        self._free_at: dict[int | str, float] = {}
        self._turns: dict[int, Turns] = {}
        self._late_counts: dict[int | str, int] = {}  # of refusals that wait

    def late(self, lag_s: float) -> None:
        """So late a timer was: to be told at regular intervals of some 50 ms."""
        self._look()
        self.room = max(self.room * SHRINK, ROOM_MIN) if lag_s > LATE_S else min(self.room * GROW, 1.0)

    def _look(self) -> float:
        """The time on the clock that goes as fast as there is room."""
        now = self._clock()
        self._now += (now - self._looked_at) * self.room
        self._looked_at = now
        return self._now

    def spent(self, owner: Payer, cost_s: float, held_s: float = 0.0) -> None:
        """So much more time was spent on frames of this key; less than nothing gives back.

        held_s: for which the event loop was held besides, in one piece.
        """
        cost_s += held_s * min(max(held_s / STALL_S, 1.0), STALL_FACTOR_MAX)
        accounts: tuple[tuple[int | str, float], ...]
        if isinstance(owner, str):
            accounts = ((owner, ADDRESS_SHARES * self._share),)
        else:
            organization_share = min(ORGANIZATION_SHARES * self._share, 1.0)
            accounts = (owner.api_key_id.int, self._share), (owner.organization_id.int, organization_share)
        now = self._look()
        for each, share in accounts:
            earliest = now - BURST_S / share
            self._free_at[each] = max(self._free_at.get(each, earliest), earliest) + cost_s / share
        if len(self._free_at) > KEYS_MAX:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}

    def read(self, owner: Payer, cost_s: float, byte_count: int) -> None:
        """A message of this size was parsed in so long."""
        self.spent(owner, BYTE_COST_S * byte_count, cost_s)
        if (visit := VISIT.get()) is not None:
            visit.was_counted(cost_s)

    @contextlib.contextmanager
    def spending(self, owner: Payer, free_s: float = 0.0) -> Iterator[None]:
        """Count the processor time of a block that does not await, beyond `free_s`."""
        began_at = time.thread_time()
        try:
            yield
        finally:
            if (cost_s := time.thread_time() - began_at - free_s) > 0:
                self.spent(owner, 0.0, cost_s)
                if (visit := VISIT.get()) is not None:
                    visit.was_counted(cost_s)

    def wait_s(self, owner: Payer) -> float:
        """For so long nothing more of this key is to be worked off."""
        if isinstance(owner, str):
            free_at = self._free_at.get(owner, -math.inf)
        else:
            key_id, organization_id = owner.api_key_id.int, owner.organization_id.int
            free_at = max(self._free_at.get(key_id, -math.inf), self._free_at.get(organization_id, -math.inf))
        if free_at <= self._now:  # as for most: that needs no look at the clock
            return 0.0
        return max(free_at - self._look(), 0.0) / self.room

    async def turn_to_call(self, owner: Owner) -> None:
        """Wait for the turn of a call that answers once, and count what it costs. Raises: TooManyCalls.

        A refusal costs too, and comes no sooner than the turn would have: who calls anew at once waits for it.
        """
        turns = self._turns.get(owner.api_key_id.int)
        waiting_count = 0 if turns is None else turns.waiting_count
        # As if there were all room: who calls no more than that is not refused because others keep the event loop busy.
        wait_s = self.wait_s(owner)
        ahead_s = wait_s * self.room + waiting_count * CALL_COST_S / self._share
        if ahead_s > CALL_WAIT_S_MAX:
            await self.refusal(owner)
            raise TooManyCalls(ahead_s)
        if turns is not None or wait_s >= WAIT_S_MIN:
            await self.turn(owner)
        self.spent(owner, CALL_COST_S)

    async def refusal(self, owner: Payer) -> None:
        """Wait before an answer that is a refusal, if others of its payer are waited for: at most `REFUSAL_WAIT_S_MAX`."""
        line = owner if isinstance(owner, str) else owner.api_key_id.int
        if (wait_s := self.wait_s(owner)) < WAIT_S_MIN or self._late_counts.get(line, 0) >= REFUSALS_WAITING_MAX:
            return
        self._late_counts[line] = self._late_counts.get(line, 0) + 1
        try:
            await asyncio.sleep(min(wait_s, REFUSAL_WAIT_S_MAX))
        finally:
            self._late_counts[line] -= 1
            if not self._late_counts[line]:
                del self._late_counts[line]

    async def turn(self, owner: Owner) -> bool:
        """Wait until the next slice of this key may be worked off; whether that was not at once.

        Streams take turns. Without that each new one would have its first slice at once, and all that wait would wake together.
        """
        key_id = owner.api_key_id.int
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


class Visit:
    """One call or HTTP request: what it costs on the event loop, and who pays for it once it is over.

    An address pays until a key is known. Nobody pays for what is let in, which quotas bound, and for administrators.
    """

    def __init__(self, pace: FramePace, peer: str) -> None:
        """peer: who has connected, as gRPC names it."""
        self._pace = pace
        self._peer = peer
        self._owner: Owner | None = None
        self._is_free = False
        self._had_turn = False
        self._counted_s = 0.0
        self.work_s = 0.0

    def belongs_to(self, owner: Owner, *, is_free: bool) -> None:
        """A key is known. is_free: nobody pays for what it does."""
        self._owner = owner
        self._is_free = self._is_free or is_free

    async def turn_to_call(self) -> None:
        """Wait for its turn, unless it has had it. Raises: TooManyCalls."""
        if self._is_free or self._had_turn or self._owner is None:
            return
        self._had_turn = True
        await self._pace.turn_to_call(self._owner)
        self._counted_s += CALL_COST_S

    def was_counted(self, work_s: float) -> None:
        """So much of its work was counted elsewhere."""
        self.work_s -= work_s

    def let_in(self) -> None:
        """What it asks for is done, and bounded by quotas: what was counted for it is given back."""
        if not self._is_free:
            self._is_free = True
            self._pace.spent(self._payer, -self._counted_s)

    def count(self, cost_s: float) -> None:
        """Count so much of it now, before it is over."""
        self._counted_s += cost_s
        self._pace.spent(self._payer, cost_s)

    def over(self) -> None:
        """Count what it has cost and was not counted before."""
        if not self._is_free and (cost_s := self.work_s + CALL_OVERHEAD_S - self._counted_s) > 0:
            self.count(cost_s)

    async def turn(self) -> None:
        """Wait before it is answered, if it has had no turn and its payer owes time."""
        if not self._is_free and not self._had_turn:
            self._had_turn = True
            await self._pace.refusal(self._payer)

    @property
    def _payer(self) -> Payer:
        return address_of(self._peer) if self._owner is None else self._owner


VISIT: ContextVar[Visit | None] = ContextVar("visit", default=None)  # of the call or HTTP request that this task answers


@types.coroutine
def measured(visit: Visit, work: Coroutine[Any, Any, Value]) -> Generator[Any, Any, Value]:
    """Run a coroutine and add the processor time of each of its steps to the visit's."""
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        began_at = time.thread_time()
        try:
            awaited = step(value)
        except StopIteration as done:
            result: Value = done.value
            return result
        finally:
            visit.work_s += time.thread_time() - began_at
            value = None  # an error keeps this frame, which is not to keep the error
        try:
            value = yield awaited
            step = work.send
        except BaseException as error:
            value, step = error, work.throw
