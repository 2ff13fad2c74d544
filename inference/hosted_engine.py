"""An engine in a child process as the API process sees it: started, watched, and started again.

Implements `Engine` for every backend that is spoken to by `host_protocol.py`; what differs is in a `HostKind`. Holds no model and
imports no torch. Everything runs on the caller's event loop: `serve` is all that runs in the background, a task of the caller's
`TaskGroup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import assert_never

from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    SequenceFinished,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineStartFailed, EngineUnavailable, RequestImpossible
from inference.host_process import HostKind, HostProcess, HostWaits, open_host
from inference.host_protocol import (
    CancelSequence,
    Event,
    LoadFailed,
    Loading,
    ProtocolBroken,
    Ready,
    RefusedEvent,
    Shutdown,
    StepReport,
    ToParent,
    sequence_event,
    start_message,
)
from inference.limits import EngineLimits, request_fault
from inference.prefix_hint import PrefixHint
from inference.sequence_stream import BufferedStream
from inference.tensorrt.kv_events import KvCacheChange
from inference.watchdog import Watchdog

_log = logging.getLogger("weir.inference.engine")

_CLOSED = EngineCondition(EngineState.CLOSED, reason="closed")


class HostedEngine:
    """One model in one child process. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: HostWaits, kind: HostKind) -> None:
        """Starts nothing."""
        self._model = model
        self._limits = limits
        self._settings = waits
        self._kind = kind
        self._condition = EngineCondition(EngineState.COLD, reason="not started yet")
        self._changed = asyncio.Event()
        self._start_requested = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = False
        self._load_failure_count = 0
        self._load_time_s = 2.0  # seconds: what loading took last; before the first time, what the demo model takes
        self._host: HostProcess | None = None
        self._streams: dict[int, BufferedStream] = {}
        self._next_number = 0
        self._block_count = 0
        self._statistics = EngineStatistics()
        self._hint = PrefixHint(0, kind.block_tokens)
        self._last_queue_ms = 0.0
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging_host)

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`."""
        return self._model

    @property
    def host_pid(self) -> int | None:
        """The child's process id, for operators and tests; None while there is none."""
        return None if self._host is None else self._host.pid

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
        if self._host is not None and healthy:
            self._host.send(Shutdown())
        if healthy or closing:  # a second close gives the first one's farewell its time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.close_timeout_s):
                    await self._served.wait()
        if self._host is not None:
            self._host.kill()
        await self._served.wait()

    async def serve(self) -> None:
        """See `Engine.serve`."""
        assert not self._serving, "an engine is served once"
        if self._close_requested.is_set():
            return
        self._serving = True
        delay_s = self._settings.restart_delay_s_min
        clock = asyncio.get_running_loop().time
        try:
            await self._start_requested.wait()
            while not self._close_requested.is_set() and self._condition.state is not EngineState.FAILED:
                started_at_s = clock()
                await self._run_host()
                if clock() - started_at_s > self._settings.stable_after_s:
                    delay_s = self._settings.restart_delay_s_min
                if self._condition.state is EngineState.RESTARTING and not self._close_requested.is_set():
                    await self._pause(delay_s)
                    delay_s = min(delay_s * 2, self._settings.restart_delay_s_max)
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

    def _open_stream(self, request: GenerationRequest) -> BufferedStream:
        condition, host = self._condition, self._host
        if condition.state is EngineState.FAILED:
            raise EngineStartFailed(condition.reason)
        if condition.state is not EngineState.READY or host is None:
            raise EngineUnavailable(f"the engine is {condition.state.value}: {condition.reason}", condition.retry_after_s)
        fault = request_fault(request, self._limits, self._model.vocabulary_size, self._block_count)
        if fault is not None:
            raise RequestImpossible(fault)
        if (unserved := self._kind.unserved(request)) is not None:
            raise unserved
        if (
            sum(stream.request.choice_count for stream in self._streams.values() if not stream.scheduled)
            >= self._limits.waiting_sequence_count_max
        ):
            raise EngineOverloaded("the engine's queue is full", self._overload_wait_s())
        stream = BufferedStream(self._next_number, request, self._send_cancel)
        self._next_number += 1
        if not self._streams:
            self._watchdog.heard()  # an idle host had no reason to report
        self._streams[stream.number] = stream
        host.send(start_message(stream.number, request))
        return stream

    def _send_cancel(self, stream: BufferedStream) -> None:
        if self._host is not None and stream.number in self._streams:
            self._host.send(CancelSequence(stream.number))

    def _overload_wait_s(self) -> float:
        """What the last sequence waited is the best guess of what the next would; never so short that callers spin."""
        return max(self._last_queue_ms / 1e3, 0.5)

    async def _run_host(self) -> None:
        """One life of a child: start, load, serve, until it is gone. Leaves the condition FAILED or RESTARTING."""
        self._set_condition(EngineCondition(EngineState.LOADING, 0.0, "process", self._load_time_s, "loading"))
        reason = "the engine process ended"
        try:
            async with open_host(self._kind.module, self._kind.environment) as host:
                if self._close_requested.is_set():
                    return  # closed while the process started; nobody would kill it later
                self._host = host
                try:
                    await self._load(host)
                    while self._condition.state is not EngineState.FAILED and (message := await host.receive()) is not None:
                        self._handle(message)
                    reason = await self._exit_reason(host)
                except TimeoutError:
                    reason = f"loading took more than {self._settings.load_timeout_s:.0f} s"
                except ProtocolBroken as error:
                    reason = f"the engine process broke the protocol: {error}"
                finally:
                    self._host = None
                    self._watchdog.disarm()
        except OSError as error:
            reason = f"the engine process could not be started: {error}"
        if self._condition.state is EngineState.LOADING:
            self._load_failure_count += 1
        if self._condition.state is not EngineState.FAILED:
            self._set_condition(EngineCondition(EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=reason))
        if not self._close_requested.is_set():
            _log.error("engine %s: %s", self._model.name, reason)
        self._forget_cache()
        self._statistics = EngineStatistics()
        self._fail_streams(reason)

    def _forget_cache(self) -> None:
        """The child is gone, and its cache with it."""
        self._hint.clear()

    async def _load(self, host: HostProcess) -> None:
        loop = asyncio.get_running_loop()
        started_at_s = loop.time()
        host.send(self._kind.load)
        async with asyncio.timeout(self._settings.load_timeout_s):
            while self._condition.state is EngineState.LOADING:
                message = await host.receive()
                if message is None:
                    return
                self._handle(message)
        if self._condition.state is EngineState.READY:
            self._load_time_s = loop.time() - started_at_s

    async def _exit_reason(self, host: HostProcess) -> str:
        """Why the child is gone, as far as its exit status tells."""
        if self._condition.state is EngineState.FAILED:
            return self._condition.reason
        await host.wait_gone(self._settings.close_timeout_s)
        return f"the engine process ended with status {host.exit_status}"

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt; a close ends the wait."""
        self._set_condition(
            EngineCondition(EngineState.RESTARTING, retry_after_s=delay_s + self._load_time_s, reason=self._condition.reason)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._close_requested.wait()

    def _handle(self, message: ToParent) -> None:
        match message:
            case StepReport():
                self._watchdog.heard()
                self._statistics = EngineStatistics(*message.statistics)
                for event in message.events:
                    self._dispatch(event)
            case Loading():
                self._set_condition(
                    EngineCondition(
                        EngineState.LOADING, message.fraction, message.stage, self._load_time_s * (1 - message.fraction), "loading"
                    )
                )
            case Ready():
                self._block_count = message.kv_block_count
                self._hint = PrefixHint(message.kv_block_count, self._kind.block_tokens)
                self._set_condition(EngineCondition(EngineState.READY, loading_fraction=1.0))
                self._watchdog.arm()
            case LoadFailed():
                self._load_failure_count += 1
                self._set_condition(EngineCondition(EngineState.FAILED, reason=message.message))
            case KvCacheChange():
                pass  # of a backend that does not tell whose blocks they are
            case _:
                assert_never(message)

    def _dispatch(self, event: Event) -> None:
        stream = self._streams.get(event.number)
        if stream is None:
            return  # its caller has left
        if isinstance(event, RefusedEvent):
            refused: EngineError = RequestImpossible(event.message, event.field)
            if event.failed:
                refused = EngineFailed(event.message)
            elif event.overloaded:
                refused = EngineOverloaded(event.message, self._overload_wait_s())
            stream.fail(refused)
            return
        received = sequence_event(event)
        if isinstance(received, TokensGenerated) and not any(stream.outputs):
            self._hint.note(stream.request.prompt_token_ids, stream.request.cache_salt)
        stream.put(received)
        if isinstance(received, SequenceFinished):
            self._last_queue_ms = received.timings.queue_ms
            prompt = stream.request.prompt_token_ids
            for output in stream.outputs:
                computed_count = len(prompt) + len(output) - 1  # the last token's KV is never computed, since nothing followed it
                if (
                    computed_count // self._kind.block_tokens > len(prompt) // self._kind.block_tokens
                ):  # else the prompt's blocks are all
                    self._hint.note((*prompt, *output[:-1]), stream.request.cache_salt)

    def _fail_streams(self, reason: str) -> None:
        closed = self._condition.state is EngineState.CLOSED
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(reason, retry_after_s=0.0) if closed else EngineFailed(reason))

    def _set_condition(self, condition: EngineCondition) -> None:
        if self._condition.state is EngineState.CLOSED:
            return  # the end of a life; what the child still does changes nothing
        self._condition = condition
        self._changed.set()
        self._changed = asyncio.Event()

    def _kill_hanging_host(self, silence_s: float) -> None:
        """A host that owes events and sends none is killed; its end is then handled like any other crash."""
        if self._host is not None and any(not stream.ended for stream in self._streams.values()):
            _log.error("engine %s: no report for %.0f s, killing the process", self._model.name, silence_s)
            self._host.kill()
