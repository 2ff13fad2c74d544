"""The engine protocol: the interface between token generation and the rest of Weir.

Requests and events are defined in `sequences.py` and re-exported here. Implementations are in
`adapters/`. `Encoder` is the counterpart of `Engine` for embedding models; `Backend` is their
common base.

Lifecycle: the composition root runs `serve` as a task of its `TaskGroup`, which owns all background
work of the engine. The first `start` loads the model; after `close`, `serve` returns.

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        sequence = engine.submit(request, print)
        ...
        sequence.close()
        await engine.close()
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from inference.capabilities import Capabilities
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable
from inference.sequences import (
    BeamSearchParams,
    ChoiceFinished,
    EarlyStopping,
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceRefused,
    StopCriteria,
    StoppedBy,
    ThinkingStart,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)

__all__ = [
    "Backend",
    "BeamSearchParams",
    "ChoiceFinished",
    "EarlyStopping",
    "EmbeddingRequest",
    "Embeddings",
    "Encoder",
    "Engine",
    "EngineCondition",
    "EngineFinishReason",
    "EngineState",
    "EngineStatistics",
    "EngineTimings",
    "EventSink",
    "GenerationRequest",
    "GrammarKind",
    "ModelInfo",
    "ResponseFormat",
    "SamplingParams",
    "Scheduled",
    "SequenceEvent",
    "SequenceFinished",
    "SequenceHandle",
    "SequenceRefused",
    "StopCriteria",
    "StoppedBy",
    "ThinkingStart",
    "TokenLogprob",
    "TokenLogprobs",
    "TokensGenerated",
    "Vector",
    "ignore_event",
]


# Receives a sequence's events in order: `Scheduled`, any number of `TokensGenerated` and
# `ChoiceFinished`, last `SequenceFinished`, or an error if the engine failed. Called on the event
# loop, never from `submit`. Must not block; exceptions are reported as incidents, and the sequence
# continues.
EventSink = Callable[[SequenceEvent | EngineError], None]


def ignore_event(event: SequenceEvent | EngineError) -> None:
    """Ignore the events of a sequence."""


class SequenceHandle(Protocol):
    """A running sequence. The caller closes it in the end, whatever its events."""

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each choice so far, with the request's `output_token_ids`."""
        ...

    def cancel(self) -> None:
        """Ask the engine to stop. Idempotent, never blocks.

        The engine answers within one step with `SequenceFinished(CANCELLED)`, or with the regular
        end if the sequence had already finished.
        """
        ...

    def close(self) -> None:
        """Stop all events, and cancel the sequence if it is running. Idempotent, never blocks."""
        ...


class EngineStatistics(msgspec.Struct, array_like=True, frozen=True):
    """Engine state after its last step. Counts in blocks, sequences and tokens.

    running_sequence_count_max: sequences that fit in the batch; 0 if unknown. replica_count: ready
    engines whose counts are summed here; step_count is then their mean. migration_count: sequences
    moved to another engine after their first token; replacement_count: before it.
    draft_token_count: tokens guessed from earlier text; accepted_token_count: right ones.
    """

    waiting_sequence_count: int = 0
    running_sequence_count: int = 0
    kv_block_count_total: int = 0
    kv_block_count_free: int = 0
    kv_block_count_cached: int = 0
    kv_block_count_held: int = 0
    step_count: int = 0
    prompt_token_count: int = 0
    cached_token_count: int = 0
    output_token_count: int = 0
    preemption_count: int = 0
    running_sequence_count_max: int = 0
    replica_count: int = 1
    migration_count: int = 0
    replacement_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded checkpoint.

    directory: contains tokenizer and chat template, so that the API can tokenize without the
    engine. continues_output: whether the engine accepts requests with `output_token_ids`.
    continues_exactly: it counts them as its own output; otherwise they become part of the prompt,
    and requests affected by the difference are refused (`SamplingParams.counts_output`).
    capabilities: supported request fields; the engine refuses all others. embedding_dimension:
    vector length, 0 for generating models. For embedding models, context_window_tokens limits a
    text. adapters: names of the LoRA adapters that requests may have applied. fingerprint: of
    weights and engine, equal for every copy.
    """

    name: str
    architecture: str
    engine: str
    context_window_tokens: int
    vocabulary_size: int
    directory: str
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    continues_output: bool = False
    continues_exactly: bool = False
    embedding_dimension: int = 0
    capabilities: Capabilities = field(default_factory=Capabilities)
    adapters: tuple[str, ...] = ()
    fingerprint: str = ""

    def can_continue(self, request: GenerationRequest) -> bool:
        """Return whether an engine of this model can exactly continue the request mid-output."""
        if not (request.may_be_continued and self.continues_output):
            return False
        if self.capabilities.counts_from_usage:  # its output has no token ids
            return False
        return self.continues_exactly or not request.sampling.counts_output


class EngineState(StrEnum):
    """State in an engine's lifecycle."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineCondition:
    """Current state of an engine, for progress frames, readiness checks and operators.

    LOADING includes reloading after a restart; RESTARTING is the delay before it. FAILED requires
    an operator: the checkpoint is unusable, and nothing is retried. loading_fraction: 0 to 1, 1
    when READY. loading_stage: part being loaded, one word. retry_after_s: estimated time until
    READY. reason: why it is not READY. client_message: for clients, if `reason` is for operators,
    see `EngineError`. starts_on_demand: COLD or LOADING by design; calling `start`
    makes it ready. kernels: what an embedded engine computes with: the instruction set of the
    native kernels; `torch` without them, several times slower; `cuda`; `simulated`. Empty if
    unknown.
    """

    state: EngineState
    loading_fraction: float = 0.0
    loading_stage: str = ""
    retry_after_s: float = 0.0
    reason: str = ""
    starts_on_demand: bool = False
    kernels: str = ""
    client_message: str = ""

    def fault(self, retry_after_s: float, subject: str = "the engine") -> EngineError:
        """Return the error for a request that it refuses: it is not READY."""
        if self.state is EngineState.FAILED:
            return EngineStartFailed(self.reason).with_client_message(self.client_message)
        is_so = f"{subject} is {self.state.value}"
        error = EngineUnavailable(f"{is_so}: {self.reason}", retry_after_s)
        return error.with_client_message(self.client_message and f"{is_so}: {self.client_message}")


class Backend(Protocol):
    """A model on some backend: the interface for health checks, routing and supervision."""

    @property
    def model(self) -> ModelInfo:
        """The served checkpoint; known before `start`."""
        ...

    async def serve(self) -> None:
        """Run the engine: wait for the first `start`, restart after crashes, return after `close`.

        Run once, as a task of the caller's `TaskGroup`. A load failure is not raised here, where it
        would stop other engines, but by `start` and `submit`, and shown by `condition`.
        Cancellation stops the engine at once.
        """
        ...

    async def start(self) -> None:
        """Load the model; returns when the engine accepts requests.

        Needs a running or scheduled `serve`. Idempotent; concurrent calls wait for the same
        loading. Raises: EngineStartFailed with the reason if loading fails, EngineUnavailable if it
        was closed.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """Return the last reported statistics; never blocks."""
        ...

    def healthy(self) -> bool:
        """Return whether requests are accepted, that is, `condition().state` is READY."""
        ...

    def condition(self) -> EngineCondition:
        """Return the current state; never blocks."""
        ...

    async def close(self) -> None:
        """Cancel everything and free all memory. Idempotent.

        Running work ends as described in `submit` and `embed`. A closed engine cannot be restarted.
        """
        ...


class Engine(Backend, Protocol):
    """A text generation model on one backend."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> SequenceHandle:
        """Start a sequence. sink: called with its events, after this returns.

        Raises: RequestImpossible if it can never run on this engine, EngineOverloaded if the queue
        is full, EngineUnavailable while the engine is cold, loading or restarting,
        EngineStartFailed if an operator must act. When the engine is closed, running sequences end
        with `SequenceFinished(CANCELLED)`.
        """
        ...

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Predict the prompt tokens in the prefix cache, from prompts sent before; not exact."""
        ...


Vector: TypeAlias = "array[float]"  # type code "f": four bytes per float


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, as token ids including special tokens.

    rank: position in the queue, lowest first, then by arrival. on_begin: called once, when the
    first text starts.
    """

    inputs: tuple[tuple[int, ...], ...]
    rank: float = 0.0
    on_begin: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector per text, in order. Durations in ms: before and after the first text starts."""

    vectors: tuple[Vector, ...]
    queue_ms: float
    encode_ms: float


class Encoder(Backend, Protocol):
    """An embedding model on one backend.

    `model.context_window_tokens` limits each text, and `model.embedding_dimension` is above 0.
    `statistics` counts texts as sequences, batches as steps, and embedded tokens as prompt tokens.
    """

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Embed all texts of a request, batched with other requests. Cancellation removes texts not
        yet started.

        Raises: RequestImpossible with the field of a text that can never be embedded,
        EngineOverloaded if the queue is full, EngineUnavailable while the encoder is down or
        closed, EngineStartFailed if an operator must act, EngineFailed if it broke; then nothing
        was embedded.
        """
        ...
