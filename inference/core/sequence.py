"""One sequence inside the engine: its tokens, its blocks, and how far each has come.

    token_ids      [ prompt .................... | output ......... ]
    positions      [ computed: KV in the blocks of `block_table` | uncomputed ]
                                                  ^ computed_token_count

A step computes some uncomputed tokens. When none is left, the logits of the last give the next token, which is uncomputed
again: a decoding sequence is one with a single uncomputed token, and prefill, decode and recomputing are the same thing.

`BeamGroup` has the sequences of one beam search. A beam is a `Sequence` of its own, so that it is batched like any other; what
beams have in common, they have in common KV blocks. Three phases follow each other:

    computing the prompt    one sequence, as if it were alone
    searching               a beam each, all of equal length and all computed in the same step: `ready`
    preempted               all at once: one sequence with the tokens that all share waits in their place. When it has been computed
                            again, the beams share its blocks and compute what is their own: not `ready` until all have

Owned by the step loop.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from inference.core.kv_cache import BlockKey, CachedBlock
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    SequenceEvent,
    SequenceFinished,
    TokensGenerated,
)
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.sampling.beam_search import BeamSearch, Hypothesis
from inference.sampling.grammar import Grammar
from inference.sampling.sampler import Chosen, Draw, SeenTokens
from inference.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from inference.core.scheduler import Scheduler


class AppendedToken(NamedTuple):
    """What one new token did: text let go, and why the sequence is over if it is."""

    text: str
    finish_reason: EngineFinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence; changed only by the step loop.

    number: the order of arrival, and the handle that the host and its parent share; choices of one request share it too.
    end_token_ids: ids that end it, the model's and the request's. seed: the drawn one if the request had none. grammar: its
    response format's. group: those of the beam search that it is one of. rotary_offset: row of the rotation tables that turns its
    position 0. rank: the request's, until it was overtaken often enough (overtaken_count). ended_before: why nothing is left to
    generate of a sequence that is continued. Times are `time.monotonic()` seconds.
    """

    number: int
    request: GenerationRequest
    seed: int
    end_token_ids: frozenset[int]
    detokenizer: Detokenizer
    arrived_at_s: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    computed_token_count: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_keys: list[BlockKey] = field(default_factory=list)
    registered_block_count: int = 0
    registered_tip: CachedBlock | None = None
    cached_token_count: int | None = None
    scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    seen: SeenTokens | None = None
    grammar: Grammar | None = None
    choice_index: int = 0
    rank: float = field(init=False)
    overtaken_count: int = 0
    group: BeamGroup | None = None
    rotary_offset: int = 0
    ended_before: EngineFinishReason | None = field(init=False, default=None)
    prompt_token_count: int = field(init=False, default=0)
    takes_best: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.rank = self.request.rank
        self.prompt_token_count = len(self.token_ids)
        sampling = self.request.sampling
        if penalises := sampling.penalises:
            self.seen = SeenTokens(self.token_ids)
        is_plain = not (penalises or sampling.logit_bias) and sampling.top_logprobs is None and self.grammar is None
        self.takes_best = is_plain and sampling.temperature == 0.0 and self.request.beam_search is None
        for token_id in self.request.output_token_ids:
            # Its text was given out where the token was generated; what was held back there is held back here.
            self.ended_before = self.append(token_id, None).finish_reason

    @property
    def precedence(self) -> tuple[float, int, int]:
        """Orders sequences by rank, and those of equal rank by arrival: the lower, the sooner."""
        return self.rank, self.number, self.choice_index

    @property
    def output_token_count(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_token_count

    @property
    def uncomputed_token_count(self) -> int:
        """Tokens whose KV is not in the pool yet; at least 1 while the sequence lives."""
        return len(self.token_ids) - self.computed_token_count

    @property
    def owed_output_token_count(self) -> int:
        """Output tokens that may still come."""
        return self.request.stop.max_output_tokens - len(self.token_ids) + self.prompt_token_count

    @property
    def cache_salt(self) -> str:
        """The request's; what is turned otherwise is cached apart."""
        salt = self.request.cache_salt
        return f"{salt}\0{self.rotary_offset}" if self.rotary_offset else salt

    @property
    def place_count(self) -> int:
        """Places in the batch that it takes, those of beams to come included."""
        return 1 if self.group is None else self.group.place_count(self)

    @property
    def may_decode(self) -> bool:
        """Whether its last token may be computed now: that of a beam together with those of all others."""
        return len(self.token_ids) - self.computed_token_count == 1 and (self.group is None or self.group.ready)

    @property
    def has_room(self) -> bool:
        """Whether its next token goes into a block that it has, and that nobody else reads."""
        return self.computed_token_count % KV_BLOCK_TOKENS > 0 and self.group is None

    @property
    def plannable_token_count(self) -> int:
        """Tokens that may be computed now: of one of several beams the last one only together with those of all others."""
        uncomputed_token_count = len(self.token_ids) - self.computed_token_count
        if self.group is None or len(self.group.beams) == 1 or self.may_decode:
            return uncomputed_token_count
        return uncomputed_token_count - 1

    @property
    def next_takes_best(self) -> bool:
        """Whether its next token is the one with the largest logit, and nothing else is asked of the row."""
        return self.takes_best and len(self.token_ids) - self.prompt_token_count >= self.request.stop.min_output_tokens

    def draw(self) -> Draw:
        """How the next token is sampled."""
        index = self.output_token_count
        held_off = tuple(self.end_token_ids) if index < self.request.stop.min_output_tokens else ()
        candidate_count = 0 if self.group is None else self.group.candidate_count
        return Draw(self.request.sampling, self.seed, index, self.seen, held_off, self.grammar, candidate_count)

    def twin(self) -> Sequence:
        """Another sequence with the same tokens, which grows by itself; without blocks, and nothing of it computed."""
        twin = copy.copy(self)
        twin.token_ids = list(self.token_ids)
        twin.seen = None if self.seen is None else self.seen.copy()
        twin.block_table, twin.prefix_keys = [], []
        twin.computed_token_count = twin.registered_block_count = 0
        twin.registered_tip = None
        return twin

    def take(self, token_id: int) -> None:
        """One more output token, and nothing but that."""
        self.token_ids.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)

    def append(self, token_id: int, now_s: float | None) -> AppendedToken:
        """Take the next output token and decide whether it is the last. now_s: None for one that was generated elsewhere."""
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        self.take(token_id)
        if token_id in self.end_token_ids:
            return AppendedToken("", EngineFinishReason.STOP)
        stop, output_token_count = self.request.stop, len(self.token_ids) - self.prompt_token_count
        piece = self.detokenizer.push(token_id, may_stop=output_token_count > stop.min_output_tokens)
        if piece.stopped:
            return AppendedToken(piece.text, EngineFinishReason.STOP_SEQUENCE)
        return AppendedToken(piece.text, EngineFinishReason.LENGTH if output_token_count >= stop.max_output_tokens else None)

    def finished(self, reason: EngineFinishReason, text: str, generated_token_count: int, now_s: float) -> SequenceFinished:
        """The last event of the request whose first choice this is. A phase that was not reached takes no time."""
        scheduled_s = now_s if self.scheduled_at_s is None else self.scheduled_at_s
        first_token_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        timings = EngineTimings(
            queue_ms=(scheduled_s - self.arrived_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
        cached_token_count = self.cached_token_count or 0
        return SequenceFinished(reason, text, self.prompt_token_count, cached_token_count, generated_token_count, timings)


class BeamGroup:
    """One request's beams. `beams` are those that the scheduler has, in the order of the search."""

    def __init__(self, first: Sequence, open_detokenizer: Callable[[], Detokenizer]) -> None:
        """first: the sequence that computes the prompt; it gets to know its group."""
        params = first.request.beam_search
        assert params is not None, "the request asks for it"
        self.beams = [first]
        self.width = params.width
        self._first = first  # keeps the request's times
        self._search = BeamSearch(params, first.end_token_ids, first.request.stop.max_output_tokens)
        self._preempted: list[Sequence] = []  # beams whose shared tokens are being computed again
        self._detokenizers = [open_detokenizer() for _ in range(first.request.choice_count)]
        self._told_count = 0  # tokens that each choice has been told
        first.group = self

    @property
    def candidate_count(self) -> int:
        return self._search.candidate_count

    @property
    def token_count(self) -> int:
        return self._search.token_count

    @property
    def ended(self) -> bool:
        """Whether the outputs are decided. The group has no sequence any more then."""
        return self._search.ended

    @property
    def ready(self) -> bool:
        """Whether the next step may choose: every beam lacks one token's KV."""
        return all(beam.uncomputed_token_count == 1 for beam in self.beams)

    def place_count(self, beam: Sequence) -> int:
        """Places in the batch that a beam stands for: those of beams that are yet to come are kept by the first."""
        return self.width - len(self.beams) + 1 if beam is self.beams[0] else 1

    def collapse(self) -> Sequence:
        """All are preempted, and have given their blocks back. Returns the sequence that waits in their place."""
        if len(self.beams) == 1:
            return self.beams[0]
        self._preempted = self.beams
        waiting = self.beams[0].twin()
        waiting.token_ids = waiting.token_ids[: _shared_count([beam.token_ids for beam in self.beams])]
        self.beams = [waiting]
        return waiting

    def advance(self, queue: Scheduler, chosen: Mapping[Sequence, Chosen], now_s: float) -> list[SequenceEvent]:
        """The step has computed all beams. chosen: of at least these. Returns what the request is told of it."""
        if self._preempted:
            self._return_to_search(queue)
            return []
        self._first.first_token_at_s = self._first.first_token_at_s or now_s
        candidates = [chosen[beam].candidates for beam in self.beams]
        parents = self._search.advance([each for each in candidates if each is not None])
        if not self._search.ended:
            self._follow(queue, parents)
            return self._tell_certain()
        for beam in self.beams:
            queue.remove(beam)
        return self._tell_end(now_s)

    def cancel(self, queue: Scheduler, now_s: float) -> list[SequenceEvent]:
        """End the search with what every choice has been told."""
        for beam in self.beams:
            queue.remove(beam)
        return self._finished([EngineFinishReason.CANCELLED] * len(self._detokenizers), now_s)

    def _follow(self, queue: Scheduler, parents: list[int]) -> None:
        """Make the sequences those of the living hypotheses: a beam's first child goes on in its place, others share its blocks."""
        before, followed = self.beams, set[int]()
        after = []
        for parent in parents:
            beam = before[parent]
            if parent in followed:
                beam = beam.twin()
                queue.fork(before[parent], beam)
            followed.add(parent)
            after.append(beam)
        for index, beam in enumerate(before):
            if index not in followed:
                queue.remove(beam)
        for beam, hypothesis in zip(after, self._search.living, strict=True):
            beam.take(hypothesis.token_ids[-1])
        self.beams = after

    def _return_to_search(self, queue: Scheduler) -> None:
        [shared], self.beams, self._preempted = self.beams, self._preempted, []
        for beam in self.beams:
            queue.fork(shared, beam)
        queue.remove(shared)

    def _tell_certain(self) -> list[SequenceEvent]:
        count = self._search.certain_token_count(len(self._detokenizers), self._told_count)
        hypothesis = (self._search.living or self._search.finished)[0]
        events = [
            event for choice in range(len(self._detokenizers)) for event in self._tell(choice, hypothesis, self._told_count, count)
        ]
        self._told_count = count
        return events

    def _tell_end(self, now_s: float) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        reasons = []
        for choice, hypothesis in enumerate(self._search.finished[: len(self._detokenizers)]):
            events += self._tell(choice, hypothesis, self._told_count, len(hypothesis.token_ids))
            stopped = hypothesis.token_ids[-1] in self._first.end_token_ids
            reasons.append(EngineFinishReason.STOP if stopped else EngineFinishReason.LENGTH)
        return events + self._finished(reasons, now_s)

    def _tell(self, choice: int, hypothesis: Hypothesis, start: int, end: int) -> list[SequenceEvent]:
        """Events of some tokens, one each, so that a lease may end between any two."""
        events: list[SequenceEvent] = []
        for index in range(start, end):
            token_id = hypothesis.token_ids[index]
            ends = token_id in self._first.end_token_ids
            text = "" if ends else self._detokenizers[choice].push(token_id).text
            events.append(TokensGenerated((token_id,), text, tuple(hypothesis.logprobs[index : index + 1]), choice))
        return events

    def _finished(self, reasons: list[EngineFinishReason], now_s: float) -> list[SequenceEvent]:
        texts = [detokenizer.finish().text for detokenizer in self._detokenizers]
        events: list[SequenceEvent] = []
        if len(texts) > 1:
            events += [ChoiceFinished(index, reason, texts[index]) for index, reason in enumerate(reasons)]
        text = texts[0] if len(texts) == 1 else ""
        return [*events, self._first.finished(reasons[0], text, self.token_count, now_s)]


def _shared_count(lists: list[list[int]]) -> int:
    """How many first entries all have in common."""
    for index, entries in enumerate(zip(*lists, strict=False)):
        if any(entry != entries[0] for entry in entries):
            return index
    return min(map(len, lists))
