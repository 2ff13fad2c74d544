"""The engine protocol: all that the rest of Weir may know about how tokens are made.

Values are frozen and valid by construction where a plain check can make them so; the API parses client input before it builds
them. Implementations: `torch_engine.TorchEngine` (a child process around the step loop).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol

SequenceId = NewType("SequenceId", str)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    temperature: 0 is greedy, else logits are divided by it. top_p: in (0, 1]. top_k: 0 keeps all. seed: the output depends on
    it and the prompt alone, never on what else is in the batch; None draws one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a sequence ends by itself.

    max_output_tokens: at least 1; the caller has made sure that prompt and output fit the context window.
    stop_sequences: texts that end the output and are cut off, matched across token borders.
    stop_token_ids: in addition to the model's own end-of-sequence ids. ignore_eos: the model's own ids do not end it.
    """

    max_output_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to run.

    sequence_id is unique among running sequences. cache_salt separates prefix caches: blocks are shared between equal salts only.
    """

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCriteria
    cache_salt: str = ""


class EngineFinishReason(StrEnum):
    """Why the engine ended a sequence."""

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The sequence left the engine's queue. cached_token_count: prompt tokens that the prefix cache serves, exact."""

    cached_token_count: int


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New output of one step. `text` may lag behind `token_ids`: characters and possible stop sequences are held back."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class EngineTimings:
    """Durations inside the engine, in ms: waiting for a place, computing the prompt, producing the rest."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last event of a sequence that did not fail. Its KV blocks are free again.

    text: what was still held back and turned out to be output; a matched stop sequence is never in it.
    generated_token_count: all tokens of the sequence's `TokensGenerated`, for a cancelled one those too that nobody has read.
    """

    reason: EngineFinishReason
    text: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    timings: EngineTimings


SequenceEvent = Scheduled | TokensGenerated | SequenceFinished


class SequenceStream(Protocol):
    """A running sequence as its caller sees it."""

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        """Events in order: `Scheduled`, any number of `TokensGenerated`, then `SequenceFinished`.

        Ends after `SequenceFinished`. Raises an `EngineError` instead if the engine failed or went away.
        """
        ...

    def cancel(self) -> None:
        """Ask the engine to stop. It answers with `SequenceFinished(CANCELLED)` within one step; idempotent, never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What the engine told after its last step. Counts in blocks, sequences and tokens."""

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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs to know of a loaded checkpoint.

    directory holds tokenizer and chat template, so that the API can tokenize without the engine.
    """

    name: str
    architecture: str
    engine: str
    context_window_tokens: int
    vocabulary_size: int
    directory: str
    default_sampling: SamplingParams = field(default_factory=SamplingParams)


class Engine(Protocol):
    """One model on one backend."""

    @property
    def model(self) -> ModelInfo:
        """The checkpoint that this engine serves; known before `start`."""
        ...

    async def start(self) -> None:
        """Load the model. Returns when the engine takes requests; raises `EngineStartFailed` with the reason otherwise."""
        ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[SequenceStream]:
        """Run one sequence. Leaving the block cancels what still runs and forgets it; nothing leaks on any exit.

        Raises on entering: `EngineOverloaded` if the engine's queue is full, `EngineUnavailable` while it is down.
        """
        ...

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Prompt tokens that the prefix cache would probably serve now: a hint from what was sent before."""
        ...

    def statistics(self) -> EngineStatistics:
        """The last that the engine told; never blocks."""
        ...

    def healthy(self) -> bool:
        """Whether requests are taken now."""
        ...

    async def close(self) -> None:
        """Cancel everything and give all memory back; idempotent."""
        ...
