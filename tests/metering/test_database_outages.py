"""Gate of an unavailable database: one attempt at a time, after growing random pauses."""

from __future__ import annotations

import pytest

from metering.core.errors import DatabaseUnavailable
from metering.store.db import BACKOFF_MAX_S, BACKOFF_MIN_S, StoreGate
from tests.metering.hold_world import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


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

    with pytest.raises(DatabaseUnavailable), gate.attempt():
        raise AssertionError("let through at once")
    clock.now += BACKOFF_MIN_S
    with gate.attempt():
        assert isinstance(gate.refusal(), DatabaseUnavailable)
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

    expected = [min(BACKOFF_MIN_S * 2**n, BACKOFF_MAX_S) * (0.5 + luck) for n in range(12)]
    assert pauses == pytest.approx(expected)
    assert gate.away_s == pytest.approx(sum(expected)), "counted from the first failure"


def test_a_refused_client_gets_a_retry_after(clock: Clock) -> None:
    gate = StoreGate(clock, jitter=lambda: 0.5)
    for _ in range(8):
        fail(gate)
        clock.now += gate.pause_s
    fail(gate)

    refusal = gate.refusal()

    assert isinstance(refusal, DatabaseUnavailable)
    assert refusal.retry_after_s == pytest.approx(BACKOFF_MAX_S)
