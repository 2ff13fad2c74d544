"""`weir retention` on a database: months that are due, obstacles, and removals."""

from __future__ import annotations

import json

import psycopg
import pytest

from metering.store.db import psycopg_conninfo
from tests.cli.conftest import Run

MONTHS = """
INSERT INTO organizations (name, currency_code) VALUES ('acme', 'USD');
INSERT INTO audit_log (created_at, actor, action, subject_id)
VALUES ('2025-01-01', 'x', 'org.create', 'acme');
SELECT create_usage_partition('2025-01-01'), create_usage_partition('2025-02-01');
"""
UNBILLED = """
INSERT INTO ledger_transactions (kind, organization_id, billing_month, effective_at, description)
SELECT 'usage', id, '2025-02-01', '2025-02-03', 'x' FROM organizations
"""


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a migrated database with two old, empty months."""
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    monkeypatch.setenv("WEIR_USAGE_RETENTION_MONTHS", "3")
    monkeypatch.setenv("WEIR_AUDIT_RETENTION_MONTHS", "3")
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(MONTHS)
    return database_url


def test_months_are_shown_and_a_dry_run_removes_nothing(bare_weir: Run, database: str) -> None:
    for command in ("retention show", "retention apply --dry-run"):
        result = bare_weir(command)

        assert result.exit_code == 0
        assert "2025-01" in result.stdout
        assert "due" in result.stdout
        assert "1 entry before" in result.stderr
    document = json.loads(bare_weir("retention show --json").stdout)
    assert [each["state"] for each in document["months"][:2]] == ["due", "due"]
    assert document["audit_entry_count"] == 1


def test_what_is_due_is_removed_up_to_the_first_obstacle(bare_weir: Run, database: str) -> None:
    with psycopg.connect(psycopg_conninfo(database)) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(UNBILLED)

    result = bare_weir("retention apply")

    assert result.exit_code == 1
    assert "removed the details of the usage of 2025-01" in result.stdout
    assert "removed 1 audit entry" in result.stdout
    assert "billed by open months: close acme 2025-02" in result.stderr
    shown = bare_weir("retention show")
    assert "removed" in shown.stdout
    assert "2025-02 cannot be removed" in shown.stderr


def test_without_settings_all_is_kept(
    bare_weir: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIR_USAGE_RETENTION_MONTHS")
    monkeypatch.delenv("WEIR_AUDIT_RETENTION_MONTHS")

    result = bare_weir("retention apply")

    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing was due" in result.stderr
    assert "kept for ever" in bare_weir("retention show").stderr


@pytest.mark.parametrize("value", ["2", "0", "-1", "1201", "six", "3.5"])
def test_a_wrong_setting_names_what_is_allowed(
    bare_weir: Run, database: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("WEIR_USAGE_RETENTION_MONTHS", value)

    result = bare_weir("retention show")

    assert result.exit_code == 2
    assert f"WEIR_USAGE_RETENTION_MONTHS={value!r}" in result.stderr
    assert "must be a whole number from 3 to 1200" in result.stderr
