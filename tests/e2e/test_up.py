"""`weir up` and its related commands as a new user runs them; no process remains afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from api.core.endpoint import read_endpoint
from common.processes import alive, children_of
from tests.service import MODEL, PATIENCE_S, wait_for


def command(*arguments: str) -> list[str]:
    """Return the command line of `weir` for this interpreter."""
    return [sys.executable, "-m", "weir_cli", *arguments]


@pytest.fixture
def environment(postgres_home: Path, model: Path) -> dict[str, str]:
    """Return an environment with a new home and the tiny model, and no outside settings."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    own = {
        "WEIR_HOME": str(postgres_home),
        "WEIR_MODELS": f"{MODEL}={model}",
        "WEIR_ENGINE_THREADS": "1",
    }
    return {**outer, **own, "WEIR_LISTEN": "127.0.0.1:0", "NO_COLOR": "1", "COLUMNS": "120"}


def unused_port() -> int:
    """Return a port that is free together with those beside it for HTTP and metrics."""
    for first in range(23_000, 30_000, 7):
        with contextlib.ExitStack() as stack:
            try:
                for port in (first, first + 1000, *range(first + 2000, first + 2003)):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no port is free")


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found = set(children_of(pid))
    return found.union(*map(descendants, found))


def test_everything_on_one_machine(environment: dict[str, str], postgres_home: Path) -> None:
    home = postgres_home
    log = postgres_home / "up.log"

    def weir(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(*arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"weir {' '.join(arguments)}: {done.stderr}\n{log.read_text()}"
        return done

    with log.open("wb") as file:
        up = subprocess.Popen(
            command("up"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            process_group=0,
        )
    processes: set[int] = set()
    try:

        def ready() -> bool:
            assert up.poll() is None, log.read_text()
            return (home / "connection.json").exists()

        wait_for(ready, "weir up")
        assert (home / "connection.json").stat().st_mode & 0o077 == 0, "it has keys"
        assert home.stat().st_mode & 0o067 == 0, "nobody else lists or writes the directory"
        assert [each for each in (home / "logs").iterdir() if each.stat().st_mode & 0o077] == []

        url = str(json.loads((home / "serve.json").read_text())["openai_url"])
        wait_for(lambda: "".join(log.read_text().split()).count(url), "the base URL to be told")
        with openai.OpenAI(
            base_url=url, api_key=json.loads((home / "connection.json").read_text())["api_key"]
        ) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
        streamed = weir(
            "generate",
            "Which hotel has a garden?",
            "--model",
            MODEL,
            "--max-output-tokens",
            "12",
            "--json",
        )
        answer = json.loads(streamed.stdout)
        traced = weir("trace", answer["request_id"]).stdout
        report = report_of(weir, expected_requests=1)
        month = report["month"]
        weir("month", "show", month, "--json", "--output", str(home / "report.json"))
        weir("receipt", "export", month, "--output", str(home / "receipts.jsonl"))
        receipts = weir(
            "receipt", "verify", str(home / "receipts.jsonl"), "--report", str(home / "report.json")
        ).stdout
        postmaster = int((home / "postgres" / "postmaster.pid").read_text().split()[0])
        processes = {postmaster, *descendants(postmaster), *descendants(up.pid)}
        assert len(processes) >= 4, "PostgreSQL, api server, engine worker, worker"

        os.killpg(up.pid, signal.SIGINT)  # as a terminal does: to all that it runs there
        assert up.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        if up.poll() is None:
            up.kill()
            for pid in descendants(up.pid):
                os.kill(pid, signal.SIGKILL)

    wait_for(lambda: not any(map(alive, processes)), "every process to end")
    assert "prefill" in traced
    assert "✓ 1 receipt of 1 project, 1 signed" in receipts
    assert (home / "receipt-key.pem").stat().st_mode & 0o077 == 0
    assert answer["usage"]["delivered_token_count"] <= 12
    assert report["reconciliation"]["balanced"] is True


def test_weir_up_runs_in_the_background_until_weir_down(
    environment: dict[str, str], postgres_home: Path
) -> None:
    def weir(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    try:
        stopped = weir("status")
        started = weir("up", "--detach")
        again = weir("up", "--detach")
        status = weir("status")
        document = json.loads(weir("status", "--json").stdout)
        logs = weir("logs", "up", "postgres", "--lines", "3").stdout
    finally:
        down = weir("down")

    assert stopped.returncode == 1
    assert "no server is running" in stopped.stderr
    assert started.returncode == 0, started.stderr
    for step in ("Starting PostgreSQL", "Loading the model", "weir down"):
        assert step in started.stderr
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert (status.returncode, document["status"]) == (0, "ready")
    for part in ("server", "database", "billing worker", f"engine {MODEL}"):
        assert part in status.stdout
    assert "Weir 0.0.0" not in status.stdout
    assert {line.partition("|")[0].strip() for line in logs.splitlines()} == {"up", "postgres"}
    assert down.returncode == 0, down.stderr
    wait_for(lambda: not alive(document["pid"]), "the api server to end")
    assert not alive(document["supervisor_pid"])
    assert "no `weir up` is running" in weir("down").stderr


def test_several_processes_share_the_port_and_the_engine(
    environment: dict[str, str], postgres_home: Path
) -> None:
    """Each api process in turn is killed: another one answers meanwhile, with the same engine."""
    environment = environment | {"WEIR_LISTEN": f"127.0.0.1:{unused_port()}"}
    home = postgres_home

    def weir(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def serving() -> list[int]:
        found = [read_endpoint(each) for each in (home, home / "api-2", home / "api-3")]
        return [each.pid for each in found if each.serving and alive(each.pid)]

    def worker() -> int:
        [lock] = (home / "engines").glob(f"{MODEL}*.lock")
        return int(json.loads(lock.read_text())["pid"])

    unchosen = weir("up", "--detach", "--processes", "3", "--listen", "127.0.0.1:0")
    try:
        started = weir("up", "--detach", "--processes", "3")
        assert started.returncode == 0, started.stderr
        wait_for(lambda: len(serving()) == 3, "three processes to serve")
        first, engine = serving(), worker()
        assert len(set(first)) == 3
        for pid in first:
            os.kill(pid, signal.SIGKILL)
            answer = weir("generate", "Hello", "--model", MODEL, "--max-output-tokens", "5")
            assert answer.returncode == 0, answer.stderr
            wait_for(lambda: len(serving()) == 3, "the killed process to be replaced")
        assert not {*first} & {*serving()}
        assert worker() == engine
        status = weir("status")
        assert all(f"api server {pid}" in status.stdout + status.stderr for pid in serving())
        logs = weir("logs", "api", "--lines", "1").stdout
        assert {line.partition("|")[0].strip() for line in logs.splitlines()} == {
            "api",
            "api-2",
            "api-3",
        }
        last = serving()
    finally:
        down = weir("down")
    assert down.returncode == 0, down.stderr
    wait_for(lambda: not any(map(alive, [engine, *last])), "all processes to end")
    assert unchosen.returncode == 1
    assert "--listen must name it" in unchosen.stderr


def test_a_demo_says_in_a_pipe_what_it_does(environment: dict[str, str]) -> None:
    bundled = {name: each for name, each in environment.items() if not name.startswith("WEIR_")}
    done = subprocess.run(
        command("demo", "--agents", "2"),
        env=bundled,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    for phase in ("Starting PostgreSQL", "Loading the model", "Waiting for the billing worker"):
        assert phase in lines


def report_of(weir: Any, expected_requests: int) -> dict[str, Any]:
    """Return the month's report, once the worker has rated everything."""
    month = f"{datetime.now(UTC):%Y-%m}"

    def rated() -> dict[str, Any] | None:
        document: dict[str, Any] = json.loads(weir("month", "show", month, "--json").stdout)
        return document if document["lines"] and not document["unrated_event_count"] else None

    report = wait_for(rated, "the worker to rate the request")
    assert report["request_counts"]["total_count"] == expected_requests
    return report
