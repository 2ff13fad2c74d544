"""Commits are durable with any server setting; a lossy server is named."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text

from metering.core.errors import DatabaseUnavailable
from metering.store.db import (
    BoundedConnection,
    Sessions,
    create_engine,
    create_sessions,
    psycopg_conninfo,
    undurable_settings,
)

SHOW = "SHOW synchronous_commit"


@pytest.fixture
def admin(module_database: str) -> Iterator[psycopg.Connection[tuple[str]]]:
    with psycopg.connect(psycopg_conninfo(module_database), autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize(
    "scope", ["DATABASE {database}", "ROLE {role}", "ROLE {role} IN DATABASE {database}"]
)
@pytest.mark.parametrize(
    ("requested", "had"),
    [
        ("off", "on"),
        ("local", "local"),
        ("on", "on"),
        ("remote_write", "remote_write"),
        ("remote_apply", "remote_apply"),
    ],
)
async def test_commits_are_durable_and_stronger_demands_stay(
    module_database: str,
    admin: psycopg.Connection[tuple[str]],
    scope: str,
    requested: str,
    had: str,
) -> None:
    target = scope.format(database=admin.info.dbname, role=f'"{admin.info.user}"')
    admin.execute(f"ALTER {target} SET synchronous_commit = {requested}".encode())
    try:
        engine = create_engine(module_database)
        async with create_sessions(engine)() as session:
            of_session = await session.scalar(text(SHOW))
        await engine.dispose()
        async with await BoundedConnection.connect(
            psycopg_conninfo(module_database), autocommit=True
        ) as connection:
            [of_connection] = await (await connection.execute(SHOW)).fetchone() or ("",)
    finally:
        admin.execute(f"ALTER {target} RESET synchronous_commit".encode())

    assert (of_session, of_connection) == (had, had)


async def test_a_server_that_loses_commits_is_named(
    sessions: Sessions, admin: psycopg.Connection[tuple[str]]
) -> None:
    found = admin.execute(
        "SELECT name FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting ="
        " 'off'"
    ).fetchall()

    assert await undurable_settings(sessions) == sorted(name for (name,) in found)


async def test_a_database_that_is_away_is_not_judged() -> None:
    engine = create_engine("postgresql://nobody@127.0.0.1:1/weir")
    with pytest.raises(DatabaseUnavailable):
        await undurable_settings(create_sessions(engine))
    await engine.dispose()
