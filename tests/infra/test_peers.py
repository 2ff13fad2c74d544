"""Run of the tests with engines of other projects."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from infra import clients, peers
from infra.architecture import ROOT
from infra.peers import PEERS, Peer, tried


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_a_peer_pins_its_package_and_has_tests(peer: Peer) -> None:
    pin = "==" if peer.manager == "pip" else "@"
    assert f"{peer.package}{pin}" in " ".join(peer.steps)
    assert peer.tests
    assert all((ROOT / path).is_file() for path in peer.tests)
    assert set(peer.needs) <= PEERS.keys()


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import os\ndef test_a(): assert os.environ['WEIR_TEST_A_PYTHON']", "1 passed"),
        ("def test_a(): assert False", "fail: 1 failed"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", "fail: 1 skipped"),
    ],
)
def test_a_peer_passes_if_its_tests_pass(
    code: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text(code)
    peer = Peer("a", "pytest", ("install pytest",), (str(tests),), "test_a")
    monkeypatch.setattr(peers, "PEERS", {"a": peer})
    monkeypatch.setattr(peers, "CACHE", tmp_path / "clients")
    monkeypatch.setenv("WEIR_TEST_A_PYTHON", sys.executable)

    row, is_good = tried(peer)

    assert is_good == (result == "1 passed")
    assert row.startswith(f"| a | {pytest.__version__} | test_it.py | {result}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep peers in a directory of the test, with this interpreter: a new one takes seconds."""

    def run(
        command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], limit_s: float
    ) -> str:
        if "venv" not in command:
            return clients.run(command, folder, environment, limit_s)
        python = folder / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return ""

    monkeypatch.setattr(peers, "CACHE", tmp_path / "clients")
    monkeypatch.setattr(peers, "run", run)


@pytest.mark.usefixtures("cache")
def test_a_failed_installation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer("a", "pytest", ("install --no-index no-such-package",), ("tests",), "")
    monkeypatch.setattr(peers, "PEERS", {"a": peer})

    row, is_good = tried(peer)

    assert not is_good
    assert row.startswith("| a | - | tests | fail: ")
    assert not (peer.folder / ".installed").exists()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("options", "max_s"), [("--proxy http://127.0.0.1:9 --retries 1", 60), ("", 0.01)]
)
def test_a_peer_is_skipped_if_its_packages_cannot_be_downloaded(
    options: str, max_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("a", "pytest", (f"install --isolated {options} no-such-package",), ("tests",), "")
    monkeypatch.setattr(peers, "PEERS", {"a": peer})

    row, is_good = tried(peer, max_s)

    assert is_good
    assert row.startswith("| a | - | tests | skipped, not downloaded: ")
