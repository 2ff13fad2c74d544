"""Key of an open stream: intervals of its checks, and its rights in between."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from api.access.auth import StreamKey
from api.core.errors import AuthenticationThrottled, PermissionDenied, Unauthenticated
from metering.core.errors import DatabaseUnavailable, KeyInvalid
from metering.tenants.authentication import Principal

ALICE = Principal(
    uuid.uuid4(), "wk_12345678", uuid.uuid4(), uuid.uuid4(), "USD", frozenset({"inference"})
)
INTERVAL_S = 60.0


class World:
    """Clock, and the result of a look-up."""

    def __init__(self, found: Principal = ALICE) -> None:
        self.now = 1000.0
        self.found: Principal | Exception = found
        self.requested = 0
        self.key = StreamKey(found, self._look_up, INTERVAL_S, clock=lambda: self.now)

    async def _look_up(self) -> Principal:
        self.requested += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def message(self, after_s: float) -> None:
        """Send the next message of the stream; raise the refusal of its request."""
        self.now += after_s
        await self.key.refresh()
        self.key.check()


async def test_it_is_requested_once_per_interval_and_only_when_something_comes() -> None:
    world = World()
    for after_s in (1.0, INTERVAL_S - 1.1, 0.2, 1.0, 10 * INTERVAL_S):
        await world.message(after_s)

    assert world.requested == 2


@pytest.mark.parametrize(
    "refusal", [KeyInvalid("the API key is not valid"), PermissionDenied("not for this")]
)
async def test_a_refusal_holds_until_the_key_is_good_again(refusal: Exception) -> None:
    world = World()
    world.found = refusal
    await world.message(INTERVAL_S / 2)
    for after_s in (INTERVAL_S, 1.0):
        with pytest.raises(type(refusal)):
            await world.message(after_s)
    assert world.requested == 1
    world.found = limited = replace(ALICE, models=frozenset({"small"}))

    await world.message(INTERVAL_S)

    assert world.key.principal == limited


@pytest.mark.parametrize("away", [DatabaseUnavailable("away"), AuthenticationThrottled(1.0)])
async def test_without_an_answer_it_stays_as_it_was_and_is_read_again(away: Exception) -> None:
    world = World()
    world.found = away
    await world.message(INTERVAL_S)
    await world.message(0.1)

    assert world.requested == 2
    assert world.key.principal == ALICE


async def test_a_replaced_secret_ends_when_it_was_to() -> None:
    world = World(replace(ALICE, secret_lifetime_s=90.0))
    world.found = replace(ALICE, secret_lifetime_s=30.0)
    await world.message(INTERVAL_S)
    await world.message(29.0)
    with pytest.raises(Unauthenticated, match="rotated"):
        await world.message(1.0)
