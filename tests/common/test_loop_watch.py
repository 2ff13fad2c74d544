"""Watch over an event loop: lengths of its blocks, and the path, key and stage of each."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping

import pytest
from structlog.testing import capture_logs

from common.incidents import INCIDENT_COUNTS, Retries
from common.loop_watch import (
    BEAT_S,
    BLOCK_S,
    CHECK_INTERVAL_S,
    CURRENT,
    READERS,
    SOURCE,
    LoopBlocked,
    LoopWatch,
    Sample,
    Stage,
    function_of,
)
from tests.service import until


class Call:
    """Work for a caller."""

    def facts(self) -> Mapping[str, str]:
        return {"path": "/v1/chat/completions", "api_key_id": "k-1"}


@pytest.fixture
async def watch() -> AsyncIterator[LoopWatch]:
    """Yield a running watch over the test's loop, which has a heartbeat."""
    watch = LoopWatch()

    async def beat() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            watch.beat(max(loop.time() - due_at, 0.0))

    watch.start()
    async with asyncio.TaskGroup() as tasks:
        heart = tasks.create_task(beat())
        await asyncio.sleep(0)
        yield watch
        heart.cancel()
    watch.stop()


def hold_loop(watch: LoopWatch) -> None:
    """Hold the loop until the watching thread has taken its second sample."""
    first = None
    while first is None or watch._sample is first:
        first = first or watch._sample


async def test_who_holds_the_loop_is_named_with_path_key_stage_and_stack(watch: LoopWatch) -> None:
    before = INCIDENT_COUNTS[SOURCE]
    with capture_logs() as logs:
        CURRENT.work = Call()
        with Stage("parse"):
            hold_loop(watch)
        CURRENT.work = None
        await until(lambda: INCIDENT_COUNTS[SOURCE] > before, "the incident")

    [incident] = [entry for entry in logs if entry["event"] == "incident"]
    assert incident["path"] == "/v1/chat/completions"
    assert (incident["api_key_id"], incident["stage"]) == ("k-1", "parse")
    assert "hold_loop" in incident["stack"]
    assert incident["blocked_ms"] > BLOCK_S * 1000
    for reader in READERS:
        assert watch.longest_s == watch.take_longest_s(reader) > BLOCK_S, "of each reader"
        assert watch.take_longest_s(reader) < watch.longest_s, "each scrape resets it"


def test_the_function_is_the_innermost_one_of_the_service() -> None:
    found: list[str] = []

    def sample() -> float:
        found.append(function_of(sys._getframe()))
        return 0.0

    Retries("test", clock=sample).failed(LoopBlocked())  # which calls this test's function

    assert found[0] == "common.incidents.Retries.failed"


class Clocks:
    """Clock and used processor time of a process, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.used_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "process_time", lambda: self.used_s)

    def pass_by(self, seconds: float, *, used_s: float) -> None:
        self.now_s += seconds
        self.used_s += used_s


@pytest.mark.parametrize(
    ("used_s", "longest_s"),
    [(3.0, 3.0 - BEAT_S), (0.0, 0.0)],
    ids=["computed with the interpreter held", "stopped"],
)
def test_a_pause_is_no_block(
    monkeypatch: pytest.MonkeyPatch, used_s: float, longest_s: float
) -> None:
    """Either way the watching thread cannot look for three seconds."""
    clocks = Clocks(monkeypatch)
    watch = LoopWatch()

    clocks.pass_by(3.0, used_s=used_s)
    watch.beat(3.0 - BEAT_S)
    watch._check()

    assert watch.longest_s == pytest.approx(longest_s, abs=CHECK_INTERVAL_S)


def test_a_loop_that_waits_for_something_to_do_is_no_incident() -> None:
    idle, watched = threading.Event(), LoopWatch()

    async def wait() -> None:
        watched._thread_id = threading.get_ident()
        asyncio.get_running_loop().call_soon(idle.set)
        await asyncio.to_thread(polled.wait)

    polled = threading.Event()
    loop = threading.Thread(target=lambda: asyncio.run(wait()))
    loop.start()
    idle.wait()
    frames = sys._current_frames()
    while not Sample(frames[watched._thread_id], None, "").is_idle:
        frames = sys._current_frames()
    polled.set()
    loop.join()
