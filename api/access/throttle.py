"""Throttling of failed authentications by address, shared between processes.

An address may have a number of failures at once, and the same number per minute. Above that, its
secrets are no longer looked up, which keeps floods of wrong keys from the database. A secret of 256
bits cannot be guessed, so no key is ever locked. Keys that were valid before are never throttled,
since a whole company may share one address.
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

ADDRESSES_MAX = 10_000  # some 500 bytes each; beyond it the least recently seen address is dropped
# Failures: a caller that returns on time must not be refused because of a rounding error.
ROUNDING = 1e-6
ADDRESS_BYTES = 60  # of one address with its count, at most
# Addresses with most failures come first; the rest follows in the next broadcast.
ADDRESSES_AT_ONCE = BYTES_MAX // ADDRESS_BYTES - 1

log = structlog.get_logger(__name__)


class Bucket:
    """Leaky bucket of the failures of one address.

    `failure_count` is its current level, and `under_way_count` the number of lookups that may still
    fail. `holder_count` counts all attempts that use the bucket, even waiting ones.
    """

    def __init__(self, now: float) -> None:
        self.failure_count = 0.0
        self.under_way_count = 0
        self.holder_count = 0
        self.drained_at = now
        self.is_refused = False
        self.changed = asyncio.Event()

    def drain(self, now: float, per_s: float) -> None:
        """Lower the level at the rate `per_s` for the time since the last call."""
        self.failure_count = max(0.0, self.failure_count - (now - self.drained_at) * per_s)
        self.drained_at = now

    def ended(self) -> None:
        self.under_way_count -= 1
        self.changed.set()
        self.changed = asyncio.Event()


class Throttle:
    """Limit of failed authentications per address, as counted in one process."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """An address may fail `per_minute` times at once, and as often per minute; 0: no limit."""
        self._most = per_minute
        self._per_s = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # most recently seen last
        self._unshared: Counter[str] = Counter()  # failures seen here that were not broadcast yet

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def refused_count(self) -> int:
        """Number of addresses that were refused and have not been quiet since then."""
        now = self._clock()
        refused = [bucket for bucket in self._buckets.values() if bucket.is_refused]
        for bucket in refused:
            bucket.drain(now, self._per_s)
        return sum(not self._is_quiet(bucket) for bucket in refused)

    @contextlib.asynccontextmanager
    async def attempt(self, peer: str, is_known: Callable[[], bool]) -> AsyncIterator[None]:
        """Guard the lookup of a secret. A KeyInvalid raised in the block counts as a failure.

        `peer` is the client in gRPC's notation. `is_known` returns whether the secret was valid
        before; it is called again after each wait, because the number of concurrent lookups is
        limited to the failures that are left. Raises: AuthenticationThrottled.
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
            self.failed(peer)
            raise
        finally:
            if counted:
                bucket.ended()
            bucket.holder_count -= 1
            # An address keeps its bucket while an attempt uses it; a new bucket would lose its
            # failures.
            if (
                not bucket.holder_count
                and not bucket.failure_count
                and self._buckets.get(address) is bucket
            ):
                del self._buckets[address]

    def failed(self, peer: str) -> None:
        """Count a failed authentication of this peer."""
        if not self._most:
            return
        address = address_of(peer)
        self._count(self._bucket(address), 1)  # a new one if the address was dropped meanwhile
        if address in self._unshared or len(self._unshared) < ADDRESSES_MAX:
            self._unshared[address] += 1

    def take_unshared(self, address_count_max: int) -> dict[str, int]:
        """Remove and return failures that were not broadcast yet, by address.

        Takes the addresses with the most failures if there are more than `address_count_max`.
        """
        taken = dict(self._unshared.most_common(address_count_max))
        for address in taken:
            del self._unshared[address]
        return taken

    def add(self, counts: Mapping[str, int]) -> None:
        """Add failures that other processes have counted, by address."""
        if not self._most:
            return
        for address, count in counts.items():
            self._count(self._bucket(address), max(count, 0))

    def _count(self, bucket: Bucket, failure_count: int) -> None:
        bucket.drain(self._clock(), self._per_s)
        bucket.failure_count = min(bucket.failure_count + failure_count, float(self._most))

    async def _enter(self, address: str, bucket: Bucket, is_known: Callable[[], bool]) -> bool:
        """Wait until the address may look up another secret.

        Returns True if the attempt is counted, and False if the secret turned out to be known.
        Raises: AuthenticationThrottled.
        """
        while not is_known():
            bucket.drain(self._clock(), self._per_s)
            room = self._most - bucket.failure_count
            if room < 1 - ROUNDING:
                if not bucket.is_refused:
                    bucket.is_refused = True
                    log.warning(
                        "authentication_throttled", address=address, failures_per_minute=self._most
                    )
                raise AuthenticationThrottled((1 - room) / self._per_s)
            # Log the next refusal after a quiet period.
            bucket.is_refused = bucket.is_refused and not self._is_quiet(bucket)
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
    """Broadcast message with failures by address. `owner` is the process that counted them."""

    owner: str
    counts: dict[str, int]


class SharedFailures:
    """Broadcaster of a throttle's failures to other processes. Implements `Broadcaster`."""

    def __init__(self, throttle: Throttle, process_id: uuid.UUID) -> None:
        """`process_id` identifies this process, so that it ignores its own broadcasts."""
        self._throttle = throttle
        self._owner = process_id.hex

    def next_broadcast(self) -> str:
        counts = self._throttle.take_unshared(ADDRESSES_AT_ONCE)
        return msgspec.json.encode(Failures(self._owner, counts)).decode() if counts else ""

    def receive(self, text: str) -> None:
        try:
            failures = msgspec.json.decode(text, type=Failures)
        except msgspec.MsgspecError as error:  # from a process of another version
            log.info("failures_unread", cause=str(error))
            return
        if failures.owner != self._owner:
            self._throttle.add(failures.counts)
