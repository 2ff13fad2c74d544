"""Preparation of prompts: limits per key, order of texts, and cancelled work."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from api.core.errors import Overloaded, PreparationLimit
from api.core.settings import PreparationSettings
from api.generation.parsing.text_work import LONG_S, TextWork, conversation_size
from inference.text.tokenizer import ChatMessage
from inference.text.tools import Tool, ToolCall
from metering.quotas.quota_rules import Payer
from tests.service import PATIENCE_S

A, B = uuid.UUID(int=1), uuid.UUID(int=2)


def owner(key_id: uuid.UUID, organization_id: uuid.UUID | None = None) -> Payer:
    """Return a key, in a new organization by default."""
    return Payer(
        organization_id or uuid.UUID(int=100 + key_id.int), uuid.UUID(int=0), key_id, "USD"
    )


@dataclass
class Threads:
    """Calls that end when a test lets them."""

    began: list[str] = field(default_factory=list)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def call(self, name: str) -> Callable[[], str]:
        """Run a call until the test ends it."""

        def run() -> str:
            self.began.append(name)
            assert self.gate.acquire(timeout=PATIENCE_S)
            return name

        return run

    def end(self, count: int = 1) -> None:
        """End this many calls."""
        self.gate.release(count)


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads()
    yield threads
    threads.end(1000)


def one_thread() -> TextWork:
    """Return a single thread with room for everything."""
    return TextWork(PreparationSettings(chars_max=10**9, chars_per_key_max=10**9, thread_count=1))


async def begun(threads: Threads, count: int) -> None:
    """Wait until this many calls have begun."""
    async with asyncio.timeout(PATIENCE_S):
        while len(threads.began) < count:  # noqa: ASYNC110  # a thread notifies no task
            await asyncio.sleep(0.001)


def test_a_key_may_have_so_much_prepared_at_once_and_one_request_of_any_size() -> None:
    work = TextWork(PreparationSettings(chars_max=10**6, chars_per_key_max=100, thread_count=1))
    with work.permit(owner(A), 60):
        with (
            work.permit(owner(A), 40),
            pytest.raises(PreparationLimit) as refusal,
            work.permit(owner(A), 1),
        ):
            pass
        with work.permit(owner(B), 100):
            assert work.taken_chars == 160
    with work.permit(owner(A), 5000):
        pass
    assert work.taken_chars == 0
    assert refusal.value.retry_after_s > 0
    assert "limit of 100" in str(refusal.value)


def test_all_keys_together_may_have_so_much_prepared_at_once() -> None:
    work = TextWork(PreparationSettings(chars_max=100, chars_per_key_max=80, thread_count=1))
    with (
        work.permit(owner(A), 80),
        pytest.raises(Overloaded, match="limit of 100"),
        work.permit(owner(B), 30),
    ):
        pass
    with pytest.raises(KeyError), work.permit(owner(A), 80):
        raise KeyError
    assert work.taken_chars == 0


def test_keys_of_one_organization_take_no_more_than_they_leave_free() -> None:
    work = TextWork(PreparationSettings(chars_max=100, chars_per_key_max=80, thread_count=1))
    a, b, other = owner(A, A), owner(B, A), owner(uuid.UUID(int=3))
    with work.permit(a, 40), work.permit(b, 10):
        with (
            pytest.raises(PreparationLimit, match="of your organization with 50") as refusal,
            work.permit(b, 1),
        ):
            pass
        with work.permit(other, 50):
            assert work.taken_chars == 100
    assert "limit of 50" in str(refusal.value)
    assert work.taken_chars == 0


def test_each_part_of_a_conversation_counts() -> None:
    call = ToolCall("a", "name", '{"x": 1}')
    messages = [ChatMessage("user", "abc"), ChatMessage("assistant", "", (call,))]
    tools = [Tool("t", "of", "{}", strict=False)]
    assert conversation_size(messages, tools) == (3 + 4 + 8 + 1 + 2 + 2, 4)


async def test_the_organization_that_had_least_done_is_next(threads: Threads) -> None:
    """An organization with a hundred large texts does not delay another one by all of them."""
    work = one_thread()
    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(work.run(A, 1000, threads.call(f"a{number}")))
        await begun(threads, 1)
        for number in range(3):
            tasks.create_task(work.run(B, 100, threads.call(f"b{number}")))
        await asyncio.sleep(0)
        assert (work.waiting_count, work.running_count) == (7, 1)
        threads.end(8)
    assert threads.began == ["a0", "a1", "b0", "b1", "b2", "a2", "a3", "a4"]
    assert (work.waiting_count, work.running_count) == (0, 0)


async def test_work_of_a_request_that_was_cancelled_is_never_begun(threads: Threads) -> None:
    work = one_thread()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work.run(A, 10, threads.call("first")))
        await begun(threads, 1)
        cancelled = tasks.create_task(work.run(A, 10, threads.call("cancelled")))
        tasks.create_task(work.run(B, 10, threads.call("last")))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert work.waiting_count == 1
        threads.end(2)
    assert threads.began == ["first", "last"]


async def test_cancelled_work_keeps_its_thread_until_it_ends(threads: Threads) -> None:
    work = one_thread()
    running = asyncio.create_task(work.run(A, 10, threads.call("cancelled")))
    await begun(threads, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    following = asyncio.create_task(work.run(B, 10, threads.call("next")))
    await asyncio.sleep(0)
    assert (threads.began, work.running_count) == (["cancelled"], 1)
    threads.end(2)
    assert (await following)[0] == "next"
    assert work.running_count == 0


async def test_an_exception_of_a_call_reaches_its_caller_and_the_thread_continues() -> None:
    work = one_thread()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await work.run(A, 10, fail)
    value, seconds = await work.run(A, 10, lambda: sum(range(10_000)))
    assert value == sum(range(10_000))
    assert 0 <= seconds < PATIENCE_S


@pytest.mark.parametrize(
    "package",
    ["requests", "streams", "embedding", "openai", "queue", "access", "console", "observability"],
)
def test_nothing_of_tenants_goes_to_the_executor_that_all_share(package: str) -> None:
    """There it would wait behind the work of any other code, and delay it in turn."""
    for path in (Path("api") / package).rglob("*.py"):
        source = path.read_text()
        assert "to_thread" not in source, path
        assert "run_in_executor(None" not in source, path


async def test_a_thread_pauses_after_a_long_call_only() -> None:
    """The loop has the interpreter for a multiple of each long call."""
    settings = PreparationSettings(chars_max=10**9, chars_per_key_max=10**9, thread_count=1)
    work = TextWork(settings, rest=4.0)
    spans: list[tuple[float, float]] = []

    def busy(seconds: float) -> Callable[[], None]:
        def call() -> None:
            began_at, until_s = time.monotonic(), time.thread_time() + seconds
            while time.thread_time() < until_s:
                pass
            spans.append((began_at, time.monotonic()))

        return call

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work.run(A, 1, busy(2 * LONG_S)))
        tasks.create_task(work.run(B, 1, busy(0.0)))
        tasks.create_task(work.run(B, 1, busy(0.0)))

    pauses = [after[0] - before[1] for before, after in pairwise(spans)]
    assert pauses[0] >= 8 * LONG_S - 0.005
    assert pauses[1] < 8 * LONG_S
    assert work.running_count == 0
