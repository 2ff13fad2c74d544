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
        check_growth("compared one by one", compared_one_by_one, SIZE // 16)


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
