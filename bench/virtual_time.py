"""Engines in virtual time: minutes of load on many GPUs are computed quickly and reproducibly.

An event loop whose time jumps to the next timer, with simulated engines. Scheduler, KV blocks,
prefix cache and cost model are the product's; only the processes around them are missing. Results
do not depend on the machine's load.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from inference.checkpoint.checkpoint import read_model_info
from inference.core.engine_core import EngineCore
from inference.core.options import CostModel, EngineOptions
from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    EventSink,
    GenerationRequest,
    SequenceFinished,
    SequenceRefused,
    TokensGenerated,
)
from inference.errors import RequestImpossible
from inference.kv_blocks import KV_BLOCK_TOKENS, PrefixHint
from inference.limits import EngineLimits
from inference.workers.engine import EngineSequence


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` stops while callbacks are ready, then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        """Return the virtual seconds since the loop began."""
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # the base class keeps both, and offers neither
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class VirtualEngine:
    """Simulated engine core in this process, on the loop's virtual time. Implements `Engine`."""

    def __init__(self, directory: Path, name: str, cost: CostModel, limits: EngineLimits) -> None:
        """Build an engine for a model. `directory` is a checkpoint, whose tokenizer is used.

        Needs a running event loop.
        """
        info = read_model_info(
            directory,
            name=name,
            engine="simulated",
            context_window_tokens_max=limits.context_window_tokens,
        )
        self.model = replace(info, continues_output=True)
        self._clock = asyncio.get_running_loop().time
        options = EngineOptions(str(directory), limits, simulation=cost)
        self._core = EngineCore(options, clock=self._clock, sleep=self._note_step)
        self._step_s = 0.0
        self._sequences: dict[int, EngineSequence] = {}  # not ended
        self._next_number = 0
        self._hint = PrefixHint(cost.kv_block_count, KV_BLOCK_TOKENS)
        self._wake = asyncio.Event()
        self._closed = False
        self.busy_s = 0.0

    async def serve(self) -> None:
        """Implement `Engine.serve`."""
        while not self._closed:
            if self._core.idle:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._step_s = 0.0
            events = self._core.step()
            self.busy_s += self._step_s
            await asyncio.sleep(self._step_s)  # results are available at the end of the step
            for number, event in events:
                assert not isinstance(event, SequenceRefused), (
                    "no request here has a response format"
                )
                if (sequence := self._sequences.get(number)) is None:
                    continue
                request = sequence.request
                if isinstance(event, TokensGenerated):
                    if not sequence.outputs[0]:
                        self._hint.note(request.prompt_token_ids, request.cache_salt)
                    sequence.outputs[0] += event.token_ids
                if isinstance(event, SequenceFinished):
                    del self._sequences[number]
                    self._hint.note(
                        (*request.prompt_token_ids, *sequence.outputs[0][:-1]), request.cache_salt
                    )
                sequence.sink(event)

    async def start(self) -> None:
        """Do nothing: the engine is always ready."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        if (fault := self._core.request_fault(request)) is not None:
            raise RequestImpossible(fault)
        number = self._next_number
        self._next_number += 1
        assert self._core.add(number, request), "the queue takes all of a benchmark"
        sequence = self._sequences[number] = EngineSequence(self, number, request, sink)
        self._wake.set()
        return sequence

    def cancel(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.cancel`."""
        self._core.cancel(sequence.number)

    def forget(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.close`."""
        if self._sequences.pop(sequence.number, None) is not None:
            self._core.cancel(sequence.number)

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count`."""
        return self._hint.predict(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """Implement `Engine.statistics`."""
        return self._core.statistics()

    def healthy(self) -> bool:
        """Implement `Engine.healthy`."""
        return not self._closed

    def condition(self) -> EngineCondition:
        """Implement `Engine.condition`."""
        return EngineCondition(
            EngineState.CLOSED if self._closed else EngineState.READY, loading_fraction=1.0
        )

    async def close(self) -> None:
        """Implement `Engine.close`; call it only when nothing is running."""
        self._closed = True
        self._wake.set()

    def _note_step(self, seconds: float) -> None:
        self._step_s = seconds
