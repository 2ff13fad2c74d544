"""What is remembered of a key for a time without the database: nothing once it was revoked, and no longer than its secret lasts."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from api import auth
from api.auth import Authenticator
from metering.errors import StoreAway
from metering.store.db import create_engine, create_sessions
from metering.tenants.tenants import Principal

SECRET = "wk_12345678_" + "a" * 43
ALICE = Principal(uuid.uuid4(), "wk_12345678", uuid.uuid4(), uuid.uuid4(), "USD", frozenset({"inference"}))
GRACE_S = 100.0


class Context:
    """A call with a key."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {SECRET}"),)


class World:
    """A database that answers or does not, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.principal: Principal | None = ALICE
        self.now = 1000.0
        monkeypatch.setattr(auth, "authenticate", self._authenticate)
        monkeypatch.setattr(auth, "boot_time_s", lambda: self.now)
        sessions = create_sessions(create_engine("postgresql://nobody@localhost/nothing"))
        self.authenticator = Authenticator(sessions, grace_s=GRACE_S)

    async def _authenticate(self, session: Any, secret: str) -> Principal:
        if self.principal is None:
            raise StoreAway("the database does not answer")
        return self.principal

    async def call(self) -> Principal:
        """A call with the key."""
        context: Any = Context()
        return await self.authenticator.principal(context, "inference")


async def test_a_known_key_is_good_for_the_grace_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.call()
    world.principal = None

    world.now += GRACE_S
    assert await world.call() == ALICE
    world.now += 1
    with pytest.raises(StoreAway):
        await world.call()


async def test_a_revoked_key_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.call()
    world.authenticator.forget(uuid.uuid4())
    world.principal = None
    assert await world.call() == ALICE, "it was another key"

    world.authenticator.forget(ALICE.api_key_id)

    with pytest.raises(StoreAway):
        await world.call()


async def test_a_replaced_secret_is_not_good_beyond_its_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.principal = replace(ALICE, secret_lifetime_s=30.0)
    await world.call()
    world.principal = None

    world.now += 20
    assert (await world.call()).secret_lifetime_s == 10.0
    world.now += 10
    with pytest.raises(StoreAway):
        await world.call()
