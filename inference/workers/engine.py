"""Sequences of an engine that may restart, and the engine in a worker process.

Holds no model and imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from common.incidents import Retries
from inference.engine import (
    EventSink,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceRefused,
    TokensGenerated,
    ignore_event,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.kv_blocks import PrefixHint
from inference.limits import EngineLimits, request_fault
from inference.workers.protocol import (
    CachedBlocks,
    CancelSequence,
    Message,
    ProtocolBroken,
    Pulse,
    Ready,
    Shutdown,
    StartSequence,
    StepReport,
)
from inference.workers.supervised_backend import READY, RestartPolicy, SupervisedBackend
from inference.workers.worker import Worker, WorkerKind, WorkerPolicy


class EngineSequence:
    """Sequence of one engine. Implements `SequenceHandle`."""

    __slots__ = (
        "_engine",
        "has_ended",
        "has_output",
        "is_cancelled",
        "is_scheduled",
        "number",
        "outputs",
        "request",
        "sink",
    )

    def __init__(
        self, engine: SequenceOwner, number: int, request: GenerationRequest, sink: EventSink
    ) -> None:
        self.number = number
        self.request = request
        self.sink = sink
        self.outputs: list[list[int]] = [list(request.output_token_ids)]
        for _ in range(1, request.choice_count):
            self.outputs.append(list(request.output_token_ids))
        self.is_scheduled = False
        self.has_output = False  # reported by this engine
        self.is_cancelled = False
        self.has_ended = False  # or is closed
        self._engine = engine

    def cancel(self) -> None:
        """Implement `SequenceHandle.cancel`."""
        self._engine.cancel(self)

    def close(self) -> None:
        """Implement `SequenceHandle.close`."""
        if not self.has_ended:
            self._engine.forget(self)


class SequenceOwner(Protocol):
    """Interface of an engine for its sequences."""

    def cancel(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.cancel`."""

    def forget(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.close`."""


class SupervisedEngine(SupervisedBackend):
    """Engine that is restarted when it is lost. Implements `Engine`."""

    def __init__(
        self, model: ModelInfo, limits: EngineLimits, waits: RestartPolicy, block_tokens: int
    ) -> None:
        """Start nothing. `block_tokens` is the number of tokens per block of its prefix cache."""
        super().__init__(model, waits)
        self._limits = limits
        self._sequences: dict[int, EngineSequence] = {}  # not ended
        self._waiting_count = 0  # choices of sequences that are not scheduled yet
        self._next_number = 0
        self._block_tokens = block_tokens
        self._block_count = 0  # of `KV_BLOCK_TOKENS` each
        self._hint = PrefixHint(0, block_tokens)
        self._last_queue_ms = 0.0
        self._valid_sampling: SamplingParams | None = None  # of the last request
        self._callback_failures = Retries("engine")

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count`."""
        return self._hint.predict(prompt_token_ids, self._cache_group(cache_salt))

    @abstractmethod
    def _send_start(self, sequence: EngineSequence) -> None:
        """Send a sequence to the engine, which must be READY."""

    @abstractmethod
    def _send_cancel(self, sequence: EngineSequence) -> None:
        """Ask the engine to end a sequence. Never blocks."""

    def _cache_group(self, cache_salt: str) -> str:
        """Choose the group of a salt; prefixes are shared within a group."""
        return cache_salt

    def _forget_cache(self) -> None:
        """Forget the contents of the cache, which is lost with the engine."""
        self._hint.clear()

    def submit(self, request: GenerationRequest, sink: EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        if self._condition.state is not READY or self._stall:
            self._check_ready()
        model = self._model
        fault = request_fault(
            request, self._limits, model.vocabulary_size, self._block_count, self._valid_sampling
        )
        if fault is not None:
            raise RequestImpossible(fault)
        self._valid_sampling = request.sampling
        model.capabilities.check(request, model.engine)
        if request.adapter and request.adapter not in model.adapters:
            raise RequestImpossible(
                f"this model's engine has no LoRA adapter {request.adapter!r}: use a model that the"
                " server lists"
            )
        if self._waiting_count >= self._limits.waiting_sequence_count_max:
            raise EngineOverloaded("the engine's queue is full", self._overload_wait_s())
        sequence = self._sequences[self._next_number] = EngineSequence(
            self, self._next_number, request, sink
        )
        self._next_number += 1
        self._waiting_count += request.choice_count
        self._send_start(sequence)
        return sequence

    def cancel(self, sequence: EngineSequence) -> None:
        """Implement `SequenceHandle.cancel`."""
        if not sequence.has_ended and not sequence.is_cancelled:
            sequence.is_cancelled = True
            self._send_cancel(sequence)

    def forget(self, sequence: EngineSequence) -> None:
        """Implement `SequenceOwner.forget` for a sequence that has not ended."""
        self.cancel(sequence)
        self._remove(sequence)

    def _remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence that has ended or is closed; it gets no more events."""
        del self._sequences[sequence.number]
        sequence.has_ended = True
        sequence.sink = ignore_event  # releases the callback's references
        if not sequence.is_scheduled:
            self._waiting_count -= sequence.request.choice_count

    def _overload_wait_s(self) -> float:
        """Estimate the retry-after in seconds by the last sequence's wait; at least 0.5."""
        return max(self._last_queue_ms / 1e3, 0.5)

    def _deliver(
        self, events: Iterable[tuple[int, SequenceEvent | SequenceRefused | EngineError]]
    ) -> None:
        """Apply events of the engine, each with its sequence number, and report them to callers."""
        sequences = self._sequences
        for number, event in events:
            sequence = sequences.get(number)
            if sequence is None:
                continue  # closed
            sink, request = sequence.sink, sequence.request
            if isinstance(event, TokensGenerated):
                if not sequence.has_output:
                    sequence.has_output = True
                    self._note_cached(request.prompt_token_ids, request.cache_salt)
                sequence.outputs[event.choice_index] += event.token_ids
            elif isinstance(event, Scheduled):
                if not sequence.is_scheduled:
                    sequence.is_scheduled = True
                    self._waiting_count -= request.choice_count
            elif isinstance(event, SequenceFinished):
                self._remove(sequence)
                self._last_queue_ms = event.timings.queue_ms
                self._note_output(sequence)
            elif isinstance(event, SequenceRefused):
                self._remove(sequence)
                event = self._refusal(event)
            elif isinstance(event, EngineError):
                self._remove(sequence)
            try:
                sink(event)
            except Exception as error:
                self._callback_failures.failed(error)

    def _note_output(self, sequence: EngineSequence) -> None:
        """Record the blocks of a sequence's output, which it leaves in the cache."""
        prompt = sequence.request.prompt_token_ids
        for output in sequence.outputs:
            computed_count = len(prompt) + len(output) - 1  # the last token's KV is never computed
            # Otherwise the output completes no further block.
            if computed_count // self._block_tokens > len(prompt) // self._block_tokens:
                self._note_cached((*prompt, *output[:-1]), sequence.request.cache_salt)

    def _note_cached(self, token_ids: tuple[int, ...], cache_salt: str) -> list[int]:
        """Record tokens that the engine has computed; return the hashes of unknown blocks."""
        return self._hint.note(token_ids, self._cache_group(cache_salt))

    def _refusal(self, refused: SequenceRefused) -> EngineError:
        if refused.failed:
            return EngineFailed(refused.message)
        if refused.overloaded:
            return EngineOverloaded(refused.message, self._overload_wait_s())
        return RequestImpossible(refused.message, refused.field)

    def _ready(self, block_count: int, loading_time_s: float, kernels: str = "") -> None:
        """Set the engine READY. Each of the `block_count` blocks has `KV_BLOCK_TOKENS` tokens."""
        self._block_count = block_count
        self._now_ready(loading_time_s, kernels)

    def _fail_waiting(self, reason: str) -> None:
        self._forget_cache()
        self._deliver([(number, self._loss(reason)) for number in self._sequences])


class WorkerEngine(SupervisedEngine):
    """Engine with its model in one worker process. Implements `Engine`."""

    def __init__(
        self, model: ModelInfo, limits: EngineLimits, waits: WorkerPolicy, kind: WorkerKind
    ) -> None:
        """Create the engine without starting a process, which `serve` does."""
        super().__init__(replace(model, continues_output=True), limits, waits, kind.block_tokens)
        self._worker = Worker(
            self,
            kind,
            waits,
            on_ready=self._worker_ready,
            on_message=self._receive,
            owes_answers=self._owes_answers,
        )

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, for operators and tests; None without a worker."""
        return self._worker.pid

    async def _run(self) -> str:
        return await self._worker.run()

    def _begin_shutdown(self) -> None:
        self._worker.send(Shutdown())

    def _kill(self) -> None:
        self._worker.leave()

    def _note_cached(self, token_ids: tuple[int, ...], cache_salt: str) -> list[int]:
        keys = super()._note_cached(token_ids, cache_salt)
        if keys and self._worker.is_shared:
            self._worker.send(CachedBlocks(keys))
        return keys

    def _send_start(self, sequence: EngineSequence) -> None:
        if len(self._sequences) == 1:
            self._worker.heard()  # an idle worker had nothing to report
        self._worker.send(StartSequence(sequence.number, sequence.request))

    def _send_cancel(self, sequence: EngineSequence) -> None:
        self._worker.send(CancelSequence(sequence.number))

    def _worker_ready(self, message: Ready, loading_time_s: float) -> None:
        self._hint = PrefixHint(message.kv_block_count, self._block_tokens)
        self._ready(message.kv_block_count, loading_time_s, message.kernels)

    def _receive(self, message: Message) -> None:
        """Apply a step's report, a pulse, or what others have cached.

        Raises ProtocolBroken for any other message.
        """
        if isinstance(message, Pulse):
            self._worker.pulse(message)
            return
        if isinstance(message, CachedBlocks):
            self._hint.add(message.keys)
            return
        if not isinstance(message, StepReport):
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        self._worker.heard()
        self._statistics = message.statistics
        self._deliver(message.events)

    def _owes_answers(self) -> bool:
        return bool(self._sequences)
