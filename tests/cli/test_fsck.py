"""`weir fsck` on a database: output, exit code, and refusals."""

from __future__ import annotations

import json

import psycopg
import pytest

from metering.proof.fsck import CHECKS
from metering.store.db import psycopg_conninfo
from tests.cli.conftest import Run


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a migrated database for the commands."""
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    return database_url


def break_it(database_url: str) -> None:
    """Add money without a source, and disable a guard."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute("ALTER TABLE usage_events DISABLE TRIGGER usage_events_append_only")
        connection.execute("INSERT INTO organizations (name, currency_code) VALUES ('acme', 'USD')")
        connection.execute("""INSERT INTO quotas (subject, subject_id, dimension, limit_value)
               SELECT 'organization', id, 'concurrent_requests', 1 FROM organizations""")
        connection.execute(
            "INSERT INTO quota_counters (quota_id, window_start, held) SELECT id, 'epoch', 2 FROM"
            " quotas"
        )


def test_an_empty_database_is_sound(bare_weir: Run, database: str) -> None:
    result = bare_weir("fsck --at-rest")

    assert result.exit_code == 0
    assert f"All {len(CHECKS) + 1} checks hold" in result.stdout


def test_violations_are_named_and_exit_with_1(bare_weir: Run, database: str) -> None:
    break_it(database)

    result = bare_weir("fsck")

    assert result.exit_code == 1
    assert "trigger usage_events_append_only: is disabled" in result.stdout
    assert "held 2, but live holds reserve 0" in result.stdout
    assert "used 0 + held 2 exceed the limit 1" in result.stdout
    assert "3 of " in result.stdout


def test_a_script_gets_one_document(bare_weir: Run, database: str) -> None:
    break_it(database)

    result = bare_weir("fsck --json --check triggers-are-enabled --check no-live-holds --since 24h")

    document = json.loads(result.stdout)
    assert (result.exit_code, document["sound"]) == (1, False)
    assert [(each["name"], each["violation_count"]) for each in document["checks"]] == [
        ("triggers-are-enabled", 1),
        ("no-live-holds", 0),
    ]
    assert document["checks"][0]["sample"] == [
        {"subject": "trigger usage_events_append_only", "problem": "is disabled"}
    ]


def test_an_unknown_check_is_refused_with_the_names_of_all(bare_weir: Run, database: str) -> None:
    result = bare_weir("fsck --check everything")

    assert result.exit_code == 1
    assert "there is no check 'everything'" in result.stderr
    assert "holds-end-once" in result.stderr


def test_a_database_of_another_version_has_a_remedy(bare_weir: Run, database: str) -> None:
    with psycopg.connect(psycopg_conninfo(database)) as connection:
        connection.execute("ALTER TABLE holds RENAME quota_ids TO limits")

    result = bare_weir("fsck")

    assert result.exit_code == 1
    assert "run `weir migrate` first" in result.stderr


def test_the_checks_are_listed_with_what_they_prove(bare_weir: Run) -> None:
    result = bare_weir("fsck --list")

    assert result.exit_code == 0
    assert all(check.name in result.stdout for check in CHECKS)
    assert len(json.loads(bare_weir("fsck --list --json").stdout)) == len(CHECKS) + 1
