"""The engine protocol: all that the rest of Weir may know about how tokens are made.

What a sequence is asked for and what it tells stands in `sequences.py`, and is imported from here. Implementations:
`torch_engine.TorchEngine` (a child process around the step loop). `Encoder` stands beside `Engine`, for models that embed;
`Backend` is what both have in common.

Life of an engine: the composition root runs `serve` as a task of its `TaskGroup`, so that everything an engine does in the
background has a parent. The first `start` loads the model, `close` ends it, and `serve` returns.

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
from inference.errors import EngineError
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
    "GenerationRequest",
    "GrammarKind",
    "ModelInfo",
    "ResponseFormat",
    "SamplingParams",
    "Scheduled",
    "Sequence",
    "SequenceEvent",
    "SequenceFinished",
    "SequenceRefused",
    "StopCriteria",
    "Tell",
    "TokenLogprob",
    "TokenLogprobs",
    "TokensGenerated",
    "Vector",
    "tell_nobody",
]


# Told of a sequence: its events in order, `Scheduled`, any number of `TokensGenerated` and `ChoiceFinished`, then as the last one
# `SequenceFinished`, or an error if the engine failed or went away. Called on the event loop, never by `submit` itself. Must not
# block; what it raises becomes an incident, and the sequence goes on.
Tell = Callable[[SequenceEvent | EngineError], None]


def tell_nobody(event: SequenceEvent | EngineError) -> None:
    """A `Tell` for a sequence that nobody follows."""


class Sequence(Protocol):
    """A running sequence as its caller sees it. The caller closes it in the end, whatever it was told."""

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each choice so far, those of the request's `output_token_ids` included; known after the end too."""
        ...

    def cancel(self) -> None:
        """Ask the engine to stop; idempotent, never blocks.

        The engine answers with `SequenceFinished(CANCELLED)` within one step; if the sequence ended by itself before the
        request to cancel arrived, with how it ended.
        """
        ...

    def close(self) -> None:
        """Forget it, and cancel what still runs: nothing is told from now on. Idempotent, never blocks."""
        ...


class EngineStatistics(msgspec.Struct, array_like=True, frozen=True):
    """What the engine told after its last step. Counts in blocks, sequences and tokens.

    running_sequence_count_max: places in the batch; 0 where they are not known. replica_count: engines that take requests now and
    whose counts these are the sums of; step_count is then their mean pace. migration_count: sequences that went on elsewhere after
    their first token; replacement_count: that began anew elsewhere before it.
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs to know of a loaded checkpoint.

    directory holds tokenizer and chat template, so that the API can tokenize without the engine. continues_output: whether the
    engine takes requests with `output_token_ids`. continues_exactly: it counts them as its own output; otherwise they are a part of
    the prompt there, and requests for which that makes a difference are refused (`SamplingParams.counts_output`).
    capabilities: which fields of a request the engine honours; it refuses all others.
    embedding_dimension: floats of a vector; 0 of a model that generates. Of one that embeds, context_window_tokens bounds a text.
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

    def can_continue(self, request: GenerationRequest) -> bool:
        """Whether an engine of this model could take a request up in mid-output, and go on with it as it began."""
        if not (request.may_be_continued and self.continues_output):
            return False
        return self.continues_exactly or not request.sampling.counts_output


class EngineState(StrEnum):
    """Where an engine is in its life."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineCondition:
    """What an engine is doing now, for progress frames, readiness and the operator.

    LOADING also holds while a restarted engine loads again; RESTARTING is the pause before that. FAILED needs a person: the
    checkpoint is unusable, and no retry is under way. loading_fraction: 0 to 1, 1 when READY. loading_stage: what is being
    loaded, one word. retry_after_s: the engine's own guess of when it takes requests. reason: why it is not READY.
    starts_on_demand: it is COLD or LOADING by design, and whoever calls `start` now will be served.
    """

    state: EngineState
    loading_fraction: float = 0.0
    loading_stage: str = ""
    retry_after_s: float = 0.0
    reason: str = ""
    starts_on_demand: bool = False


class Backend(Protocol):
    """One model somewhere, whatever it does: what health checks, routing and supervision need to know."""

    @property
    def model(self) -> ModelInfo:
        """The checkpoint that is served; known before `start`."""
        ...

    async def serve(self) -> None:
        """Be the engine for its life: wait for the first `start`, run, restart after a crash, return after `close`.

        A task of the caller's `TaskGroup`, run once. An engine that cannot load does not raise here, so that it takes no other
        engine down: `start`, `submit` and `condition` tell. Cancelled, it stops the engine at once.
        """
        ...

    async def start(self) -> None:
        """Load the model; returns when the engine takes requests.

        Needs `serve` to be running or about to run. Idempotent, and safe to call from many tasks at once: all wait for the same
        loading. Raises `EngineStartFailed` with the reason if it cannot load, `EngineUnavailable` if it was closed.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """The last that the engine told; never blocks."""
        ...

    def healthy(self) -> bool:
        """Whether requests are taken now; the same as `condition().state` being READY."""
        ...

    def condition(self) -> EngineCondition:
        """What the engine is doing now; never blocks."""
        ...

    async def close(self) -> None:
        """Cancel everything and give all memory back; idempotent.

        What runs ends as `submit` and `embed` say. A closed engine is not started again: build a new one.
        """
        ...


class Engine(Backend, Protocol):
    """One model that generates, on one backend."""

    def submit(self, request: GenerationRequest, tell: Tell) -> Sequence:
        """Begin one sequence. tell: called with its events, later.

        Raises `RequestImpossible` if it could never run here, `EngineOverloaded` if the engine's queue is full,
        `EngineUnavailable` while it is down (cold, loading, restarting), `EngineStartFailed` if it needs a person. Running
        sequences of an engine that is closed end with `SequenceFinished(CANCELLED)`.
        """
        ...

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Prompt tokens that the prefix cache would probably serve now: a hint from what was sent before."""
        ...


Vector: TypeAlias = "array[float]"  # of the type code "f": four bytes a float


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, as token ids with all special tokens.

    rank: who is next, the lowest first, and of equal ones the first to arrive. on_begin: called once, when the encoder begins with
    the first of them.
    """

    inputs: tuple[tuple[int, ...], ...]
    rank: float = 0.0
    on_begin: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each text, in their order. Durations in ms: until the encoder began with the first text; from then on."""

    vectors: tuple[Vector, ...]
    queue_ms: float
    encode_ms: float


class Encoder(Backend, Protocol):
    """One model that embeds, on one backend.

    `model.context_window_tokens` bounds each text, and `model.embedding_dimension` is above 0. `statistics` counts texts as
    sequences, batches as steps, and embedded tokens as those of prompts.
    """

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Embed all texts of a request, in batches with those of others. Cancelled, it takes out what has not begun.

        Raises: `RequestImpossible` with the text's field if one could never run here, `EngineOverloaded` if the queue is full,
        `EngineUnavailable` while the encoder is down or when it is closed, `EngineStartFailed` if it needs a person, `EngineFailed`
        if it broke; then nothing was embedded.
        """
        ...
