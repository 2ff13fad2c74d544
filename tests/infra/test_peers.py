"""Run of the tests with engines of other projects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infra import peers
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


def test_a_failed_installation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CACHE", tmp_path / "clients")
    peer = Peer("a", "pytest", ("install --no-index no-such-package",), ("tests",), "")
    monkeypatch.setattr(peers, "PEERS", {"a": peer})

    row, is_good = tried(peer)

    assert not is_good
    assert row.startswith("| a | - | tests | fail: ")
    assert not (peer.folder / ".installed").exists()
