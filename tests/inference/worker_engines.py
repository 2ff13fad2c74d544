"""Engines in child processes, for tests: start, read, close."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from bench import engine_streams as streams
from bench.engine_streams import SequenceStream
from inference.adapters.tensorrt_engine import TensorRtEngine
from inference.adapters.tensorrt_settings import TensorRtSettings
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import Engine, GenerationRequest, Scheduled, SequenceFinished, TokensGenerated
from inference.workers.engine import WorkerEngine
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import Outcome, random_prompt

WAIT_S = 180.0  # seconds: far above any time here, so that a busy machine fails no test
LONG = 1500  # output tokens: a sequence that does not end by itself during a test


class Served(Protocol):
    """Engine or encoder that is served by a task."""

    async def serve(self) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...


ServedT = TypeVar("ServedT", bound=Served)


def settings_for(checkpoint: TinyCheckpoint, **changes: Any) -> TorchEngineSettings:
    """Return settings with small pools, short pauses and one thread."""
    options: dict[str, Any] = {
        "kv_cache_bytes": 8 << 20,
        "torch_thread_count": 1,
        "restart_delay_s_min": 0.05,
    }
    return TorchEngineSettings(directory=checkpoint.directory, name="tiny", **(options | changes))


@contextlib.asynccontextmanager
async def served(engine: ServedT, *, started: bool = True) -> AsyncIterator[ServedT]:
    """Yield an engine with its task, closed at the end."""
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        try:
            if started:
                await engine.start()
            yield engine
        finally:
            await engine.close()


def serving(
    settings: TorchEngineSettings | TensorRtSettings, *, started: bool = True
) -> AbstractAsyncContextManager[WorkerEngine]:
    """Serve an engine during the block."""
    engine = (
        TorchEngine(settings)
        if isinstance(settings, TorchEngineSettings)
        else TensorRtEngine(settings)
    )
    return served(engine, started=started)


async def read_all(stream: SequenceStream) -> Outcome:
    """Read to the end; return all events."""
    outcome, is_final = Outcome(), True
    async for event in stream:
        assert outcome.finished is None
        match event:
            case Scheduled():
                assert outcome.token_ids == []
                outcome.cached_token_count, is_final = event.cached_token_count, event.is_final
            case TokensGenerated():
                outcome.token_ids += event.token_ids
                outcome.text += event.text
            case SequenceFinished():
                outcome.finished = event
                outcome.text += event.text
                if not is_final:
                    outcome.cached_token_count = event.cached_token_count
    return outcome


async def run(engine: Engine, request: GenerationRequest) -> Outcome:
    """Run one request to its end."""
    async with streams.stream(engine, request) as stream:
        return await read_all(stream)


async def first_tokens(stream: SequenceStream, count: int) -> int:
    """Read until `count` tokens have arrived; return how many have, since some arrive together."""
    seen = 0
    async for event in stream:
        seen += len(event.token_ids) if isinstance(event, TokensGenerated) else 0
        if seen >= count:
            break
    return seen


async def until(condition: Callable[[], bool]) -> None:
    """Poll for an effect of the engine, which has no event to wait for."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.001)


def prompt(seed: int, token_count: int = 40) -> list[int]:
    """Return plain tokens."""
    return random_prompt(random.Random(seed), token_count)
