"""Least rate of clients: progress keeps a request alive, signs of life do not. In virtual time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.output_buffer import (
    FlowControl,
    OutputBuffer,
    SendBuffer,
    end_slow_reader,
)
from api.generation.delivery.replay import ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.state import End, EndDecision
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal

ALLOWANCE_S = 60.0
DAY_S = 86_400.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock moves to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        """Implement `time`."""
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario)


class World:
    """Request with output, and its client."""

    def __init__(self, journal: UsageJournal, *, kept: bool = False, credit: int | None = 0):
        self.loop = asyncio.get_running_loop()
        self.ended_s: float | None = None
        self.end: End | None = None
        request_state = EndDecision(self._on_stop)
        self.journal = journal
        self.writer = StreamWriter(journal)
        subscription = FrameSubscription(self.writer, "r", lambda _: None)
        stalled = partial(end_slow_reader, request_state, 1.0, ALLOWANCE_S)
        flow = FlowControl(credit, ALLOWANCE_S, stalled)
        self.output: OutputBuffer = SendBuffer(
            subscription, "m", flow, request_state, lambda _: None
        )
        if kept:
            buffers = ReplayBuffers[ReplayableBuffer](
                journal, bytes_max=10**9, bytes_per_request_max=10**9
            )
            kept_in = buffers.open(uuid.uuid4())
            self.output = ReplayableBuffer(
                subscription, "m", flow, request_state, lambda _: None, 60.0, kept_in
            )
        self.output.hold_id = uuid.uuid4()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.writing = asyncio.ensure_future(self.writer.write_all(self.write))

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()

    def _on_stop(self, end: End) -> None:
        self.end, self.ended_s = end, self.loop.time()

    def append(self, token_count: int) -> None:
        for token_id in range(token_count):
            self.output.append(0, "x", (token_id,))

    def attach(self) -> None:
        """Attach from another stream."""
        self.output.attach(FrameSubscription(self.writer, "r", lambda _: None), 0, 0)

    async def grant(self, pattern: Iterable[tuple[float, int]]) -> None:
        """Wait, and grant credit, until the request is stopped."""
        for pause_s, token_count in pattern:
            await asyncio.sleep(pause_s)
            if self.end is not None:
                return
            if token_count:
                self.output.grant(token_count)


def repeated(
    pause_s: float, token_count: int, total_s: float = DAY_S
) -> Iterator[tuple[float, int]]:
    return ((pause_s, token_count) for _ in range(int(total_s / pause_s)))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("pattern", "ended_s"),
    [
        (lambda: repeated(59.0, 1), 61.0),
        (lambda: repeated(10.0, 1), 66.0),
        (lambda: repeated(2.0, 1), 118.0),
        (lambda: repeated(1.25, 1), 300.0),
        (lambda: [(59.0, 30), *repeated(59.0, 30)], 90.0),
        (lambda: [(DAY_S, 0)], 60.0),
    ],
    ids=["59 s", "10 s", "2 s", "0.8 a second", "bursts", "nothing"],
)
def test_a_client_below_the_least_rate_is_ended_however_it_asks(
    journal: UsageJournal,
    pattern: Callable[[], Iterable[tuple[float, int]]],
    ended_s: float,
    kept: bool,
) -> None:
    async def scenario() -> None:
        world = World(journal, kept=kept)
        world.append(4000)

        await world.grant(pattern())

        assert world.end is not None
        assert world.end.outcome is Outcome.SLOW_CONSUMER
        assert "fewer than 1 tokens per second for more than 60 s" in world.end.detail
        assert "WEIR_CLIENT_TOKENS_PER_SECOND_MIN" in world.end.detail
        assert world.ended_s == pytest.approx(ended_s, abs=6.0)
        assert world.ended_s is not None
        assert world.ended_s >= ALLOWANCE_S

    in_virtual_time(scenario())


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        lambda: repeated(1 / 3, 1, 4000 / 3),
        lambda: repeated(1.0, 1, 4000),
        lambda: repeated(59.0, 59, 3900),
        lambda: [(59.0, 1), (0.5, 500), (59.0, 500), *repeated(1 / 3, 1, 900)],
    ],
    ids=["speech", "the least rate", "bursts", "a pause of a minute"],
)
def test_a_slow_reader_above_the_least_rate_is_never_ended(
    journal: UsageJournal, pattern: Callable[[], Iterable[tuple[float, int]]], kept: bool
) -> None:
    async def scenario() -> None:
        world = World(journal, kept=kept)
        world.append(4000)

        await world.grant(pattern())

        assert world.end is None

    in_virtual_time(scenario())


def test_a_slow_engine_is_not_the_clients_fault(journal: UsageJournal) -> None:
    async def scenario() -> None:
        world = World(journal, credit=1)
        for _ in range(100):
            world.append(1)
            await asyncio.sleep(600.0)
            world.output.grant(1)

        assert world.end is None

    in_virtual_time(scenario())


def test_attaching_again_renews_no_allowance(journal: UsageJournal) -> None:
    async def scenario() -> None:
        world = World(journal, kept=True)
        world.append(100)
        for _ in range(100):
            await asyncio.sleep(10.0)
            if world.end is not None:
                break
            world.attach()

        assert world.ended_s == pytest.approx(60.0, abs=1.0)

    in_virtual_time(scenario())


@pytest.mark.parametrize(("waiting", "ended_s"), [(100, 160.0), (1000, 1060.0)])
def test_the_rest_of_an_output_must_be_taken_in_time(
    journal: UsageJournal, waiting: int, ended_s: float
) -> None:
    """Frames of other requests, and credit, delay the end of this one for a bounded time."""

    async def scenario() -> None:
        world, done = World(journal), asyncio.Event()
        world.output.flow.close()  # as credit that comes just in time
        world.append(waiting)
        world.output.when_taken(done.set, ALLOWANCE_S)
        while not done.is_set() and world.loop.time() < DAY_S:
            await asyncio.sleep(20.0)
            world.writer.push(pb.ServerFrame(progress=pb.ProgressFrame()))

        assert world.end is not None
        assert world.end.outcome is Outcome.SLOW_CONSUMER
        assert world.ended_s == pytest.approx(ended_s, abs=31.0)

    in_virtual_time(scenario())


def test_a_message_for_a_stalled_client_is_billed_at_the_end(journal: UsageJournal) -> None:
    """It cannot be recalled: otherwise a client could stall, and read it free of charge later."""

    async def scenario() -> None:
        world, done = World(journal, credit=None), asyncio.Event()
        world.may_write.clear()
        world.append(10)
        await asyncio.sleep(1.0)
        assert world.output.usage.delivered_token_count == 0
        world.output.when_taken(done.set, ALLOWANCE_S)
        await done.wait()
        assert world.output.usage.delivered_token_count == 10

        world.may_write.set()
        await asyncio.sleep(1.0)

        assert world.output.usage.delivered_token_count == 10, "once"

    in_virtual_time(scenario())
