"""Sequences on an engine that may come and go: the caller's streams, and the engine in a child process that serves them.

Holds no model and imports no torch.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType

from inference.engine import (
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceRefused,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.kv_blocks import PrefixHint
from inference.limits import EngineLimits, request_fault
from inference.workers.life import BackendLife, HostKind, HostWaits, LifeWaits, Worker
from inference.workers.protocol import CancelSequence, Message, ProtocolBroken, Ready, Shutdown, StartSequence, StepReport


class BufferedStream:
    """Implements `SequenceStream`. One reader; the engine puts events from the same event loop."""

    def __init__(self, number: int, request: GenerationRequest, cancel: Callable[[BufferedStream], None]) -> None:
        self.number = number
        self.request = request
        self.scheduled = False
        self.ended = False
        self.has_output = False
        # Token ids by choice, those from before a continuation included.
        self.outputs: list[list[int]] = [list(request.output_token_ids) for _ in range(request.choice_count)]
        self._cancel = cancel
        self._cancel_sent = False
        self._events: deque[SequenceEvent] = deque()
        self._failure: EngineError | None = None
        self._take: Callable[[SequenceEvent], bool] | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits; an `asyncio.Event` costs three times as much per token

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._events.popleft()

    def cancel(self) -> None:
        """See `SequenceStream.cancel`."""
        if not self.ended and not self._cancel_sent:
            self._cancel_sent = True
            self._cancel(self)

    def deliver_to(self, take: Callable[[SequenceEvent], bool]) -> None:
        """See `SequenceStream.deliver_to`."""
        self._take = take

    def put(self, event: SequenceEvent) -> None:
        """Called by the engine: the sequence's next event."""
        if type(event) is TokensGenerated:
            self.has_output = True
            self.outputs[event.choice_index] += event.token_ids
        elif type(event) is Scheduled:
            self.scheduled = True
        elif type(event) is SequenceFinished:
            self.ended = True
        reader = self._reader
        # Past the reader only where it has read everything and was not woken.
        if self._take is not None and reader is not None and not (self.ended or self._events or reader.done()):
            try:
                if self._take(event):
                    return
            except Exception as error:
                reader.set_exception(error)
                return
        self._events.append(event)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Called by the engine: no more events will come. What came before is still read first."""
        if not self.ended:
            self.ended = True
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineLife(BackendLife):
    """One model on an engine that is started, lost, and started again. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: LifeWaits, block_tokens: int) -> None:
        """Starts nothing. block_tokens: how many tokens the engine caches as one."""
        super().__init__(model, waits)
        self._limits = limits
        self._streams: dict[int, BufferedStream] = {}
        self._waiting_count = 0  # sequences among them that the engine has not let enter
        self._next_number = 0
        self._block_tokens = block_tokens
        self._block_count = 0  # of `KV_BLOCK_TOKENS` each
        self._hint = PrefixHint(0, block_tokens)
        self._last_queue_ms = 0.0

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        return self._hint.predict(prompt_token_ids, self._cache_group(cache_salt))

    def generate(self, request: GenerationRequest) -> EngineSequence:
        """See `Engine.generate`."""
        return EngineSequence(self, request)

    @abstractmethod
    def _submit(self, stream: BufferedStream) -> None:
        """Hand a sequence to the engine, which is READY."""

    @abstractmethod
    def _send_cancel(self, stream: BufferedStream) -> None:
        """Ask the engine to end a sequence; never blocks."""

    def _unserved(self, request: GenerationRequest) -> RequestImpossible | None:
        """What this backend cannot serve of a request that fits its limits."""
        return None

    def _cache_group(self, cache_salt: str) -> str:
        """Who shares prefixes with this salt: those of the same group."""
        return cache_salt

    def _forget_cache(self) -> None:
        """The engine is gone, and its cache with it, as far as anybody knows."""
        self._hint.clear()

    def enter(self, stream: BufferedStream) -> None:
        """Hand a sequence to the engine, for `leave` to follow. Raises as `generate` on entering."""
        self._check_ready()
        request = stream.request
        fault = request_fault(request, self._limits, self._model.vocabulary_size, self._block_count)
        if fault is not None:
            raise RequestImpossible(fault)
        self._model.check_capabilities(request)
        if (unserved := self._unserved(request)) is not None:
            raise unserved
        if self._waiting_count >= self._limits.waiting_sequence_count_max:
            raise EngineOverloaded("the engine's queue is full", self._overload_wait_s())
        stream.number = self._next_number
        self._next_number += 1
        self._streams[stream.number] = stream
        self._submit(stream)
        self._waiting_count += request.choice_count

    def leave(self, stream: BufferedStream) -> None:
        """Its caller has left: it is cancelled if it still runs, and forgotten."""
        stream.cancel()
        if self._streams.pop(stream.number, None) is not None and not stream.scheduled:
            self._waiting_count -= stream.request.choice_count

    def cancel(self, stream: BufferedStream) -> None:
        """Ask the engine to end a sequence that has not ended."""
        if stream.number in self._streams:
            self._send_cancel(stream)

    def _overload_wait_s(self) -> float:
        """What the last sequence waited is the best guess of what the next would; never so short that callers spin."""
        return max(self._last_queue_ms / 1e3, 0.5)

    def _take(self, stream: BufferedStream, event: SequenceEvent) -> None:
        """The engine tells of a sequence."""
        request = stream.request
        if isinstance(event, TokensGenerated):
            if not stream.has_output:
                self._hint.note(request.prompt_token_ids, self._cache_group(request.cache_salt))
        elif isinstance(event, Scheduled) and not stream.scheduled:
            self._waiting_count -= request.choice_count
        elif isinstance(event, SequenceFinished):
            self._last_queue_ms = event.timings.queue_ms
            prompt = request.prompt_token_ids
            for output in stream.outputs:
                computed_count = len(prompt) + len(output) - 1  # the last token's KV is never computed, since nothing followed it
                if computed_count // self._block_tokens > len(prompt) // self._block_tokens:  # else the prompt's blocks are all
                    self._hint.note((*prompt, *output[:-1]), self._cache_group(request.cache_salt))
        stream.put(event)

    def _ready(self, block_count: int, loading_time_s: float) -> None:
        """The engine takes requests. block_count: of `KV_BLOCK_TOKENS` each."""
        self._block_count = block_count
        self._now_ready(loading_time_s)

    def _fail_waiting(self, reason: str) -> None:
        self._forget_cache()
        for stream in self._streams.values():
            stream.fail(self._loss(reason))


class EngineSequence(BufferedStream):
    """One sequence on an engine, as a context manager: leaving it ends the sequence."""

    def __init__(self, engine: EngineLife, request: GenerationRequest) -> None:
        super().__init__(-1, request, engine.cancel)
        self._engine = engine

    async def __aenter__(self) -> SequenceStream:
        self._engine.enter(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.leave(self)


class HostedEngine(EngineLife):
    """One model in one child process. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: HostWaits, kind: HostKind) -> None:
        """Starts nothing."""
        super().__init__(replace(model, continues_output=True), limits, waits, kind.block_tokens)
        self._worker = Worker(
            self, kind, waits, on_ready=self._worker_ready, on_message=self._receive, owes_answers=self._owes_answers
        )

    @property
    def host_pid(self) -> int | None:
        """The child's process id, for operators and tests; None while there is none."""
        return self._worker.pid

    async def _run(self) -> str:
        return await self._worker.run()

    def _reachable(self) -> bool:
        return self._worker.pid is not None

    def _say_farewell(self) -> None:
        self._worker.send(Shutdown())

    def _end_at_once(self) -> None:
        self._worker.kill()

    def _submit(self, stream: BufferedStream) -> None:
        for other in self._streams.values():
            if not (other.ended or other is stream):
                break
        else:
            self._worker.heard()  # an idle host had no reason to report, whoever has yet to read what it has told
        self._worker.send(StartSequence(stream.number, stream.request))

    def _send_cancel(self, stream: BufferedStream) -> None:
        self._worker.send(CancelSequence(stream.number))

    def _worker_ready(self, message: Ready, loading_time_s: float) -> None:
        self._hint = PrefixHint(message.kv_block_count, self._block_tokens)
        self._ready(message.kv_block_count, loading_time_s)

    def _receive(self, message: Message) -> None:
        """What the child says of its sequences, all events of a step together. Raises: ProtocolBroken."""
        if not isinstance(message, StepReport):
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        self._worker.heard()
        self._statistics = EngineStatistics(*message.statistics)
        streams = self._streams
        for number, event in message.events:
            stream = streams.get(number)
            if stream is None:
                continue  # its caller has left
            if type(event) is TokensGenerated and stream.has_output:
                stream.put(event)
            elif isinstance(event, SequenceRefused):
                stream.fail(self._refusal(event))
            else:
                self._take(stream, event)

    def _owes_answers(self) -> bool:
        return any(not stream.ended for stream in self._streams.values())

    def _refusal(self, refused: SequenceRefused) -> EngineError:
        if refused.failed:
            return EngineFailed(refused.message)
        if refused.overloaded:
            return EngineOverloaded(refused.message, self._overload_wait_s())
        return RequestImpossible(refused.message, refused.field)
