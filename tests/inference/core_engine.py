"""An engine whose step loop runs in this process, for tests that lose engines at exact moments: `lose_at` is its `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

from inference.checkpoint.checkpoint import read_model_info
from inference.core.engine_core import EngineCore
from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    SequenceRefused,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import EngineFailed, EngineOverloaded, EngineUnavailable, RequestImpossible
from inference.kv_blocks import PrefixHint
from inference.workers.engine import BufferedStream
from tests.inference.checkpoints import TinyCheckpoint

NUMBERS = itertools.count(1)  # of all engines, since several may share a core


class CoreEngine:
    """`Engine` around a core. lose_at: tokens of all its sequences together after which it dies; it is not started again."""

    def __init__(
        self, checkpoint: TinyCheckpoint, make: Callable[[], EngineCore], name: str = "tiny", *, continues_exactly: bool = True
    ) -> None:
        info = read_model_info(checkpoint.directory, name=name, engine="torch", context_window_tokens_max=None)
        self.model = ModelInfo(
            **{field: getattr(info, field) for field in ModelInfo.__dataclass_fields__}
            | {"continues_output": True, "continues_exactly": continues_exactly}
        )
        self.make = make
        self.core: EngineCore | None = None
        self.lose_at: int | None = None
        self.token_count = 0
        self.requests: list[GenerationRequest] = []
        self.state = EngineState.COLD
        self.queue_is_full = False
        self._streams: dict[int, BufferedStream] = {}
        self._cancel_count = 0  # since the outermost call of `_cancel` began
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
        """Be there, or be there again with an empty cache."""
        if self.state is EngineState.CLOSED:
            raise EngineUnavailable("closed", 0.0)
        if self.core is None:
            self.core, self.state = self.make(), EngineState.READY

    def step(self) -> None:
        """One step, told at once; or the end, if it is time."""
        assert self.core is not None
        if self._is_due():
            return
        for number, event in self.core.step():
            stream = self._streams.get(number)
            if stream is None:
                continue
            assert not isinstance(event, SequenceRefused)
            stream.put(event)
            if isinstance(event, TokensGenerated):
                self.token_count += len(event.token_ids)
                self._hint.note(stream.request.prompt_token_ids, stream.request.cache_salt)
                if self._is_due():
                    return

    def _is_due(self) -> bool:
        if self.lose_at is not None and self.token_count >= self.lose_at:
            self.lose()
        return self.core is None

    def lose(self) -> None:
        """Die as a process does: nothing more comes of what runs."""
        assert self.core is not None
        for number in self._streams:
            self.core.cancel(number)
        self.core, self.state = None, EngineState.RESTARTING
        self._hint.clear()
        for stream in self._streams.values():
            stream.fail(EngineFailed("killed"))

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[SequenceStream]:
        """See `Engine.generate`."""
        if self.core is None:
            raise EngineUnavailable(f"it is {self.state}", 0.05)
        if self.queue_is_full:
            raise EngineOverloaded("full", 0.05)
        if (fault := self.core.request_fault(request)) is not None:
            raise RequestImpossible(fault)
        number = next(NUMBERS)
        stream = self._streams[number] = BufferedStream(number, request, self._cancel)
        self.requests.append(request)
        assert self.core.add(number, request)
        self._wake.set()
        try:
            yield stream
        finally:
            stream.cancel()
            del self._streams[number]

    def _cancel(self, stream: BufferedStream) -> None:
        if self.core is None:
            return
        self.core.cancel(stream.number)
        self._cancel_count += 1
        if self._cancel_count > 1:  # a stream that was just given an event has cancelled: the loop below steps once more
            return
        stepped_count = 0
        try:
            while stepped_count < self._cancel_count:
                stepped_count = self._cancel_count
                for number, event in self.core.step() if not self._is_due() else ():
                    if (other := self._streams.get(number)) is not None:
                        assert not isinstance(event, SequenceRefused)
                        other.put(event)
        finally:
            self._cancel_count = 0

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine`."""
        return self._hint.predict(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """See `Engine`."""
        return EngineStatistics() if self.core is None else self.core.statistics()

    def healthy(self) -> bool:
        """See `Engine`."""
        return self.state is EngineState.READY

    def condition(self) -> EngineCondition:
        """See `Engine`."""
        return EngineCondition(self.state, retry_after_s=0.05, reason="test")

    async def close(self) -> None:
        """See `Engine`."""
        if self.core is not None:
            self.core.cancel_all()
            for number, event in self.core.step():
                if (stream := self._streams.get(number)) is not None:
                    assert not isinstance(event, SequenceRefused)
                    stream.put(event)
        self.core, self.state = None, EngineState.CLOSED
        self._wake.set()
