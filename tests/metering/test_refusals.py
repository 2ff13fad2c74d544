"""Refusals of PostgreSQL told apart: conflicts are repeated, and an outage says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from api.core.interceptor import guarded
from metering import tasks
from metering.core.errors import DatabaseUnavailable, WriteConflict
from metering.core.models import QuotaDimension
from metering.holds import hold_connection
from metering.holds.operations import Admitted
from metering.store.db import Sessions, psycopg_conninfo
from metering.store.refusals import ATTEMPTS_MAX, repeated
from tests.metering.hold_world import HoldWorld, admit
from tests.metering.invariants import check_invariants
from tests.metering.usage import Customer
from tests.metering.workers import wait_until

RAISE = "DO $$ BEGIN RAISE EXCEPTION 'planted' USING ERRCODE = '{}'; END $$"
CONFLICTS = {"40001": "SerializationFailure", "40P01": "DeadlockDetected", "55P03": "LockNotAvail"}
OUTAGES = {
    "25006": "the database is read-only",
    "53100": "the database's disk is full",
    "53200": "the database lacks memory",
    "53300": "the database has no free connection: raise max_connections",
    "53400": "the database lacks memory or cannot use its disk",
    "57014": "the database is too slow",
    "57P01": "the database shuts down or starts up",
    "57P02": "the database shuts down or starts up",
    "57P03": "the database shuts down or starts up",
    "57P05": "the database does not answer",
    "58030": "the database lacks memory or cannot use its disk",
    "25P03": "the database does not answer",
    "25P04": "the database is too slow",
    "08006": "the database does not answer",
}


@pytest.mark.parametrize(("code", "message"), OUTAGES.items())
async def test_an_outage_names_its_cause(sessions: Sessions, code: str, message: str) -> None:
    with pytest.raises(DatabaseUnavailable, match=message) as refusal:
        async with sessions.begin() as session:
            await session.execute(text(RAISE.format(code)))

    assert not isinstance(refusal.value, WriteConflict)


@pytest.mark.parametrize("code", CONFLICTS)
async def test_a_conflict_is_repeated_as_a_whole_and_reported_only_if_it_stays(
    sessions: Sessions, code: str
) -> None:
    attempts: list[int] = []

    async def work(conflict_count: int) -> str:
        async with sessions.begin() as session:
            await session.execute(text("CREATE TABLE IF NOT EXISTS tried (attempt integer)"))
            attempts.append(len(attempts))
            await session.execute(text("INSERT INTO tried VALUES (1)"))
            if len(attempts) <= conflict_count:
                await session.execute(text(RAISE.format(code)))
            return str(await session.scalar(text("SELECT count(*) FROM tried")))

    assert await repeated(lambda: work(ATTEMPTS_MAX - 1)) == "1", "nothing of the others is left"
    assert len(attempts) == ATTEMPTS_MAX
    attempts.clear()
    with pytest.raises(WriteConflict, match=CONFLICTS[code]):
        await repeated(lambda: work(1_000))
    assert len(attempts) == ATTEMPTS_MAX


async def test_an_outage_and_a_broken_rule_are_not_repeated(sessions: Sessions) -> None:
    attempts: list[str] = []

    async def work(code: str) -> None:
        attempts.append(code)
        async with sessions.begin() as session:
            await session.execute(text(RAISE.format(code)))

    with pytest.raises(DatabaseUnavailable):
        await repeated(lambda: work("57014"))
    with pytest.raises(IntegrityError):
        await repeated(lambda: work("23514"))
    assert attempts == ["57014", "23514"]


async def test_two_calls_that_deadlock_both_succeed(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await session.execute(
            text("INSERT INTO projects (organization_id, name) VALUES (:owner, 'second')"),
            {"owner": customer.organization_id},
        )
    both_locked = asyncio.Barrier(2)
    attempts: list[str] = []

    def handler(*names: str) -> Callable[[Any, Any], Coroutine[Any, Any, str]]:
        async def handle(request: object, context: object) -> str:
            is_first = names[0] not in attempts
            attempts.append(names[0])
            async with sessions.begin() as session:
                # The server looks for deadlocks after this time; a second is its default.
                await session.execute(text("SET LOCAL deadlock_timeout = '10ms'"))
                for name in names:
                    await session.execute(
                        text("UPDATE projects SET name = name WHERE name = :name"), {"name": name}
                    )
                    if is_first and name == names[0]:
                        await both_locked.wait()
            return "done"

        return guarded(handle, "/weir.v1.AdminService/Test", repeats=True)

    answers = await asyncio.gather(
        handler("search", "second")(None, None), handler("second", "search")(None, None)
    )

    assert [*answers] == ["done", "done"]
    assert len(attempts) == 3, "one of them was repeated"


def test_a_task_is_repeated_after_a_conflict(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    attempts: list[int] = []

    async def work(sessions: Sessions) -> None:
        attempts.append(len(attempts))
        async with sessions.begin() as session:
            if len(attempts) == 1:
                await session.execute(text(RAISE.format("40P01")))

    tasks.run(work)

    assert attempts == [0, 1]


async def test_an_admission_outlasts_a_lock_that_is_held_beyond_the_time_limit(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session holds the counters of the quota until the first attempt has failed."""
    limits = [each for each in hold_connection.SERVER_LIMITS if not each.startswith("lock_timeout")]
    monkeypatch.setattr(hold_connection, "SERVER_LIMITS", (*limits, "lock_timeout=50"))
    with (
        HoldWorld(database_url) as world,
        structlog.testing.capture_logs() as logged,
        psycopg.connect(psycopg_conninfo(database_url)) as other,
    ):
        payer = world.tenant()
        world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
        await world.run(admit(payer))
        other.execute("LOCK TABLE quota_counters IN ACCESS EXCLUSIVE MODE")

        admission = asyncio.create_task(world.run(admit(payer)))
        await asyncio.to_thread(
            wait_until,
            lambda: any(each["event"] == "hold_batch_repeated" for each in logged),
            "a conflict",
        )
        other.rollback()
        answers = await admission

    assert [type(answer) for answer in answers] == [Admitted]
    assert {each["cause"] for each in logged if "repeated" in each["event"]} == {"LockNotAvailable"}
    check_invariants(database_url)
