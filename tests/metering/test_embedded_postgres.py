"""Embedded server: detected, restarted after a kill, reachable under any path."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from metering.store import embedded_postgres
from metering.store.embedded_postgres import PostgresNotStarted, start
from metering.store.migrations_runner import migrate


def ask(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row and row[0]


@pytest.mark.faults
def test_data_survives_a_killed_server_and_a_pid_file_that_names_a_stranger(
    postgres_home: Path,
) -> None:
    server = start(postgres_home / "postgres")
    migrate(server.url)
    found_again = start(postgres_home / "postgres")
    with psycopg.connect(server.url) as connection:
        connection.execute("INSERT INTO organizations (name, currency_code) VALUES ('acme', 'USD')")
    killed = server.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)

    pid_file = postgres_home / "postgres" / "postmaster.pid"
    lines = pid_file.read_text().split("\n")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))
    restarted = start(postgres_home / "postgres")

    assert found_again == server == restarted
    assert restarted.pid not in (None, killed)
    assert ask(restarted.url, "SELECT name FROM organizations") == "acme"
    migrate(restarted.url)
    restarted.stop()
    restarted.stop()
    assert restarted.pid is None


@pytest.mark.faults
def test_a_server_that_is_just_dying_is_replaced(postgres_home: Path) -> None:
    """For some milliseconds the process, its children and their memory remain."""
    server = start(postgres_home / "postgres")
    for _ in range(6):
        with psycopg.connect(server.url), psycopg.connect(server.url):
            killed = server.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)

            assert start(postgres_home / "postgres") == server

            assert server.pid not in (None, killed)
            assert ask(server.url, "SELECT 1") == 1


@pytest.mark.faults
def test_processes_that_start_and_migrate_at_once_alternate(postgres_home: Path) -> None:
    start_and_migrate = (
        "import sys; from pathlib import Path; from metering.store.embedded_postgres import start;"
        " from metering.store.migrations_runner import migrate; url = start(Path(sys.argv[1])).url;"
        " migrate(url); print(url)"
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        start_and_migrate,
        str(postgres_home / "postgres"),
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]

    ended = [process.communicate(timeout=100) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert len({url for url, _ in ended}) == 1
    assert ask(ended[0][0].strip(), "SELECT count(*) FROM organizations") == 0


def test_a_path_too_long_for_a_socket_gets_a_short_one(postgres_home: Path) -> None:
    deep = postgres_home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)

    server = start(deep / "postgres")
    answer = ask(server.url, "SELECT current_database()")
    mode = server.socket_dir.stat().st_mode & 0o777
    server.stop()

    assert answer == "weir"
    assert not server.socket_dir.exists()
    assert server.socket_dir != server.data_dir
    assert mode == 0o700


def test_a_directory_that_holds_something_else_is_refused(postgres_home: Path) -> None:
    (postgres_home / "postgres").mkdir()
    (postgres_home / "postgres" / "thesis.txt").write_text("mine")

    with pytest.raises(PostgresNotStarted, match="not a PostgreSQL cluster"):
        start(postgres_home / "postgres")


def test_processes_that_need_the_account_at_once_add_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    existing: list[str] = []

    def find(name: str) -> str:
        if name not in existing:
            raise KeyError(name)
        return name

    def add(command: list[str], **options: object) -> None:
        time.sleep(0.01)  # the others look for it meanwhile
        existing.append(command[-1])

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", find)
    monkeypatch.setattr(subprocess, "run", add)

    with ThreadPoolExecutor(8) as threads:
        found: list[object] = list(
            threads.map(lambda _: embedded_postgres._server_account(), range(8))
        )

    assert existing == ["pgserver"]
    assert found == ["pgserver"] * 8
