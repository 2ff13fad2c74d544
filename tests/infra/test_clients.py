"""Page of third-party clients: its sections, and the run of their code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import clients
from infra.clients import PAGE, PASS, TABLE_HEAD, Client, clients_of, tried

CLIENTS = clients_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_section_says_what_runs_and_how_to_install_it(client: Client) -> None:
    assert client.ran
    assert client.install[:2] in (["pip", "install"], ["npm", "install"])
    assert client.blocks
    assert {language for language, _ in client.blocks} <= clients.SUFFIXES.keys()


def test_the_table_has_every_client_with_its_verified_version() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(TABLE_HEAD)[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]

    assert [(name, ran, result) for name, _, ran, result, _ in rows] == [
        (client.name, client.ran, PASS) for client in CLIENTS
    ]
    assert all(version[0].isdigit() for _, version, *_ in rows)


@pytest.mark.parametrize(
    ("install", "package"),
    [
        ("pip install a-b[c]", "a-b"),
        ("pip install a==0.5.0", "a"),
        ("npm install @a/b zod", "@a/b"),
        ("npm install a@0.2.2", "a"),
    ],
)
def test_the_package_is_named_without_its_extras_and_version(install: str, package: str) -> None:
    assert Client("A", "Chat", install.split(), []).package == package


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an installed client of a block of code."""
    monkeypatch.setattr(clients, "CACHE", tmp_path)

    def installed(language: str, code: str) -> Client:
        client = Client("A (npm)", "Chat", ["npm", "install", "a"], [(language, code)])
        manifest = client.folder / "node_modules" / "a" / "package.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"version": "1.2.3"}))
        (client.folder / ".installed").write_text("npm install a")
        return client

    return installed


@pytest.mark.parametrize(
    ("language", "code", "result"),
    [
        ("bash", "echo $WEIR_API_KEY", PASS),
        ("bash", "true", "fail: no output"),
        ("bash", "echo a\necho 'b|c' >&2\nfalse", "fail: b/c"),
        ("bash", "exit 3", "fail: status 3"),
        ("python", "print(1 / 0)", "fail: ZeroDivisionError: division by zero"),
    ],
)
def test_code_passes_if_it_ends_well(install: Any, language: str, code: str, result: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

    row = tried(install(language, code), {"PATH": path, "WEIR_API_KEY": "wk"})

    assert (row.version, row.result) == ("1.2.3", result)
    assert str(row).startswith(f"| A (npm) | 1.2.3 | Chat | {result} | ")


def test_code_that_does_not_end_is_stopped(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by the signal at which pytest ends what its tests have started."""
    monkeypatch.setattr(clients, "PROGRAM_MAX_S", 0.4)
    client = install("bash", "trap 'echo ended >ended; exit' INT; while true; do sleep 0.05; done")

    row = tried(client, {"PATH": os.environ["PATH"]})

    assert row.result == "fail: did not end within 0 s"
    assert (client.folder / "ended").exists()
