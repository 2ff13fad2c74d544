"""The client's stall: each moment in which tokens were ready that it did not take, counted once.

In virtual time. The gaps between tokens are the engine's, whatever the client does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from api.generation.delivery import replayable_buffer as output_module
from api.generation.delivery import stream_writer as writer_module
from api.generation.delivery.output_buffer import FlowControl, OutputBuffer, SendBuffer
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import (
    SLOW_WRITE_S,
    FrameSubscription,
    StreamWriter,
    WholeAnswerWriter,
)
from api.generation.state import CLIENT_STALL, DECODE, EndDecision, Stopwatch
from api.observability import observer as observer_module
from inference.engine import EngineTimings
from metering.holds.journal import UsageJournal
from tests.api.test_least_rate import in_virtual_time

STEP_S = 0.02  # between tokens of the engine


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a scenario with all clocks on virtual time."""
    for module in (writer_module, output_module, observer_module):
        monkeypatch.setattr(module, "monotonic", lambda: asyncio.get_running_loop().time())
    return in_virtual_time


class Client:
    """Stream of some requests, whose client reads while `reads` is set."""

    def __init__(
        self,
        journal: UsageJournal,
        *,
        count: int = 1,
        credit: int | None = None,
        kept: bool = False,
        whole: bool = False,
        write_s: float = 0.0,
    ) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.write_s = write_s
        self.writer = (
            WholeAnswerWriter(journal, count, lambda _: None) if whole else StreamWriter(journal)
        )
        buffers = ReplayBuffers[ReplayableBuffer](
            journal, bytes_max=10**9, bytes_per_request_max=10**9
        )
        self.outputs: list[OutputBuffer] = []
        for index in range(count):
            subscription = FrameSubscription(self.writer, f"r{index}", lambda _: None)
            flow, request_state = FlowControl(credit, 1000.0, lambda: None), EndDecision()
            kept_in = buffers.open(uuid.uuid4())
            self.outputs.append(
                ReplayableBuffer(
                    subscription, "m", flow, request_state, lambda _: None, 60.0, kept_in
                )
                if kept
                else SendBuffer(subscription, "m", flow, request_state, lambda _: None)
            )
            self.outputs[-1].hold_id = uuid.uuid4()
        self.output = self.outputs[0]
        self.writing = asyncio.ensure_future(self.writer.write_all(self.write))

    async def write(self, data: bytes) -> None:
        """Take a message once the client reads."""
        if self.write_s:
            await asyncio.sleep(self.write_s)
        await self.reads.wait()

    async def generate(self, token_count: int, index: int = 0) -> None:
        """Generate tokens, as the engine does whether or not the client reads."""
        for _ in range(token_count):
            output = self.outputs[index]
            output.usage.generated_token_count += 1
            output.append(0, " word", (7,))
            await asyncio.sleep(STEP_S)

    async def close(self) -> None:
        self.reads.set()
        for output in self.outputs:
            output.flow.close()
        self.writer.close()
        await self.writing


async def pause(client: Client) -> float:
    """Stop reading for 5 s in the middle: the engine goes on for 2 s."""
    await client.generate(10)
    client.reads.clear()
    await client.generate(100)
    await asyncio.sleep(3.0)
    client.reads.set()
    await client.generate(10)
    return 5.0


async def two_pauses(client: Client) -> float:
    return await pause(client) + await pause(client)


async def too_little_credit(client: Client) -> float:
    """Grant nothing from the eleventh token on, for 4 s."""
    client.output.grant(10)
    await client.generate(10)
    await client.generate(1)
    await asyncio.sleep(4.0 - STEP_S)
    client.output.grant(1000)
    await client.generate(10)
    return 4.0


async def both(client: Client) -> float:
    """Stop reading at 0 s, run out of credit at 1 s, grant at 3 s, and read at 5 s."""
    client.output.grant(1)
    client.reads.clear()
    await client.generate(1)
    await asyncio.sleep(1.0 - STEP_S)
    await client.generate(1)
    await asyncio.sleep(2.0 - STEP_S)
    client.output.grant(1000)
    await asyncio.sleep(2.0)
    client.reads.set()
    await asyncio.sleep(0.1)
    return 5.0


async def behind(client: Client) -> float:
    """Generate the first token of the second request 3 s after the first one's is stuck."""
    client.output = client.outputs[1]
    client.reads.clear()
    await client.generate(1)
    await asyncio.sleep(3.0 - STEP_S)
    await client.generate(1, index=1)
    await asyncio.sleep(2.0 - STEP_S)
    client.reads.set()
    await asyncio.sleep(0.1)
    return 2.0


async def stopped(client: Client) -> float:
    """Ask after 3 s of a write that goes on: the end of a request does not wait for it."""
    client.reads.clear()
    await client.generate(1)
    await asyncio.sleep(3.0 - STEP_S)
    assert client.output.stalled_s == pytest.approx(3.0)
    client.output.discard()
    return 3.0


async def fast(client: Client) -> float:
    client.output.grant(10**6)
    await client.generate(500)
    return 0.0


async def never_attached(client: Client) -> float:
    """Detach the client for 5 s: no client could take the tokens."""
    client.output.detach()
    await client.generate(100)
    await asyncio.sleep(3.0)
    return 0.0


async def together(client: Client) -> float:
    """Wait for the other prompt of an answer in one piece, then for the client for 2 s."""
    await client.generate(10)
    await asyncio.sleep(3.0)
    client.reads.clear()
    for output in client.outputs:
        output.complete()
    await asyncio.sleep(2.0)
    client.reads.set()
    await asyncio.sleep(0.1)
    return 2.0


Scenario = Callable[[Client], Coroutine[Any, Any, float]]
SCENARIOS: list[tuple[Scenario, dict[str, Any]]] = [
    (pause, {}),
    (pause, {"kept": True}),
    (two_pauses, {}),
    (too_little_credit, {"credit": 0}),
    (too_little_credit, {"credit": 0, "kept": True}),
    (both, {"credit": 0}),
    (behind, {"count": 2}),
    (behind, {"count": 2, "kept": True}),
    (stopped, {}),
    (fast, {}),
    (fast, {"credit": 0}),
    (fast, {"write_s": SLOW_WRITE_S / 2}),
    (never_attached, {"kept": True}),
    (together, {"count": 2, "whole": True}),
]


@pytest.mark.parametrize(
    ("scenario", "fields"), SCENARIOS, ids=lambda each: getattr(each, "__name__", None)
)
def test_the_stall_is_the_time_in_which_ready_tokens_were_not_taken(
    in_time: Callable[[Coroutine[Any, Any, None]], None],
    journal: UsageJournal,
    scenario: Scenario,
    fields: dict[str, Any],
) -> None:
    async def run() -> None:
        client = Client(journal, **fields)
        stall_s = await scenario(client)

        assert client.output.stalled_s == pytest.approx(stall_s, abs=STEP_S + 1e-6)
        await client.close()

    in_time(run())


@pytest.mark.parametrize("fields", [{}, {"kept": True}])
def test_the_gaps_are_those_of_the_engine(
    in_time: Callable[[Coroutine[Any, Any, None]], None],
    journal: UsageJournal,
    fields: dict[str, Any],
) -> None:
    """The client reads nothing for 5 s while tokens come every 20 ms."""

    async def run() -> None:
        client = Client(journal, **fields)
        client.reads.clear()
        await client.generate(250)
        client.reads.set()
        await client.generate(10)

        assert client.output.gaps.facts()["itl_max_ms"] == pytest.approx(STEP_S * 1000)
        assert client.output.stalled_s == pytest.approx(5.0, abs=STEP_S)
        await client.close()

    in_time(run())


def test_only_the_stall_after_the_last_token_is_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it is in the decode time, too."""
    now_s = 100.0
    monkeypatch.setattr("api.generation.state.time.monotonic_ns", lambda: round(now_s * 1e9))
    watch = Stopwatch(now_s, 0.0)
    watch.first_token()
    now_s += 4.0
    watch.engine_finished(EngineTimings(0.0, 0.0, 4000.0))
    now_s += 3.0

    watch.forwarded(5.0, 2.0)
    watch.lap(8)

    timings = watch.timings()
    assert [watch._stages_us[stage] for stage in (DECODE, CLIENT_STALL)] == [4_000_000, 5_000_000]
    assert timings["settle_ms"] == pytest.approx(1000.0)
    stages = sum(value for name, value in timings.items() if name not in ("total_ms", "ttft_ms"))
    assert stages - 3000.0 == timings["total_ms"] == 7000.0
