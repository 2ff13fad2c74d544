"""API key of a client: a text, or a function that returns a short-lived token.

Decides when the function is called: at the first use, before the token expires, and after the
server has refused it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable

from weir_client import errors

FUNCTION_FAILED = "API_KEY_FUNCTION_FAILED"  # this client's reason
KeySource = str | Callable[[], str | Awaitable[str]]

RENEWED_BEFORE_S = 30.0  # before its expiry; a token that lives shorter, after four fifths of it


class CurrentKey:
    """Key that a connection sends. Create it in the event loop that uses it."""

    def __init__(self, given: KeySource) -> None:
        self._get = None if isinstance(given, str) else given
        self._is_due = self._get is not None
        self._renew_at = math.inf  # of the monotonic clock
        self._lock = asyncio.Lock()
        self.text = given if isinstance(given, str) else ""

    @property
    def is_renewable(self) -> bool:
        """True if a function returns the key."""
        return self._get is not None

    def refused(self, text: str) -> bool:
        """Forget a key that the server has refused. Return whether another one can be had."""
        self._is_due |= self.is_renewable and text == self.text
        return self.is_renewable

    async def renew(self) -> None:
        """Call the function if a key is missing or due; concurrent calls share one.

        Raises: Unauthenticated if the function fails.
        """
        if not self._due():
            return
        async with self._lock:
            if self._get is None or not self._due():
                return
            try:
                if inspect.iscoroutinefunction(self._get):
                    key = await self._get()
                else:  # it may block
                    key = await asyncio.to_thread(self._get)
                    key = await key if inspect.isawaitable(key) else key
            except Exception as error:
                raise errors.Unauthenticated(
                    f"the function api_key failed: {error!r}", reason=FUNCTION_FAILED
                ) from error
            self.text = checked_key(key, FUNCTION_FAILED)
            self._is_due = False
            self._renew_at = time.monotonic() + _lifetime_s(self.text)

    def _due(self) -> bool:
        return self._is_due or time.monotonic() >= self._renew_at


def checked_key(key: object, reason: str = "") -> str:
    """Return a key without white space around it. Raises: Unauthenticated."""
    if not isinstance(key, str):
        raise errors.Unauthenticated(
            f"the API key must be a string, not {type(key).__name__}", reason=reason
        )
    if not key.isascii():
        raise errors.Unauthenticated(
            "the API key holds characters that no key has; was it copied in full?", reason=reason
        )
    return key.strip()


def _lifetime_s(token: str) -> float:
    """Return the seconds for which to use a token: unlimited if it does not tell its expiry.

    A token that has expired by this machine's clock is used too: the clock may be wrong.
    """
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "==")) if len(parts) == 3 else {}
        lifetime_s = float(claims["exp"]) - time.time()
    except (ValueError, TypeError, KeyError, binascii.Error, RecursionError):
        return math.inf
    return max(lifetime_s - RENEWED_BEFORE_S, lifetime_s * 0.8) if lifetime_s > 0 else math.inf
