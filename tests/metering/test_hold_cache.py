"""Cached rules are keyed by row version, so changes are never missed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import psycopg
import pytest

from metering.holds.read import RULE_COLUMNS, RuleCache, rules_of_rows
from metering.quotas.quota_rules import QuotaRule
from metering.store.db import psycopg_conninfo
from metering.store.pipeline import Connection, run_pipeline


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(database_url), autocommit=True
    ) as opened:
        yield opened


async def add_quota(connection: Connection) -> uuid.UUID:
    cursor = await connection.execute(
        "INSERT INTO quotas (subject, subject_id, dimension, limit_value) "
        "VALUES ('project', gen_random_uuid(), 'tokens_per_day', 5) RETURNING id"
    )
    [(quota_id,)] = await cursor.fetchall()
    assert isinstance(quota_id, uuid.UUID)
    return quota_id


async def read(connection: Connection, quota_id: uuid.UUID) -> QuotaRule:
    [rows] = await run_pipeline(
        connection, [(f"SELECT {RULE_COLUMNS} FROM quota_terms WHERE id = %s", (str(quota_id),))]
    )
    return rules_of_rows(connection, rows)[quota_id.int]


async def test_a_rule_is_one_object_until_its_row_changes(connection: Connection) -> None:
    quota_id, other_id = await add_quota(connection), await add_quota(connection)

    first, again, other = (
        await read(connection, quota_id),
        await read(connection, quota_id),
        await read(connection, other_id),
    )
    await connection.execute("UPDATE quotas SET limit_value = 7 WHERE id = %s", (quota_id,))
    changed = await read(connection, quota_id)

    assert first is again
    assert other is not first
    assert (first.limit_value, changed.limit_value) == (5, 7)
    assert await read(connection, other_id) is other


async def test_a_row_at_the_address_of_another_is_not_taken_for_it(connection: Connection) -> None:
    quota_id = await add_quota(connection)

    for limit in range(10, 18):
        await connection.execute(
            "UPDATE quotas SET limit_value = %s WHERE id = %s", (limit, quota_id)
        )
        await connection.execute("VACUUM quotas")  # the earlier version's place is free again

        assert (await read(connection, quota_id)).limit_value == limit


async def test_a_row_that_a_rewrite_moves_is_not_taken_as_written(connection: Connection) -> None:
    """Rows move within a transaction, and when a table is rewritten."""
    async with connection.transaction():
        first, other = await add_quota(connection), await add_quota(connection)
    assert [(await read(connection, each)).id for each in (first, other)] == [first, other]

    await connection.execute("UPDATE quotas SET limit_value = 7 WHERE id = %s", (first,))
    await connection.execute("VACUUM FULL quotas")

    assert [(await read(connection, each)).limit_value for each in (first, other)] == [7, 5]


async def test_a_raise_ends_without_anybody_touching_the_row(connection: Connection) -> None:
    quota_id = await add_quota(connection)
    await connection.execute(
        "UPDATE quotas SET override_limit_value = 50, override_until = now() + interval '1 hour',"
        " override_reason = 'launch' WHERE id = %s",
        (quota_id,),
    )
    now = f"SELECT {RULE_COLUMNS} FROM quota_terms WHERE id = %s"
    later = now.replace("now()", "(now() + interval '2 hours')")
    [raised], [ended] = await run_pipeline(
        connection, [(now, (str(quota_id),)), (later, (str(quota_id),))]
    )

    rules = [
        rules_of_rows(connection, [row])[quota_id.int] for row in (raised, ended, raised, ended)
    ]

    assert [rule.limit_value for rule in rules] == [50, 5, 50, 5]
    assert rules[0] is rules[2]
    assert rules[1] is rules[3]


async def test_each_connection_has_its_own(connection: Connection, database_url: str) -> None:
    """Rows of two servers may have equal places and transaction numbers."""
    quota_id = await add_quota(connection)
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(database_url), autocommit=True
    ) as other:
        assert await read(connection, quota_id) is not await read(other, quota_id)


async def test_it_is_bounded(connection: Connection) -> None:
    ids = [await add_quota(connection) for _ in range(5)]
    [rows] = await run_pipeline(connection, [(f"SELECT {RULE_COLUMNS} FROM quota_terms", ())])
    cache = RuleCache(count_max=2)

    rules = [cache.of(row) for row in rows]

    assert {rule.id for rule in rules} == set(ids)
    assert len(cache._rules) <= 2
