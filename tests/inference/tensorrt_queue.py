"""Queue of TensorRT-LLM over the double, in this process; records events by request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from inference import engine
from inference.adapters.external_queue import ExternalQueue
from inference.adapters.tensorrt_library import EngineWatch, TensorRtLibrary
from inference.adapters.tensorrt_settings import TensorRtOptions
from inference.adapters.tensorrt_worker import TensorRtAnswers
from inference.checkpoint.checkpoint import read_config
from inference.errors import EngineError
from inference.limits import EngineLimits
from inference.text.text_decoder import TextDecoder
from inference.text.tokenizer import Tokenizer
from tests.inference.running import Outcome
from tests.inference.tensorrt_engines import DOUBLE, OPTIONS

LIMITS = EngineLimits(
    context_window_tokens=2048, step_token_count_max=256, running_sequence_count_max=4
)
WAIT_S = 60.0


@contextlib.contextmanager
def double_imported(monkeypatch: pytest.MonkeyPatch, faults: str = "") -> Iterator[Any]:
    """Install the double as the module `tensorrt_llm` of this process."""
    monkeypatch.setenv("TENSORRT_DOUBLE", faults)
    monkeypatch.syspath_prepend(str(DOUBLE))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("tensorrt_llm")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


@dataclass
class World:
    """A queue, its engine, and the outcome of each request."""

    library: TensorRtLibrary
    llm: Any
    options: TensorRtOptions
    tasks: asyncio.TaskGroup
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    ends_of_choices: dict[int, list[int]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    queue: ExternalQueue = field(init=False)

    def emit(self, number: int, event: engine.SequenceEvent | EngineError) -> None:
        outcome = self.outcomes.setdefault(number, Outcome())
        assert outcome.finished is None, "nothing follows the last event"
        assert number not in self.failures
        match event:
            case EngineError():
                self.failures[number] = str(event)
            case engine.Scheduled():
                assert outcome.token_ids == []
                outcome.cached_token_count = event.cached_token_count
            case engine.TokensGenerated():
                assert outcome.cached_token_count is not None
                outcome.token_ids += event.token_ids
                outcome.text += event.text
                outcome.logprobs += event.logprobs
            case engine.ChoiceFinished():
                self.ends_of_choices.setdefault(number, []).append(event.choice_index)
            case engine.SequenceFinished():
                outcome.finished = event
                outcome.text += event.text

    def add(self, number: int, request: engine.GenerationRequest) -> None:
        self.queue.add(number, request, asyncio.get_running_loop().time())

    async def run(self, number: int, request: engine.GenerationRequest) -> Outcome:
        self.add(number, request)
        return await self.end(number)

    async def end(self, number: int) -> Outcome:
        await until(
            lambda: self.outcomes.get(number, Outcome()).finished is not None,
            f"the end of request {number}",
        )
        return self.outcomes[number]

    async def first_token(self, number: int) -> None:
        await until(
            lambda: bool(self.outcomes.get(number, Outcome()).token_ids),
            f"the first token of request {number}",
        )

    def watch(self) -> EngineWatch:
        return EngineWatch(self.library, self.llm, self.queue, self.options, self.broken.append)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition set by the engine's thread."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the world offers nothing to wait on
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


@contextlib.asynccontextmanager
async def queue_world(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    faults: str = "lonely",
    limits: EngineLimits = LIMITS,
    **options: Any,
) -> AsyncIterator[World]:
    """Yield a queue on a checkpoint; shut down at the end."""
    config, tokenizer = read_config(directory), Tokenizer(directory)
    chosen = replace(OPTIONS, **options)
    with double_imported(monkeypatch, faults):
        library = TensorRtLibrary()
        llm = library.build(str(directory), limits, chosen)
        async with asyncio.TaskGroup() as tasks:
            world = World(library, llm, chosen, tasks)
            world.queue = ExternalQueue(
                functools.partial(TensorRtAnswers, library, llm, config.vocabulary_size),
                decoder=TextDecoder(
                    tokenizer.backend, tokenizer.special_token_ids, "tokenizer.json"
                ),
                vocabulary_size=config.vocabulary_size,
                model_end_token_ids=config.end_token_ids,
                limits=limits,
                abort_limits=chosen,
                sink=world.emit,
                broken=world.broken.append,
                tasks=tasks,
            )
            try:
                yield world
            finally:
                for task in list(world.queue._inside.values()):
                    task.cancel()
                llm.shutdown()
