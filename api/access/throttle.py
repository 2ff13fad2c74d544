"""Failed authentications by address: so many at once and per minute, and then nothing is looked up for it any more.

It keeps floods of wrong keys from the database. Nobody guesses a secret of 256 bits, so no key is ever locked, and keys that were
good before pass whatever comes from their address: behind one address there may be a whole company. Owns the counts of this
process, for so many addresses and no more; `auth.py` brings those of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
import structlog
from msgspec import Struct

from api.core.addresses import address_of
from api.core.errors import AuthenticationThrottled
from metering.control.control_channel import BYTES_MAX
from metering.core.errors import KeyInvalid

ADDRESSES_MAX = 10_000  # some 500 bytes each; beyond it the address that came least recently is forgotten
ROUNDING = 1e-6  # failures: who comes when it was told must not be early by the last digit of a float

log = structlog.get_logger(__name__)

ADDRESS_BYTES = 60  # of one address with its count, at most
ADDRESSES_AT_ONCE = BYTES_MAX // ADDRESS_BYTES - 1  # those with most failures first, the others the next time


class Bucket:
    """One address. failure_count: those that have not drained yet; under_way_count: attempts that may still fail.

    holder_count: attempts that know this bucket, whether they wait, are under way, or are let in as known.
    """

    def __init__(self, now: float) -> None:
        self.failure_count = 0.0
        self.under_way_count = 0
        self.holder_count = 0
        self.drained_at = now
        self.is_refused = False
        self.changed = asyncio.Event()

    def drain(self, now: float, per_s: float) -> None:
        """Let failures go as time passes."""
        self.failure_count = max(0.0, self.failure_count - (now - self.drained_at) * per_s)
        self.drained_at = now

    def ended(self) -> None:
        self.under_way_count -= 1
        self.changed.set()
        self.changed = asyncio.Event()


class Throttle:
    """The counts of one process."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """per_minute: failures that an address may have, all at once or one by one; 0: any number."""
        self._most = per_minute
        self._per_s = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # the one that came last stands last
        self._untold: Counter[str] = Counter()  # failures here that the other processes have not been told of

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def refused_count(self) -> int:
        """Addresses that have been refused, and were not quiet since."""
        now = self._clock()
        refused = [bucket for bucket in self._buckets.values() if bucket.is_refused]
        for bucket in refused:
            bucket.drain(now, self._per_s)
        return sum(not self._is_quiet(bucket) for bucket in refused)

    @contextlib.asynccontextmanager
    async def attempt(self, peer: str, is_known: Callable[[], bool]) -> AsyncIterator[None]:
        """A block in which a secret is looked up; KeyInvalid out of it counts against the address.

        peer: as gRPC names it. is_known: whether the secret was good before, which may turn out while others are waited for, since
        no more attempts are under way than may fail. Raises: AuthenticationThrottled.
        """
        if not self._most:
            yield
            return
        address = address_of(peer)
        bucket = self._bucket(address)
        bucket.holder_count += 1
        counted = False
        try:
            counted = await self._enter(address, bucket, is_known)
            yield
        except KeyInvalid:
            self._count(self._bucket(address), 1)  # another one, if so many addresses came meanwhile that this one was forgotten
            if address in self._untold or len(self._untold) < ADDRESSES_MAX:
                self._untold[address] += 1
            raise
        finally:
            if counted:
                bucket.ended()
            bucket.holder_count -= 1
            # An address has one bucket as long as anybody holds it: failures in another one would be forgotten with it.
            if not bucket.holder_count and not bucket.failure_count and self._buckets.get(address) is bucket:
                del self._buckets[address]

    def take_untold(self, address_count_max: int) -> dict[str, int]:
        """Failures of this process that were not given out before, by address; those with most of them first."""
        taken = dict(self._untold.most_common(address_count_max))
        for address in taken:
            del self._untold[address]
        return taken

    def add(self, counts: Mapping[str, int]) -> None:
        """Count failures that others have seen."""
        if not self._most:
            return
        for address, count in counts.items():
            self._count(self._bucket(address), max(count, 0))

    def _count(self, bucket: Bucket, failure_count: int) -> None:
        bucket.drain(self._clock(), self._per_s)
        bucket.failure_count = min(bucket.failure_count + failure_count, float(self._most))

    async def _enter(self, address: str, bucket: Bucket, is_known: Callable[[], bool]) -> bool:
        """Wait for room among the attempts of the address; whether this one is counted among them.

        Raises: AuthenticationThrottled.
        """
        while not is_known():
            bucket.drain(self._clock(), self._per_s)
            room = self._most - bucket.failure_count
            if room < 1 - ROUNDING:
                if not bucket.is_refused:
                    bucket.is_refused = True
                    log.warning("authentication_throttled", address=address, failures_per_minute=self._most)
                raise AuthenticationThrottled((1 - room) / self._per_s)
            bucket.is_refused = bucket.is_refused and not self._is_quiet(bucket)  # logged again once it was quiet for a while
            if bucket.under_way_count < int(room + ROUNDING):
                bucket.under_way_count += 1
                return True
            await bucket.changed.wait()
        return False

    def _is_quiet(self, bucket: Bucket) -> bool:
        return self._most - bucket.failure_count >= self._most / 2

    def _bucket(self, address: str) -> Bucket:
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = Bucket(self._clock())
            if len(self._buckets) > ADDRESSES_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(address)
        return bucket


class Failures(Struct, forbid_unknown_fields=True):
    """One text. owner: the process that has seen them. counts: by address."""

    owner: str
    counts: dict[str, int]


class SharedFailures:
    """The `Gossip` of a throttle."""

    def __init__(self, throttle: Throttle, owner_id: uuid.UUID) -> None:
        """owner_id: this process, which hears itself."""
        self._throttle = throttle
        self._owner = owner_id.hex

    def told(self) -> str:
        counts = self._throttle.take_untold(ADDRESSES_AT_ONCE)
        return msgspec.json.encode(Failures(self._owner, counts)).decode() if counts else ""

    def heard(self, text: str) -> None:
        try:
            failures = msgspec.json.decode(text, type=Failures)
        except msgspec.MsgspecError as error:  # of a process of another version
            log.info("failures_unread", cause=str(error))
            return
        if failures.owner != self._owner:
            self._throttle.add(failures.counts)
