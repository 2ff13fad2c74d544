"""Whether the database is away, and who may try it: one at a time, after growing pauses, at a time of its own."""

from __future__ import annotations

import pytest

from metering.core.errors import StoreAway
from metering.store.db import BACKOFF_LEAST_S, BACKOFF_MOST_S, StoreGate


class Clock:
    """Stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(gate: StoreGate) -> None:
    with pytest.raises(OSError, match="refused"), gate.attempt():
        raise OSError("refused")


def test_while_the_database_answers_any_number_may_connect_at_once(clock: Clock) -> None:
    gate = StoreGate(clock)

    with gate.attempt(), gate.attempt():
        assert gate.refusal() is None

    assert gate.away_s is None


def test_after_a_failure_one_at_a_time_may_try_and_only_after_the_pause(clock: Clock) -> None:
    gate = StoreGate(clock, jitter=lambda: 0.5)
    fail(gate)

    with pytest.raises(StoreAway), gate.attempt():
        raise AssertionError("let through at once")
    clock.now += BACKOFF_LEAST_S
    with gate.attempt():
        assert isinstance(gate.refusal(), StoreAway)
        gate.answered()

    assert gate.refusal() is None
    assert gate.away_s is None


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_pauses_double_up_to_a_bound_and_differ_by_chance(clock: Clock, luck: float) -> None:
    gate = StoreGate(clock, jitter=lambda: luck)
    pauses = []
    for _ in range(12):
        fail(gate)
        pauses.append(gate._next_attempt_at - clock.now)
        clock.now = gate._next_attempt_at

    expected = [min(BACKOFF_LEAST_S * 2**n, BACKOFF_MOST_S) * (0.5 + luck) for n in range(12)]
    assert pauses == pytest.approx(expected)
    assert gate.away_s == pytest.approx(sum(expected)), "counted from the first failure"


def test_whoever_is_refused_is_told_when_to_come_again(clock: Clock) -> None:
    gate = StoreGate(clock, jitter=lambda: 0.5)
    for _ in range(8):
        fail(gate)
        clock.now += gate.pause_s
    fail(gate)

    refusal = gate.refusal()

    assert isinstance(refusal, StoreAway)
    assert refusal.retry_after_s == pytest.approx(BACKOFF_MOST_S)
