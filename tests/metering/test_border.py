"""Border of an organization: every table, with every statement, under every database role."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core.audit import list_audit_entries, record_change
from metering.core.errors import NotFound
from metering.store.border import SCHEMA, Actor, acting
from metering.store.db import (
    Sessions,
    create_engine,
    create_sessions,
    psycopg_conninfo,
    read_one_moment,
)
from metering.tenants.api_keys import create_api_key, find_api_key, list_api_keys
from metering.tenants.tenants import create_project, find_organization
from tests.conftest import as_application

ROWS = Path(__file__).parents[2] / "infra" / "rows_0008.sql"
ACME, BOLT = (uuid.UUID(f"a0000000-0000-4000-8000-00000000000{n}") for n in (1, 2))
PROJECT = uuid.UUID("b0000000-0000-4000-8000-000000000001")  # of acme
# Tables without a view: they have no data of organizations, or ids only, and a statement in a
# transaction of an organization reads or writes them.
SHARED = {
    *("admin_requests", "alert_scans", "audit_retentions", "cancel_commands", "export_progress"),
    *("receipt_batches", "receipt_keys", "retired_months", "rule_changes"),
}
# Views that show rows of the service to every organization.
OF_ALL = {"price_versions", "plan_versions"}
RELATIONS = """
SELECT relname FROM pg_class
WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition
"""
COLUMNS = """
SELECT array_agg(attname::text ORDER BY attname)
FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
"""


@pytest.fixture
def database(database_url: str) -> Iterator[psycopg.Connection]:
    """Yield a connection to a database with rows of two organizations in every older table."""
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute(ROWS.read_bytes())
        yield connection


@pytest.fixture(params=["owner", "application"])
async def sessions(
    database: psycopg.Connection, database_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Sessions]:
    """Sessions of the owner of the tables, a superuser, and of the application role."""
    is_owner = request.param == "owner"
    engine = create_engine(database_url if is_owner else as_application(database_url))
    yield create_sessions(engine)
    await engine.dispose()


def relations(connection: psycopg.Connection, schema: str) -> set[str]:
    return {name for (name,) in connection.execute(RELATIONS, [schema])}


def rows_within(
    connection: psycopg.Connection, organization_id: uuid.UUID, views: Sequence[str]
) -> dict[str, set[str]]:
    """Return the rows that each view has for an organization."""
    found = {}
    with connection.transaction():
        actor = Actor("owner", organization_id, is_bound=True)
        connection.execute(actor.settings.encode())
        for view in views:
            rows = connection.execute(f'SELECT t::text FROM "{view}" t'.encode()).fetchall()
            found[view] = {row for (row,) in rows}
    return found


def shared_rows(connection: psycopg.Connection) -> set[str]:
    """Return the views that show the same row to two organizations."""
    views = sorted(relations(connection, SCHEMA) - OF_ALL)
    acme, bolt = (rows_within(connection, each, views) for each in (ACME, BOLT))
    assert sum(map(len, acme.values())) > 40, "a walk that finds nothing proves nothing"
    assert bolt["api_keys"]
    return {view for view in views if acme[view] & bolt[view]}


def test_each_table_has_a_view_or_is_shared(database: psycopg.Connection) -> None:
    """A new table needs a view in `organization_border`, or a reason to be shared."""
    tables, views = relations(database, "public"), relations(database, SCHEMA)

    assert tables - views == SHARED
    assert views - tables == {"subjects"}


def test_each_view_has_all_columns_of_its_table(database: psycopg.Connection) -> None:
    """A revision that adds a column to a table must create the view again."""
    for name in sorted(relations(database, SCHEMA) - {"subjects"}):
        of_view, of_table = (
            database.execute(COLUMNS, [f"{schema}.{name}"]).fetchone()
            for schema in (SCHEMA, "public")
        )
        assert of_view == of_table, name


def test_no_row_is_within_two_borders(database: psycopg.Connection) -> None:
    assert shared_rows(database) == set()


def test_a_view_without_its_border_is_found(database: psycopg.Connection) -> None:
    for name in ("api_keys", "ledger_entries", "audit_log"):
        database.execute(f"CREATE OR REPLACE VIEW {SCHEMA}.{name} AS SELECT * FROM {name}".encode())
        assert name in shared_rows(database)


def test_without_an_organization_no_view_can_be_read(database: psycopg.Connection) -> None:
    for name in sorted(relations(database, SCHEMA) - {"plan_versions"}):
        is_of_service = database.execute(
            "SELECT definition LIKE '%%WHERE false%%' FROM pg_views"
            " WHERE schemaname = %s AND viewname = %s",
            [SCHEMA, name],
        ).fetchone()
        if is_of_service != (True,):
            with pytest.raises(psycopg.errors.UndefinedObject, match=r"weir\.organization"):
                database.execute(f'SELECT * FROM {SCHEMA}."{name}"'.encode())


def of(
    sessions: Sessions, organization_id: uuid.UUID, project_id: uuid.UUID | None = None
) -> Sessions:
    """Return the sessions of an organization's key."""
    role = "owner" if project_id is None else "developer"
    return acting(sessions, Actor(role, organization_id, is_bound=True, project_id=project_id))


async def test_lookups_do_not_find_objects_of_others(sessions: Sessions) -> None:
    async with of(sessions, BOLT).begin() as session:
        assert (await find_organization(session, "bolt")).id == BOLT
        for ref in ("acme", str(ACME)):
            with pytest.raises(NotFound, match=f"no organization '{ref}'|{ref}"):
                await find_organization(session, ref)
        with pytest.raises(NotFound):
            await find_api_key(session, "wk_aaaaaaaa")
        assert [each.prefix for each in (await list_api_keys(session))[0]] == ["wk_bbbbbbbb"]
        with pytest.raises(NotFound):
            await create_project(session, organization="acme", name="theirs", actor="test")


CHANGES = [
    f"INSERT INTO projects (organization_id, name) VALUES ('{ACME}', 'more')",
    f"INSERT INTO api_keys (project_id, name, prefix, secret_hash, scopes)"
    f" VALUES ('{PROJECT}', 'k', 'wk_dddddddd', sha256('4'), '{{inference}}')",
    f"INSERT INTO quotas (subject, subject_id, dimension, limit_value)"
    f" VALUES ('organization', '{ACME}', 'requests_per_day', 1)",
    f"UPDATE api_keys SET project_id = '{PROJECT}'",
    "INSERT INTO replica_drains (model, replica, reason) VALUES ('m', '0', 'none')",
]


@pytest.mark.parametrize("statement", CHANGES)
async def test_no_statement_writes_beyond_the_border(sessions: Sessions, statement: str) -> None:
    with pytest.raises(DBAPIError, match="violates check option"):
        async with of(sessions, BOLT).begin() as session:
            await session.execute(text(statement))


async def test_no_statement_changes_rows_of_others(
    sessions: Sessions, database: psycopg.Connection
) -> None:
    async with of(sessions, BOLT).begin() as session:
        for statement in (
            "UPDATE api_keys SET revoked_at = now() WHERE prefix <> 'wk_bbbbbbbb'",
            "UPDATE quotas SET deleted_at = now() WHERE subject_id <> :bolt AND deleted_at IS NULL",
            "DELETE FROM alert_webhooks WHERE organization_id <> :bolt",
        ):
            result = await session.execute(text(statement), {"bolt": BOLT})
            assert result.rowcount == 0, statement  # type: ignore[attr-defined]


async def test_a_developer_sees_and_changes_one_project(sessions: Sessions) -> None:
    async with of(sessions, ACME).begin() as session:
        other = await create_project(session, organization="acme", name="other", actor="test")
        await create_api_key(
            session, organization="acme", project="other", name="theirs", actor="test"
        )

    async with of(sessions, ACME, PROJECT).begin() as session:
        assert {each.project_id for each in (await list_api_keys(session))[0]} == {PROJECT}
        await create_api_key(session, organization="acme", project="search", name="own", actor="x")
        with pytest.raises(NotFound):
            await create_api_key(
                session, organization="acme", project=str(other.id), name="beyond", actor="test"
            )
        projects = await session.scalars(text("SELECT DISTINCT project_id FROM usage_sums"))
        assert set(projects) <= {PROJECT}


async def test_the_border_ends_with_the_transaction(sessions: Sessions) -> None:
    """Connections are shared, and have prepared the same statements for both."""
    for _ in range(8):
        async with of(sessions, BOLT).begin() as session:
            assert len((await list_api_keys(session))[0]) == 1
        async with sessions.begin() as session:
            assert len((await list_api_keys(session))[0]) == 3
        async with of(sessions, ACME)() as session:
            await read_one_moment(session, 5.0)
            assert len((await list_api_keys(session))[0]) == 2


async def test_the_audit_log_names_role_and_organization(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await record_change(session, "system", "month.close", "theirs", after={})
    async with acting(sessions, Actor("operator", ACME, is_bound=False)).begin() as session:
        await record_change(session, "wk_aaaaaaaa", "quota.set", str(uuid.uuid4()), after={})
    async with of(sessions, ACME).begin() as session:
        await record_change(session, "wk_aaaaaaaa", "project.create", str(PROJECT), after={})
        own = await list_audit_entries(session)

    # Nor does an operator's change of others appear where its key belongs.
    async with sessions() as session:
        latest = (await list_audit_entries(session))[:3]
    assert [(each.actor_role, each.actor_organization_id) for each in latest] == [
        ("owner", ACME),
        ("operator", ACME),
        ("", None),
    ]
    assert [each.action for each in own] == ["project.create", "organization.create"]
