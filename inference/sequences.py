"""Requests and events of sequences: the values of the engine protocol.

`engine.py` re-exports them. Immutable, and validated where that is simple; the API parses client
input before it builds them.

`uniform` derives all random decisions from a sequence's seed and a position. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

# Stands for each token of an engine that reports no ids (`Capabilities.counts_from_usage`). The
# largest id on the wire: in lists, -1 would be the last token of a vocabulary.
UNKNOWN_TOKEN_ID = 2**31 - 1
# The stop sequence or the id of the stop token of a request that ended an output; None for others.
StoppedBy: TypeAlias = str | int | None
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of the next token.

    They are applied to the model's logits in this order: logit_bias is added for its token ids;
    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or
    output; frequency_penalty is subtracted once per occurrence in the output, presence_penalty once
    if there is any; temperature divides, 0 is greedy; top_k keeps the k largest, 0 keeps all; top_p
    in (0, 1] keeps the smallest set that reaches it; min_p in [0, 1] keeps tokens at least that
    fraction as likely as the most likely one. seed: output depends only on it and the prompt, not
    on the batch; None for a random seed. top_logprobs: report each token's log-probability and
    those of this many top tokens; None for no report. prompt_logprobs: the same for the prompt's
    tokens, computed without the prefix cache.
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
    prompt_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """True if there is a penalty, which depends on previous tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def counts_output(self) -> bool:
        """True if the next token depends on which previous tokens are output."""
        is_drawn = self.temperature > 0.0 and self.seed is not None
        return is_drawn or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Conditions that end a sequence.

    max_output_tokens: at least 1; the caller ensures that prompt and output fit the context window.
    stop_sequences: texts that end the output and are cut off, matched across tokens.
    stop_token_ids: in addition to the model's end tokens; the token that ends a sequence is counted
    and is in `token_ids`, but has no text. ignore_eos: the model's end tokens do not end the
    sequence. min_output_tokens: until then, end tokens are suppressed and stop sequences are not
    matched. max_reasoning_tokens: after so many tokens of thinking the closing mark is written;
    None for no limit. Needs `splits_reasoning`.
    """

    max_output_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_output_tokens: int = 0
    max_reasoning_tokens: int | None = None

    @property
    def leaves_end_open(self) -> bool:
        """True if only the model's end tokens end the sequence, as a response format requires."""
        return not (self.ignore_eos or self.min_output_tokens or self.stop_token_ids)


class GrammarKind(StrEnum):
    """Language of a response format."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Required format of the output. The sequence ends by itself only where its text is a complete
    answer.

    given_as: field of the start frame it was derived from, if not `response_format`.
    """

    kind: GrammarKind
    source: str
    given_as: str = ""

    @property
    def field(self) -> str:
        """Name of the start frame's field, for errors."""
        return self.given_as or f"response_format.{self.kind.value}"


class EarlyStopping(StrEnum):
    """End of a beam search with `width` finished outputs: False, True and "never" in transformers.

    HEURISTIC: when the best beam, ended now, would not be among them. WHEN_FULL: at once. NEVER:
    when no beam could be among them even if it reached the maximum length without losing score.
    """

    HEURISTIC = "heuristic"
    WHEN_FULL = "when_full"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Search for the most likely outputs instead of sampling; see `beam_search.py`.

    width: beams, at least 2. length_penalty: outputs are ranked by log-probability / tokens **
    length_penalty; above 0 favours long ones. Bias and penalties act on log-probabilities.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class ThinkingStart(StrEnum):
    """Begin of the thinking of an output.

    NONE: there is none. ENDED: the prompt has had it, as if the model had thought nothing. PROMPT:
    the prompt has begun it. MODEL: the model begins it.
    """

    NONE = "none"
    ENDED = "ended"
    PROMPT = "prompt"
    MODEL = "model"


@dataclass(slots=True)
class GenerationRequest:
    """A sequence to run. Must not be modified after submission; `frozen` would cost 2 µs per
    request.

    cache_salt: separates prefix caches; blocks are shared between equal salts only.
    response_format: needs `StopCriteria.leaves_end_open`. choice_count: number of outputs, each
    with its own `stop` limits; the first equals a single one, the others use seeds derived from the
    request's. beam_search: choices are the best outputs found, best first. Needs temperature 0;
    excludes stop sequences and a response format. Tokens are emitted once all possible best outputs
    share them, the others at the end. rank: queue position, lowest first, then by arrival. In
    tokens: a waiting sequence displaces a running one if its rank is lower by more than its
    prompt's tokens. No sequence is overtaken indefinitely. output_token_ids: output generated
    elsewhere, which the sequence continues. It counts in all limits, penalties, counts and random
    positions; events cover only new output. Needs `ModelInfo.continues_output`; excludes a response
    format, beam search and several choices. regions: where it may run, preferred first; empty for
    anywhere. Used by replica sets only. adapter: one of `ModelInfo.adapters` to apply; empty for
    the base model. splits_reasoning: thinking is told apart from the answer, if the model marks it;
    stop sequences and stop token ids then act on the answer only. thinking: whether the model is to
    think before its answer; a response format is that of the answer. marked_functions: functions
    whose calls are marked in the text if only token ids tell them from it, see
    `CallFormat.HARMONY`.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCriteria
    cache_salt: str = ""
    response_format: ResponseFormat | None = None
    choice_count: int = 1
    beam_search: BeamSearchParams | None = None
    rank: float = 0.0
    output_token_ids: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()
    adapter: str = ""
    splits_reasoning: bool = False
    thinking: ThinkingStart = ThinkingStart.NONE
    marked_functions: tuple[str, ...] = ()

    @property
    def may_be_continued(self) -> bool:
        """True if another engine can continue it mid-output, by its tokens alone."""
        return (
            self.choice_count == 1
            and self.beam_search is None
            and self.response_format is None
            and UNKNOWN_TOKEN_ID not in self.output_token_ids
            and self.sampling.prompt_logprobs is None
        )


class EngineFinishReason(StrEnum):
    """Reason for the end of a sequence."""

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Scheduled(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The sequence left the engine's queue. cached_token_count: cached prompt tokens.

    is_final: the count cannot change. Otherwise the engine reports it at the end of the output, in
    `SequenceFinished`; if that never comes, this count is the last known one.
    """

    cached_token_count: int
    is_final: bool = True


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of one token and of the most likely tokens, in descending order.

    From the model's own distribution: before bias, penalties, constraints and temperature.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokensGenerated(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """New output of one step. `text` may lag behind `token_ids`: characters and possible stops are
    held back.

    logprobs: one per token if requested. choice_index: of the output, from 0. prompt_logprobs: with
    the first token of the first choice, one per token of the prompt if requested. The first has
    none: 0 and no top tokens. reasoning: thinking, which precedes the text. reasoning_token_count:
    tokens now known to be thinking; more than `token_ids` if a marker had left earlier ones
    undecided.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    reasoning_token_count: int = 0


class ChoiceFinished(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """One of several choices has ended; sent for each of them. Fields as in `SequenceFinished`."""

    choice_index: int
    reason: EngineFinishReason
    text: str
    reasoning: str = ""
    stopped_by: StoppedBy = None


class EngineTimings(msgspec.Struct, array_like=True, frozen=True):
    """Durations in the engine, in ms: wait for a place, computation of the prompt, generation."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float


class SequenceFinished(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Last event of a sequence that did not fail. Its KV blocks are free again.

    text: held-back text that turned out to be output; never contains a matched stop sequence.
    reasoning: the same of the thinking. stopped_by: the request's stop sequence, or the id of its
    stop token, that ended the output; None for an end token of the model, and for other ends.
    generated_token_count: all tokens in `TokensGenerated` events, including unread ones of a
    cancelled sequence; for beam search, those of all beams. For several choices it is the sum, sent
    after the last one; reason, stopped_by and timings are the first choice's, and text is empty.
    migration_count: how often it moved to another engine after its first token; counts cover the
    whole sequence, each token once.
    """

    reason: EngineFinishReason
    text: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    timings: EngineTimings
    migration_count: int = 0
    reasoning: str = ""
    stopped_by: StoppedBy = None


class SequenceRefused(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Sent instead of the last event: the engine rejected the sequence or cannot continue it.

    overloaded: the queue is full. failed: the engine is at fault. Otherwise `message` says why it
    cannot run, and `field` names the field to change, if it is a single one.
    """

    message: str
    field: str | None = None
    overloaded: bool = False
    failed: bool = False


SequenceEvent = Scheduled | TokensGenerated | ChoiceFinished | SequenceFinished


def uniform(seed: int, index: int) -> float:
    """Return a deterministic number in [0, 1) with 53 random bits. SplitMix64, Steele 2014."""
    return (_mix(_mix(seed & _MASK) ^ (index * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def choice_seed(seed: int, choice_index: int) -> int:
    """Return the seed of a choice; the first choice uses the request's own."""
    return seed if choice_index == 0 else _mix(_mix(seed & _MASK) + choice_index)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class RequestField(StrEnum):
    """A field of the start frame that some engines do not support. The value is its name there."""

    TOP_P = "sampling.top_p"
    TOP_K = "sampling.top_k"
    MIN_P = "sampling.min_p"
    SEED = "sampling.seed"
    REPETITION_PENALTY = "sampling.repetition_penalty"
    PRESENCE_PENALTY = "sampling.presence_penalty"
    FREQUENCY_PENALTY = "sampling.frequency_penalty"
    LOGIT_BIAS = "sampling.logit_bias"
    TOP_LOGPROBS = "top_logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    STOP_TOKEN_IDS = "stop_token_ids"
    IGNORE_EOS = "ignore_eos"
    MIN_OUTPUT_TOKENS = "min_output_tokens"
    JSON_SCHEMA = "response_format.json_schema"
    REGEX = "response_format.regex"
    LARK = "response_format.lark"
    BEAM_SEARCH = "beam_search"
    MAX_REASONING_TOKENS = "max_reasoning_tokens"
