"""The key of an open stream: looked at again from time to time, since a stream may outlive what it was let in with."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from api.errors import AuthenticationThrottled, PermissionDenied, Unauthenticated
from metering.errors import KeyInvalid, StoreAway
from metering.tenants.tenants import Principal


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
        self._refusal: Exception | None = None

    @property
    def principal(self) -> Principal:
        """Whose key it is, and what it was good for when it was last good."""
        return self._principal

    async def look_again(self) -> None:
        """Ask whether the key is still good, and for what, if the last answer is too old. Never raises what is found."""
        now = self._clock()
        if now - self._looked_at < self._interval_s:
            return
        try:
            self._principal, self._refusal = await self._look_up(), None
        except (KeyInvalid, PermissionDenied) as refusal:
            self._refusal = refusal
        except (StoreAway, AuthenticationThrottled):
            return  # nothing is known; the next message asks again
        self._looked_at = now

    def check(self) -> None:
        """Whether a request may begin. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        lifetime_s = self._principal.secret_lifetime_s
        if lifetime_s is not None and self._clock() >= self._looked_at + lifetime_s:
            raise Unauthenticated("the API key of this stream has expired or was rotated: open a stream with the new secret")
