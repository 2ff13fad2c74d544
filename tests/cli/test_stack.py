"""Processes of `weir up`: restarted at once if they had been ready, else with growing delays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from weir_cli.connection import Connection

from api.cli import stack as stack_module
from api.cli.stack import (
    OPERATOR_EMAIL,
    Child,
    Stack,
    bootstrap,
    open_sessions,
    print_sign_in_link,
    stop_all,
    written_pid,
)
from api.core.endpoint import make_private
from metering.tenants.members import deactivate_person
from tests.service import until

NOWHERE = Connection("", "", "", "", "")
READY = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
BROKEN = "raise SystemExit(3)"
HELD_PROGRAM = (
    "import os; from api.__main__ import released;"
    " print(released(os.environ)['WEIR_DATABASE_URL'], os.environ.get('WEIR_HELD'))"
)
# Starts a held process and ends as if it was killed.
KILLED_SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from api.cli.stack import Child

async def main():
    log_path, program = Path(sys.argv[1]), sys.argv[2]
    await Child("child", [sys.executable, "-c", program], log_path).start_held(os.environ)
    os._exit(0)

asyncio.run(main())
"""
# Ends when another one that runs the same has been told to end, too.
ENDS_BESIDE = """
import pathlib, signal, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: own.with_suffix(".told").touch())
own.touch()
while not (own.with_suffix(".told").exists() and other.with_suffix(".told").exists()):
    time.sleep(0.01)
"""


class Delays:
    """Pauses of a supervisor, recorded instead of waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        self._sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self.wait)

    async def wait(self, seconds: float) -> None:
        """Implement `asyncio.sleep`."""
        if seconds >= stack_module.RESTART_DELAY_S_MIN:
            self.seconds.append(seconds)
            seconds = 0
        await self._sleep(seconds)


@contextlib.asynccontextmanager
async def supervised(tmp_path: Path, program: str) -> AsyncIterator[tuple[Child, list[str]]]:
    """Yield a supervised child that runs this program, and the reports about it."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", program, str(ready)]
    child = Child("child", command, tmp_path / "child.log", lambda: written_pid(ready))
    await child.start(os.environ)
    reports: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        supervisor = tasks.create_task(
            Stack(NOWHERE, [child], os.environ, "").supervise(reports.append)
        )
        try:
            yield child, reports
        finally:
            supervisor.cancel()
            await child.stop()


async def test_a_process_that_had_been_ready_is_started_again_at_once_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = Delays(monkeypatch)
    async with supervised(tmp_path, READY) as (child, reports):
        for killed_count in range(1, 7):
            await until(
                lambda: child.process is not None and child.ready_pid() == child.process.pid,
                "it to be ready",
            )
            assert child.process is not None
            os.kill(child.process.pid, signal.SIGKILL)
            await until(lambda: len(reports) == killed_count, "its end to be noticed")  # noqa: B023
        await until(
            lambda: child.process is not None and child.ready_pid() == child.process.pid,
            "it to be back",
        )

    assert delays.seconds == []
    assert all("starting it again (log" in report for report in reports)


async def test_a_process_that_fails_to_start_is_started_again_ever_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = Delays(monkeypatch)
    async with supervised(tmp_path, BROKEN) as (_, reports):
        await until(lambda: len(delays.seconds) >= 8, "it to be started again")

    assert delays.seconds[:8] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert "ended with status 3 before it was ready; starting it again in 0.5 s" in reports[0]


async def test_logs_are_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "child.log").touch(mode=0o644)
    child = Child("child", [sys.executable, "-c", ""], tmp_path / "child.log")
    await child.start(os.environ)
    assert child.process is not None
    await child.process.wait()

    assert (tmp_path / "child.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("before", "after"), [(None, 0o700), (0o755, 0o710), (0o700, 0o700), (0o710, 0o710)]
)
def test_the_home_directory_is_private(tmp_path: Path, before: int | None, after: int) -> None:
    """Its group may enter: for root, the embedded PostgreSQL runs under another account."""
    home = tmp_path / "home"
    if before is not None:
        home.mkdir()
        home.chmod(before)

    make_private(home)

    assert home.stat().st_mode & 0o777 == after


async def test_a_held_process_continues_with_the_settings_of_its_release(tmp_path: Path) -> None:
    child = Child("child", [sys.executable, "-c", HELD_PROGRAM], tmp_path / "child.log")
    await child.start_held({**os.environ, "WEIR_DATABASE_URL": ""})
    assert child.process is not None

    assert child.release({"WEIR_DATABASE_URL": "postgresql://prepared"})
    assert await child.process.wait() == 0
    assert child.log_tail() == "postgresql://prepared None"
    assert not child.release({})


async def test_a_held_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    log_path = tmp_path / "child.log"
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_SUPERVISOR, str(log_path), HELD_PROGRAM)
    )
    assert await supervisor.wait() == 0

    await until(lambda: "weir up ended before" in log_path.read_text(), "it to end")


async def test_a_held_process_that_was_killed_does_not_disturb_its_release(tmp_path: Path) -> None:
    child = Child("child", [sys.executable, "-c", HELD_PROGRAM], tmp_path / "child.log")
    await child.start_held(os.environ)
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGKILL)
    await child.process.wait()

    assert child.release({"WEIR_DATABASE_URL": "postgresql://prepared"})


async def test_children_are_stopped_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "STOP_TIMEOUT_S", 20.0)
    one, other = tmp_path / "one", tmp_path / "other"
    children = [
        Child(path.name, [sys.executable, "-c", ENDS_BESIDE, *paths], path.with_suffix(".log"))
        for path, paths in ((one, (str(one), str(other))), (other, (str(other), str(one))))
    ]
    for child in children:
        await child.start(os.environ)
    await until(lambda: one.exists() and other.exists(), "both to run")

    await stop_all(children)

    assert [child.process and child.process.returncode for child in children] == [0, 0]


async def test_a_deactivated_operator_gets_no_link_and_keeps_nothing_from_starting(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await bootstrap(database_url, tmp_path, [])
    await print_sign_in_link(database_url, "http://127.0.0.1:1/console/")
    assert "http://127.0.0.1:1/console/#/sign-in?link=wl_" in capsys.readouterr().err

    async with open_sessions(database_url) as sessions, sessions.begin() as session:
        await deactivate_person(session, person=OPERATOR_EMAIL, actor="test")
    await print_sign_in_link(database_url, "http://127.0.0.1:1/console/")

    shown = capsys.readouterr().err
    assert "wl_" not in shown
    assert "is deactivated: reactivate the person first" in " ".join(shown.split())
