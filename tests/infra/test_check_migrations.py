"""Check of migrations: passes the present ones and detects planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from infra import check_migrations, migrated_rows
from metering.store.db import psycopg_conninfo, sqlalchemy_url
from metering.store.migrations_runner import config, migrate
from tests.conftest import new_database

ACME, KEY = (f"'{letter}0000000-0000-4000-8000-000000000001'" for letter in "ac")
# By revision: rows that the previous schema cannot store, and the error of the downgrade.
REFUSED = {
    "0021": (
        "INSERT INTO adjustments (organization_id, currency_code, amount_picos, reason, author) "
        f"VALUES ({ACME}, 'USD', 0, 'r', 'ann')",
        "adjustments of zero",
    ),
    "0020": (
        "INSERT INTO usage_corrections (hold_id, part, settled_at, adjustment_id, corrected_by) SELECT hold_id, part, settled_at, "
        "(SELECT adjustment_id FROM adjustment_decisions LIMIT 1), 'ann' FROM unrated_usage LIMIT 1",
        "usage that was billed by adjustments",
    ),
    "0018": (
        "INSERT INTO stripe_month_settlements (organization_id, month, currency_code, due_picos, carried_in_picos, due_minor) "
        f"VALUES ({ACME}, '2026-09-01', 'USD', 4000000000, 0, 0)",
        "amounts due of closed months",
    ),
    "0017": (
        "INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, "
        "labels, owner_id, input_token_count, leased_token_count, quota_ids, expires_at, embedding) "
        "SELECT gen_random_uuid(), organization_id, project_id, api_key_id, gen_random_uuid(), payload_hash, model, "
        "price_version_id, labels, owner_id, 9, 0, '{}', expires_at, true FROM holds LIMIT 1",
        "usage of embeddings",
    ),
    "0016": (f"UPDATE api_keys SET models = '{{demo}}' WHERE id = {KEY}", "keys are limited to models"),
}
PLANTED = {
    "UPDATE quota_counters SET used = used - 1 WHERE used = 300": "quota_counters has lost or changed",
    "DELETE FROM usage_events WHERE part = 1": "usage_events has lost or changed",
    "ALTER TABLE live_reports DROP COLUMN owner_name": "column owner_name of live_reports is gone",
    "DROP TABLE stop_orders": "of stop_orders is gone",
    "SELECT setval(pg_get_serial_sequence('price_versions', 'id'), 1)": "price_versions_id_seq counts from an earlier number",
}


@pytest.fixture
def with_rows(postgres_server: str) -> Iterator[tuple[str, migrated_rows.Connection]]:
    """Yield an old database with rows, and a connection that bypasses the guards."""
    with new_database(postgres_server) as url, psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection:
        migrate(url, migrated_rows.REVISION)
        connection.execute(migrated_rows.ROWS.read_bytes())
        yield url, connection


def test_migrations_go_up_down_and_up_lose_no_row_and_equal_the_models(postgres_server: str) -> None:
    with new_database(postgres_server) as url:
        assert list(check_migrations.complaints(url)) == []


def test_what_no_migration_removes_and_no_model_declares_is_reported(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE stray (id bigint); CREATE TYPE mood AS ENUM ('calm')"))
    engine.dispose()

    found = list(check_migrations.complaints(database_url))

    assert "left over after the downgrade: table stray" in found
    assert "left over after the downgrade: type mood" in found
    assert any("stray" in line for line in found if line.startswith("the models are not what the migrations build"))


def test_every_row_that_is_lost_or_changed_is_reported(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    _, connection = with_rows
    before, drawn = migrated_rows.contents(connection), migrated_rows.numbers(connection)
    unharmed = list(migrated_rows.lost(connection, before, drawn, "then"))
    connection.execute("SET session_replication_role = replica")

    for statement in PLANTED:
        connection.execute(statement.encode())
    found = list(migrated_rows.lost(connection, before, drawn, "then"))

    assert unharmed == []
    assert [told for told in PLANTED.values() if not any(told in line for line in found)] == []


def test_what_is_done_to_every_row_of_a_large_table_is_reported(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    _, connection = with_rows
    made = migrated_rows.things(connection, migrated_rows.MADE)

    connection.execute("ALTER TABLE holds ALTER labels TYPE json")
    connection.execute("CREATE INDEX slow ON usage_events (model)")
    connection.execute("ALTER TABLE ledger_entries ADD CONSTRAINT slow CHECK (id > 0)")
    connection.execute("ALTER TABLE meter_batches ADD CONSTRAINT quick CHECK (part < 9) NOT VALID")
    found = {told for told, _ in migrated_rows.things(connection, migrated_rows.MADE) - made}

    assert {"table holds is rewritten", "constraint slow of ledger_entries is checked"} < found
    assert "index usage_events_2026_09_model_idx of usage_events_2026_09 is built" in found
    assert not any("quick" in told for told in found)


def test_what_the_processes_of_before_write_a_newer_schema_takes(database_url: str) -> None:
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute(migrated_rows.ROWS.read_bytes())

        assert connection.execute("SELECT count(*), sum(embedding_token_count)::int FROM usage_events").fetchone() == (6, 0)


def test_no_downgrade_forgets_what_the_schema_before_cannot_say(with_rows: tuple[str, migrated_rows.Connection]) -> None:
    url, connection = with_rows
    migrate(url)
    connection.execute("SET session_replication_role = replica")

    for revision, (statement, told) in REFUSED.items():
        before = f"{int(revision) - 1:04}"
        command.downgrade(config(url), revision)
        connection.execute(statement.encode())
        with pytest.raises(DBAPIError, match=told):
            command.downgrade(config(url), before)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(revision,)]
        unplant(connection, revision)
        command.downgrade(config(url), before)


def unplant(connection: migrated_rows.Connection, revision: str) -> None:
    """Take the rows of `REFUSED` out again, as nobody could who is not the test."""
    statements = {
        "0021": "DELETE FROM adjustments WHERE amount_picos = 0",
        "0020": "DELETE FROM usage_corrections",
        "0018": "DELETE FROM stripe_month_settlements",
        "0017": "DELETE FROM holds WHERE embedding",
        "0016": "UPDATE api_keys SET models = '{}'",
    }
    connection.execute(statements[revision].encode())


def test_a_migration_that_fails_in_the_middle_leaves_nothing_and_can_be_run_again(
    with_rows: tuple[str, migrated_rows.Connection],
) -> None:
    """It fails where it is about to change the third of four large tables."""
    url, connection = with_rows
    before = migrated_rows.columns_of(connection)
    connection.execute("""
        CREATE FUNCTION break_off() RETURNS event_trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE objid = 'ledger_entries'::regclass) THEN
                RAISE EXCEPTION 'broken off';
            END IF;
        END $$;
        CREATE EVENT TRIGGER break_off ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION break_off();
    """)
    migrate(url, "0016")

    with pytest.raises(DBAPIError, match="broken off"):
        migrate(url, "0017")
    left = migrated_rows.columns_of(connection)
    connection.execute("DROP EVENT TRIGGER break_off")
    migrate(url)

    assert left == before | {"api_keys": [*before["api_keys"], "models"]}
    assert "embedding" in migrated_rows.columns_of(connection)["holds"]
