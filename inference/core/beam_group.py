"""The sequences of one beam search, as scheduler and engine core see them, and what the request gets to hear.

A beam is a `Sequence` of its own, so that it is batched like any other; what beams have in common, they have in common KV blocks.
Three phases follow each other:

    computing the prompt    one sequence, as if it were alone
    searching               a beam each, all of equal length and all computed in the same step: `ready`
    preempted               all at once: one sequence with the tokens that all share waits in their place. When it has been computed
                            again, the beams share its blocks and compute what is their own: not `ready` until all have

Owned by the step loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from inference.core.sequence import Sequence as EngineSequence
from inference.engine import ChoiceFinished, EngineFinishReason, SequenceEvent, SequenceFinished, TokensGenerated
from inference.sampling.beam_search import BeamSearch, Hypothesis
from inference.sampling.sampler import Chosen
from inference.text.detokenizer import Detokenizer


class BeamQueue(Protocol):
    """What the group needs of the scheduler."""

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Let a child run that shares all of a running parent's blocks."""
        ...

    def remove(self, sequence: EngineSequence) -> None:
        """Forget a sequence, and take its blocks back."""
        ...


class BeamGroup:
    """One request's beams. `beams` are those that the scheduler has, in the order of the search."""

    def __init__(self, first: EngineSequence, open_detokenizer: Callable[[], Detokenizer]) -> None:
        """first: the sequence that computes the prompt; it gets to know its group."""
        params = first.request.beam_search
        assert params is not None, "the request asks for it"
        self.beams = [first]
        self.width = params.width
        self._first = first  # keeps the request's times
        self._search = BeamSearch(params, first.end_token_ids, first.request.stop.max_output_tokens)
        self._preempted: list[EngineSequence] = []  # beams whose shared tokens are being computed again
        self._detokenizers = [open_detokenizer() for _ in range(first.request.choice_count)]
        self._told_count = 0  # tokens that each choice has been told
        first.group = self

    @property
    def candidate_count(self) -> int:
        """See `BeamSearch.candidate_count`."""
        return self._search.candidate_count

    @property
    def token_count(self) -> int:
        """See `BeamSearch.token_count`."""
        return self._search.token_count

    @property
    def ended(self) -> bool:
        """Whether the outputs are decided. The group has no sequence any more then."""
        return self._search.ended

    @property
    def ready(self) -> bool:
        """Whether the next step may choose: every beam lacks one token's KV."""
        return all(beam.uncomputed_token_count == 1 for beam in self.beams)

    def place_count(self, beam: EngineSequence) -> int:
        """Places in the batch that a beam stands for: those of beams that are yet to come are kept by the first."""
        return self.width - len(self.beams) + 1 if beam is self.beams[0] else 1

    def collapse(self) -> EngineSequence:
        """All are preempted, and have given their blocks back. Returns the sequence that waits in their place."""
        if len(self.beams) == 1:
            return self.beams[0]
        self._preempted = self.beams
        waiting = self.beams[0].twin()
        waiting.token_ids = waiting.token_ids[: _shared_count([beam.token_ids for beam in self.beams])]
        self.beams = [waiting]
        return waiting

    def advance(self, queue: BeamQueue, chosen: Mapping[EngineSequence, Chosen], now_s: float) -> list[SequenceEvent]:
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

    def cancel(self, queue: BeamQueue, now_s: float) -> list[SequenceEvent]:
        """End the search with what every choice has been told."""
        for beam in self.beams:
            queue.remove(beam)
        return self._finished([EngineFinishReason.CANCELLED] * len(self._detokenizers), now_s)

    def _follow(self, queue: BeamQueue, parents: Sequence[int]) -> None:
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

    def _return_to_search(self, queue: BeamQueue) -> None:
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

    def _finished(self, reasons: Sequence[EngineFinishReason], now_s: float) -> list[SequenceEvent]:
        texts = [detokenizer.finish().text for detokenizer in self._detokenizers]
        events: list[SequenceEvent] = []
        if len(texts) > 1:
            events += [ChoiceFinished(index, reason, texts[index]) for index, reason in enumerate(reasons)]
        finished = SequenceFinished(
            reason=reasons[0],
            text=texts[0] if len(texts) == 1 else "",
            prompt_token_count=self._first.prompt_token_count,
            cached_token_count=self._first.cached_token_count or 0,
            generated_token_count=self.token_count,
            timings=self._first.timings(now_s),
        )
        return [*events, finished]


def _shared_count(lists: Sequence[Sequence[int]]) -> int:
    """How many first entries all have in common."""
    for index, entries in enumerate(zip(*lists, strict=False)):
        if any(entry != entries[0] for entry in entries):
            return index
    return min(map(len, lists))
