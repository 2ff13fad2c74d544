"""Commands that run Weir itself: errors, and hints about the next step."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from weir_cli.render import to_text

from api.cli.local import readable
from api.cli.stack import welcome
from api.core.endpoint import ConnectionFile
from metering.store.db import psycopg_conninfo
from tests.cli.conftest import Run
from tests.conftest import APPLICATION_ROLE


def up(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `weir up` in a process of its own, since it starts itself again."""
    return subprocess.run(
        [sys.executable, "-m", "weir_cli", "up", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_second_weir_up_in_one_directory_touches_nothing_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text("the first one's")

    with (tmp_path / ".up.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = up("--home", str(tmp_path))

    assert result.returncode == 1
    assert result.stderr.startswith(
        f"error: `weir up` is already running in {tmp_path}: use it from other terminals"
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == [".up.lock", "serve.json"]


@pytest.mark.parametrize("command", ["serve", "worker", "migrate", "init", "fsck"])
@pytest.mark.parametrize(
    "url", ["!nonsense!", "mysql://weir:hunter2@db/weir", "postgresql://weir:hunter2@db:port/weir"]
)
def test_an_invalid_database_url_is_refused_without_its_password(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch, command: str, url: str
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", url)

    result = bare_weir(command)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: WEIR_DATABASE_URL must ")
    assert "hunter2" not in result.stderr


def test_an_unavailable_database_is_reported_in_one_line(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", "postgresql://weir@127.0.0.1:1/weir")

    result = bare_weir("serve")

    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: the database of WEIR_DATABASE_URL does not answer: connection failed: "
    )
    assert result.stderr.count("\n") == 1
    assert "sqlalche" not in result.stderr


def test_where_to_listen_is_host_and_port(tmp_path: Path) -> None:
    flag = up("--home", str(tmp_path), "--listen", "8443")
    variable = up("--home", str(tmp_path), WEIR_LISTEN="localhost")

    assert (flag.returncode, variable.returncode) == (2, 2)
    assert (
        flag.stderr
        == "error: --listen must be host:port, such as 127.0.0.1:8443, or unix:/path, not '8443'\n"
    )
    assert (
        variable.stderr
        == "error: WEIR_LISTEN='localhost': must be host:port, such as 127.0.0.1:8443, or"
        " unix:/path\n"
    )


def test_the_suggested_command_can_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/weir", "up"])

    text = to_text(welcome("127.0.0.1:8443", tmp_path, ConnectionFile()))

    assert '  .venv/bin/weir generate "Hello"' in text
    assert f"  export WEIR_HOME={tmp_path}" in text.replace("\n", "")


def test_the_next_steps_are_short_with_default_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "weir"), "up"])
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "weir"))

    text = to_text(welcome("127.0.0.1:8443", tmp_path / ".weir", ConnectionFile()))

    assert '  weir generate "Hello"' in text
    assert "WEIR_HOME" not in text


def test_a_worker_gets_the_settings_of_its_command(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[tuple[list[str], str]] = []
    monkeypatch.setenv("WEIR_DATABASE_URL", "postgresql://weir@127.0.0.1:1/weir")
    monkeypatch.setattr(
        os,
        "execve",
        lambda path, command, environment: begun.append((command, environment["WEIR_HOME"])),
    )

    result = bare_weir("worker", "--home", str(tmp_path))

    assert result.exit_code == 0
    ((command, home),) = begun
    assert command[:3] == [sys.executable, "-m", "celery"]
    assert home == str(tmp_path)


def test_migrating_grants_the_application_role_its_rights(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)

    granted = bare_weir("migrate", "--grant", APPLICATION_ROLE)
    missing = bare_weir("migrate --grant nobody")

    assert (granted.exit_code, missing.exit_code) == (0, 1)
    assert (
        f"role {APPLICATION_ROLE} has the privileges of api processes and workers, and no others"
        in " ".join(granted.stderr.split())
    )
    assert " ".join(missing.stderr.split()).startswith(
        "error: role 'nobody' does not exist: set WEIR_APPLICATION_PASSWORD to create it"
    )


@pytest.mark.parametrize("command", ["migrate", "serve", "init"])
def test_a_schema_of_another_line_is_refused_with_what_to_do(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch, database_url: str, command: str
) -> None:
    """A column preceded `description` before 0.1.0; newer schemas have an unknown revision."""
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        newer = bare_weir(command)
        connection.execute("DROP SCHEMA organization_border CASCADE")
        connection.execute("ALTER TABLE ledger_transactions DROP description, ADD description text")
        connection.execute("UPDATE alembic_version SET version_num = '0008'")
        development = bare_weir(command)

    assert (newer.exit_code, development.exit_code) == (1, 1)
    assert (
        " ".join(newer.stderr.split())
        == "error: the database is at schema revision 9999, which this version of Weir does not"
        " know: use the version that migrated it or a newer one"
    )
    assert (
        " ".join(development.stderr.split())
        == "error: the database is at schema revision 0008 of a development version before 0.1.0,"
        " which no release migrates: save its configuration (`weir export` of that version),"
        " then migrate an empty database; `weir up` creates one after you move `postgres` out of"
        " its home directory"
    )


def test_the_embedded_database_has_no_second_role(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIR_DATABASE_URL", raising=False)

    result = bare_weir("migrate --grant weir_app")

    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: --grant needs a separate PostgreSQL: set WEIR_DATABASE_URL"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            '{"event": "part_ready", "level": "info", "part": "engine/demo", "serving": true,'
            ' "timestamp": "2026-11-28T00:25:25.803763Z"}',
            "2026-11-28 00:25:25 info    part_ready part=engine/demo serving=true",
        ),
        (
            '{"event": "lost", "level": "error", "cause": "\\u001b[2Jx", "timestamp": ""}',
            " error   lost cause=[2Jx",
        ),
        ("LOG:  database system is ready", "LOG:  database system is ready"),
        ('{"no": "event"}', '{"no": "event"}'),
        ("[1]", "[1]"),
    ],
)
def test_a_line_of_a_log_reads_as_text_on_a_terminal(line: str, text: str) -> None:
    assert readable(line) == text
