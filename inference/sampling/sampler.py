"""Chooses next tokens: greedy or by chance, row by row once the whole batch's rules have acted.

Chance comes from a counter: the number for output token i of a sequence is a hash of its seed and i. So what a sequence draws
depends on its seed alone, not on its neighbours, on the step, or on whether it was preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from inference.engine import SamplingParams, TokenLogprobs
from inference.sampling.beam_rows import BeamRows
from inference.sampling.beam_search import Candidates
from inference.sampling.grammar import Grammar, PendingMasks
from inference.sampling.logit_rules import SeenTokens, apply_rules
from inference.sampling.logprobs import LogprobReport
from inference.sampling.row_sampler import draw_token
from inference.sampling.seeds import uniform


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. seed: any integer; index: of the output token, from 0. seen, held_off_ids: see `Ruled`. grammar: what
    the output has to follow, where it stands now. candidate_count: of a beam, how many continuations are wanted; 0 for all others.
    """

    params: SamplingParams
    seed: int
    index: int
    seen: SeenTokens | None = None
    held_off_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    candidate_count: int = 0


class Chosen(NamedTuple):
    """A row's next token. logprobs: if its parameters ask for them. candidates: of a beam, whose search decides instead."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None


def choose(logits: Tensor, draws: Sequence[Draw], masks: PendingMasks | None = None) -> list[Chosen]:
    """One token per row of logits (R, V) fp32, which are changed: rules, then masks, then `sample`.

    Log-probabilities are of before. masks: of the draws' grammars, if there are any.
    """
    report = LogprobReport(logits, [draw.params for draw in draws])
    beams = BeamRows(logits, draws)
    apply_rules(logits, draws)
    if masks is not None:
        masks.apply(logits)
    token_ids = sample(logits, draws)
    logprobs = report.of(token_ids)
    candidates = beams.candidates(logits, logprobs)
    return [Chosen(token_id, logprobs.get(row), candidates.get(row)) for row, token_id in enumerate(token_ids)]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of logits (R, V) fp32.

    Temperature divides, then `top_k` keeps the k largest, then `top_p` the fewest of those whose probability reaches p, then
    `min_p` those at least so many times as likely as the likeliest. Ties at the border of top_k fall to whichever comes first.
    """
    rows = logits.numpy()
    chosen = []
    for row, draw in zip(rows, draws, strict=True):
        if draw.params.temperature > 0:
            chosen.append(draw_token(row, draw.params, uniform(draw.seed, draw.index)))
        else:
            chosen.append(int(row.argmax()))
    return chosen
