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
    """Discard an event: the sink of a sequence that is closed."""


class SequenceHandle(Protocol):
    """A running sequence. The caller must close it, whatever events it has received."""

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each choice so far, beginning with the request's `output_token_ids`."""
        ...

    def cancel(self) -> None:
        """Ask the engine to stop the sequence. Idempotent, never blocks.

        The engine reports `SequenceFinished(CANCELLED)` within one step, or the regular end if the
        sequence had already finished.
        """
        ...

    def close(self) -> None:
        """Stop all events, and cancel the sequence if it is running. Idempotent, never blocks."""
        ...


class EngineStatistics(msgspec.Struct, array_like=True, frozen=True):
    """Engine state after its last step, in blocks, sequences and tokens.

    `running_sequence_count_max` is the number of sequences that fit in the batch, 0 if unknown.
    `replica_count` is the number of ready engines whose counts are summed here; `step_count` is
    then their mean. `migration_count` counts sequences that moved to another engine after their
    first token, `replacement_count` those that moved before it. `draft_token_count` counts tokens
    guessed from earlier text, `accepted_token_count` those that were right.
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

    `directory` contains the tokenizer and the chat template, so that the API can tokenize without
    the engine. `continues_output` tells whether the engine accepts requests with
    `output_token_ids`. With `continues_exactly` it counts these tokens as its own output; otherwise
    they become part of the prompt, and requests for which that makes a difference are refused
    (`SamplingParams.counts_output`). `capabilities` lists the supported request fields; the engine
    refuses all others. `embedding_dimension` is the vector length, 0 for generating models. For
    embedding models, `context_window_tokens` limits each text. `adapters` names the LoRA adapters
    that a request may select. `fingerprint` identifies weights and engine, and is equal for every
    copy of the files.
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
        """Return whether an engine of this model can continue the request's output exactly."""
        if not (request.may_be_continued and self.continues_output):
            return False
        if self.capabilities.counts_from_usage:  # its output has no token ids
            return False
        return self.continues_exactly or not request.sampling.counts_output


class EngineState(StrEnum):
    """Phase in the lifecycle of an engine."""

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
    an operator: the checkpoint is unusable, and nothing is retried. `loading_fraction` goes from 0
    to 1, and is 1 when READY. `loading_stage` names the part being loaded, in one word.
    `retry_after_s` estimates the seconds until READY. `reason` says why the engine is not READY; if
    that is for operators only, clients get `client_message`, see `EngineError`. With
    `starts_on_demand`, COLD and LOADING are normal, and calling `start` makes the engine ready.
    `kernels` says how an embedded engine computes: the instruction set of its native kernels;
    `torch` without them, several times slower; `cuda`; `simulated`; or empty if unknown.
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
        """Build the error for a request that the engine refuses because it is not READY."""
        if self.state is EngineState.FAILED:
            return EngineStartFailed(self.reason).with_client_message(self.client_message)
        is_so = f"{subject} is {self.state.value}"
        error = EngineUnavailable(f"{is_so}: {self.reason}", retry_after_s)
        return error.with_client_message(self.client_message and f"{is_so}: {self.client_message}")


class Startable(Protocol):
    """Interface to something that requests wait for: a backend, or the part that they may use."""

    async def start(self) -> None:
        """Load the model, and return when the engine accepts requests.

        Needs a running or scheduled `serve`. Idempotent; concurrent calls wait for the same
        loading. Raises EngineStartFailed with the reason if loading fails, and EngineUnavailable if
        the engine was closed.
        """
        ...

    def healthy(self) -> bool:
        """Return whether requests are accepted, that is, `condition().state` is READY."""
        ...

    def condition(self) -> EngineCondition:
        """Return the current state; never blocks."""
        ...


class Backend(Startable, Protocol):
    """Interface to a model, whatever computes it: lifecycle, health and statistics."""

    @property
    def model(self) -> ModelInfo:
        """Checkpoint that the backend serves; known before `start`."""
        ...

    async def serve(self) -> None:
        """Run the engine: wait for the first `start`, restart after crashes, return after `close`.

        Run once, as a task of the caller's `TaskGroup`. A load failure is not raised here, where it
        would stop other engines, but by `start` and `submit`, and shown by `condition`.
        Cancellation stops the engine at once.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """Return the last reported statistics; never blocks."""
        ...

    async def close(self) -> None:
        """Cancel all running work and free all memory. Idempotent.

        Running work ends as described in `submit` and `embed`. A closed engine cannot be restarted.
        """
        ...


class Pooled(Protocol):
    """Backend whose engines other api processes use too."""

    @property
    def pool(self) -> str:
        """Identity of these engines, equal in all processes that use the same ones; empty if no
        other process uses them.
        """
        ...


def pool_of(backend: Backend) -> str:
    """Return the identity of the engines that a backend shares with other processes, or empty."""
    # An `isinstance` of a protocol takes 30 µs, and each broadcast asks for all engines.
    pool: str = getattr(backend, "pool", "")
    return pool


class Engine(Backend, Protocol):
    """Backend of a model that generates text."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> SequenceHandle:
        """Start a sequence. The engine calls `sink` with each event, never before `submit` has
        returned.

        Raises RequestImpossible if the request can never run on this engine, EngineOverloaded if
        the queue is full, EngineUnavailable while the engine is cold, loading or restarting, and
        EngineStartFailed if an operator must act. When the engine is closed, running sequences end
        with `SequenceFinished(CANCELLED)`.
        """
        ...

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Estimate how many prompt tokens are in the prefix cache, from the prompts sent before."""
        ...


Vector: TypeAlias = "array[float]"  # type code "f": four bytes per float


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, as token ids including special tokens.

    The queue is ordered by `rank`, lowest first, then by arrival. `on_begin` is called once, when
    the first text starts. With `bound_region`, encoder sets use only replicas known to be there.
    """

    inputs: tuple[tuple[int, ...], ...]
    rank: float = 0.0
    on_begin: Callable[[], None] = lambda: None
    bound_region: str = ""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector per text, in order. Durations in ms, before and after the first text starts."""

    vectors: tuple[Vector, ...]
    queue_ms: float
    encode_ms: float


class Encoder(Backend, Protocol):
    """Backend of a model that embeds texts.

    `model.context_window_tokens` limits each text, and `model.embedding_dimension` is above 0.
    `statistics` counts texts as sequences, batches as steps, and embedded tokens as prompt tokens.
    """

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Embed all texts of a request, batched with other requests. If the call is cancelled,
        texts that have not started are dropped.

        Raises RequestImpossible, with the field, if a text can never be embedded; EngineOverloaded
        if the queue is full; EngineUnavailable while the encoder is down or closed;
        EngineStartFailed if an operator must act; and EngineFailed if the encoder broke. It returns
        all vectors or none.
        """
        ...
