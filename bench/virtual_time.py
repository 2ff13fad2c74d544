"""Engines that run on a clock of their own: a load of minutes on many GPUs is computed as fast as this machine counts, and exactly.

An event loop whose time jumps to the next thing that is due, and simulated engines in it. Scheduler, KV blocks, prefix cache and
cost model are the product's; only the processes around them are missing. Nothing depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from inference.checkpoint.checkpoint import read_model_info
from inference.core.cost_model import CostModel
from inference.core.engine_core import EngineCore, EngineOptions
from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    SequenceFinished,
    SequenceRefused,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import RequestImpossible
from inference.kv_blocks import KV_BLOCK_TOKENS, PrefixHint
from inference.limits import EngineLimits
from inference.workers.engine import BufferedStream


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` stands still while anything can run, and jumps to the next timer when nothing can."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # the base class keeps both, and offers neither
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class VirtualEngine:
    """Implements `Engine` by a simulated core in this process, on the loop's time."""

    def __init__(self, directory: Path, name: str, cost: CostModel, limits: EngineLimits) -> None:
        """directory: a checkpoint's, for its tokenizer. Needs the running loop."""
        info = read_model_info(directory, name=name, engine="simulated", context_window_tokens_max=limits.context_window_tokens)
        self.model = replace(info, continues_output=True)
        self._clock = asyncio.get_running_loop().time
        options = EngineOptions(directory, limits, simulation=cost)
        self._core = EngineCore(options, clock=self._clock, sleep=self._note_step)
        self._step_s = 0.0
        self._streams: dict[int, BufferedStream] = {}
        self._next_number = 0
        self._hint = PrefixHint(cost.kv_block_count, KV_BLOCK_TOKENS)
        self._wake = asyncio.Event()
        self._closed = False
        self.busy_s = 0.0

    async def serve(self) -> None:
        """See `Engine.serve`."""
        while not self._closed:
            if self._core.idle:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._step_s = 0.0
            events = self._core.step()
            self.busy_s += self._step_s
            await asyncio.sleep(self._step_s)  # what it computed is there when the step is over
            for number, event in events:
                assert not isinstance(event, SequenceRefused), "no request here has a response format"
                if (stream := self._streams.get(number)) is None:
                    continue
                if isinstance(event, TokensGenerated) and not stream.has_output:
                    self._hint.note(stream.request.prompt_token_ids, stream.request.cache_salt)
                stream.put(event)
                if isinstance(event, SequenceFinished):
                    computed = (*stream.request.prompt_token_ids, *stream.outputs[0][:-1])
                    self._hint.note(computed, stream.request.cache_salt)

    async def start(self) -> None:
        """It is there already."""

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[SequenceStream]:
        """See `Engine.generate`."""
        if (fault := self._core.request_fault(request)) is not None:
            raise RequestImpossible(fault)
        number = self._next_number
        self._next_number += 1
        stream = self._streams[number] = BufferedStream(number, request, lambda each: self._core.cancel(each.number))
        assert self._core.add(number, request), "the queue takes all of a benchmark"
        self._wake.set()
        try:
            yield stream
        finally:
            stream.cancel()
            del self._streams[number]

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        return self._hint.predict(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return self._core.statistics()

    def healthy(self) -> bool:
        """See `Engine.healthy`."""
        return not self._closed

    def condition(self) -> EngineCondition:
        """See `Engine.condition`."""
        return EngineCondition(EngineState.CLOSED if self._closed else EngineState.READY, loading_fraction=1.0)

    async def close(self) -> None:
        """See `Engine.close`; only when nothing runs any more."""
        self._closed = True
        self._wake.set()

    def _note_step(self, seconds: float) -> None:
        self._step_s = seconds
