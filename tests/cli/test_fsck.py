"""`weir fsck` on a database: what it tells, its exit code, and what it refuses."""

from __future__ import annotations

import json

import psycopg
import pytest

from metering.proof.fsck import CHECKS
from metering.store.db import psycopg_conninfo
from tests.cli.conftest import Run


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A migrated database that the commands work on."""
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    return database_url


def break_it(database_url: str) -> None:
    """Money that comes from nowhere, and a guard that sleeps."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute("ALTER TABLE usage_events DISABLE TRIGGER usage_events_append_only")
        connection.execute("INSERT INTO organizations (name, currency_code) VALUES ('acme', 'USD')")
        connection.execute(
            """INSERT INTO quotas (subject, subject_id, dimension, limit_value)
               SELECT 'organization', id, 'concurrent_requests', 1 FROM organizations"""
        )
        connection.execute("INSERT INTO quota_counters (quota_id, window_start, held) SELECT id, 'epoch', 2 FROM quotas")


def test_an_empty_database_is_sound(bare_weir: Run, database: str) -> None:
    result = bare_weir("fsck", "--at-rest")

    assert result.exit_code == 0
    assert f"All {len(CHECKS) + 1} checks hold" in result.stdout


def test_what_is_wrong_is_named_and_ends_with_exit_code_1(bare_weir: Run, database: str) -> None:
    break_it(database)

    result = bare_weir("fsck")

    assert result.exit_code == 1
    assert "trigger usage_events_append_only: is switched off" in result.stdout
    assert "held 2, but live holds claim 0" in result.stdout
    assert "used 0 + held 2 exceed the limit 1" in result.stdout
    assert "3 of " in result.stdout


def test_a_script_gets_one_document(bare_weir: Run, database: str) -> None:
    break_it(database)

    result = bare_weir("fsck", "--json", "--check", "guards-stand", "--check", "no-hold-is-left", "--since", "24h")

    document = json.loads(result.stdout)
    assert (result.exit_code, document["sound"]) == (1, False)
    assert [(each["name"], each["violation_count"]) for each in document["checks"]] == [("guards-stand", 1), ("no-hold-is-left", 0)]
    assert document["checks"][0]["sample"] == [{"subject": "trigger usage_events_append_only", "problem": "is switched off"}]


def test_an_unknown_check_is_refused_with_the_names_of_all(bare_weir: Run, database: str) -> None:
    result = bare_weir("fsck", "--check", "everything")

    assert result.exit_code == 1
    assert "there is no check 'everything'" in result.stderr
    assert "holds-end-once" in result.stderr


def test_a_database_of_another_version_is_refused_with_what_to_do(bare_weir: Run, database: str) -> None:
    with psycopg.connect(psycopg_conninfo(database)) as connection:
        connection.execute("ALTER TABLE holds RENAME quota_ids TO limits")

    result = bare_weir("fsck")

    assert result.exit_code == 1
    assert "run `weir migrate` first" in result.stderr


def test_the_checks_are_listed_with_what_they_prove(bare_weir: Run) -> None:
    result = bare_weir("fsck", "--list")

    assert result.exit_code == 0
    assert all(check.name in result.stdout for check in CHECKS)
    assert len(json.loads(bare_weir("fsck", "--list", "--json").stdout)) == len(CHECKS) + 1
