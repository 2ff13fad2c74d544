"""One start for each demand, however often the scaler is killed in the middle of it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from tests.conftest import ask
from tests.faults import scaler_process
from tests.service import PATIENCE_S

pytestmark = pytest.mark.faults

TRY_COUNT = int(os.environ.get("WEIR_TEST_LAUNCHES", "8"))
PROCESS_COUNT = 3
KILL_S_MAX = 0.6  # longer than a start takes
SCALER = """
SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND objid = 7355609 AND granted
"""


class Scalers:
    """Processes of one database, with one replica that all of them want or do not want."""

    def __init__(self, database_url: str, directory: Path, context: ForkServerContext) -> None:
        self.database_url = database_url
        self.directory = directory
        self._context = context
        self.processes: dict[int, ForkServerProcess] = {}

    def start(self) -> None:
        """Start a process."""
        process = self._context.Process(
            target=scaler_process.run, args=(self.database_url, str(self.directory))
        )
        process.start()
        assert process.pid is not None
        self.processes[process.pid] = process

    def kill(self, pid: int) -> None:
        """Kill a process and wait for its end."""
        process = self.processes.pop(pid)
        process.kill()
        process.join()

    def forget(self, pid: int) -> None:
        """Let the demand of a killed process expire at once."""
        process_id = (self.directory / f"process-{pid}").read_text()
        ask(self.database_url, "DELETE FROM replica_demands WHERE process_id = %s", process_id)

    def want(self) -> None:
        (self.directory / "wanted").touch()

    def leave(self) -> None:
        (self.directory / "wanted").unlink()

    def scaler(self) -> int | None:
        """Return the process that is elected; None if none is."""
        rows = ask(self.database_url, SCALER).fetchall()
        return int(rows[0][0].rpartition("_")[2]) if rows else None

    def state(self) -> str:
        rows = ask(self.database_url, "SELECT state FROM launched_replicas").fetchall()
        return str(rows[0][0]) if rows else ""

    def server_count(self) -> int:
        """Return the number of starts that the servers have noted."""
        path = self.directory / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def scalers(database_url: str, tmp_path: Path) -> Iterator[Scalers]:
    """Yield processes, and kill them and their server at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.scaler_process"])
    found = Scalers(database_url, tmp_path, context)
    yield found
    for pid in tuple(found.processes):
        found.kill(pid)
    for file in tmp_path.glob("launched/*/pid"):
        try:
            os.killpg(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait(condition: Callable[[], object], what: str) -> None:
    give_up_at_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at_s, f"waited for {what}"
        time.sleep(0.005)


def test_a_killed_scaler_starts_nothing_twice(scalers: Scalers) -> None:
    chance = random.Random()
    for _ in range(PROCESS_COUNT):
        scalers.start()
    killed_during: dict[str, int] = {}
    for number in range(1, TRY_COUNT + 1):
        wait(scalers.scaler, "an election")
        scalers.want()
        time.sleep(chance.uniform(0, KILL_S_MAX))
        pid, state = scalers.scaler(), scalers.state()
        assert pid is not None
        killed_during[state] = killed_during.get(state, 0) + 1
        scalers.kill(pid)

        wait(lambda: scalers.state() == "ready", "the replica")

        assert scalers.server_count() == number, "exactly one start for this demand"
        scalers.leave()
        scalers.forget(pid)
        wait(lambda: scalers.state() == "stopped", "its stop")
        scalers.start()
    print("killed during:", killed_during)
    lifetimes = ask(
        scalers.database_url, "SELECT count(*), count(ended_at) FROM replica_runs"
    ).fetchone()
    assert lifetimes == (TRY_COUNT, TRY_COUNT)
