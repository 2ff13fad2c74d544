"""Garbage of one test that is collected inside a parse of another does not fail that one."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
from pathlib import Path

import pytest


async def fail() -> int:
    return [1, 2][2] + 1  # an expression that a traceback marks, for which it parses the line


def test_a_task_collected_inside_a_parse_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    source = Path(inspect.__file__).read_text()
    thresholds = gc.get_threshold()
    loop = asyncio.new_event_loop()
    try:
        gc.set_threshold(50, 5, 2)
        for _ in range(10):
            gc.disable()
            task = loop.create_task(fail())
            loop.run_until_complete(asyncio.wait([task]))
            cycle: list[object] = [task]
            cycle.append(cycle)
            del task, cycle
            gc.enable()
            assert ast.parse(source).body
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        loop.close()
    gc.collect()
    assert "exception was never retrieved" in caplog.text
