"""Usage events by month: partitions, missing ones, and guards."""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from metering import tasks
from metering.ledger.rating import MONTHS_AHEAD, create_partitions, rate_all_pending
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import Sessions
from tests.metering.queries import fetch_column
from tests.metering.usage import NOVEMBER, Acme, Consumed, add_usage

INSTANT = timedelta(microseconds=1)
WHERE = text("SELECT settled_at, tableoid::regclass::text FROM usage_events ORDER BY id")
MONTHS = text(
    "SELECT relname FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid ORDER BY relname"
)


async def months(session: AsyncSession) -> list[str]:
    """Return the names of all partitions except those of indexes."""
    return [
        name
        for name in (await session.execute(MONTHS)).scalars()
        if name.count("_") in (2, 3) and name[-1].isdigit()
    ]


async def forget(session: AsyncSession, month: str) -> None:
    """Drop a month's partition, as if it had not been created in time."""
    await session.execute(text(f"DROP TABLE IF EXISTS usage_events_{month}"))


def complaints(database_url: str) -> set[str]:
    """Return the failed checks of events, ledger and schema."""
    checks = [
        check for check in CHECKS if check.name not in ("price-at-admission", "usage-is-rated")
    ]
    return {verdict.check.name for verdict in fsck(database_url, checks) if verdict.violation_count}


async def refused(session: AsyncSession, statement: str) -> str:
    """Return the error of a statement that the database must refuse; keep the session usable."""
    with pytest.raises(DBAPIError) as error:
        async with session.begin_nested():
            await session.execute(text(statement))
    return str(error.value.orig)


async def test_a_month_ends_where_the_next_begins(acme: Acme) -> None:
    begins = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (begins + timedelta(days=32)).replace(day=1)
    await acme.use(
        *([Consumed(1, settled_at=at) for at in (begins, following - INSTANT, following)])
    )

    async with acme.sessions() as session:
        found = [name for _, name in await session.execute(WHERE)]

    this, coming = f"usage_events_{begins:%Y_%m}", f"usage_events_{following:%Y_%m}"
    assert found == [this, this, coming]


async def test_usage_without_partition_counts_and_is_moved(acme: Acme, database_url: str) -> None:
    begins = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (begins + timedelta(days=32)).replace(day=1)
    async with acme.sessions.begin() as session:
        for month in (begins, following):
            await forget(session, f"{month:%Y_%m}")
        first = [
            Consumed(3, 1, 2, settled_at=at)
            for at in (begins, begins + timedelta(hours=5), following)
        ]
        await add_usage(session, acme.customer, acme.price, first)
    assert await rate_all_pending(acme.sessions) == 3
    async with acme.sessions.begin() as session:
        await add_usage(session, acme.customer, acme.price, [Consumed(4, settled_at=begins)])
        before = {name for _, name in await session.execute(WHERE)}
    assert before == {"usage_events_default"}
    assert complaints(database_url) == {"partitions-exist", "all-usage-is-rated"}

    async with acme.sessions.begin() as session:
        made = await create_partitions(session)
    async with acme.sessions.begin() as session:
        again = await create_partitions(session)
        after = [name for _, name in await session.execute(WHERE)]

    assert made.created == (f"{begins:%Y-%m}", f"{following:%Y-%m}")
    assert (made.in_default, again.created, again.in_default) == ({}, (), {})
    this, coming = f"usage_events_{begins:%Y_%m}", f"usage_events_{following:%Y_%m}"
    assert after == [this, this, coming, this]
    assert await rate_all_pending(acme.sessions) == 1
    assert complaints(database_url) == set()


async def test_usage_written_under_a_clock_far_ahead_counts_and_is_reported(
    acme: Acme, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await acme.use(*([Consumed(3, 1, 2, settled_at=datetime(2099, 1, 31, 23, tzinfo=UTC))] * 2))

    assert await rate_all_pending(acme.sessions) == 2
    with caplog.at_level(logging.ERROR):
        async with acme.sessions.begin() as session:
            kept = await create_partitions(session)

    assert kept.in_default == {"2099-01": 2}
    assert "2 of 2099-01" in caplog.text
    posted = await fetch_column(
        acme.sessions, "SELECT billing_month::text FROM ledger_transactions"
    )
    assert posted == ["2099-01-01"]
    assert complaints(database_url) == {"partitions-exist"}


async def test_partitions_are_there_after_a_migration_and_are_made_once(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        now = (await session.execute(text("SELECT now()"))).scalar_one()
        numbers = [now.year * 12 + now.month - 1 + ahead for ahead in range(MONTHS_AHEAD + 1)]
        expected = [f"usage_events_{number // 12}_{number % 12 + 1:02}" for number in numbers]
        assert await months(session) == expected
        for name in expected[2:]:
            await forget(session, name.removeprefix("usage_events_"))

    async def keep() -> int:
        async with sessions.begin() as session:
            return len((await create_partitions(session)).created)

    assert sorted(await asyncio.gather(*(keep() for _ in range(3)))) == [0, 0, MONTHS_AHEAD - 1]
    async with sessions() as session:
        assert await months(session) == expected


async def test_the_worker_makes_them(
    sessions: Sessions, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    async with sessions.begin() as session:
        expected = await months(session)
        await forget(session, expected[-1].removeprefix("usage_events_"))

    await asyncio.to_thread(tasks.keep_partitions)

    async with sessions() as session:
        assert await months(session) == expected


async def test_a_partition_takes_no_statement_by_its_own_name(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        await add_usage(
            session, acme.customer, acme.price, [Consumed(1, settled_at=datetime.now(UTC))]
        )
        names = [*await months(session), "usage_events_default"]
    async with acme.sessions() as session:
        for name in names:
            for statement in (
                f"UPDATE {name} SET rated_at = now()",
                f"DELETE FROM {name}",
                f"TRUNCATE {name}",
                f"INSERT INTO {name} OVERRIDING SYSTEM VALUE SELECT * FROM usage_events",
            ):
                assert "write to usage_events" in await refused(session, statement)


async def test_a_part_of_a_hold_is_unique_in_all_months(acme: Acme) -> None:
    """Also across partitions, which the primary key cannot compare."""
    hold = uuid.uuid4()
    await acme.use(Consumed(1, hold_id=hold), Consumed(0, 0, 2, hold_id=hold, part=1))
    columns = """hold_id, organization_id, project_id, api_key_id, request_id, model, outcome,
        input_token_count, cached_input_token_count, generated_token_count, delivered_token_count,
        billed_token_count, price_version_id, cost_picos, labels, admitted_at"""
    copy = (
        f"INSERT INTO usage_events (part, settled_at, {columns}) SELECT {{}}, {{}}, {columns} FROM"
        " usage_events WHERE part = 0"
    )
    async with acme.sessions() as session:
        for part in (0, 1):
            for at in ("settled_at", "settled_at + interval '1 month'", "timestamptz '2099-01-01'"):
                reported = await refused(session, copy.format(part, at))
                assert "has this part already" in reported or "_pkey" in reported
        assert "has this part twice" in await refused(
            session,
            f"{copy.format(2, 'settled_at')} UNION ALL"
            f" {copy[copy.index('SELECT') :].format(2, 'now()')}",
        )
        await session.execute(text(copy.format(2, "settled_at + interval '1 month'")))


async def test_an_event_needs_an_ended_hold_and_is_written_unrated(acme: Acme) -> None:
    await acme.use(Consumed(1, settled_at=NOVEMBER))
    copy = """INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id,
        request_id, model, outcome, input_token_count, cached_input_token_count,
        generated_token_count, delivered_token_count, billed_token_count, price_version_id,
        cost_picos, labels, admitted_at, rated_at, ledger_transaction_id)
        SELECT {hold}, 1, organization_id, project_id, api_key_id, request_id, model, outcome, 0, 0,
               0, 0, 0, price_version_id, 0, labels, admitted_at, {rated} FROM usage_events"""
    live = """INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id,
        payload_hash, model, price_version_id, labels, process_id, input_token_count,
        leased_token_count, quota_ids, expires_at)
        SELECT gen_random_uuid(), organization_id, project_id, api_key_id, gen_random_uuid(),
               payload_hash, model, price_version_id, labels, process_id, 1, 1, '{}', now()
        FROM holds
        RETURNING id"""
    async with acme.sessions() as session:
        hold = (await session.execute(text(live))).scalar_one()
        assert "has not ended" in await refused(
            session, copy.format(hold=f"'{hold}'::uuid", rated="NULL, NULL")
        )
        assert "must not be rated" in await refused(
            session, copy.format(hold="hold_id", rated="now(), 1")
        )
        await session.execute(text(copy.format(hold="hold_id", rated="NULL, NULL")))
