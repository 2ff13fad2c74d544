"""Watchdog of a worker: what counts as a stall, and how steps are timed."""

from __future__ import annotations

import math
import time

import pytest

from inference.workers.child import FIRST_STEPS, StepClock
from inference.workers.protocol import Pulse
from inference.workers.worker import PULSE_LOST_S, STEP_FACTOR, STEP_S_MIN, Watchdog, overdue


@pytest.mark.parametrize(
    ("step_s", "usual_s", "stalled"),
    [
        (0.0, 0.1, False),
        (STEP_S_MIN, 0.01, False),
        (STEP_S_MIN + 0.1, 0.01, True),
        (STEP_FACTOR * 3.0, 3.0, False),  # a long prefill on a slow CPU
        (STEP_FACTOR * 3.0 + 0.1, 3.0, True),
        (100.0, math.inf, False),  # one of the first steps, which may compile
    ],
)
def test_a_step_is_overdue_beyond_recent_ones(step_s: float, usual_s: float, stalled: bool) -> None:
    assert bool(overdue(Pulse(step_s, usual_s))) is stalled


def test_a_long_prefill_counts_and_first_steps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    steps = StepClock()

    def run(step_s: float) -> None:
        nonlocal now_s
        steps.begin()
        now_s += step_s
        steps.end()

    for _ in range(FIRST_STEPS - 1):
        run(0.02)
    assert steps.pulse() == Pulse(0.0, math.inf)
    run(2.0)
    for _ in range(500):
        run(0.02)
    steps.begin()
    now_s += 7.0
    pulse = steps.pulse()

    assert pulse.step_s == pytest.approx(7.0)
    assert 1.0 < pulse.usual_s < 2.0
    assert not overdue(pulse)


def a_watchdog(stalls: list[str], silences: list[float]) -> Watchdog:
    """Return an armed watchdog with a pulse; the timeout is 4 s."""
    dog = Watchdog(4.0, silences.append, stalls.append)
    dog.arm()
    dog.pulse(Pulse(0.0, 0.1))
    return dog


def poll(dog: Watchdog, monkeypatch: pytest.MonkeyPatch, *, after_s: float, late_s: float) -> None:
    """Let it look so long after the last sign of life, and so long after its timer was due."""
    assert dog._timer is not None
    now_s = dog._timer.when() + late_s
    monkeypatch.setattr(Watchdog, "_now_s", staticmethod(lambda: now_s))
    monkeypatch.setattr(dog, "_heard_at_s", now_s - after_s)
    monkeypatch.setattr(dog, "_pulse", (now_s - after_s, Pulse(0.0, 0.1)))
    dog._poll()


async def test_a_worker_stalls_and_then_counts_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls: list[str] = []
    silences: list[float] = []
    dog = a_watchdog(stalls, silences)

    for after_s in (PULSE_LOST_S - 0.5, PULSE_LOST_S + 0.5, 5.0, 0.0):
        poll(dog, monkeypatch, after_s=after_s, late_s=0.0)
    reported = list(stalls)
    dog.disarm()

    assert reported == ["", "no sign of life for 4 s", "no sign of life for 5 s", ""]
    assert silences == [pytest.approx(5.0)]
    assert stalls[-1] == "", "an ended worker is not stalled"


async def test_a_late_poll_does_not_judge_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each block of the loop would stall, or kill, every engine."""
    stalls: list[str] = []
    silences: list[float] = []
    dog = a_watchdog(stalls, silences)

    poll(dog, monkeypatch, after_s=20.0, late_s=20.0)
    reported = list(stalls), list(silences)
    dog.disarm()

    assert reported == ([], [])
