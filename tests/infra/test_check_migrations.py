"""Check of migrations: passes the present ones and detects planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from infra import check_migrations, migrated_rows
from metering.proof.check import Moment
from metering.proof.fsck import fsck, select_checks
from metering.store.db import psycopg_conninfo, sqlalchemy_url
from metering.store.migrations_runner import migrate
from tests.conftest import new_database

PLANTED = {
    "UPDATE quota_counters SET used = used - 1 WHERE used = 95": (
        "quota_counters has lost or changed"
    ),
    "DELETE FROM usage_events WHERE part = 1": "usage_events has lost or changed",
    "ALTER TABLE live_reports DROP COLUMN process_name": (
        "column process_name of live_reports is gone"
    ),
    "DROP TABLE cancel_commands": "of cancel_commands is gone",
    "SELECT setval(pg_get_serial_sequence('price_versions', 'id'), 1)": (
        "price_versions_id_seq counts from an earlier number"
    ),
}


@pytest.fixture
def with_rows(postgres_server: str) -> Iterator[tuple[str, migrated_rows.Connection]]:
    """Yield a database of release 0.1.0 with rows, and a connection that bypasses the guards."""
    with (
        new_database(postgres_server) as url,
        psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection,
    ):
        migrate(url, migrated_rows.REVISION)
        connection.execute(migrated_rows.ROWS.read_bytes())
        yield url, connection


def test_migrations_go_up_down_up_lose_no_row_and_equal_the_models(postgres_server: str) -> None:
    with new_database(postgres_server) as url:
        assert list(check_migrations.complaints(url)) == []


def test_objects_without_migration_and_model_are_reported(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE stray (id bigint); CREATE TYPE mood AS ENUM ('calm')")
        )
    engine.dispose()

    found = list(check_migrations.complaints(database_url))

    assert "left over after the downgrade: table stray" in found
    assert "left over after the downgrade: type mood" in found
    assert any(
        "stray" in line
        for line in found
        if line.startswith("the models differ from the migrated schema")
    )


def test_each_lost_or_changed_row_is_found(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    _, connection = with_rows
    before, drawn = migrated_rows.contents(connection), migrated_rows.numbers(connection)
    unharmed = list(migrated_rows.lost(connection, before, drawn, "then"))
    connection.execute("SET session_replication_role = replica")

    for statement in PLANTED:
        connection.execute(statement.encode())
    found = list(migrated_rows.lost(connection, before, drawn, "then"))

    assert unharmed == []
    assert [
        reported for reported in PLANTED.values() if not any(reported in line for line in found)
    ] == []


def test_rewrites_and_scans_are_reported(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    _, connection = with_rows
    made = migrated_rows.objects(connection, migrated_rows.MADE)

    connection.execute("ALTER TABLE holds ALTER labels TYPE json")
    connection.execute("CREATE INDEX slow ON usage_events (model)")
    connection.execute("ALTER TABLE ledger_entries ADD CONSTRAINT slow CHECK (id > 0)")
    connection.execute("ALTER TABLE meter_batches ADD CONSTRAINT quick CHECK (part < 9) NOT VALID")
    found = {
        reported for reported, _ in migrated_rows.objects(connection, migrated_rows.MADE) - made
    }

    assert {"table holds is rewritten", "constraint slow of ledger_entries is checked"} < found
    assert "index usage_events_2026_09_model_idx of usage_events_2026_09 is built" in found
    assert not any("quick" in reported for reported in found)


def test_a_newer_schema_accepts_rows_of_earlier_processes(database_url: str) -> None:
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute(migrated_rows.ROWS.read_bytes())

        assert connection.execute(
            "SELECT count(*), sum(embedding_token_count)::int FROM usage_events"
        ).fetchone() == (7, 0)


def test_an_installation_of_0_1_0_upgrades(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    url, _ = with_rows
    # Nothing has rated or swept since it was stopped.
    checks = select_checks(moments=(Moment.ALWAYS,))

    migrate(url)
    found = {
        verdict.check.name: verdict.sample
        for verdict in fsck(url, checks)
        if verdict.violation_count
    }

    assert found == {}


def test_a_migration_that_fails_half_way_changes_nothing(postgres_server: str) -> None:
    """It fails at the last of four tables that it creates."""
    with (
        new_database(postgres_server) as url,
        psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection,
    ):
        connection.execute("""
            CREATE FUNCTION break_off() RETURNS event_trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands()
                WHERE object_identity = 'public.ledger_entries') THEN
                    RAISE EXCEPTION 'broken off';
                END IF;
            END $$;
            CREATE EVENT TRIGGER break_off ON ddl_command_end WHEN TAG IN ('CREATE TABLE')
            EXECUTE FUNCTION break_off();
        """)
        migrate(url, "0003")
        before = migrated_rows.columns_of(connection)

        with pytest.raises(DBAPIError, match="broken off"):
            migrate(url, "0004")
        left = migrated_rows.columns_of(connection)
        connection.execute("DROP EVENT TRIGGER break_off")
        migrate(url)

        assert left == before
        assert "ledger_entries" in migrated_rows.columns_of(connection)


def test_the_downgrade_forgets_limits_that_the_previous_code_does_not_know(
    with_rows: tuple[str, migrated_rows.Connection],
) -> None:
    """With their counters and alerts; requests that run go on under their other limits."""
    url, connection = with_rows
    migrate(url)
    connection.execute("""
        WITH added AS (
            INSERT INTO quotas (subject, subject_id, model, dimension, limit_value)
            SELECT 'organization', id, '', 'requests_per_week', 5 FROM organizations LIMIT 1
            RETURNING id, subject_id
        ), counted AS (
            INSERT INTO quota_counters (quota_id, window_start, used)
            SELECT id, '2026-11-23', 1 FROM added
        ), charged AS (
            UPDATE holds SET quota_ids = quota_ids || added.id FROM added WHERE state = 'held'
        )
        INSERT INTO alerts (organization_id, quota_id, window_start, threshold, limit_value, used)
        SELECT subject_id, id, '2026-11-23', 50, 5, 3 FROM added
    """)
    added = connection.execute("SELECT id FROM quotas WHERE dimension LIKE '%_week'").fetchall()
    live = "SELECT id, {} FROM holds WHERE state = 'held' ORDER BY id"
    without = live.format("array_remove(quota_ids, %s)")
    expected = connection.execute(without, added[0]).fetchall()

    command.downgrade(check_migrations.configuration(url), "0017")

    assert expected
    assert connection.execute(live.format("quota_ids")).fetchall() == expected
    assert not connection.execute("SELECT FROM quotas WHERE id = %s", added[0]).fetchall()
    with pytest.raises(psycopg.errors.RestrictViolation):
        connection.execute("DELETE FROM alerts")
    migrate(url)
