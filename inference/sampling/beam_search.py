"""Beam search over scores: selects living and finished hypotheses, and detects the end of the
search.

The definition is that of `generate(num_beams=...)` in transformers 5, with equal outputs:
- a score is the sum of the log-probabilities of the output's tokens; bias and penalties act on
  log-probabilities, not on logits;
- each step considers the `(1 + end ids) * width`, at least `2 * width`, best continuations of all
  beams; of the first `width`, those that end are finished; of the others, the best `width` that do
  not end stay alive;
- finished hypotheses are ranked by score / tokens ** length_penalty, and the best `width` are kept;
- `EarlyStopping` decides when the search ends, at the latest at the maximum output length.

Works on numbers only: no tensors, KV blocks or text. Owned by one `BeamGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inference.engine import BeamSearchParams, EarlyStopping, TokenLogprob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidates:
    """Best continuations of one beam, in descending order; only tokens with finite scores.

    `scores` are log-probabilities after bias and penalties, `logprobs` the model's own. `top` has
    the most likely tokens if requested.
    """

    token_ids: Sequence[int]
    scores: Sequence[float]
    logprobs: Sequence[float]
    top: tuple[TokenLogprob, ...] | None = None


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

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
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

    def _best(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
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

    def _extended(
        self, continuation: _Continuation, candidates: Sequence[Candidates]
    ) -> Hypothesis:
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
