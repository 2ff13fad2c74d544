"""The embedded server: found again, started after a kill, and reachable however long its path is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest

from metering.embedded_postgres import PostgresNotStarted, start
from metering.migrations_runner import migrate


def ask(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row and row[0]


@pytest.mark.faults
def test_data_survives_a_killed_server_and_a_pid_file_that_names_a_stranger(postgres_home: Path) -> None:
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


def test_a_path_too_long_for_a_socket_gets_a_short_one(postgres_home: Path) -> None:
    deep = postgres_home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)

    server = start(deep / "postgres")
    answer = ask(server.url, "SELECT current_database()")
    mode = server.socket_dir.stat().st_mode & 0o777
    server.stop()

    assert answer == "weir"
    assert server.socket_dir != server.data_dir
    assert mode == 0o700


def test_a_directory_that_holds_something_else_is_refused(postgres_home: Path) -> None:
    (postgres_home / "postgres").mkdir()
    (postgres_home / "postgres" / "thesis.txt").write_text("mine")

    with pytest.raises(PostgresNotStarted, match="not a PostgreSQL cluster"):
        start(postgres_home / "postgres")
