"""The measurements of `tests/growth.py`, each shown to find a planted fault."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.growth import (
    BLOCK_MAX_S,
    HOLD_MAX_S,
    Call,
    Growth,
    LoopWatch,
    as_in_service,
    check_growth,
    check_hold,
    longest_hold,
)

SIZE = 20_000
HELD_S = BLOCK_MAX_S / 4
IN_C = "[" + "[]," * 500_000 + "[]]"  # one call in C that takes four times as long


def compared_one_by_one(size: int) -> Call:
    """Return a call that looks for each element among all before it."""

    def call() -> list[int]:
        seen: list[int] = []
        for each in range(size):
            if each not in seen:
                seen.append(each)
        return seen

    return call


def joined_once(size: int) -> Call:
    return lambda: "\n".join(["x" * 10 for _ in range(size)])


def busy(seconds: float) -> None:
    """Use processor time in Python."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_linear_work_passes() -> None:
    with as_in_service():
        check_growth("joined once", joined_once, SIZE)


def test_quadratic_work_is_found() -> None:
    with as_in_service(), pytest.raises(AssertionError, match="compared one by one"):
        check_growth("compared one by one", compared_one_by_one, SIZE // 10)


def test_python_code_in_a_thread_lets_others_run() -> None:
    with as_in_service():
        check_hold("Python", lambda: busy(2 * HOLD_MAX_S), BLOCK_MAX_S)


def test_one_long_call_in_c_is_found_and_named() -> None:
    def parses() -> None:
        json.loads(IN_C)

    # Freeing the lists may take longer than making them.
    with as_in_service(), pytest.raises(AssertionError, match=r"raw_decode|parses\b"):
        check_hold("parse", parses, HELD_S)


def test_a_call_in_c_that_ends_before_the_other_thread_runs_is_counted() -> None:
    with as_in_service():
        found = min(longest_hold(lambda: json.loads(IN_C)).seconds for _ in range(3))

    assert found > HELD_S


async def test_a_callback_that_blocks_the_loop_is_found_and_named() -> None:
    async def blocks() -> None:
        await asyncio.sleep(0)
        busy(2 * BLOCK_MAX_S)

    with LoopWatch() as watch:
        await asyncio.create_task(blocks())

    assert watch.longest.seconds >= 2 * BLOCK_MAX_S
    assert "blocks" in watch.longest.where


async def test_a_thread_that_keeps_the_interpreter_is_found() -> None:
    loop = asyncio.get_running_loop()

    with ThreadPoolExecutor(1, "work") as threads, LoopWatch("work") as watch:
        await loop.run_in_executor(threads, json.loads, IN_C)

    assert watch.longest.seconds > HELD_S


async def test_a_thread_that_shares_the_interpreter_is_no_block() -> None:
    loop = asyncio.get_running_loop()

    with ThreadPoolExecutor(1, "work") as threads, LoopWatch("work") as watch:
        await loop.run_in_executor(threads, busy, 4 * BLOCK_MAX_S)

    assert watch.longest.seconds < BLOCK_MAX_S


@pytest.mark.parametrize(
    ("milliseconds", "is_linear"),
    [
        ((5, 10, 20, 40), True),
        ((1.2, 2.5, 5.3, 13.2), True),  # the last step leaves the processor's cache
        ((22, 52, 128, 290), True),  # memory is slower than caches all the way
        ((0.5, 0.7, 1.8, 16), True),  # from the last step on, memory is new pages
        ((1.0, 2.3, 9.2, 38.8), False),  # quadratic, but for the smallest size
        ((1, 4, 16, 64), False),
        ((0.2, 0.9, 3.6, 14.4), False),
        ((13, 30, 78, 245), False),  # the square is two thirds of the largest
    ],
)
def test_a_step_that_caches_or_pages_make_longer_is_no_growth(
    milliseconds: tuple[float, ...], is_linear: bool
) -> None:
    assert Growth(tuple(each / 1e3 for each in milliseconds)).is_linear == is_linear
