"""Engines in their child processes, for tests: started, read from, closed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from bench import engine_streams as streams
from bench.engine_streams import SequenceStream
from inference.adapters.tensorrt_engine import TensorRtEngine, TensorRtSettings
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import Engine, GenerationRequest, Scheduled, SequenceFinished, TokensGenerated
from inference.workers.engine import HostedEngine
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import Outcome, random_prompt

WAIT_S = 180.0  # seconds: far above what anything here takes, so that a busy machine fails no test
LONG = 1500  # output tokens: a sequence that does not end by itself during a test


def settings_for(checkpoint: TinyCheckpoint, **changes: Any) -> TorchEngineSettings:
    """Small pools, short pauses, one thread."""
    options: dict[str, Any] = {"kv_cache_bytes": 8 << 20, "torch_thread_count": 1, "restart_delay_s_min": 0.05}
    return TorchEngineSettings(directory=checkpoint.directory, name="tiny", **(options | changes))


@contextlib.asynccontextmanager
async def serving(settings: TorchEngineSettings | TensorRtSettings, *, started: bool = True) -> AsyncIterator[HostedEngine]:
    """An engine with its task, closed at the end."""
    engine = TorchEngine(settings) if isinstance(settings, TorchEngineSettings) else TensorRtEngine(settings)
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        try:
            if started:
                await engine.start()
            yield engine
        finally:
            await engine.close()


async def read_all(stream: SequenceStream) -> Outcome:
    """Read to the end; everything that came."""
    outcome = Outcome()
    async for event in stream:
        assert outcome.finished is None
        match event:
            case Scheduled():
                assert outcome.token_ids == []
                outcome.cached_token_count = event.cached_token_count
            case TokensGenerated():
                outcome.token_ids += event.token_ids
                outcome.text += event.text
            case SequenceFinished():
                outcome.finished = event
                outcome.text += event.text
    return outcome


async def run(engine: Engine, request: GenerationRequest) -> Outcome:
    """Run one request to its end."""
    async with streams.stream(engine, request) as stream:
        return await read_all(stream)


async def first_tokens(stream: SequenceStream, count: int) -> None:
    """Read until `count` tokens have come."""
    seen = 0
    async for event in stream:
        seen += len(event.token_ids) if isinstance(event, TokensGenerated) else 0
        if seen >= count:
            return


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine does by itself; it offers nothing to wait on, since its callers only ever ask."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.001)


def prompt(seed: int, token_count: int = 40) -> list[int]:
    """Plain tokens."""
    return random_prompt(random.Random(seed), token_count)
