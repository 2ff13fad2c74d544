"""Engine whose step loop runs in this process; `lose_at` is its `kill -9`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from inference import errors
from inference.checkpoint.checkpoint import read_model_info
from inference.core.engine_core import EngineCore
from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    EventSink,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceRefused,
    TokensGenerated,
)
from inference.kv_blocks import PrefixHint
from inference.workers.engine import EngineSequence
from tests.inference.checkpoints import TinyCheckpoint

NUMBERS = itertools.count(1)  # of all engines, since several may share a core


class CoreEngine:
    """`Engine` around a core. lose_at: total tokens after which it dies for good."""

    def __init__(
        self,
        checkpoint: TinyCheckpoint,
        make: Callable[[], EngineCore],
        name: str = "tiny",
        *,
        continues_exactly: bool = True,
    ) -> None:
        info = read_model_info(
            checkpoint.directory, name=name, engine="torch", context_window_tokens_max=None
        )
        self.model = ModelInfo(
            **{field: getattr(info, field) for field in ModelInfo.__dataclass_fields__}
            | {"continues_output": True, "continues_exactly": continues_exactly}
        )
        self.make = make
        self.core: EngineCore | None = None
        self.lose_at: int | None = None
        self.counts_late = False  # reports cached tokens at the end only
        self.token_count = 0
        self.requests: list[GenerationRequest] = []
        self.state = EngineState.COLD
        self.queue_is_full = False
        self._sequences: dict[int, EngineSequence] = {}  # that have not ended
        self._is_cancelling = False  # set until the next turn of the event loop, which cancels
        self._hint = PrefixHint(1000, 16)
        self._wake = asyncio.Event()

    async def serve(self) -> None:
        """Step while there is something to compute."""
        while self.state is not EngineState.CLOSED:
            await self._wake.wait()
            if self.core is not None:
                self.step()
            if self.core is None or self.core.idle:
                self._wake.clear()
            await asyncio.sleep(0)

    async def start(self) -> None:
        """Become ready, the second time with an empty cache."""
        if self.state is EngineState.CLOSED:
            raise errors.EngineUnavailable("closed", 0.0)
        if self.core is None:
            self.core, self.state = self.make(), EngineState.READY

    def step(self) -> None:
        """Run one step and report its events; or die, if it is time."""
        assert self.core is not None
        if self._is_due():
            return
        for number, event in self.core.step():
            assert not isinstance(event, SequenceRefused)
            sequence = self._sequences.get(number)
            if sequence is None:
                continue
            self._emit(sequence, event)
            if isinstance(event, TokensGenerated):
                self.token_count += len(event.token_ids)
                self._hint.note(sequence.request.prompt_token_ids, sequence.request.cache_salt)
                if self._is_due():
                    return

    def _emit(self, sequence: EngineSequence, event: SequenceEvent | errors.EngineError) -> None:
        if isinstance(event, TokensGenerated):
            sequence.outputs[event.choice_index] += event.token_ids
        elif isinstance(event, SequenceFinished | errors.EngineError):
            del self._sequences[sequence.number]
        elif isinstance(event, Scheduled) and self.counts_late:
            event = Scheduled(0, is_final=False)
        sequence.sink(event)

    def _is_due(self) -> bool:
        if self.lose_at is not None and self.token_count >= self.lose_at:
            self.lose()
        return self.core is None

    def lose(self) -> None:
        """Die like a process: running sequences get no further events."""
        assert self.core is not None
        for number in self._sequences:
            self.core.cancel(number)
        self.core, self.state = None, EngineState.RESTARTING
        self._hint.clear()
        for sequence in tuple(self._sequences.values()):
            self._emit(sequence, errors.EngineFailed("killed"))

    def submit(self, request: GenerationRequest, sink: EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        if self.core is None:
            raise errors.EngineUnavailable(f"it is {self.state}", 0.05)
        if self.queue_is_full:
            raise errors.EngineOverloaded("full", 0.05)
        if (fault := self.core.request_fault(request)) is not None:
            raise errors.RequestImpossible(fault)
        number = next(NUMBERS)
        self.requests.append(request)
        assert self.core.add(number, request)
        sequence = self._sequences[number] = EngineSequence(self, number, request, sink)
        self._wake.set()
        return sequence

    def cancel(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.cancel`. Takes effect in the next turn of the event loop."""
        if self.core is not None and sequence.number in self._sequences:
            self.core.cancel(sequence.number)
            if not self._is_cancelling:
                self._is_cancelling = True
                asyncio.get_running_loop().call_soon(self._emit_cancelled)

    def forget(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.close`."""
        self.cancel(sequence)
        self._sequences.pop(sequence.number, None)

    def _emit_cancelled(self) -> None:
        self._is_cancelling = False
        if self.core is not None:
            self.step()

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine`."""
        return self._hint.predict(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """Implement `Engine`."""
        return EngineStatistics() if self.core is None else self.core.statistics()

    def healthy(self) -> bool:
        """Implement `Engine`."""
        return self.state is EngineState.READY

    def condition(self) -> EngineCondition:
        """Implement `Engine`."""
        return EngineCondition(self.state, retry_after_s=0.05, reason="test")

    async def close(self) -> None:
        """Implement `Engine`."""
        if self.core is not None:
            self.core.cancel_all()
            self.lose_at = None
            self.step()
        self.core, self.state = None, EngineState.CLOSED
        self._wake.set()
