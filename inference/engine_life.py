"""What every engine that may come and go has in common: its life, its callers' streams, and the hint of what is cached.

Implements `Engine` but for what reaches the engine itself: `hosted_engine.py` and `remote/engine.py` add that. Everything runs on
the caller's event loop: `serve` is all that runs in the background, a task of the caller's `TaskGroup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Protocol

from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    SequenceEvent,
    SequenceFinished,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import EngineFailed, EngineOverloaded, EngineStartFailed, EngineUnavailable, RequestImpossible
from inference.limits import EngineLimits, request_fault
from inference.prefix_hint import PrefixHint
from inference.sequence_stream import BufferedStream

_log = logging.getLogger("weir.inference.engine")

_CLOSED = EngineCondition(EngineState.CLOSED, reason="closed")


class LifeWaits(Protocol):
    """How long what may take, in seconds; part of every backend's settings."""

    @property
    def close_timeout_s(self) -> float:
        """For the running sequences to end when the engine is closed."""

    @property
    def restart_delay_s_min(self) -> float:
        """Before the first new start; doubled by each that fails."""

    @property
    def restart_delay_s_max(self) -> float:
        """The longest pause."""

    @property
    def stable_after_s(self) -> float:
        """Of service, after which the restart delay begins anew."""


class EngineLife(ABC):
    """One model on an engine that is started, lost, and started again. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: LifeWaits, block_tokens: int) -> None:
        """Starts nothing. block_tokens: how many tokens the engine caches as one."""
        self._model = model
        self._limits = limits
        self._waits = waits
        self._condition = EngineCondition(EngineState.COLD, reason="not started yet")
        self._changed = asyncio.Event()
        self._start_requested = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = False
        self._load_failure_count = 0
        self._load_time_s = 2.0  # seconds: what loading took last; before the first time, what the demo model takes
        self._streams: dict[int, BufferedStream] = {}
        self._next_number = 0
        self._block_tokens = block_tokens
        self._block_count = 0  # of `KV_BLOCK_TOKENS` each
        self._statistics = EngineStatistics()
        self._hint = PrefixHint(0, block_tokens)
        self._last_queue_ms = 0.0

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`."""
        return self._model

    def healthy(self) -> bool:
        """See `Engine.healthy`."""
        return self._condition.state is EngineState.READY

    def condition(self) -> EngineCondition:
        """See `Engine.condition`."""
        return self._condition

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return self._statistics

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        return self._hint.predict(prompt_token_ids, cache_salt)

    async def start(self) -> None:
        """See `Engine.start`."""
        failures_before = self._load_failure_count
        self._start_requested.set()
        while self._condition.state is not EngineState.READY:
            if self._condition.state is EngineState.CLOSED:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            if self._condition.state is EngineState.FAILED or self._load_failure_count > failures_before:
                raise EngineStartFailed(self._condition.reason)
            await self._changed.wait()

    async def close(self) -> None:
        """See `Engine.close`."""
        healthy, closing = self.healthy(), self._close_requested.is_set()
        self._set_condition(_CLOSED)  # before the first wait, so that nobody enters any more
        self._close_requested.set()
        self._start_requested.set()
        if not self._serving:
            return
        if healthy:
            self._say_farewell()
        if healthy or closing:  # a second close gives the first one's farewell its time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._waits.close_timeout_s):
                    await self._served.wait()
        self._end_at_once()
        await self._served.wait()

    async def serve(self) -> None:
        """See `Engine.serve`."""
        assert not self._serving, "an engine is served once"
        if self._close_requested.is_set():
            return
        self._serving = True
        delay_s = self._waits.restart_delay_s_min
        clock = asyncio.get_running_loop().time
        try:
            await self._start_requested.wait()
            while not self._close_requested.is_set() and self._condition.state is not EngineState.FAILED:
                started_at_s = clock()
                self._set_condition(EngineCondition(EngineState.LOADING, 0.0, "process", self._load_time_s, "loading"))
                self._lost(await self._run())
                if clock() - started_at_s > self._waits.stable_after_s:
                    delay_s = self._waits.restart_delay_s_min
                if self._condition.state is EngineState.RESTARTING and not self._close_requested.is_set():
                    await self._pause(delay_s)
                    delay_s = min(delay_s * 2, self._waits.restart_delay_s_max)
            await self._close_requested.wait()
        finally:
            self._set_condition(_CLOSED)
            self._fail_streams("the engine was closed")
            self._served.set()

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[SequenceStream]:
        """See `Engine.generate`."""
        stream = self._open_stream(request)
        try:
            yield stream
        finally:
            stream.cancel()
            self._streams.pop(stream.number, None)

    @abstractmethod
    async def _run(self) -> str:
        """One life of the engine: begin, say when it is ready, serve until it is gone. Returns why it is gone."""

    @abstractmethod
    def _reachable(self) -> bool:
        """Whether a READY engine can be told anything now; it may be gone already."""

    @abstractmethod
    def _submit(self, stream: BufferedStream) -> None:
        """Hand a sequence to the engine, which is READY."""

    @abstractmethod
    def _send_cancel(self, stream: BufferedStream) -> None:
        """Ask the engine to end a sequence; never blocks."""

    @abstractmethod
    def _say_farewell(self) -> None:
        """Ask the engine to end all sequences and then itself; never blocks."""

    @abstractmethod
    def _end_at_once(self) -> None:
        """`_run` must return now, whatever still runs."""

    def _unserved(self, request: GenerationRequest) -> RequestImpossible | None:
        """What this backend cannot serve of a request that fits its limits."""
        return None

    def _forget_cache(self) -> None:
        """The engine is gone, and its cache with it, as far as anybody knows."""
        self._hint.clear()

    def _open_stream(self, request: GenerationRequest) -> BufferedStream:
        condition = self._condition
        if condition.state is EngineState.FAILED:
            raise EngineStartFailed(condition.reason)
        if condition.state is not EngineState.READY or not self._reachable():
            raise EngineUnavailable(f"the engine is {condition.state.value}: {condition.reason}", condition.retry_after_s)
        fault = request_fault(request, self._limits, self._model.vocabulary_size, self._block_count)
        if fault is not None:
            raise RequestImpossible(fault)
        if (unserved := self._unserved(request)) is not None:
            raise unserved
        if (
            sum(stream.request.choice_count for stream in self._streams.values() if not stream.scheduled)
            >= self._limits.waiting_sequence_count_max
        ):
            raise EngineOverloaded("the engine's queue is full", self._overload_wait_s())
        stream = BufferedStream(self._next_number, request, self._cancel)
        self._next_number += 1
        self._streams[stream.number] = stream
        self._submit(stream)
        return stream

    def _cancel(self, stream: BufferedStream) -> None:
        if stream.number in self._streams:
            self._send_cancel(stream)

    def _overload_wait_s(self) -> float:
        """What the last sequence waited is the best guess of what the next would; never so short that callers spin."""
        return max(self._last_queue_ms / 1e3, 0.5)

    def _ready(self, block_count: int, loading_time_s: float) -> None:
        """The engine takes requests. block_count: of `KV_BLOCK_TOKENS` each."""
        self._block_count = block_count
        self._load_time_s = loading_time_s
        self._set_condition(EngineCondition(EngineState.READY, loading_fraction=1.0))

    def _lost(self, reason: str) -> None:
        """A life of the engine is over. Leaves the condition FAILED or RESTARTING."""
        if self._condition.state is EngineState.LOADING:
            self._load_failure_count += 1
        if self._condition.state is not EngineState.FAILED:
            self._set_condition(EngineCondition(EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=reason))
        if not self._close_requested.is_set():
            _log.error("engine %s: %s", self._model.name, reason)
        self._forget_cache()
        self._statistics = EngineStatistics()
        self._fail_streams(reason)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt; a close ends the wait."""
        self._set_condition(
            EngineCondition(EngineState.RESTARTING, retry_after_s=delay_s + self._load_time_s, reason=self._condition.reason)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._close_requested.wait()

    def _cannot_start(self, reason: str) -> None:
        """A person has to see to it: no retry would help."""
        self._load_failure_count += 1
        self._set_condition(EngineCondition(EngineState.FAILED, reason=reason))

    def _take(self, stream: BufferedStream, event: SequenceEvent) -> None:
        """The engine tells of a sequence."""
        request = stream.request
        if isinstance(event, TokensGenerated) and not stream.has_output:
            self._hint.note(request.prompt_token_ids, request.cache_salt)
        stream.put(event)
        if isinstance(event, SequenceFinished):
            self._last_queue_ms = event.timings.queue_ms
            prompt = request.prompt_token_ids
            for output in stream.outputs:
                computed_count = len(prompt) + len(output) - 1  # the last token's KV is never computed, since nothing followed it
                if computed_count // self._block_tokens > len(prompt) // self._block_tokens:  # else the prompt's blocks are all
                    self._hint.note((*prompt, *output[:-1]), request.cache_salt)

    def _fail_streams(self, reason: str) -> None:
        closed = self._condition.state is EngineState.CLOSED
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(reason, retry_after_s=0.0) if closed else EngineFailed(reason))

    def _set_condition(self, condition: EngineCondition) -> None:
        if self._condition.state is EngineState.CLOSED:
            return  # the end of a life; what the engine still does changes nothing
        self._condition = condition
        self._changed.set()
        self._changed = asyncio.Event()
