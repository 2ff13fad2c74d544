"""The rows of a batch whose sequences are beams: from logits to each one's best continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference.engine import TokenLogprobs
from inference.sampling.beam_search import Candidates


class BeamDraw(Protocol):
    """What decides about one row. candidate_count: of the beam's next token; 0 if the row is none of a beam."""

    @property
    def candidate_count(self) -> int: ...


class BeamRows:
    """Taken from a step's logits before rules change them; asked for candidates afterwards."""

    def __init__(self, logits: Tensor, draws: Sequence[BeamDraw]) -> None:
        """Replaces the rows of beams in logits (R, V) fp32 by their log-softmax, since in beam search rules act on that."""
        self._counts = {row: draw.candidate_count for row, draw in enumerate(draws) if draw.candidate_count}
        if self._counts:
            self._logprobs = logits[list(self._counts)].log_softmax(dim=-1)
            logits[list(self._counts)] = self._logprobs

    def candidates(self, scores: Tensor, reports: Mapping[int, TokenLogprobs]) -> dict[int, Candidates]:
        """By row. scores: the same logits, after the rules. reports: of the rows that report log-probabilities."""
        if not self._counts:
            return {}
        count = min(max(self._counts.values()), scores.shape[-1])
        best = scores[list(self._counts)].topk(count, dim=-1)
        own = self._logprobs.gather(-1, best.indices)
        possible = torch.isfinite(best.values).sum(dim=-1).tolist()  # what is held off has no finite score, and comes last
        found = {}
        rows = zip(self._counts.items(), best.indices.tolist(), best.values.tolist(), own.tolist(), possible, strict=True)
        for (row, wanted), token_ids, values, logprobs, most in rows:
            end = min(wanted, most)
            top = reports[row].top if row in reports else None
            found[row] = Candidates(token_ids[:end], values[:end], logprobs[:end], top)
        return found
