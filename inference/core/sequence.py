"""State of one sequence in the engine: tokens, KV blocks and progress.

    token_ids      [ prompt .................... | output ......... ]
    positions      [ computed: KV in the blocks of `block_table` | uncomputed ]
                                                  ^ computed_token_count

`BeamGroup` holds the sequences of one beam search. Each beam is a `Sequence`, batched like any
other; beams share the KV blocks of their common tokens. Three phases:

    prompt       one sequence, as without a search
    search       one sequence per beam, of equal length and computed in the same step: `ready`
    preempted    all at once: one sequence with the shared tokens waits in their place. After it is
                 recomputed, the beams share its blocks and compute their own tokens; not `ready`
                 until all have

Owned by the step loop.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from inference.core.kv_cache import BlockKey, CachedBlock
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    SequenceEvent,
    SequenceFinished,
    StoppedBy,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.sampling.beam_search import BeamSearch, Hypothesis
from inference.sampling.grammar import Grammar
from inference.sampling.sampler import Chosen, Draw, SeenTokens
from inference.text.detokenizer import NOTHING, Detokenizer, TextPiece


class AppendedToken(NamedTuple):
    """Result of appending a token: released text; the finish reason, None if output continues."""

    piece: TextPiece
    finish_reason: EngineFinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence; modified by the step loop only.

    `number` is the order of arrival and the handle, shared with the parent process and by all
    choices of a request. `end_token_ids` are end tokens of the model and the request,
    `answer_end_token_ids` those of them that do not end the thinking. `seed` is random if the
    request has none. `grammar` belongs to the response format, `group` to a beam search.
    `rotary_offset` is the row of the rotation tables for position 0. `precedence` is the sort key:
    rank, then arrival; the lowest comes first. `ended_before` is the finish reason of a continued
    sequence that is already complete. For `stopped_by` see `SequenceFinished`. Times are
    `time.monotonic()` seconds.
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
    precedence: tuple[float, int, int] = field(init=False)
    overtaken_count: int = 0
    group: BeamGroup | None = None
    rotary_offset: int = 0
    ended_before: EngineFinishReason | None = field(init=False, default=None)
    prompt_token_count: int = field(init=False, default=0)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    takes_best: bool = field(init=False, default=False)
    answer_end_token_ids: frozenset[int] = frozenset()
    stopped_by: StoppedBy = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.precedence = self.request.rank, self.number, self.choice_index
        self.prompt_token_count = len(self.token_ids)
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and self.choice_index == 0:
            self.prompt_logprobs.append(TokenLogprobs(TokenLogprob(self.token_ids[0], 0.0)))
        if penalises := sampling.penalises:
            self.seen = SeenTokens(self.token_ids)
        is_plain = (
            not (penalises or sampling.logit_bias)
            and sampling.top_logprobs is None
            and self.grammar is None
        )
        self.takes_best = (
            is_plain and sampling.temperature == 0.0 and self.request.beam_search is None
        )
        for token_id in self.request.output_token_ids:
            # The previous engine sent the same text; text that it held back is held back here too.
            self.ended_before = self.append(token_id, None).finish_reason

    @property
    def rank(self) -> float:
        """Request's rank, or minus infinity if the sequence was overtaken too often."""
        return self.precedence[0]

    @property
    def output_token_count(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_token_count

    @property
    def uncomputed_token_count(self) -> int:
        """Number of tokens whose KV is not in the pool; at least 1 while the sequence runs."""
        return len(self.token_ids) - self.computed_token_count

    @property
    def owed_output_token_count(self) -> int:
        """Maximum number of output tokens that the sequence may still generate."""
        return self.request.stop.max_output_tokens - len(self.token_ids) + self.prompt_token_count

    @property
    def cache_salt(self) -> str:
        """Request's salt with the rotary offset: different rotations are cached separately."""
        salt = self.request.cache_salt
        return f"{salt}\0{self.rotary_offset}" if self.rotary_offset else salt

    @property
    def batch_row_count(self) -> int:
        """Number of places in the batch, including those of future beams."""
        return 1 if self.group is None else self.group.batch_row_count(self)

    @property
    def may_decode(self) -> bool:
        """True if its last token may be computed now; the beams of a search do that together."""
        return len(self.token_ids) - self.computed_token_count == 1 and (
            self.group is None or self.group.ready
        )

    @property
    def has_room(self) -> bool:
        """True if its next token goes to a block that is allocated and not shared."""
        return self.computed_token_count % KV_BLOCK_TOKENS > 0 and self.group is None

    @property
    def plannable_token_count(self) -> int:
        """Number of tokens that may be computed now. A beam's last token waits for other beams."""
        uncomputed_token_count = len(self.token_ids) - self.computed_token_count
        if self.group is None or len(self.group.beams) == 1 or self.may_decode:
            return uncomputed_token_count
        return uncomputed_token_count - 1

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of prompt tokens are still to be computed."""
        return 0 < len(self.prompt_logprobs) < self.prompt_token_count

    def scored_token_count(self, token_count: int) -> int:
        """Count the prompt tokens whose log-probabilities the next `token_count` determine."""
        if not self.scores_prompt:
            return 0
        end = min(self.computed_token_count + token_count + 1, self.prompt_token_count)
        return max(end - len(self.prompt_logprobs), 0)

    @property
    def next_takes_best(self) -> bool:
        """True if the next token is that of the largest logit, and nothing else is needed."""
        return (
            self.takes_best
            and len(self.token_ids) - self.prompt_token_count >= self.request.stop.min_output_tokens
        )

    @property
    def may_be_drafted(self) -> bool:
        """True if several tokens can be sampled at once, as none changes the rules for the next."""
        return (
            self.group is None
            and self.grammar is None
            and self.seen is None
            and len(self.token_ids) - self.prompt_token_count >= self.request.stop.min_output_tokens
        )

    def draw(self, ahead: int = 0) -> Draw:
        """Build the sampling parameters for the next token, or for one `ahead` tokens later."""
        index = self.output_token_count + ahead
        held_off = tuple(self.end_token_ids) if index < self.request.stop.min_output_tokens else ()
        candidate_count = 0 if self.group is None else self.group.candidate_count
        return Draw(
            self.request.sampling,
            self.seed,
            index,
            self.seen,
            held_off,
            self.grammar,
            candidate_count,
        )

    def twin(self) -> Sequence:
        """Copy the sequence with its tokens, without blocks or computed tokens."""
        twin = copy.copy(self)
        twin.token_ids = list(self.token_ids)
        twin.seen = None if self.seen is None else self.seen.copy()
        twin.block_table, twin.prefix_keys = [], []
        twin.computed_token_count = twin.registered_block_count = 0
        twin.registered_tip = None
        return twin

    def take(self, token_id: int) -> None:
        """Append an output token without checking for the end."""
        self.token_ids.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)

    def append(self, token_id: int, now_s: float | None) -> AppendedToken:
        """Append an output token and check for the end. `now_s` is None if generated elsewhere."""
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        self.take(token_id)
        if token_id in self.end_token_ids and not (
            token_id in self.answer_end_token_ids and self.detokenizer.thinks
        ):
            count = int(self.detokenizer.thinks)
            self.stopped_by = self.named_end(token_id)
            return AppendedToken(
                NOTHING._replace(reasoning_token_count=count), EngineFinishReason.STOP
            )
        stop, output_token_count = self.request.stop, len(self.token_ids) - self.prompt_token_count
        piece = self.detokenizer.push(
            token_id, may_stop=output_token_count > stop.min_output_tokens
        )
        if self.grammar is not None and self.grammar.over:
            self.grammar = None
        if piece.stop:
            self.stopped_by = piece.stop
            return AppendedToken(piece, EngineFinishReason.STOP_SEQUENCE)
        return AppendedToken(
            piece,
            EngineFinishReason.LENGTH if output_token_count >= stop.max_output_tokens else None,
        )

    def named_end(self, token_id: int) -> StoppedBy:
        """Return the token that ended the output if the request names it and the model does not."""
        return token_id if token_id in self.answer_end_token_ids else None

    def finished(
        self,
        reason: EngineFinishReason,
        piece: TextPiece,
        generated_token_count: int,
        now_s: float,
    ) -> SequenceFinished:
        """Build the request's last event. A phase that was not reached takes 0 ms."""
        scheduled_s = now_s if self.scheduled_at_s is None else self.scheduled_at_s
        first_token_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        timings = EngineTimings(
            queue_ms=(scheduled_s - self.arrived_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
        cached_token_count = self.cached_token_count or 0
        return SequenceFinished(
            reason,
            piece.text,
            self.prompt_token_count,
            cached_token_count,
            generated_token_count,
            timings,
            reasoning=piece.reasoning,
            stopped_by=self.stopped_by,
        )


class BeamScheduler(Protocol):
    """Interface of the scheduler for the sequences of a beam search."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a child of a running parent, sharing its blocks."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence and release its blocks."""
        ...


class BeamGroup:
    """Beams of one request. `beams` are the scheduled sequences in the order of the search."""

    def __init__(self, first: Sequence, open_detokenizer: Callable[[], Detokenizer]) -> None:
        """Create a group of `first`, the sequence that computes the prompt, and set its `group`."""
        params = first.request.beam_search
        assert params is not None, "the request has a beam search"
        self.beams = [first]
        self.width = params.width
        self._first = first  # holds the request's times
        self._search = BeamSearch(params, first.end_token_ids, first.request.stop.max_output_tokens)
        self._preempted: list[Sequence] = []  # beams whose shared tokens are being recomputed
        self._detokenizers = [open_detokenizer() for _ in range(first.request.choice_count)]
        self._reported_count = 0  # number of tokens reported for each choice
        first.group = self

    @property
    def candidate_count(self) -> int:
        return self._search.candidate_count

    @property
    def token_count(self) -> int:
        return self._search.token_count

    @property
    def ended(self) -> bool:
        """True if the outputs are final; the group then has no sequences."""
        return self._search.ended

    @property
    def ready(self) -> bool:
        """True if the next step may choose: each beam has one uncomputed token."""
        return all(beam.uncomputed_token_count == 1 for beam in self.beams)

    def batch_row_count(self, beam: Sequence) -> int:
        """Count the batch places of a beam. The first beam reserves those of future beams."""
        return self.width - len(self.beams) + 1 if beam is self.beams[0] else 1

    def collapse(self) -> Sequence:
        """Preempt all beams and release their blocks; return the sequence that waits instead."""
        if len(self.beams) == 1:
            return self.beams[0]
        self._preempted = self.beams
        waiting = self.beams[0].twin()
        steps = zip(*(beam.token_ids for beam in self.beams), strict=False)
        shared = itertools.takewhile(lambda token_ids: len({*token_ids}) == 1, steps)
        waiting.token_ids = [token_id for token_id, *_ in shared]
        self.beams = [waiting]
        return waiting

    def advance(
        self, scheduler: BeamScheduler, chosen: Mapping[Sequence, Chosen], now_s: float
    ) -> list[SequenceEvent]:
        """Process a step that computed all beams, and return the events of the request."""
        if self._preempted:
            self._return_to_search(scheduler)
            return []
        self._first.first_token_at_s = self._first.first_token_at_s or now_s
        candidates = [chosen[beam].candidates for beam in self.beams]
        parents = self._search.advance([each for each in candidates if each is not None])
        if not self._search.ended:
            self._follow(scheduler, parents)
            return self._certain_events()
        for beam in self.beams:
            scheduler.remove(beam)
        return self._last_events(now_s)

    def cancel(self, scheduler: BeamScheduler, now_s: float) -> list[SequenceEvent]:
        """End the search with the tokens reported so far, and return the last events."""
        for beam in self.beams:
            scheduler.remove(beam)
        cancelled: tuple[EngineFinishReason, StoppedBy] = EngineFinishReason.CANCELLED, None
        return self._finished([cancelled] * len(self._detokenizers), now_s)

    def _follow(self, scheduler: BeamScheduler, parents: list[int]) -> None:
        """Replace the beams by the living hypotheses. A first child keeps its parent's sequence."""
        before, followed = self.beams, set[int]()
        after = []
        for parent in parents:
            beam = before[parent]
            if parent in followed:
                beam = beam.twin()
                scheduler.fork(before[parent], beam)
            followed.add(parent)
            after.append(beam)
        for index, beam in enumerate(before):
            if index not in followed:
                scheduler.remove(beam)
        for beam, hypothesis in zip(after, self._search.living, strict=True):
            beam.take(hypothesis.token_ids[-1])
        self.beams = after

    def _return_to_search(self, scheduler: BeamScheduler) -> None:
        [shared], self.beams, self._preempted = self.beams, self._preempted, []
        for beam in self.beams:
            scheduler.fork(shared, beam)
        scheduler.remove(shared)

    def _certain_events(self) -> list[SequenceEvent]:
        count = self._search.certain_token_count(len(self._detokenizers), self._reported_count)
        hypothesis = (self._search.living or self._search.finished)[0]
        events = [
            event
            for choice in range(len(self._detokenizers))
            for event in self._token_events(choice, hypothesis, self._reported_count, count)
        ]
        self._reported_count = count
        return events

    def _last_events(self, now_s: float) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        ends: list[tuple[EngineFinishReason, StoppedBy]] = []
        for choice, hypothesis in enumerate(self._search.finished[: len(self._detokenizers)]):
            events += self._token_events(
                choice, hypothesis, self._reported_count, len(hypothesis.token_ids)
            )
            stopped = (last := hypothesis.token_ids[-1]) in self._first.end_token_ids
            reason = EngineFinishReason.STOP if stopped else EngineFinishReason.LENGTH
            ends.append((reason, self._first.named_end(last)))
        return events + self._finished(ends, now_s)

    def _token_events(
        self, choice: int, hypothesis: Hypothesis, start: int, end: int
    ) -> list[SequenceEvent]:
        """Build one event per token, so that a lease can end between any two."""
        events: list[SequenceEvent] = []
        for index in range(start, end):
            token_id = hypothesis.token_ids[index]
            ends = token_id in self._first.end_token_ids
            piece = NOTHING if ends else self._detokenizers[choice].push(token_id)
            events.append(
                TokensGenerated(
                    (token_id,),
                    piece.text,
                    tuple(hypothesis.logprobs[index : index + 1]),
                    choice,
                    (),
                    piece.reasoning,
                    piece.reasoning_token_count,
                )
            )
        return events

    def _finished(
        self, ends: list[tuple[EngineFinishReason, StoppedBy]], now_s: float
    ) -> list[SequenceEvent]:
        pieces = [detokenizer.finish() for detokenizer in self._detokenizers]
        events: list[SequenceEvent] = []
        if len(pieces) > 1:
            events += [
                ChoiceFinished(index, reason, pieces[index].text, pieces[index].reasoning, stop)
                for index, (reason, stop) in enumerate(ends)
            ]
        piece = pieces[0] if len(pieces) == 1 else NOTHING
        reason, self._first.stopped_by = ends[0]
        return [*events, self._first.finished(reason, piece, self.token_count, now_s)]
