"""Lease clock: a process never acts under an expired hold, even after a pause."""

from __future__ import annotations

import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metering.holds.lease_clock import BOOT_CLOCK, LeaseClock
from tests.metering.hold_world import Clock

ID, OTHER = uuid.uuid4(), uuid.uuid4()

STEP = st.tuples(
    st.sampled_from(["begin", "renew", "extend", "end", "wait"]),
    st.integers(0, 3),
    st.floats(0, 100),
)


def test_a_deadline_counts_from_when_the_statement_was_sent_and_ends_before_the_expiry() -> None:
    clock = Clock()
    leases = LeaseClock(60.0, clock)

    leases.begin([ID], sent_at=995.0)

    assert 54.0 <= leases.left_s(ID) < 55.0
    assert leases.left_s(OTHER) == 0.0


def test_a_renewal_moves_what_has_not_lapsed_and_nothing_else() -> None:
    clock = Clock()
    leases = LeaseClock(60.0, clock)
    leases.begin([ID], sent_at=1000.0)
    leases.begin([OTHER], sent_at=1030.0)

    clock.now = 1061.0  # the machine slept: one of them has lapsed
    leases.renew([ID, OTHER], sent_at=1061.0)

    assert leases.left_s(ID) == 0.0
    assert leases.left_s(OTHER) == pytest.approx(60.0 * 0.99)
    assert set(leases.hold_ids) == {ID, OTHER}, "a lapsed hold is still ours to end"


def test_an_extension_proves_that_the_hold_is_still_ours() -> None:
    clock = Clock()
    leases = LeaseClock(60.0, clock)
    leases.begin([ID], sent_at=1000.0)
    clock.now = 1100.0

    leases.extend(ID, sent_at=1100.0)

    assert leases.left_s(ID) > 0.0
    leases.end([ID])
    leases.extend(ID, sent_at=1100.0)  # its settlement was answered before
    assert leases.left_s(ID) == 0.0
    assert len(leases) == 0


def test_the_clock_continues_in_sleep_and_cannot_be_set() -> None:
    assert getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) == BOOT_CLOCK
    with pytest.raises(OSError, match=r"."):
        time.clock_settime(BOOT_CLOCK, 0.0)


@given(st.lists(STEP, max_size=30))
def test_one_query_finds_all_lapsed_holds(steps: list[tuple[str, int, float]]) -> None:
    clock, ids = Clock(), [uuid.UUID(int=number) for number in range(4)]
    leases = LeaseClock(60.0, clock)
    for action, number, time_s in steps:
        if action == "wait":
            clock.now += time_s
        elif action == "end":
            leases.end([ids[number]])
        elif action == "extend":
            leases.extend(ids[number], clock.now - time_s)
        elif action == "begin":
            # The database may answer late.
            leases.begin([ids[number]], clock.now - time_s)
        else:
            leases.renew(leases.hold_ids, clock.now - time_s)

        lapsed = any(leases.left_s(hold_id) == 0.0 for hold_id in leases.hold_ids)
        assert leases.may_have_lapsed() or not lapsed
        clock.now += 0.001
