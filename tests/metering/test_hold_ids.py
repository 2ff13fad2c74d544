"""Ids of holds are unique, and ordered by time."""

from __future__ import annotations

import time
import uuid

from metering.holds.operations import new_hold_id


def test_an_id_says_when_it_was_made_and_no_two_are_the_same() -> None:
    before = time.time_ns() // 1_000_000
    ids = [new_hold_id() for _ in range(1000)]
    after = time.time_ns() // 1_000_000

    assert len(set(ids)) == len(ids)
    assert all(before <= each.int >> 80 <= after for each in ids)
    assert {(each.version, each.variant) for each in ids} == {(7, uuid.RFC_4122)}
