"""Slots for tests: engines whose loading is controlled, on an event loop with virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bench import engine_streams as streams
from bench.engine_streams import SequenceStream
from inference.engine import (
    EngineCondition,
    EngineFinishReason,
    EngineState,
    EngineStatistics,
    EngineTimings,
    EventSink,
    GenerationRequest,
    ModelInfo,
    SequenceFinished,
    ignore_event,
)
from inference.errors import CheckpointInvalid, EngineStartFailed, EngineUnavailable
from inference.routing.memory import MemoryBudget
from inference.routing.on_demand import ManagedEngine, ManagedTerms
from tests.inference.running import make_request


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time only `advance` moves; calls to threads run at once."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        super().__init__()
        self.set_default_executor(AtOnce())

    def time(self) -> float:
        return self._now_s

    def settle(self) -> None:
        """Run until no callback is ready."""

        async def turns() -> None:
            for _ in range(60):  # more than the longest chain of wake-ups here
                await asyncio.sleep(0)

        self.run_until_complete(turns())

    def advance(self, seconds: float) -> None:
        """Advance the time; callbacks that became due run at the end of it."""
        self._now_s += seconds
        self.settle()


class AtOnce(ThreadPoolExecutor):
    """Executor that runs each call at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeSequence:
    """A sequence that ends when it is cancelled."""

    def __init__(self, engine: FakeEngine, sink: EventSink) -> None:
        self.outputs: list[list[int]] = [[]]
        self._engine = engine
        self._emit = sink

    def cancel(self) -> None:
        """Implement `SequenceHandle.cancel`."""
        ended = SequenceFinished(EngineFinishReason.STOP, "", 1, 0, 0, EngineTimings(0, 0, 0))
        asyncio.get_running_loop().call_soon(self._emit, ended)

    def close(self) -> None:
        """Implement `SequenceHandle.close`."""
        self._emit = ignore_event
        self._engine.sequences.discard(self)


class FakeEngine:
    """Engine that behaves like `WorkerEngine` on command: `load`, `fail`, `break_for_good`."""

    def __init__(self, name: str, world: World) -> None:
        self._world = world
        self.model = ModelInfo(name, "fake", "fake", 100, 100, "/nowhere")
        self.state = EngineState.COLD
        self.reason = ""
        self.failure_count = 0
        self.sequences: set[FakeSequence] = set()
        self.start_requested = False
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._may_close = asyncio.Event()

    def emit(self, state: EngineState, reason: str = "") -> None:
        if self.state is not EngineState.CLOSED:
            self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()

    def load(self) -> None:
        self.emit(EngineState.READY)

    def fail(self, reason: str) -> None:
        self.failure_count += 1
        self.emit(EngineState.RESTARTING, reason)

    def break_for_good(self, reason: str) -> None:
        self.failure_count += 1
        self.emit(EngineState.FAILED, reason)

    def end_close(self) -> None:
        self._may_close.set()

    async def serve(self) -> None:
        self._world.engines_in_use(self)
        try:
            await self._closing.wait()
            if self._world.slow_close:
                await self._may_close.wait()
        finally:
            self.emit(EngineState.CLOSED)
            self._world.dies(self)

    async def start(self) -> None:
        failures_before = self.failure_count
        if not self.start_requested:
            self.start_requested = True
            self.emit(EngineState.LOADING)
        while self.state is not EngineState.READY:
            if self.state is EngineState.CLOSED:
                raise EngineUnavailable("the engine is closed", 0.0)
            if self.state is EngineState.FAILED or self.failure_count > failures_before:
                raise EngineStartFailed(self.reason)
            await self._changed.wait()

    def submit(self, request: GenerationRequest, sink: EventSink) -> FakeSequence:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}", 0.0)
        sequence = FakeSequence(self, sink)
        self.sequences.add(sequence)
        return sequence

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        return 7

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(running_sequence_count=len(self.sequences))

    def healthy(self) -> bool:
        return self.state is EngineState.READY

    def condition(self) -> EngineCondition:
        return EngineCondition(self.state, 0.5, "weights", 3.0, self.reason)

    async def close(self) -> None:
        assert not self.sequences or self._world.closing, (
            "an engine with running sequences is not closed"
        )
        self.emit(EngineState.CLOSED)
        self._closing.set()


@contextlib.asynccontextmanager
async def use(managed: ManagedEngine) -> AsyncIterator[SequenceStream]:
    """Yield a sequence in a managed that is started for it, as for requests of the service."""
    await managed.start()
    managed.begin_use()
    try:
        async with streams.stream(managed, make_request([1])) as stream:
            yield stream
    finally:
        managed.end_use()


class World:
    """All managed of a budget, and their engines."""

    def __init__(
        self, loop: VirtualLoop, total_bytes: int | None = None, *, slow_close: bool = False
    ) -> None:
        self.loop = loop
        self.total_bytes = total_bytes
        self.slow_close = slow_close
        self.closing = False
        self.budget = MemoryBudget(total_bytes, loop.time)
        self.managed: dict[str, ManagedEngine] = {}
        self.alive: dict[str, FakeEngine] = {}  # by managed
        self.most_bytes = 0
        self.unbuildable: set[str] = set()
        self.build_error: Exception | None = None  # raised for unbuildable engines instead
        self._tasks: list[asyncio.Task[Any]] = []

    def add(self, name: str, terms: ManagedTerms) -> ManagedEngine:
        managed = ManagedEngine(lambda: self._build(name), terms, self.budget, self.loop.time)
        self.managed[name] = managed
        self.run(managed.serve())
        return managed

    def run(self, work: Any) -> asyncio.Task[Any]:
        """Start a task and run it until it blocks."""
        task = self.loop.create_task(work)
        self._tasks.append(task)
        self.loop.settle()
        return task

    def _build(self, name: str) -> FakeEngine:
        if name in self.unbuildable:
            raise self.build_error or CheckpointInvalid(f"/models/{name}", "the directory is gone")
        return FakeEngine(name, self)

    def engines_in_use(self, engine: FakeEngine) -> None:
        assert engine.model.name not in self.alive, "two engines in one managed"
        self.alive[engine.model.name] = engine
        used = sum(self.managed[name].needs.memory_bytes for name in self.alive)
        assert self.total_bytes is None or used <= self.total_bytes, "the budget is exceeded"

    def dies(self, engine: FakeEngine) -> None:
        assert self.alive.pop(engine.model.name) is engine

    def close(self) -> None:
        """Close all managed and check that nothing is left."""
        self.closing = True
        for managed in self.managed.values():
            self.run(managed.close())
        for engine in list(self.alive.values()):
            engine.end_close()
        self.loop.settle()
        left = [task for task in self._tasks if not task.done()]
        assert not left, f"left over: {left}"
        for task in self._tasks:
            if not task.cancelled():
                # Otherwise asyncio reports it when the task is collected, inside another test.
                task.exception()
        assert not self.alive
        assert self.budget.held_bytes == 0


@contextlib.contextmanager
def managed_world(total_bytes: int | None = None, *, slow_close: bool = False) -> Iterator[World]:
    """Yield a world with its own time."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        world = World(loop, total_bytes, slow_close=slow_close)
        yield world
        world.close()
    finally:
        for task in asyncio.all_tasks(loop):  # of a test that failed
            task.cancel()
        loop.settle()
        asyncio.set_event_loop(None)
        loop.close()
