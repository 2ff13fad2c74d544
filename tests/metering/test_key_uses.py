"""Last uses of keys: one statement for all, monotonic, and without delay for requests."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime, timedelta

import pytest
from sqlalchemy import event, text

from metering.core.errors import DatabaseUnavailable, InvalidValue
from metering.store.db import Sessions, create_engine, create_sessions
from metering.tenants import key_uses
from metering.tenants.api_keys import (
    create_api_key,
    find_api_key,
    list_api_keys,
    revoke_api_key,
    rotate_api_key,
)
from metering.tenants.authentication import authenticate
from metering.tenants.key_uses import KeyUses
from tests.metering.hold_world import Clock
from tests.metering.queries import fetch_value
from tests.metering.usage import Customer


async def used_at(sessions: Sessions, key_id: uuid.UUID) -> datetime | None:
    """Return the last use of the key."""
    async with sessions() as session:
        return (await find_api_key(session, str(key_id))).last_used_at


async def test_a_use_is_written_with_its_own_time_and_only_moves_forward(
    sessions: Sessions, customer: Customer
) -> None:
    """Two processes write the same key in any order, the later use first."""
    clock, other_clock = Clock(), Clock()
    uses, others = KeyUses(sessions, 60.0, clock), KeyUses(sessions, 60.0, other_clock)
    assert await used_at(sessions, customer.key.id) is None

    others.note(customer.key.id)
    other_clock.now += 500
    uses.note(customer.key.id)
    clock.now += 3
    await uses.write()
    first = await used_at(sessions, customer.key.id)
    await others.write()
    after_older = await used_at(sessions, customer.key.id)
    uses.note(customer.key.id)
    await uses.write()
    last = await used_at(sessions, customer.key.id)

    assert first is not None
    assert last is not None
    assert after_older == first
    assert last > first
    now = await fetch_value(sessions, "SELECT now()")
    assert timedelta(seconds=3) <= now - first


async def test_nothing_is_written_between_two_writes_and_nothing_of_keys_that_were_not_used(
    sessions: Sessions, customer: Customer
) -> None:
    uses = KeyUses(sessions, 60.0, Clock())
    await uses.write()
    for _ in range(1000):
        uses.note(customer.key.id)

    assert len(uses) == 1
    assert await used_at(sessions, customer.key.id) is None
    await uses.write()
    assert len(uses) == 0


async def test_a_write_that_waits_holds_up_neither_authentication_nor_changes_of_the_key(
    sessions: Sessions, customer: Customer
) -> None:
    uses = KeyUses(sessions, 60.0, Clock())
    uses.note(customer.key.id)
    await uses.write()
    async with sessions.begin() as blocker:
        await blocker.execute(text("SELECT FROM api_key_uses FOR UPDATE"))
        uses.note(customer.key.id)
        writing = asyncio.create_task(uses.write())
        async with sessions.begin() as session:
            await authenticate(session, customer.secret)
            await rotate_api_key(session, api_key=customer.key.prefix, actor="ann")
        assert not writing.done()
    await writing

    assert len(uses) == 0


async def test_unwritten_uses_are_bounded_and_the_latest_keys_are_kept(
    sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_uses, "KEYS_MAX", 3)

    class Away:
        def begin(self) -> None:
            raise DatabaseUnavailable("the database does not answer")

    away: Sessions = Away()  # type: ignore[assignment]  # of a database that does not answer
    uses = KeyUses(away, 60.0, Clock())
    for _ in range(5):
        uses.note(uuid.uuid4())
    await uses.write()
    uses.note(customer.key.id)
    assert len(uses) == 3

    uses._sessions = sessions
    for stranger in [each for each in uses._noted if each != customer.key.id]:
        del uses._noted[stranger]
    await uses.write()

    assert await used_at(sessions, customer.key.id) is not None


async def test_a_database_that_is_read_only_for_now_ends_nothing(database_url: str) -> None:
    """A server whose slot went to another one: the next write tells the same."""
    engine = create_engine(database_url)
    event.listen(
        engine.sync_engine,
        "begin",
        lambda connection: connection.exec_driver_sql("SET TRANSACTION READ ONLY"),
    )
    uses = KeyUses(create_sessions(engine), 60.0, Clock())
    uses.note(uuid.uuid4())

    await uses.write()
    await engine.dispose()

    assert len(uses) == 1


async def test_many_keys_at_once_are_written_before_the_interval_is_over(
    sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_uses, "WRITE_EARLY_AT", 1)
    monkeypatch.setattr(key_uses, "INTERVAL_MIN_S", 0.001)
    uses = KeyUses(sessions, 3600.0, Clock())
    running = asyncio.create_task(uses.run())
    uses.note(customer.key.id)

    async with asyncio.timeout(60):
        while await used_at(sessions, customer.key.id) is None:
            pass
    running.cancel()


async def test_keys_are_unused_only_if_it_is_known(sessions: Sessions, customer: Customer) -> None:
    made = {}
    async with sessions.begin() as session:
        names = (
            "used lately",
            "used long ago",
            "never used",
            "too young",
            "older than the notes",
            "revoked",
        )
        for name in names:
            key, _ = await create_api_key(
                session,
                organization=customer.name,
                project=str(customer.key.project_id),
                name=name,
                actor="ann",
            )
            made[name] = key.id
        await revoke_api_key(session, api_key=str(made["revoked"]), actor="ann")
        for name, age in (("used lately", "89 days"), ("used long ago", "91 days")):
            statement = text(
                "INSERT INTO api_key_uses VALUES (:id, now() - CAST(:age AS interval))"
            )
            await session.execute(statement, {"id": made[name], "age": age})
        young = {"too young", "older than the notes"}
        for name, key_id in made.items():
            known, created = (
                "1 day" if name in young else "200 days",
                "1 day" if name == "too young" else "200 days",
            )
            aging = (
                "UPDATE api_keys SET created_at = now() - CAST(:c AS interval),"
                " uses_tracked_since = now() - CAST(:k AS interval)"
            )
            await session.execute(
                text(f"{aging} WHERE id = :id"), {"id": key_id, "c": created, "k": known}
            )
    async with sessions() as session:
        found = (
            await list_api_keys(session, organization=customer.name, unused_for=timedelta(days=90))
        )[0]
        one = (await list_api_keys(session, api_key=customer.key.prefix))[0]
        with pytest.raises(InvalidValue, match="unused_for"):
            (await list_api_keys(session, unused_for=timedelta(0)))[0]

    assert {key.name for key in found} == {"used long ago", "never used"}
    assert [key.id for key in one] == [customer.key.id]
