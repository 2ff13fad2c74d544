"""Cached keys without the database: not after a revocation, and not beyond the key's expiry."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import pytest

from api.access import auth
from api.access import auth as key_changes
from api.access.auth import Authenticator
from api.core.addresses import Origin
from api.core.errors import AddressNotAllowed, OrganizationSuspended, PermissionDenied
from api.core.interceptor import METHOD
from metering.core.errors import DatabaseUnavailable, KeyInvalid
from metering.store.db import create_engine, create_sessions
from metering.tenants.authentication import Principal, Suspended, authenticate
from metering.tenants.networks import networks_of, parse_address

SECRET = "wk_12345678_" + "a" * 43
ALICE = Principal(
    uuid.uuid4(), "wk_12345678", uuid.uuid4(), uuid.uuid4(), "USD", frozenset({"inference"})
)
GRACE_S = 100.0


METHOD.set("/weir.v1.InferenceService/GetQuota")


class Context:
    """Call with a key."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {SECRET}"),)

    def peer(self) -> str:
        return "ipv4:192.0.2.1:4711"


class World:
    """Database that may be unavailable, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.principal: Principal | None = ALICE
        self.now = 1000.0
        monkeypatch.setattr(auth, "authenticate", self._authenticate)
        monkeypatch.setattr(auth, "boot_time_s", lambda: self.now)
        sessions = create_sessions(create_engine("postgresql://nobody@localhost/nothing"))
        self.authenticator = Authenticator(sessions, grace_s=GRACE_S)

    async def _authenticate(self, session: Any, secret: str) -> Principal:
        if self.principal is None:
            raise DatabaseUnavailable("the database does not answer")
        return self.principal

    async def call(self) -> Principal:
        """Authenticate a call with the key."""
        context: Any = Context()
        return await self.authenticator.principal(context)


async def test_a_known_key_is_valid_for_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.call()
    world.principal = None

    world.now += GRACE_S
    assert await world.call() == ALICE
    world.now += 1
    with pytest.raises(DatabaseUnavailable):
        await world.call()


async def test_a_revoked_key_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.call()
    world.authenticator.changed(uuid.uuid4())
    world.principal = None
    assert await world.call() == ALICE, "it was another key"

    world.authenticator.changed(ALICE.api_key_id)

    with pytest.raises(DatabaseUnavailable):
        await world.call()
    monkeypatch.setattr(key_changes, "KEYS_MAX", 3)
    for _ in range(10):
        world.authenticator.changed(uuid.uuid4())
    with pytest.raises(DatabaseUnavailable):
        await world.call()


async def test_a_replaced_secret_ends_with_its_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.principal = replace(ALICE, secret_lifetime_s=30.0)
    await world.call()
    world.principal = None

    world.now += 20
    assert (await world.call()).secret_lifetime_s == 10.0
    world.now += 10
    with pytest.raises(DatabaseUnavailable):
        await world.call()


async def test_a_maximum_age_excludes_older_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.principal = replace(ALICE, secret_lifetime_s=2.5)
    peer: Any = {"method": METHOD.get(), "origin": Origin("unix:", None), "age_max_s": 1.0}
    await world.call()
    changed = world.principal = replace(
        ALICE, scopes=frozenset({"inference", "billing"}), secret_lifetime_s=1.5
    )

    world.now += 1.0
    known = await world.authenticator.principal_of(SECRET, **peer)
    world.now += 0.5
    requested = await world.authenticator.principal_of(SECRET, **peer)
    world.now += 0.5
    again = await world.authenticator.principal_of(SECRET, **peer)

    assert (known.scopes, known.secret_lifetime_s) == (ALICE.scopes, 1.5)
    assert (requested, again) == (changed, replace(changed, secret_lifetime_s=1.0))
    world.principal = replace(ALICE, secret_lifetime_s=0.25)
    assert await world.call() == world.principal, "who says nothing is never told what was known"
    world.now += 0.5
    world.principal = changed
    assert await world.authenticator.principal_of(SECRET, **peer) == changed, (
        "the known secret has ended"
    )
    world.authenticator.changed(ALICE.api_key_id)
    world.principal = ALICE
    assert await world.authenticator.principal_of(SECRET, **peer) == ALICE


class SlowKeys:
    """Database of one key that answers on demand, with the state at the time of the query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.principal: Principal | None = ALICE
        self.requested: list[asyncio.Event] = []
        monkeypatch.setattr(auth, "authenticate", self._authenticate)
        self.authenticator = Authenticator(
            create_sessions(create_engine("postgresql://nobody@localhost/nothing"))
        )

    async def _authenticate(self, session: Any, secret: str) -> Principal:
        found, answer = self.principal, asyncio.Event()
        self.requested.append(answer)
        await answer.wait()
        if found is None:
            raise KeyInvalid("the API key is not valid")
        return found

    def call(self, tasks: asyncio.TaskGroup) -> asyncio.Task[Principal | KeyInvalid]:
        """Start a call with the key; its result is the principal or the refusal."""

        async def attempt() -> Principal | KeyInvalid:
            context: Any = Context()
            try:
                return await self.authenticator.principal(context)
            except KeyInvalid as refusal:
                return refusal

        return tasks.create_task(attempt())

    async def settle(self) -> None:
        """Run all tasks until they block."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_each_call_has_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    near, far = (
        Origin(f"ipv4:{host}:1", parse_address(host)) for host in ("192.0.2.1", "198.51.100.7")
    )

    for origin in (near, far, far, near, Origin("unix:", None), near):
        found = await world.authenticator.principal_of(
            SECRET, method=METHOD.get(), origin=origin, age_max_s=1.0
        )

        assert (found.address, found.api_key_id) == (origin.address, ALICE.api_key_id)


async def test_calls_that_come_at_once_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = SlowKeys(monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        calls = [keys.call(tasks)]
        await keys.settle()
        calls += [keys.call(tasks) for _ in range(500)]
        await keys.settle()
        assert len(keys.requested) == 1
        keys.requested[0].set()
        await keys.settle()
        assert calls[0].done()
        assert not calls[1].done(), "the first check began before it came"
        keys.requested[1].set()

    assert [call.result() for call in calls] == [ALICE] * 501
    assert len(keys.requested) == 2
    assert not len(keys.authenticator._lookups)


async def test_a_revocation_beats_a_pending_check(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = SlowKeys(monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        before = keys.call(tasks)
        await keys.settle()
        keys.principal = None
        after = [keys.call(tasks) for _ in range(3)]
        await keys.settle()
        keys.requested[0].set()
        await keys.settle()
        keys.requested[1].set()

    assert before.result() == ALICE
    assert [type(call.result()) for call in after] == [KeyInvalid] * 3


async def test_a_caller_of_shared_work_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = SlowKeys(monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        first = keys.call(tasks)
        await keys.settle()
        second, third = keys.call(tasks), keys.call(tasks)
        first.cancel()
        await keys.settle()
        second.cancel()
        await keys.settle()
        keys.requested[-1].set()

    assert (first.cancelled(), second.cancelled(), third.result()) == (True, True, ALICE)


class BoundKeys:
    """Database of one bound key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.principal: Principal | None = replace(
            ALICE, networks=networks_of(("192.0.2.0/24",)), scopes=frozenset({"role:viewer"})
        )
        self.lookup_count = 0
        monkeypatch.setattr(auth, "authenticate_bound", self._authenticate)
        sessions = create_sessions(create_engine("postgresql://nobody@localhost/nothing"))
        self.authenticator = Authenticator(sessions, failures_per_minute=3)

    async def _authenticate(self, session: Any, api_key_id: uuid.UUID) -> Principal:
        assert api_key_id == ALICE.api_key_id
        self.lookup_count += 1
        if self.principal is None:
            raise KeyInvalid
        return self.principal

    async def call(
        self,
        method: str = "/weir.v1.AdminService/ListApiKeys",
        address: str = "192.0.2.1",
        age_max_s: float = 0.0,
    ) -> Principal:
        origin = Origin(f"ipv4:{address}:1", parse_address(address))
        return await self.authenticator.principal_of_bound_key(
            ALICE.api_key_id, method=method, origin=origin, age_max_s=age_max_s
        )


async def test_a_bound_key_is_checked_like_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BoundKeys(monkeypatch)

    found = await keys.call()

    assert (found.api_key_id, str(found.address)) == (ALICE.api_key_id, "192.0.2.1")
    with pytest.raises(AddressNotAllowed):
        await keys.call(address="198.51.100.7")
    with pytest.raises(PermissionDenied, match=r"keys\.create"):
        await keys.call("/weir.v1.AdminService/CreateApiKey")
    suspended = Suspended(of_organization=True, reason="unpaid", by_operator=True)
    keys.principal = replace(ALICE, suspended=suspended)
    with pytest.raises(OrganizationSuspended, match="unpaid"):
        await keys.call("/weir.v1.InferenceService/GetQuota")


async def test_a_bound_key_is_remembered_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BoundKeys(monkeypatch)
    for _ in range(3):
        await keys.call(age_max_s=1.0)
    assert keys.lookup_count == 1

    keys.authenticator.changed(ALICE.api_key_id, is_revoked=True)
    keys.principal = None

    with pytest.raises(KeyInvalid):
        await keys.call(age_max_s=1.0)


async def test_the_id_of_a_bound_key_is_not_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered key does not serve a caller that sends its id."""
    keys = BoundKeys(monkeypatch)
    await keys.call()
    monkeypatch.setattr(auth, "authenticate", authenticate)
    origin = Origin("ipv4:192.0.2.1:1", parse_address("192.0.2.1"))

    for secret in (str(ALICE.api_key_id), ALICE.key_prefix, ALICE.api_key_id.bytes.hex()):
        with pytest.raises(KeyInvalid):
            await keys.authenticator.principal_of(
                secret, method="/weir.v1.AdminService/ListApiKeys", origin=origin, age_max_s=9.0
            )
