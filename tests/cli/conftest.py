"""Scripted Weir, and a fixture that runs commands against it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from weir_cli import months as report_module
from weir_cli.__main__ import app

from tests.cli.scripted_weir import ScriptedAccounts, scripted_inference
from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference


@dataclass(frozen=True)
class ScriptedWeir:
    """Scripted server: its address, and the requests to its services."""

    address: str
    inference: ScriptedInference
    accounts: ScriptedAccounts


Run = Callable[..., Result]


def rows(table: str) -> list[str]:
    """Return the lines of a table, each with one blank between its words."""
    return [" ".join(line.split()) for line in table.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Return a plain terminal of 100 columns without outside settings, in December 2026."""
    for name in (
        "WEIR_ADDRESS",
        "WEIR_API_KEY",
        "WEIR_ADMIN_KEY",
        "WEIR_ROOT_CERTIFICATES",
        "FORCE_COLOR",
        "GITHUB_ACTIONS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(report_module, "present_day", lambda: date(2026, 12, 20))


@pytest.fixture
def wide_terminal(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def server() -> Iterator[ScriptedWeir]:
    inference, accounts = scripted_inference(), ScriptedAccounts()
    with scripted.serve_in_thread(inference, accounts.add) as address:
        yield ScriptedWeir(address, inference, accounts)


@pytest.fixture
def bare_weir() -> Run:
    """Return a function that runs `weir` with exactly these arguments, or with one command line."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        words = shlex.split(arguments[0]) if len(arguments) == 1 else list(arguments)
        return CliRunner().invoke(app, words, input=stdin, catch_exceptions=False)

    return run


@pytest.fixture
def weir(bare_weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `weir` against the scripted server."""
    monkeypatch.setenv("WEIR_ADDRESS", server.address)
    monkeypatch.setenv("WEIR_API_KEY", "weir_user")
    monkeypatch.setenv("WEIR_ADMIN_KEY", "weir_admin")
    return bare_weir
