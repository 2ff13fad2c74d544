"""Chooses next tokens: greedy or by chance, a whole batch at once.

Chance comes from a counter: the number for output token i of a sequence is a hash of its seed and i. So what a sequence draws
depends on its seed alone, not on its neighbours, on the step, or on whether it was preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference.beam_rows import BeamRows
from inference.beam_search import Candidates
from inference.engine import SamplingParams, TokenLogprobs
from inference.grammar import Grammar, PendingMasks
from inference.logit_rules import SeenTokens, apply_rules
from inference.logprobs import LogprobReport

_MASK = (1 << 64) - 1


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
    chosen = torch.from_numpy(logits.numpy().argmax(axis=-1))  # numpy's is 7 times as fast as torch's at 50 rows
    warm = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    cut = [row for row in warm if draws[row].params.top_k > 0 or draws[row].params.top_p < 1.0]
    plain = sorted(set(warm).difference(cut))
    if plain:
        weights = _probabilities(logits, draws, plain)
        chosen[plain] = _pick(_above_min_p(weights, [draws[row] for row in plain]), _uniforms(draws, plain))
    if cut:
        chosen[cut] = _sample_cut(_probabilities(logits, draws, cut), [draws[row] for row in cut], _uniforms(draws, cut))
    return [int(token) for token in chosen.tolist()]


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


def _probabilities(logits: Tensor, draws: Sequence[Draw], rows: list[int]) -> Tensor:
    """fp64: a running sum over a large vocabulary in fp32 would give the last tokens a wrong share."""
    temperatures = torch.tensor([[draws[row].params.temperature] for row in rows], dtype=torch.float64)
    return (logits[rows].double() / temperatures).softmax(dim=-1)


def _uniforms(draws: Sequence[Draw], rows: list[int]) -> Tensor:
    return torch.tensor([[uniform(draws[row].seed, draws[row].index)] for row in rows], dtype=torch.float64)


def _sample_cut(probabilities: Tensor, draws: Sequence[Draw], uniforms: Tensor) -> Tensor:
    """With the unlikely tokens cut off: sorts, since both cuts are of a sorted list."""
    vocabulary_size = probabilities.shape[-1]
    top_k = torch.tensor([[draw.params.top_k or vocabulary_size] for draw in draws])
    top_p = torch.tensor([[draw.params.top_p] for draw in draws], dtype=torch.float64)
    ranked, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocabulary_size) >= top_k, 0.0)
    before = ranked.cumsum(dim=-1) - ranked  # probability of all better tokens; the best one is always kept
    ranked = ranked.masked_fill(before >= top_p * ranked.sum(dim=-1, keepdim=True), 0.0)
    ranked = _above_min_p(ranked, draws)
    return token_ids.gather(-1, _pick(ranked, uniforms)[:, None]).squeeze(-1)


def _above_min_p(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """0 for what is less likely than `min_p` times the likeliest: Nguyen et al. 2024. The sum need not be 1."""
    if all(draw.params.min_p == 0 for draw in draws):
        return weights
    least = torch.tensor([[draw.params.min_p] for draw in draws], dtype=torch.float64) * weights.amax(dim=-1, keepdim=True)
    return weights.masked_fill(weights < least, 0.0)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index of the first entry whose running sum passes uniform x total; never one of weight 0."""
    sums = weights.cumsum(dim=-1)
    index = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).squeeze(-1)
    # Rounding can put the target at the total itself; the last entry with weight is then meant.
    last = (sums < sums[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
