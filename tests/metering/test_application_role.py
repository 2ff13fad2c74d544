"""Rights of the database role of api processes and workers, on a real PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime
from typing import LiteralString

import psycopg
import pytest
from psycopg import errors, sql

from metering.ledger.rating import create_partitions
from metering.proof.fsck import fsck, select_checks
from metering.retention import RetentionSettings, apply_retention
from metering.store import migrations_runner
from metering.store.db import Sessions, create_engine, create_sessions, psycopg_conninfo
from metering.store.migrations_runner import RoleUnfit, prepare_application_role
from tests.conftest import APPLICATION_ROLE, as_application
from tests.metering.closing_world import ClosingWorld
from tests.metering.usage import Consumed, Customer

ROLE = "weir_test_other"
SEPTEMBER, OCTOBER = (datetime(2025, month, 10, 12, tzinfo=UTC) for month in (9, 10))


GUARDED: list[LiteralString] = [
    "ALTER TABLE invoices DISABLE TRIGGER ALL",
    "ALTER TABLE usage_events DETACH PARTITION usage_events_default",
    "DROP TRIGGER billing_months_close_once ON billing_months",
    (
        "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN"
        " RETURN NEW; END'"
    ),
    "SET session_replication_role = replica",
    "TRUNCATE ledger_entries",
    "DELETE FROM usage_events",
    "DELETE FROM billing_months",
    "DELETE FROM holds",
    "UPDATE ledger_entries SET amount_picos = 0",
    "UPDATE invoices SET total_picos = 0",
    "UPDATE audit_log SET actor = 'nobody'",
    "UPDATE audit_log SET subject_id = ''",
    "UPDATE organizations SET currency_code = 'EUR'",
    "INSERT INTO usage_events_default DEFAULT VALUES",
    "UPDATE usage_events_default SET cost_picos = 0",
    "UPDATE alembic_version SET version_num = '0001'",
    "SELECT create_usage_partition('2031-01-01')",
    "SELECT setval('usage_events_id_seq', 1)",
    "CREATE TABLE other (id int)",
    "SET ROLE postgres",
    "DROP TABLE usage_events_default",
    "INSERT INTO retired_months (month, kept_months, summed_until) VALUES (now(), 3, now())",
    "INSERT INTO audit_retentions VALUES (now(), 3)",
    "UPDATE usage_days SET cost_picos = 0",
    "DELETE FROM audit_log",
]


@pytest.fixture
async def application_sessions(database_url: str) -> AsyncIterator[Sessions]:
    """Sessions of the application role."""
    engine = create_engine(as_application(database_url))
    yield create_sessions(engine)
    await engine.dispose()


@pytest.fixture
def application(database_url: str) -> Iterator[psycopg.Connection]:
    """Connect with the application role."""
    with psycopg.connect(
        psycopg_conninfo(as_application(database_url)), autocommit=True
    ) as connection:
        yield connection


@pytest.fixture
def owner(database_url: str) -> Iterator[psycopg.Connection]:
    """Yield a connection of the tables' owner."""
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        yield connection
        if (
            connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [ROLE]).fetchone()
            is not None
        ):
            connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(ROLE)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(ROLE)))


async def test_the_application_role_rates_closes_verifies_and_makes_partitions(
    application_sessions: Sessions, customer: Customer, database_url: str
) -> None:
    world = ClosingWorld(application_sessions, customer)
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1_000_003, 1_000, 10_007, "stop", OCTOBER))
    await world.grant(10**9, date(2025, 10, 1), date(2025, 12, 1), "paid")

    result = await world.close("2025-10")
    async with application_sessions.begin() as session:
        partitions = await create_partitions(session)

    used = 999_003 * 150_000 + 1_000 * 15_000 + 10_007 * 600_000
    assert result.report.total_picos == used - 10**9
    assert (await world.verify("2025-10")).differences == ()
    assert partitions.created == ("2025-10",)
    assert partitions.in_default == {}
    assert {
        verdict.check.name
        for verdict in fsck(as_application(database_url), select_checks())
        if verdict.violation_count
    } == set()


async def test_the_application_role_removes_old_details(
    application_sessions: Sessions, customer: Customer, database_url: str
) -> None:
    world = ClosingWorld(application_sessions, customer)
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1_000_003, 1_000, 10_007, "stop", SEPTEMBER))
    await world.close("2025-09")

    removal = await apply_retention(
        application_sessions, RetentionSettings(usage_months=3, audit_months=3), actor="test"
    )

    assert removal.months[0] == "2025-09"
    assert (await world.verify("2025-09")).differences == ()
    assert {
        verdict.check.name
        for verdict in fsck(as_application(database_url), select_checks())
        if verdict.violation_count
    } == set()


def test_the_application_role_cannot_get_past_the_guards(
    application: psycopg.Connection, subtests: pytest.Subtests
) -> None:
    for statement in GUARDED:
        with subtests.test(statement=statement), pytest.raises(errors.InsufficientPrivilege):
            application.execute(statement)


def test_every_table_with_separate_rights_exists(owner: psycopg.Connection) -> None:
    tables = {
        name
        for (name,) in owner.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    }

    named = (
        migrations_runner.READ_ONLY,
        migrations_runner.UPDATED,
        migrations_runner.LOCKED,
        migrations_runner.DELETED,
    )
    assert set().union(*named) <= tables


def test_preparing_the_role_again_takes_what_was_given_beside_it_and_keeps_its_password(
    database_url: str, owner: psycopg.Connection
) -> None:
    rights = (
        "SELECT relname, relacl::text[] FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        " ORDER BY relname"
    )
    before = owner.execute(rights).fetchall()
    verifier = "SELECT rolpassword FROM pg_authid WHERE rolname = %s"
    password = owner.execute(verifier, [APPLICATION_ROLE]).fetchone()
    owner.execute(
        sql.SQL("GRANT DELETE, TRUNCATE ON invoices TO {}").format(sql.Identifier(APPLICATION_ROLE))
    )

    prepare_application_role(database_url, APPLICATION_ROLE)

    after = owner.execute(rights).fetchall()
    assert [(name, sorted(each or ())) for name, each in after] == [
        (name, sorted(each or ())) for name, each in before
    ]
    assert owner.execute(verifier, [APPLICATION_ROLE]).fetchone() == password


def test_a_password_is_stored_as_a_verifier(database_url: str, owner: psycopg.Connection) -> None:
    prepare_application_role(database_url, ROLE, password="correct horse")

    found = owner.execute(
        "SELECT rolcanlogin, rolsuper, rolpassword FROM pg_authid WHERE rolname = %s", [ROLE]
    ).fetchone()
    assert found is not None
    assert found[:2] == (True, False)
    assert re.match(r"SCRAM-SHA-256\$", found[2])


@pytest.mark.parametrize(
    ("setup", "problem"),
    [
        (
            "",
            (
                "role 'weir_test_other' does not exist: set WEIR_APPLICATION_PASSWORD to create it,"
                " or run CREATE ROLE"
            ),
        ),
        ("CREATE ROLE weir_test_other LOGIN SUPERUSER", "must not be a superuser"),
        ("CREATE ROLE weir_test_other LOGIN IN ROLE pg_write_all_data", "has the right DELETE"),
        (
            "CREATE ROLE weir_test_other LOGIN; GRANT CREATE ON SCHEMA public TO weir_test_other",
            "can create objects",
        ),
        (
            "CREATE ROLE weir_test_other LOGIN; GRANT TRUNCATE ON invoices TO PUBLIC",
            "has the right TRUNCATE on table invoices",
        ),
    ],
)
def test_a_role_with_more_rights_is_refused_and_given_nothing(
    database_url: str, owner: psycopg.Connection, setup: LiteralString, problem: str
) -> None:
    if setup:
        owner.execute(setup)

    with pytest.raises(RoleUnfit, match=re.escape(problem)):
        prepare_application_role(database_url, ROLE)

    granted = (
        "SELECT FROM pg_class WHERE relname = 'invoices' AND relacl::text LIKE"
        " '%%weir_test_other%%'"
    )
    assert owner.execute(granted).fetchone() is None


def test_the_owner_itself_is_refused(database_url: str, owner: psycopg.Connection) -> None:
    with pytest.raises(RoleUnfit, match="name another role"):
        prepare_application_role(database_url, owner.info.user)


def test_only_the_owner_can_prepare_a_role(database_url: str) -> None:
    with pytest.raises(RoleUnfit, match="run this command as the owner of the tables"):
        prepare_application_role(as_application(database_url), ROLE, password="x")
