"""Rate limiting of frames, calls and HTTP requests by processor time.

Limits apply per API key and organization, or per address if there is no key. Processor time is
counted instead of frames, because a cancel takes 10 µs, and an attach with a database lookup half a
millisecond. Admitted requests are bounded by quotas, permits and the queue, so only above-average
parsing time counts for them; for refused requests the preparation of prompts counts as well. A key
that has used up its share of the event loop waits before its next slice or call. While the event
loop lags, all shares shrink together, to protect token latency.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from api.core.addresses import address_of
from api.core.errors import TooManyCalls
from common.loop_watch import CURRENT
from metering.quotas.quota_rules import Owner

# Seconds of work that is never delayed: a reconnecting client attaches to a hundred requests at
# once.
BURST_S = 0.1
MESSAGE_COST_S = 40e-6  # of the transport per message, which cannot be measured here
BYTE_COST_S = 1.5e-9  # of the transport per byte of a message or body
CALL_COST_S = 700e-6  # of a unary call from connection to answer; counted before the answer
CALL_OVERHEAD_S = 400e-6  # the transport's part of CALL_COST_S, which cannot be measured here
# Longest wait for the turn of a unary call; a longer one is refused.
CALL_WAIT_S_MAX = 2.0
REFUSAL_WAIT_S_MAX = 5.0  # for a refusal, which slows down a client that floods
REFUSALS_WAITING_MAX = 1500  # of one payer; further refusals are sent at once
# An attach to a request that does not run here: a database lookup, perhaps a relay.
LOOKUP_COST_S = 500e-6
# A request that was started and then refused by its model, the database or the queue.
REFUSAL_COST_S = 300e-6
START_FREE_S = 300e-6  # of parsing an admitted request; an ordinary one takes less
WAIT_S_MIN = 0.005  # shorter waits add up first, since the resolution of timers is a millisecond
# All streams wait while the event loop is blocked. Beyond this time in one piece, each second is
# charged more to its key, up to a factor.
STALL_S = 0.001
STALL_FACTOR_MAX = 64.0
# The same for work in a thread: libraries in C keep the interpreter for tens of milliseconds of it.
THREAD_STALL_S = 0.01
KEYS_MAX = 20_000  # keys and organizations; above it, those without debt are dropped
# An organization has this many shares of a key: a key that floods leaves half to the others.
ORGANIZATION_SHARES = 2.0
ADDRESS_SHARES = 0.4  # shares of a key for an address without a valid key
# Lag of a timer from which on all shares shrink; without lag they recover.
LATE_S = 0.0025
SHRINK, GROW = 0.7, 1.03
ROOM_MIN = 0.1
PATH_CHARS_MAX = 200  # in the log
READING_AGE_S_MAX = 0.001  # of a thread's processor time at the start of a piece of work
Value = TypeVar("Value")
Payer = Owner | str  # an API key with its organization, or an address

# Start of a piece of work: the time on the monotonic clock, and the thread's processor time, which
# was read at most `READING_AGE_S_MAX` before.
Started = tuple[float, float]

# Call or HTTP request that this task is handling.
CALL: ContextVar[Call | None] = ContextVar("visit", default=None)


class _Reading(threading.local):
    """Last reading of this thread's processor time, and when it was read."""

    at = -math.inf
    cpu_s = 0.0


_reading = _Reading()


def start_work() -> Started:
    """Begin to measure a piece of work of this thread, whose cost `work_s` returns."""
    now = time.monotonic()
    if now - _reading.at > READING_AGE_S_MAX:
        _reading.at, _reading.cpu_s = now, time.thread_time()
    return now, _reading.cpu_s


def work_s(started: Started) -> float:
    """Return the processor time of a piece of work so far: never less, at most a millisecond more.

    Reading the processor time is a system call of 1 to 2 µs, and a message has seven pieces of
    work. So time that passes during less than a millisecond counts as processor time.
    """
    at, cpu_s = started
    passed_s = time.monotonic() - at
    return passed_s if passed_s < READING_AGE_S_MAX else min(passed_s, time.thread_time() - cpu_s)


@dataclass(slots=True)
class WaitingCalls:
    """Waiting streams of one API key. They take turns: only the holder of `first` sleeps."""

    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0


class RateLimiter:
    """Accounts of processor time in one process, per API key, organization and address."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is the fraction of the event loop's time that one API key may use."""
        self._share = share
        self._clock = clock
        self.room = 1.0  # current fraction of each share, between `ROOM_MIN` and 1
        # A clock that runs at the rate `room`, so that refunds equal what was counted at any rate.
        self._now, self._advanced_at = 0.0, clock()
        # Time on that clock at which the debt is paid off, by number of a key or organization, or
        # by address.
        self._free_at: dict[int | str, float] = {}
        self._waiting: dict[int, WaitingCalls] = {}
        self._late_counts: dict[int | str, int] = {}  # waiting refusals

    def late(self, lag_s: float) -> None:
        """Adapt all shares to the lag of the event loop. Call this about every 50 ms.

        `lag_s` is how many seconds too late a timer fired.
        """
        self._advance()
        self.room = (
            max(self.room * SHRINK, ROOM_MIN) if lag_s > LATE_S else min(self.room * GROW, 1.0)
        )

    def _advance(self) -> float:
        """Advance the internal clock, which runs at the rate `room`, and return its time."""
        now = self._clock()
        self._now += (now - self._advanced_at) * self.room
        self._advanced_at = now
        return self._now

    def charge(self, owner: Payer, cost_s: float, held_s: float = 0.0) -> None:
        """Charge processor time to a key and its organization, or an address; negative to refund.

        `held_s` is further time that blocked the event loop in one piece; long blocks cost more.
        """
        cost_s += held_s if held_s <= STALL_S else dearer(held_s, STALL_S)
        accounts: tuple[tuple[int | str, float], ...]
        if isinstance(owner, str):
            accounts = ((owner, ADDRESS_SHARES * self._share),)
        else:
            organization_share = min(ORGANIZATION_SHARES * self._share, 1.0)
            accounts = (
                (owner.api_key_id.int, self._share),
                (owner.organization_id.int, organization_share),
            )
        read_at = self._clock()
        now = self._now = self._now + (read_at - self._advanced_at) * self.room  # as `_advance`
        self._advanced_at = read_at
        for each, share in accounts:
            earliest = now - BURST_S / share
            self._free_at[each] = max(self._free_at.get(each, earliest), earliest) + cost_s / share
        if len(self._free_at) > KEYS_MAX:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}

    def charge_in_thread(self, owner: Payer, cost_s: float) -> None:
        """Charge the processor time that work on one message took in a thread."""
        self.charge(owner, dearer(cost_s, THREAD_STALL_S))

    def read(self, owner: Payer, cost_s: float, byte_count: int) -> None:
        """Charge a parsed message: its size in bytes, and the seconds that parsing took."""
        self.charge(owner, BYTE_COST_S * byte_count, cost_s)
        if (call := CALL.get()) is not None:
            call.was_counted(cost_s)

    def charging(self, owner: Payer, free_s: float = 0.0) -> Charging:
        """Charge the processor time of the block, except the first `free_s`. It must not await."""
        return Charging(self, owner, free_s)

    def wait_s(self, owner: Payer) -> float:
        """Return how many seconds the payer has to wait until its charges are paid off."""
        if isinstance(owner, str):
            free_at = self._free_at.get(owner, -math.inf)
        else:
            key_id, organization_id = owner.api_key_id.int, owner.organization_id.int
            free_at = max(
                self._free_at.get(key_id, -math.inf), self._free_at.get(organization_id, -math.inf)
            )
        if free_at <= self._now:  # the common case, without reading the clock
            return 0.0
        return max(free_at - self._advance(), 0.0) / self.room

    async def wait_to_call(self, owner: Owner) -> None:
        """Wait until a unary call may run, and charge its cost. Raises: TooManyCalls.

        A refusal is charged too, and delayed as long as a call, to slow down immediate retries.
        """
        waiting = self._waiting.get(owner.api_key_id.int)
        waiting_count = 0 if waiting is None else waiting.waiting_count
        # At full room: a client within its share is not refused because others keep the event loop
        # busy.
        wait_s = self.wait_s(owner)
        ahead_s = wait_s * self.room + waiting_count * CALL_COST_S / self._share
        if ahead_s > CALL_WAIT_S_MAX:
            await self.refusal(owner)
            raise TooManyCalls(ahead_s)
        if waiting is not None or wait_s >= WAIT_S_MIN:
            await self.wait_for_share(owner)
        self.charge(owner, CALL_COST_S)

    async def refusal(self, owner: Payer) -> None:
        """Delay a refusal while its payer has to wait, by at most `REFUSAL_WAIT_S_MAX`."""
        line = owner if isinstance(owner, str) else owner.api_key_id.int
        if (wait_s := self.wait_s(owner)) < WAIT_S_MIN or self._late_counts.get(
            line, 0
        ) >= REFUSALS_WAITING_MAX:
            return
        self._late_counts[line] = self._late_counts.get(line, 0) + 1
        try:
            await asyncio.sleep(min(wait_s, REFUSAL_WAIT_S_MAX))
        finally:
            self._late_counts[line] -= 1
            if not self._late_counts[line]:
                del self._late_counts[line]

    async def wait_for_share(self, owner: Owner) -> bool:
        """Wait until the key may run its next slice of work. Return whether it had to wait.

        Streams of a key take turns: otherwise each new one would run its first slice at once, and
        all waiting streams would wake up together.
        """
        key_id = owner.api_key_id.int
        if key_id not in self._waiting and self.wait_s(owner) < WAIT_S_MIN:
            return False
        waiting = self._waiting.setdefault(key_id, WaitingCalls())
        waiting.waiting_count += 1
        try:
            # Released on return: the next stream runs when this slice is over.
            async with waiting.first:
                await asyncio.sleep(self.wait_s(owner))
        finally:
            waiting.waiting_count -= 1
            if not waiting.waiting_count:
                del self._waiting[key_id]
        return True


class Charging:
    """Context manager of `RateLimiter.charging`."""

    __slots__ = ("_free_s", "_owner", "_pace", "_started")

    def __init__(self, pace: RateLimiter, owner: Payer, free_s: float) -> None:
        self._pace = pace
        self._owner = owner
        self._free_s = free_s

    def __enter__(self) -> None:
        self._started = start_work()

    def __exit__(self, *error: object) -> None:
        if (cost_s := work_s(self._started) - self._free_s) > 0:
            self._pace.charge(self._owner, 0.0, cost_s)
            if (call := CALL.get()) is not None:
                call.was_counted(cost_s)


def dearer(seconds: float, stall_s: float) -> float:
    """Return the cost of work in one piece. Beyond `stall_s`, the cost per second rises."""
    return seconds * min(max(seconds / stall_s, 1.0), STALL_FACTOR_MAX)


class Call:
    """Call or HTTP request, with its payer and its cost on the event loop.

    The address pays until the API key is known. Administrators pay nothing, nor do admitted
    requests, which quotas bound.
    """

    def __init__(self, pace: RateLimiter, peer: str, path: str = "") -> None:
        """`peer` is the client in gRPC's notation, `path` the path of the call or HTTP request."""
        self._pace = pace
        self._peer = peer
        self._path = path
        self._owner: Owner | None = None
        self.is_free = False
        self._has_waited = False
        self._counted_s = 0.0
        self.work_s = 0.0

    def facts(self) -> Mapping[str, str]:
        """Implement `Doing.facts`."""
        path = {"path": self._path[:PATH_CHARS_MAX]}
        if self._owner is None:
            return {**path, "address": address_of(self._peer)}
        return {
            **path,
            "api_key_id": str(self._owner.api_key_id),
            "organization_id": str(self._owner.organization_id),
        }

    def belongs_to(self, owner: Owner, *, is_free: bool) -> None:
        """Make this key the payer. With `is_free`, the call is not charged."""
        self._owner = owner
        self.is_free = self.is_free or is_free

    async def wait_to_call(self) -> None:
        """Wait until the payer may call; only the first use waits. Raises: TooManyCalls."""
        if self.is_free or self._has_waited or self._owner is None:
            return
        self._has_waited = True
        await self._pace.wait_to_call(self._owner)
        self._counted_s += CALL_COST_S

    def was_counted(self, work_s: float) -> None:
        """Subtract work that was charged elsewhere, in seconds."""
        self.work_s -= work_s

    def on_admitted(self) -> None:
        """Refund the charges of an admitted request: quotas bound it from now on."""
        if not self.is_free:
            self.is_free = True
            self._pace.charge(self._payer, -self._counted_s)

    def count(self, cost_s: float) -> None:
        """Charge a part of the cost, in seconds, before the call ends."""
        self._counted_s += cost_s
        self._pace.charge(self._payer, cost_s)

    def over(self) -> None:
        """Charge the rest of the cost when the call has ended."""
        if not self.is_free and (cost_s := self.work_s + CALL_OVERHEAD_S - self._counted_s) > 0:
            self.count(cost_s)

    async def wait_for_share(self) -> None:
        """Delay a refusal if the call has not waited yet and its payer has to wait."""
        if not self.is_free and not self._has_waited:
            self._has_waited = True
            await self._pace.refusal(self._payer)

    @property
    def _payer(self) -> Payer:
        return address_of(self._peer) if self._owner is None else self._owner


@types.coroutine
def measured(call: Call, work: Coroutine[Any, Any, Value]) -> Generator[Any, Any, Value]:
    """Run a coroutine, and add the processor time of each of its steps to the call."""
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        CURRENT.work = call
        started = None if call.is_free else start_work()
        try:
            awaited = step(value)
        except StopIteration as done:
            result: Value = done.value
            return result
        finally:
            if started is not None:
                call.work_s += work_s(started)
            CURRENT.work = None
            value = None  # an error keeps this frame, which must not keep the error alive
        try:
            value = yield awaited
            step = work.send
        except BaseException as error:
            value, step = error, work.throw
