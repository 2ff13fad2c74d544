"""The engine protocol: all that the rest of Weir may know about how tokens are made.

Values are frozen and valid by construction where a plain check can make them so; the API parses client input before it
builds them. Implementations: `torch_engine.TorchEngine` (a child process around the step loop). `Encoder` stands beside `Engine`,
for models that embed; `Backend` is what both have in common.

Life of an engine: the composition root runs `serve` as a task of its `TaskGroup`, so that everything an engine does in the
background has a parent. The first `start` loads the model, `close` ends it, and `serve` returns.

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        async with engine.generate(request) as stream:
            async for event in stream: ...
        await engine.close()
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol, TypeAlias

SequenceId = NewType("SequenceId", str)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    They act in this order, on the model's logits: logit_bias is added for its token ids; repetition_penalty divides positive
    and multiplies negative logits of tokens in prompt or output; frequency_penalty is subtracted once per occurrence in the
    output, presence_penalty once if there is any; temperature divides, 0 is greedy; top_k keeps the k largest, 0 keeps all; top_p
    in (0, 1] keeps the fewest that reach it; min_p in [0, 1] keeps those at least so many times as likely as the likeliest.
    seed: the output depends on it and the prompt alone, never on what else is in the batch; None draws one.
    top_logprobs: reports each token's log-probability and those of so many likeliest ones; None reports nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens there were."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def takes_best(self) -> bool:
        """Whether the next token is the one with the model's largest logit, and nothing else is asked."""
        return self.temperature == 0.0 and not self.penalises and not self.logit_bias and self.top_logprobs is None


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a sequence ends by itself.

    max_output_tokens: at least 1; the caller has made sure that prompt and output fit the context window.
    stop_sequences: texts that end the output and are cut off, matched across token borders.
    stop_token_ids: in addition to the model's own end-of-sequence ids; the id that ends a sequence is counted and is in
    `token_ids`, but adds no text. ignore_eos: the model's own ids do not end it. min_output_tokens: no id that would end the
    sequence is chosen before there are so many tokens, and no stop sequence is looked for in the text of those.
    """

    max_output_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_output_tokens: int = 0

    @property
    def leaves_end_open(self) -> bool:
        """Whether the model's own end tokens, and no other ids, end the sequence: what a response format needs to be kept."""
        return not (self.ignore_eos or self.min_output_tokens or self.stop_token_ids)


class GrammarKind(StrEnum):
    """In which language a response format is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the output must look like. A sequence ends by itself only where its text is an answer in this format.

    given_as: the field of the start frame that it comes from, if that is not `response_format`.
    """

    kind: GrammarKind
    source: str
    given_as: str = ""

    @property
    def field(self) -> str:
        """The name of the start frame's field, for errors."""
        return self.given_as or f"response_format.{self.kind.value}"


class EarlyStopping(StrEnum):
    """When a beam search is over, once it has `width` finished outputs: the values False, True and "never" of transformers.

    HEURISTIC: when the best beam, ended now, would not be among them. WHEN_FULL: at once. NEVER: when no beam can be among them,
    were it to go on to the longest output without losing any more.
    """

    HEURISTIC = "heuristic"
    WHEN_FULL = "when_full"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Search for the likeliest outputs instead of choosing token by token; `beam_search.py` says how.

    width: beams, at least 2. length_penalty: outputs compete by log-probability / tokens ** length_penalty; above 0 favours long
    ones. Bias and penalties act on log-probabilities here.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to run.

    sequence_id is unique among running sequences. cache_salt separates prefix caches: blocks are shared between equal
    salts only. response_format needs `StopCriteria.leaves_end_open`. choice_count: so many outputs of the one prompt, each with
    all of `stop` for itself; the first is what a single one would be, the others draw from seeds that follow from the request's.
    beam_search: the choices are the best that it finds, the best first. Needs a temperature of 0; excludes stop sequences and a
    response format. Tokens come when all outputs share them that can still be the best, the others with the end.
    rank: who is next, the lowest first, and of equal ones the first to arrive. In tokens: one that waits takes the place of a
    running one if its rank is lower by more than its prompt's tokens. Nobody is overtaken without end, whatever the ranks.
    adapter: which of the engine's LoRA adapters changes the model; empty for none.
    output_token_ids: output that was generated elsewhere; the sequence goes on after it as if it had generated it here. It counts
    in all limits, penalties and counts, and as places in the random sequence; events tell of what follows only. Needs
    `ModelInfo.continues_output`; excludes a response format, beam search and several choices.
    regions: where it may run, the first preferred; empty for anywhere. For sets of replicas; an engine is where it is.
    """

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCriteria
    cache_salt: str = ""
    response_format: ResponseFormat | None = None
    choice_count: int = 1
    beam_search: BeamSearchParams | None = None
    rank: float = 0.0
    adapter: str = ""
    output_token_ids: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()

    @property
    def may_be_continued(self) -> bool:
        """Whether another engine could go on with it in mid-output: one output, and no state beside its tokens."""
        return self.choice_count == 1 and self.beam_search is None and self.response_format is None


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
class TokenLogprob:
    """The natural logarithm of a token's probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one output token was, and which ones were likeliest, the likeliest first.

    Of the model's own distribution: before bias, penalties, constraint and temperature.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New output of one step. `text` may lag behind `token_ids`: characters and possible stops are held back.

    logprobs: one per token if the request asked for them, else none. choice_index: whose output, from 0.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One of several choices has ended; comes for each of them if there are more than one. text: as in `SequenceFinished`."""

    choice_index: int
    reason: EngineFinishReason
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
    generated_token_count: all tokens of the sequence's `TokensGenerated`, for a cancelled one those too that nobody has
    read; of a beam search those of all beams. Of several choices it is the sum, comes after the last of them, reason and timings
    are the first one's, and text is empty. migration_count: how often it went on elsewhere after its first token, since an
    engine was lost; the counts are those of the whole sequence all the same, every token once.
    """

    reason: EngineFinishReason
    text: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    timings: EngineTimings
    migration_count: int = 0


SequenceEvent = Scheduled | TokensGenerated | ChoiceFinished | SequenceFinished


class SequenceStream(Protocol):
    """A running sequence as its caller sees it."""

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        """Events in order: `Scheduled`, any number of `TokensGenerated` and `ChoiceFinished`, then `SequenceFinished`.

        Ends after `SequenceFinished`. Raises an `EngineError` instead if the engine failed or went away.
        """
        ...

    def cancel(self) -> None:
        """Ask the engine to stop; idempotent, never blocks.

        The engine answers with `SequenceFinished(CANCELLED)` within one step; if the sequence ended by itself before the
        request to cancel arrived, with how it ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineStatistics:
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
    engine takes requests with `output_token_ids`. embedding_dimension: floats of a vector; 0 of a model that generates. Of one that
    embeds, context_window_tokens bounds each text.
    """

    name: str
    architecture: str
    engine: str
    context_window_tokens: int
    vocabulary_size: int
    directory: str
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    continues_output: bool = False
    embedding_dimension: int = 0


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
        engine down: `start`, `generate` and `condition` tell. Cancelled, it stops the engine at once.
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

        What runs ends as `generate` and `embed` say. A closed engine is not started again: build a new one.
        """
        ...


class Engine(Backend, Protocol):
    """One model that generates, on one backend."""

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[SequenceStream]:
        """Run one sequence. Leaving the block cancels what still runs and forgets it; nothing leaks on any exit.

        Raises on entering: `RequestImpossible` if it could never run here, `EngineOverloaded` if the engine's queue is full,
        `EngineUnavailable` while it is down (cold, loading, restarting), `EngineStartFailed` if it needs a person. Running streams
        of an engine that is closed end with `SequenceFinished(CANCELLED)`.
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
