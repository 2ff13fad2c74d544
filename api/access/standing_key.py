"""The key of an open stream, which may outlive what it was let in with: looked at again at times, and when it has changed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from api.core.errors import AddressNotAllowed, AuthenticationThrottled, KeyRevokedMidway, PermissionDenied, Unauthenticated
from metering.core.errors import KeyInvalid, StoreAway
from metering.tenants.networks import Network, allows
from metering.tenants.tenants import Principal

SECRET_REPLACED = "the secret of the API key that this request was begun with was replaced: use the new one"


def tell_nobody(_: Exception) -> None:
    """Of a key that nothing is open with."""


class StandingKey:
    """What the key allows as far as is known. A refusal holds for what begins from then on; what runs goes on."""

    def __init__(
        self,
        principal: Principal,
        look_up: Callable[[], Awaitable[Principal]],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """principal: as found just now. look_up: finds it again. interval_s: how old an answer may be."""
        self._principal = principal
        self._look_up = look_up
        self._interval_s = interval_s
        self._clock = clock
        self._looked_at = clock()
        self._is_stale = False
        self._refusal: Exception | None = None
        self.on_shut_out: Callable[[Exception], None] = tell_nobody  # called if it may not be used from there any more

    @property
    def principal(self) -> Principal:
        """Whose key it is, and what it was good for when it was last good."""
        return self._principal

    async def look_again(self) -> None:
        """Ask whether the key is still good, and for what, if the last answer is too old. Never raises what is found."""
        now = self._clock()
        if now - self._looked_at < self._interval_s and not self._is_stale:
            return
        self._is_stale = False  # before: what changes meanwhile is looked at again
        try:
            self._principal, self._refusal = await self._look_up(), None
        except (KeyInvalid, PermissionDenied) as refusal:
            self._refusal = refusal
        except (StoreAway, AuthenticationThrottled):
            self._is_stale = True
            return  # nothing is known; the next message asks again
        self._looked_at = now

    def change(self, networks: Sequence[Network], ended_secrets: Collection[bytes] = ()) -> None:
        """The key has changed: the next message looks at it. networks: from outside of these nothing goes on.

        ended_secrets: hashes of secrets with which nothing goes on.
        """
        self._is_stale = True
        principal = self._principal
        if principal.secret_hash in ended_secrets:
            self._refusal = KeyRevokedMidway(SECRET_REPLACED)
            self.on_shut_out(self._refusal)
        elif not allows(networks, principal.address):
            self._refusal = AddressNotAllowed(principal.address)
            self.on_shut_out(self._refusal)

    def check(self) -> None:
        """Whether a request may begin. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        lifetime_s = self._principal.secret_lifetime_s
        if lifetime_s is not None and self._clock() >= self._looked_at + lifetime_s:
            raise Unauthenticated("the API key of this stream has expired or was rotated: open a stream with the new secret")


class StandingKeys:
    """Those of all that is open, by key."""

    def __init__(self) -> None:
        self._open: dict[uuid.UUID, set[StandingKey]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @contextlib.contextmanager
    def hold(self, key: StandingKey) -> Iterator[StandingKey]:
        """For the block, the key hears of changes."""
        api_key_id = key.principal.api_key_id
        self._open.setdefault(api_key_id, set()).add(key)
        try:
            yield key
        finally:
            held = self._open[api_key_id]
            held.discard(key)
            key.on_shut_out = tell_nobody  # a stream that has ended goes at once, without a collector
            if not held:
                del self._open[api_key_id]

    def changed(self, api_key_id: uuid.UUID, networks: Sequence[Network], ended_secrets: Collection[bytes] = ()) -> None:
        """Tell all that is open with a key."""
        for key in tuple(self._open.get(api_key_id, ())):
            key.change(networks, ended_secrets)
