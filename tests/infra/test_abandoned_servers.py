"""Workers that start together remove what a killed run has left."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metering.store import embedded_postgres
from tests import conftest

WORKER_COUNT = 4
LEFT_COUNT = 12


def test_workers_that_start_together_remove_what_a_killed_run_left(
    monkeypatch: pytest.MonkeyPatch, postgres_home: Path
) -> None:
    monkeypatch.setattr(conftest, "scratch", lambda: postgres_home)
    with subprocess.Popen(["true"]) as ended:
        pass
    left = [postgres_home / f"weir-test-{ended.pid}-{number}" for number in range(LEFT_COUNT)]
    server = embedded_postgres.start(left[0] / "postgres")
    for home in left[1:]:  # killed while they were being made or removed
        (home / "postgres" / "base").mkdir(parents=True)
        (home / "postgres" / "postmaster.pid").write_text(f"{ended.pid}\n")
    with ThreadPoolExecutor(WORKER_COUNT) as workers:
        homes = list(workers.map(lambda _: conftest.new_home(), range(WORKER_COUNT)))
    assert sorted(postgres_home.glob("weir-test-*")) == sorted(homes)
    assert server.pid is None
