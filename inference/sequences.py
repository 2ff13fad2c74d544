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

    They are applied to the model's logits in this order. `logit_bias` is added to the logits of its
    token ids. `repetition_penalty` divides positive and multiplies negative logits of tokens in
    prompt or output. `frequency_penalty` is subtracted once per occurrence in the output,
    `presence_penalty` once if there is any. Logits are divided by `temperature`; 0 selects the most
    likely token. `top_k` keeps the k largest, 0 keeps all; `top_p` in (0, 1] keeps the smallest set
    that reaches it; `min_p` in [0, 1] keeps tokens at least that fraction as likely as the most
    likely one.

    The output depends only on prompt and `seed`, not on the batch; None draws a random seed.
    `top_logprobs` asks for each token's log-probability and for those of this many top tokens; None
    for none. `prompt_logprobs` asks for the same for the prompt's tokens, computed without the
    prefix cache.
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
        """True if a penalty makes the next token depend on previous ones."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def counts_output(self) -> bool:
        """True if the next token depends on which of the previous tokens are output."""
        is_drawn = self.temperature > 0.0 and self.seed is not None
        return is_drawn or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class StopCriteria:
    """Conditions that end a sequence. Not modified, like `GenerationRequest`.

    `max_output_tokens` is at least 1; the caller ensures that prompt and output fit the context
    window. `stop_sequences` are texts that end the output and are cut off; they are found even
    across tokens. `stop_token_ids` end the output like the model's end tokens; the token that ends
    it is counted and is in `token_ids`, but has no text. With `ignore_eos`, the model's end tokens
    do not end the sequence. Before `min_output_tokens`, end tokens are suppressed and stop
    sequences ignored. After `max_reasoning_tokens` tokens of thinking, the closing mark is forced;
    None sets no limit. This needs `splits_reasoning`.
    """

    max_output_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_output_tokens: int = 0
    max_reasoning_tokens: int | None = None

    @property
    def leaves_end_open(self) -> bool:
        """True if only the model's end tokens end the output, as a response format requires."""
        return not (self.ignore_eos or self.min_output_tokens or self.stop_token_ids)


class GrammarKind(StrEnum):
    """Language in which a response format is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Required format of the output. The model can end the output only where the text is complete.

    `given_as` names the field of the start frame that the format was derived from, if it is not
    `response_format`.
    """

    kind: GrammarKind
    source: str
    given_as: str = ""

    @property
    def field(self) -> str:
        """Name of the start frame's field, used in error messages."""
        return self.given_as or f"response_format.{self.kind.value}"


class EarlyStopping(StrEnum):
    """Rule that ends a beam search which has `width` finished outputs.

    The values are False, True and "never" in transformers. HEURISTIC ends it when the best beam,
    ended now, would not be among the finished outputs, WHEN_FULL at once, and NEVER when no beam
    could be among them even if it reached the maximum length without losing score.
    """

    HEURISTIC = "heuristic"
    WHEN_FULL = "when_full"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search, which finds the most likely outputs; see `beam_search.py`.

    `width` is the number of beams, at least 2. Outputs are ranked by log-probability / tokens **
    `length_penalty`; a value above 0 favours long ones. Bias and penalties act on
    log-probabilities.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class ThinkingStart(StrEnum):
    """Position where the thinking of an output begins.

    NONE: there is no thinking. ENDED: the prompt contains it, closed and empty. PROMPT: the prompt
    opens it and the model continues it. MODEL: the model opens it.
    """

    NONE = "none"
    ENDED = "ended"
    PROMPT = "prompt"
    MODEL = "model"


@dataclass(slots=True)
class GenerationRequest:
    """A sequence to run. It must not be modified after submission; `frozen` would cost 2 µs per
    request.

    Prefix caches are separated by `cache_salt`: blocks are shared between equal salts only.
    `response_format` needs `StopCriteria.leaves_end_open`. `choice_count` is the number of outputs,
    each with its own `stop` limits; the first equals a single one, the others use seeds derived
    from the request's. The queue is ordered by `rank`, lowest first, then by arrival. Ranks are in
    tokens: a waiting sequence displaces a running one if its rank is lower by more than its
    prompt's tokens, but no sequence is overtaken indefinitely.

    With `beam_search`, the choices are the best outputs found, best first. It needs temperature 0
    and excludes stop sequences and a response format. Tokens are emitted once all possible best
    outputs share them, the others at the end.

    `output_token_ids` is output generated elsewhere, which the sequence continues. It counts in all
    limits, penalties, counts and random positions; events cover only new output. It needs
    `ModelInfo.continues_output` and excludes a response format, beam search and several choices.

    `regions` lists where the request may run, preferred first, empty for anywhere; only replica
    sets use it. With `is_bound`, they use only replicas that are known to be there. `adapter` is
    one of `ModelInfo.adapters`, empty for the base model. With `splits_reasoning`, thinking is
    separated from the answer if the model marks it; stop sequences and stop token ids then act on
    the answer only. `thinking` says where the model's thinking begins; a response format applies to
    the answer after it. `marked_functions` are the functions whose calls are marked in the text if
    only token ids distinguish them from it, see `CallFormat.HARMONY`.

    With `is_whole`, the caller uses the output only when it is complete, so an engine may report
    `Scheduled` when it sends the sequence to its server, and all tokens in one event at the end.
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
    is_whole: bool = False
    is_bound: bool = False

    @property
    def may_be_continued(self) -> bool:
        """True if another engine can continue the output from its tokens alone."""
        return (
            self.choice_count == 1
            and self.beam_search is None
            and self.response_format is None
            and UNKNOWN_TOKEN_ID not in self.output_token_ids
            and self.sampling.prompt_logprobs is None
        )


class EngineFinishReason(StrEnum):
    """Reason why a sequence ended."""

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Scheduled(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The sequence left the engine's queue. `cached_token_count` is its number of cached prompt
    tokens.

    If `is_final` is False, the count may change: the engine reports it again in `SequenceFinished`.
    If that event never comes, this count is the last known one.
    """

    cached_token_count: int
    is_final: bool = True


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of one token, and of the most likely tokens in descending order.

    They come from the model's own distribution, before bias, penalties, constraints and
    temperature.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokensGenerated(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """New output of one step. `text` may lag behind `token_ids`: incomplete characters and possible
    stop sequences are held back.

    `logprobs` has one entry per token if requested. `choice_index` counts from 0. `prompt_logprobs`
    comes with the first token of the first choice, one entry per prompt token if requested; the
    first entry is 0 without top tokens. `reasoning` is thinking, which precedes the text.
    `reasoning_token_count` is the number of tokens now known to be thinking; it exceeds the length
    of `token_ids` if a marker had left earlier tokens undecided.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    reasoning_token_count: int = 0


class ChoiceFinished(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """One of several choices has ended. The fields mean the same as in `SequenceFinished`."""

    choice_index: int
    reason: EngineFinishReason
    text: str
    reasoning: str = ""
    stopped_by: StoppedBy = None


class EngineTimings(msgspec.Struct, array_like=True, frozen=True):
    """Milliseconds that a sequence spent in the engine: in the queue, in prefill and in decode.

    `decode_ms` is 0 if the tokens came together, so that the time of the first one is unknown.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float


class SequenceFinished(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Last event of a sequence that did not fail. Its KV blocks are free again.

    `text` is held-back text that turned out to be output; it never contains a matched stop
    sequence. `reasoning` is held-back thinking. `stopped_by` is the request's stop sequence, or the
    id of its stop token, that ended the output; None if anything else did. `generated_token_count`
    counts all tokens in `TokensGenerated` events, including unread ones of a cancelled sequence;
    for beam search, those of all beams. With several choices this event follows the last one and
    has the sum; reason, `stopped_by` and timings are then the first choice's, and text is empty.
    `migration_count` says how often the sequence moved to another engine after its first token;
    counts cover the whole sequence, each token once.
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
    """Last event of a sequence that the engine rejected or cannot continue.

    With `overloaded`, the queue is full; with `failed`, the engine is at fault. Otherwise `message`
    says why the request cannot run, and `field` names the field to change if a single one is the
    cause.
    """

    message: str
    field: str | None = None
    overloaded: bool = False
    failed: bool = False


SequenceEvent = Scheduled | TokensGenerated | ChoiceFinished | SequenceFinished


def uniform(seed: int, index: int) -> float:
    """Compute a number in [0, 1) with 53 bits from seed and index, by SplitMix64 (Steele 2014)."""
    return (_mix(_mix(seed & _MASK) ^ (index * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def choice_seed(seed: int, choice_index: int) -> int:
    """Derive a choice's seed from the request's; the first choice uses the request's own."""
    return seed if choice_index == 0 else _mix(_mix(seed & _MASK) + choice_index)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class RequestField(StrEnum):
    """A field that some engines do not support. The value is its name in the start frame."""

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
