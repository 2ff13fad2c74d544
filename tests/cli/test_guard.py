"""Guard of `weir up`: which ends of a supervisor it answers with another one, and how fast."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.cli.guard import AlreadyRunning, Guard, Role, lock_home, stop_signals

KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Supervisors(Guard):
    """Guard of supervisors that end with given statuses; delays are recorded, not waited for."""

    def __init__(self, home: Path, statuses: list[int]) -> None:
        super().__init__(home, None, end_left=lambda _: None)
        self._statuses = statuses
        self.delays_s: list[float] = []
        self.adopting: list[bool] = []
        self._stopping.wait = self._wait  # type: ignore[method-assign]

    def _supervised(self) -> int:
        self.adopting.append(self._adopts)
        return self._statuses.pop(0)

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.delays_s.append(timeout)
        return self._stopping.is_set()


def test_supervisors_killed_again_and_again_are_replaced_ever_more_slowly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = Supervisors(tmp_path, [KILLED] * 11 + [0])

    assert guard.run() == 0

    assert guard.delays_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    assert guard.adopting == [False] + [True] * 11
    assert "ended with status -9; starting another in 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_first_supervisor_that_ends_by_itself_ends_the_guard(tmp_path: Path, status: int) -> None:
    guard = Supervisors(tmp_path, [status])

    assert guard.run() == status
    assert guard.delays_s == []


def test_a_later_supervisor_that_cannot_start_is_replaced(tmp_path: Path) -> None:
    guard = Supervisors(tmp_path, [KILLED, 1, 0])

    assert guard.run() == 0
    assert guard.delays_s == [0.1, 0.2]


def test_two_guards_of_one_directory_exclude_each_other(tmp_path: Path) -> None:
    lock_fd = lock_home(tmp_path)
    Role(lock_fd, -1, adopts=False).supervises()

    with pytest.raises(AlreadyRunning, match=r"`kill [0-9]+`"):
        Guard(tmp_path, None, end_left=lambda _: None)


def test_a_role_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that started `weir up` of its own would else take it for its own."""
    role = Role(7, 8, adopts=True)
    for name, value in role.environment().items():
        monkeypatch.setenv(name, value)

    assert Role.taken() == role
    assert Role.taken() is None
