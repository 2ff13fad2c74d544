"""Unexpected failures: contained to their item, logged under an id, counted, retried later."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from structlog.testing import capture_logs

from common.incidents import INCIDENT_COUNTS, ITEMS_MAX, IncidentTaskGroup, Retries


class Clock:
    """Clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_failed_item_rests_twice_as_long_each_time_and_others_do_not() -> None:
    clock = Clock()
    retries = Retries("test", shortest_s=1.0, longest_s=5.0, clock=clock)
    rests: list[float] = []
    with capture_logs() as logs:
        for _ in range(5):
            with retries.survive("bad"):
                raise ValueError("broken")
            rests.append(retries.wait_s("bad"))
            assert retries.is_due("good")
            assert not retries.is_due("bad")
            clock.now_s += rests[-1]
            assert retries.is_due("bad")

    assert rests == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [(entry["source"], entry["item"], entry["failure_count"]) for entry in logs] == [
        ("test", "bad", count) for count in range(1, 6)
    ]
    assert len({entry["incident_id"] for entry in logs}) == 5


def test_incidents_are_counted_from_zero_by_source() -> None:
    retries = Retries("counted")
    before = INCIDENT_COUNTS["counted"]

    with retries.survive():
        raise ValueError("broken")

    assert (before, INCIDENT_COUNTS["counted"]) == (0, 1)


def test_success_forgets_failures() -> None:
    clock = Clock()
    retries = Retries("test", clock=clock)
    for _ in range(3):
        with retries.survive("item"):
            raise ValueError("broken")
    with retries.survive("item"):
        pass
    assert retries.resting() == []

    with retries.survive("item"):
        raise ValueError("broken")

    assert retries.wait_s("item") == 1.0


def test_an_outage_is_not_the_fault_of_an_item() -> None:
    retries = Retries("test", passing=(ConnectionError,))

    with pytest.raises(ConnectionError), retries.survive("item"):
        raise ConnectionResetError

    assert retries.is_due("item")


def test_the_memory_of_failures_is_bounded() -> None:
    retries = Retries("test", clock=Clock())
    with capture_logs():
        for item in range(ITEMS_MAX + 10):
            retries.failed(ValueError(), item)

    assert len(retries.resting()) == ITEMS_MAX


async def test_a_loop_that_raises_is_started_again_and_a_cancelled_one_is_not() -> None:
    retries = Retries("test", shortest_s=0.0, longest_s=0.0)
    starts = 0
    running = asyncio.Event()

    async def loop() -> None:
        nonlocal starts
        starts += 1
        if starts < 4:
            raise ValueError("broken")
        running.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(retries.keep_running(loop))
        await running.wait()
        task.cancel()

    assert (starts, task.cancelled()) == (4, True)


async def test_a_task_of_the_process_fails_alone() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    async def succeeds() -> str:
        return "done"

    before = INCIDENT_COUNTS["task"]
    async with IncidentTaskGroup() as tasks:
        bad = tasks.create_task(fails(), name="bad")
        good = tasks.create_task(succeeds(), name="good")

    assert (bad.result(), good.result()) == (None, "done")
    assert INCIDENT_COUNTS["task"] == before + 1


async def test_a_task_that_is_cancelled_before_its_first_step_closes_its_coroutine() -> None:
    async def work() -> None:
        raise AssertionError("it was cancelled")

    coroutine = work()
    async with IncidentTaskGroup() as tasks:
        tasks.create_task(coroutine).cancel()

    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
