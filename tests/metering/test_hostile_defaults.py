"""Weir on a database with hostile defaults: admissions, ends and every kind of connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text

from metering.control.control_channel import ControlChannel
from metering.holds.recovery import sweep_expired_holds
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import (
    BoundedConnection,
    create_engine,
    create_sessions,
    psycopg_conninfo,
)
from metering.store.migrations_runner import is_current, migrate
from tests.conftest import new_database
from tests.metering.hostile import DEFAULTS, hostile

# The same tests as of a friendly database, here with this module's fixtures.
from tests.metering.test_hold_concurrency import (
    test_demand_that_remains_fills_what_others_give_back as test_demand_that_remains,
)
from tests.metering.test_hold_concurrency import (
    test_many_tenants_at_once_each_get_exactly_their_own_quota as test_many_tenants,
)
from tests.metering.test_hold_concurrency import (
    test_one_request_sent_to_four_processes_is_admitted_once as test_one_request,
)

__all__ = ["test_demand_that_remains", "test_many_tenants", "test_one_request"]

RELIED_ON = {
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "synchronous_commit": "on",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
}
PATIENT = "-c statement_timeout=0 -c transaction_timeout=0 -c idle_in_transaction_session_timeout=0"
SHOWN = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"


@pytest.fixture(
    params=[
        ("serializable", False),
        ("repeatable read", False),
        ("serializable", True),
        ("read committed", True),
    ],
    ids=lambda param: f"{param[0]} of the {'role' if param[1] else 'database'}",
)
def defaults(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """Return an isolation, and whether it and the other defaults are those of the role."""
    isolation, of_role = request.param
    return isolation, of_role


@pytest.fixture
def database_url(
    postgres_server: str, template_database: str, defaults: tuple[str, bool]
) -> Iterator[str]:
    """Yield the URL of a migrated database with hostile defaults."""
    isolation, of_role = defaults
    with (
        new_database(postgres_server, template=template_database) as url,
        hostile(url, isolation, of_role=of_role) as hostile_url,
    ):
        yield hostile_url


def test_the_defaults_are_hostile_to_other_clients(
    database_url: str, defaults: tuple[str, bool]
) -> None:
    """Shows that the checks below can fail."""
    plain = psycopg_conninfo(database_url)
    with psycopg.connect(plain, options=PATIENT) as client:
        found: dict[str, str] = dict(client.execute(SHOWN, (list(RELIED_ON),)).fetchall())

    friendly = {name for name in RELIED_ON if found[name] == RELIED_ON[name]}
    assert found["default_transaction_isolation"] == defaults[0]
    assert friendly <= {"transaction_timeout", "default_transaction_isolation"}
    assert set(RELIED_ON) <= set(DEFAULTS)


async def test_each_connection_has_the_settings_that_weir_relies_on(database_url: str) -> None:
    engine = create_engine(database_url)
    async with create_sessions(engine)() as session:
        query = text(SHOWN.replace("%s", ":names"))
        rows = await session.execute(query, {"names": list(RELIED_ON)})
        pooled = {name: setting for name, setting in rows.all()}  # noqa: C416
    await engine.dispose()
    channel = ControlChannel(
        database_url,
        uuid.uuid4(),
        "test",
        stop=lambda _: None,
        report=list,
        drain=lambda _: None,
        report_replicas=list,
    )
    async with await channel._connect() as connection:
        cursor = await connection.execute(SHOWN, (list(RELIED_ON),))
        listening = dict(await cursor.fetchall())
    async with await BoundedConnection.connect(psycopg_conninfo(database_url)) as connection:
        cursor = await connection.execute(SHOWN, (list(RELIED_ON),))
        bounded = dict(await cursor.fetchall())

    assert pooled == listening == bounded == RELIED_ON


def test_a_database_is_migrated_and_examined_whatever_its_defaults(postgres_server: str) -> None:
    with new_database(postgres_server) as url, hostile(url) as hostile_url:
        migrate(hostile_url)

        assert is_current(hostile_url)
        assert [verdict.violation_count for verdict in fsck(hostile_url, CHECKS)] == [0] * len(
            CHECKS
        )
        assert asyncio.run(sweep_expired_holds(hostile_url)) == 0
