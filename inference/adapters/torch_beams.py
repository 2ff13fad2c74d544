"""Beam searches of a worker, run over ordinary sequences of its engine core.

In each round the core scores every beam of a search: one sequence per beam, which computes the
beam's tokens and ends with the candidates of the next one. The search then chooses among the
candidates of all beams. Beams find their common tokens in the prefix cache, and each computes again
only the tokens after its last full block, at most `KV_BLOCK_TOKENS`. Between two rounds a search
holds no blocks; if its cached ones are evicted, they are computed again.

The core therefore schedules, preempts and displaces beams like all other sequences. Rounds keep the
place of the request's arrival in the queue.

The definition of a search is that of `generate(num_beams=...)` in transformers 5, with equal
outputs:
- a score is the sum of the log-probabilities of the output's tokens; bias and penalties act on
  log-probabilities, not on logits;
- each step considers the `(1 + end ids) * width`, at least `2 * width`, best continuations of all
  beams; of the first `width`, those that end are finished; of the others, the best `width` that do
  not end stay alive;
- finished hypotheses are ranked by score / tokens ** length_penalty, and the best `width` are kept;
- `EarlyStopping` decides when the search ends, at the latest at the maximum output length.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from inference.core.engine_core import EngineCore, NumberedEvent
from inference.core.sequence import Sequence
from inference.engine import (
    BeamSearchParams,
    ChoiceFinished,
    EarlyStopping,
    EngineFinishReason,
    GenerationRequest,
    SequenceEvent,
    StoppedBy,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from inference.sampling.sampler import Candidates
from inference.text.detokenizer import NOTHING, Detokenizer


@dataclass(slots=True)
class Hypothesis:
    """One output. `score` is the sum of its log-probabilities, length-penalized once the output is
    finished. `logprobs` is empty unless requested.
    """

    token_ids: list[int] = field(default_factory=list)
    score: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Continuation:
    """Candidate of a beam, by indices. `total` is the score of the whole output, summed in fp32."""

    beam: int
    candidate: int
    token_id: int
    total: float


class BeamSearch:
    """State of a search. `living` (the beams) and `finished` are sorted by descending score."""

    def __init__(
        self, params: BeamSearchParams, end_token_ids: frozenset[int], max_output_tokens: int
    ) -> None:
        self.living = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.ended = False
        self.token_count = 0  # of all beams: every token that extended or ended one
        self._params = params
        self._end_token_ids = end_token_ids
        self._max_output_tokens = max_output_tokens

    @property
    def candidate_count(self) -> int:
        """Number of candidates per beam, enough for `width` even if it includes all end tokens."""
        return max(2, 1 + len(self._end_token_ids)) * self._params.width

    def advance(self, candidates: list[Candidates]) -> list[int]:
        """Advance by one token, with candidates per beam; return the parent of each living beam."""
        width, length = self._params.width, len(self.living[0].token_ids) + 1
        best = self._best(candidates)
        last = length >= self._max_output_tokens
        ending = [each for each in best[:width] if last or each.token_id in self._end_token_ids]
        going = (
            []
            if last
            else [each for each in best if each.token_id not in self._end_token_ids][:width]
        )
        for each in ending:
            hypothesis = self._extended(each, candidates)
            hypothesis.score = float(
                np.float32(each.total) / np.float32(length**self._params.length_penalty)
            )
            self.finished.append(hypothesis)
        self.finished = sorted(self.finished, key=lambda one: one.score, reverse=True)[:width]
        self.living = [self._extended(each, candidates) for each in going]
        self.token_count += len(ending) + len(going)
        self.ended = not self.living or self._is_decided(length)
        return [each.beam for each in going]

    def certain_token_count(self, choice_count: int, known_count: int) -> int:
        """Measure the common prefix of all possible best outputs; at least `known_count` tokens."""
        possible = [one.token_ids for one in (*self.finished[:choice_count], *self.living)]
        first, count = possible[0], known_count
        while all(len(one) > count and one[count] == first[count] for one in possible):
            count += 1
        return count

    def _best(self, candidates: list[Candidates]) -> list[_Continuation]:
        totals = np.concatenate(
            [
                np.float32(one.score) + np.array(each.scores, np.float32)
                for one, each in zip(self.living, candidates, strict=True)
            ]
        )
        positions = [
            (beam, index)
            for beam, each in enumerate(candidates)
            for index in range(len(each.token_ids))
        ]
        found = []
        for position in np.argsort(-totals, kind="stable")[: self.candidate_count].tolist():
            beam, index = positions[position]
            found.append(
                _Continuation(
                    beam, index, candidates[beam].token_ids[index], float(totals[position])
                )
            )
        return found

    def _extended(self, continuation: _Continuation, candidates: list[Candidates]) -> Hypothesis:
        before, chosen = self.living[continuation.beam], candidates[continuation.beam]
        logprobs = before.logprobs
        if chosen.top is not None:
            own = TokenLogprob(continuation.token_id, chosen.logprobs[continuation.candidate])
            logprobs = [*logprobs, TokenLogprobs(own, chosen.top)]
        return Hypothesis([*before.token_ids, continuation.token_id], continuation.total, logprobs)

    def _is_decided(self, length: int) -> bool:
        """Return whether the finished hypotheses are final, as defined by `early_stopping`."""
        params = self._params
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        # A positive penalty favours long outputs, so the best possible score is the one at maximum
        # length.
        is_exhaustive = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        reached = self._max_output_tokens if is_exhaustive else length
        best_possible = np.float32(self.living[0].score) / np.float32(
            reached**params.length_penalty
        )
        return bool(best_possible <= np.float32(self.finished[-1].score))


@dataclass(slots=True)
class Running:
    """A running search. `first` computed the prompt, and has the request's times.

    `reported_count` is the number of tokens reported for each choice.
    """

    request: GenerationRequest
    first: Sequence
    search: BeamSearch
    detokenizers: list[Detokenizer]
    reported_count: int = 0
    is_due: bool = False  # for the next round


class BeamSearches:
    """Requests of one core, with and without a beam search. Used by the core's thread only.

    While a search is in `running`, steps are made here; otherwise those of the core are enough.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.running: dict[int, Running] = {}

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return self.core.idle and not self.running

    def add(
        self, number: int, request: GenerationRequest, arrived_at_s: float | None = None
    ) -> bool:
        """Queue a request like `EngineCore.add`."""
        params = request.beam_search
        if params is None:
            return self.core.add(number, request, arrived_at_s)
        if self.core.scheduler.waiting_is_full:
            return False
        search = BeamSearch(
            params, self.core.end_token_ids(request), request.stop.max_output_tokens
        )
        plain = replace(
            request,
            beam_search=None,
            choice_count=1,
            sampling=replace(request.sampling, prompt_logprobs=None),
        )
        [first] = self._score(number, plain, search, None, arrived_at_s)
        open_detokenizer = self.core.detokenizer_of(plain)
        detokenizers = [open_detokenizer() for _ in range(request.choice_count)]
        self.running[number] = Running(plain, first, search, detokenizers)
        return True

    def cancel(self, number: int) -> None:
        """End a request; the next `step` returns its events. Idempotent."""
        running = self.running.pop(number, None)
        if running is None:
            self.core.cancel(number)
            return
        self.core.drop(number)
        cancelled: tuple[EngineFinishReason, StoppedBy] = EngineFinishReason.CANCELLED, None
        ends = [cancelled] * len(running.detokenizers)
        self.core.events += [(number, event) for event in self._finished(running, ends)]

    def cancel_all(self) -> None:
        for number in list(self.running):
            self.cancel(number)
        self.core.cancel_all()

    def step(self) -> list[NumberedEvent]:
        """Compute one step of the core, and advance the searches whose beams it has scored."""
        for number, running in self.running.items():
            if running.is_due:
                running.is_due = False
                cached_token_count = running.first.cached_token_count
                self._score(number, running.request, running.search, cached_token_count)
        events = self.core.step()
        for number, scores in self.core.take_scores().items():
            events += [(number, event) for event in self._advance(number, scores)]
        return events

    def _score(
        self,
        number: int,
        request: GenerationRequest,
        search: BeamSearch,
        cached_token_count: int | None,
        arrived_at_s: float | None = None,
    ) -> list[Sequence]:
        """Queue a sequence per beam, which needs room for one more token."""
        outputs = [hypothesis.token_ids for hypothesis in search.living]
        stop = replace(request.stop, max_output_tokens=len(outputs[0]) + 1)
        return self.core.score(
            number,
            replace(request, stop=stop),
            outputs,
            search.candidate_count,
            cached_token_count,
            arrived_at_s,
        )

    def _advance(self, number: int, scores: list[Candidates]) -> list[SequenceEvent]:
        """Advance a search by one token; return the events of its request."""
        running = self.running[number]
        search, first = running.search, running.first
        first.first_token_at_s = first.first_token_at_s or self.core.clock()
        before = search.token_count
        search.advance(scores)
        self.core.output_token_count += search.token_count - before
        if not search.ended:
            running.is_due = True
            return self._certain_events(running)
        del self.running[number]
        events: list[SequenceEvent] = []
        ends: list[tuple[EngineFinishReason, StoppedBy]] = []
        for choice, hypothesis in enumerate(search.finished[: len(running.detokenizers)]):
            events += self._token_events(running, choice, hypothesis, len(hypothesis.token_ids))
            stopped = (last := hypothesis.token_ids[-1]) in first.end_token_ids
            reason = EngineFinishReason.STOP if stopped else EngineFinishReason.LENGTH
            ends.append((reason, first.named_end(last)))
        return events + self._finished(running, ends)

    def _certain_events(self, running: Running) -> list[SequenceEvent]:
        """Report the tokens that all possible outputs have in common."""
        search, choice_count = running.search, len(running.detokenizers)
        count = search.certain_token_count(choice_count, running.reported_count)
        hypothesis = (search.living or search.finished)[0]
        events = [
            event
            for choice in range(choice_count)
            for event in self._token_events(running, choice, hypothesis, count)
        ]
        running.reported_count = count
        return events

    @staticmethod
    def _token_events(
        running: Running, choice: int, hypothesis: Hypothesis, end: int
    ) -> list[SequenceEvent]:
        """Build one event per unreported token, so that a lease can end between any two."""
        events: list[SequenceEvent] = []
        for index in range(running.reported_count, end):
            token_id = hypothesis.token_ids[index]
            ends = token_id in running.first.end_token_ids
            piece = NOTHING if ends else running.detokenizers[choice].push(token_id)
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
        self, running: Running, ends: list[tuple[EngineFinishReason, StoppedBy]]
    ) -> list[SequenceEvent]:
        """Build the last events of a request, with the end of each choice."""
        pieces = [detokenizer.finish() for detokenizer in running.detokenizers]
        events: list[SequenceEvent] = []
        if len(pieces) > 1:
            events += [
                ChoiceFinished(index, reason, pieces[index].text, pieces[index].reasoning, stop)
                for index, (reason, stop) in enumerate(ends)
            ]
        piece = pieces[0] if len(pieces) == 1 else NOTHING
        reason, running.first.stopped_by = ends[0]
        token_count = running.search.token_count
        return [*events, running.first.finished(reason, piece, token_count, self.core.clock())]
