"""What a sequence is asked for, and what it tells: the values that cross the engine protocol.

`engine.py` names them for all others. Frozen, and valid by construction where a plain check can make them so; the API parses
client input before it builds them.

What chance decides is a hash of a sequence's seed and a position: `uniform`. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec


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
    def counts_output(self) -> bool:
        """Whether the next token hangs on which of those before it are output, and how many."""
        is_drawn = self.temperature > 0.0 and self.seed is not None
        return is_drawn or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


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


@dataclass(slots=True)
class GenerationRequest:
    """One sequence to run. Nobody changes it once an engine has it; `frozen` would cost two microseconds for each.

    cache_salt separates prefix caches: blocks are shared between equal salts only. response_format needs
    `StopCriteria.leaves_end_open`. choice_count: so many outputs of the one prompt, each with all of `stop` for itself; the
    first is what a single one would be, the others draw from seeds that follow from the request's. beam_search: the choices
    are the best that it finds, the best first. Needs a temperature of 0; excludes stop sequences and a response format.
    Tokens come when all outputs share them that can still be the best, the others with the end.
    rank: who is next, the lowest first, and of equal ones the first to arrive. In tokens: one that waits takes the place of a
    running one if its rank is lower by more than its prompt's tokens. Nobody is overtaken without end, whatever the ranks.
    output_token_ids: output that was generated elsewhere; the sequence goes on after it as if it had generated it here. It counts
    in all limits, penalties and counts, and as places in the random sequence; events tell of what follows only. Needs
    `ModelInfo.continues_output`; excludes a response format, beam search and several choices.
    regions: where it may run, the first preferred; empty for anywhere. For sets of replicas; an engine is where it is.
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


class Scheduled(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The sequence left the engine's queue. cached_token_count: prompt tokens that the prefix cache serves, exact."""

    cached_token_count: int


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """The natural logarithm of a token's probability."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """How likely one output token was, and which ones were likeliest, the likeliest first.

    Of the model's own distribution: before bias, penalties, constraint and temperature.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokensGenerated(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """New output of one step. `text` may lag behind `token_ids`: characters and possible stops are held back.

    logprobs: one per token if the request asked for them, else none. choice_index: whose output, from 0.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0


class ChoiceFinished(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """One of several choices has ended; comes for each of them if there are more than one. text: as in `SequenceFinished`."""

    choice_index: int
    reason: EngineFinishReason
    text: str


class EngineTimings(msgspec.Struct, array_like=True, frozen=True):
    """Durations inside the engine, in ms: waiting for a place, computing the prompt, producing the rest."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float


class SequenceFinished(msgspec.Struct, tag=2, array_like=True, frozen=True):
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


class SequenceRefused(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Comes instead of the last event: the engine did not take the sequence, or cannot go on with it.

    overloaded: the queue is full. failed: the engine is to blame. Else message says why it cannot run, and field what to mend, if
    it is one field.
    """

    message: str
    field: str | None = None
    overloaded: bool = False
    failed: bool = False


SequenceEvent = Scheduled | TokensGenerated | ChoiceFinished | SequenceFinished
_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments. SplitMix64, Steele et al. 2014."""
    return (_mix(_mix(seed & _MASK) ^ (index * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def choice_seed(seed: int, choice_index: int) -> int:
    """The seed of one of several choices; the first one's is the request's own."""
    return seed if choice_index == 0 else _mix(_mix(seed & _MASK) + choice_index)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
