"""Chooses next tokens: greedy or by chance, row by row once the whole batch's rules have acted.

Chance comes from a counter: the number for output token i of a sequence is a hash of its seed and i. So what a sequence draws
depends on its seed alone, not on its neighbours, on the step, or on whether it was preempted and computed again.

`RowLogprobs` has the log-probabilities of output tokens, for the rows that asked for them. They are the model's own: the
log-softmax of its logits before bias, penalties, constraint, temperature and cuts, as in OpenAI's API. So they tell what the
model thought, whatever it was made to say, and a token's value does not depend on how it was sampled.

`draw_token` draws one token from one row of logits, at the cost of looking at the likely tokens only. The cuts `top_k`, `top_p`
and `min_p` are of a ranked list, and ranking a whole vocabulary costs more than a small model's forward pass. So a bound is found
first that at least so many tokens reach; only those are ranked, and more if the nucleus turns out to be larger. The result is the
one that ranking all of them gives, bit for bit: sums run from the likeliest token on, so they do not depend on how many follow,
and what they are compared with is summed over the whole row in either case.

It uses numpy, row by row: a row's numbers stay in the processor's cache, and what a row draws cannot depend on its neighbours.

What a request asks to be changed in the logits first (bias, penalties, tokens held off) acts on the whole batch at once and only
on the entries that change: a row without any of this costs nothing.

Formulas, in the order in which they act (that of `transformers`, whose greedy search gives the same tokens):
- bias: logit + bias, as in OpenAI's `logit_bias`;
- repetition penalty r over prompt and output: logit / r if positive, else logit * r (Keskar et al. 2019, section 4.1, with the sign
  rule that `transformers` and vLLM use);
- frequency and presence penalty over the output alone: logit - count * frequency - (count > 0) * presence (OpenAI's definition);
- held off: minus infinity, for ids that would end the output before it has `min_output_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.engine import SamplingParams, TokenLogprob, TokenLogprobs
from inference.sampling.beam_search import Candidates
from inference.sampling.grammar import Grammar, PendingMasks
from inference.sequences import uniform


class SeenTokens:
    """The distinct token ids of a sequence, and how often each one is in its output. Grows by a token at constant cost."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        capacity = max(2 * len(self._slots), 64)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(capacity, dtype=np.float32)

    @property
    def token_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Each id once. A view: valid until the next `add`."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Occurrences in the output of each of `token_ids`; 0 for one that is in the prompt only."""
        return self._counts[: len(self._slots)]

    def copy(self) -> SeenTokens:
        """Another one with the same tokens, for a sequence that goes on from here."""
        other = SeenTokens(())
        other._slots, other._ids, other._counts = dict(self._slots), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. seed: any integer; index: of the output token, from 0.

    seen: there if the parameters penalise. held_off_ids: ids that must not be chosen now. grammar: what the output has to follow,
    where it stands now. candidate_count: of a beam, how many continuations are wanted; 0 for all others.
    """

    params: SamplingParams
    seed: int
    index: int
    seen: SeenTokens | None = None
    held_off_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    candidate_count: int = 0


def apply_rules(logits: Tensor, rows: Sequence[Draw]) -> None:
    """Change logits (R, V) fp32 in place as each row's request asks."""
    biased = [row for row, ruled in enumerate(rows) if ruled.params.logit_bias]
    if biased:
        _add_biases(logits, biased, [rows[row].params for row in biased])
    penalised = [row for row, ruled in enumerate(rows) if ruled.seen is not None]
    if penalised:
        _penalise(logits, penalised, [rows[row] for row in penalised])
    entries = [(row, token_id) for row, ruled in enumerate(rows) for token_id in ruled.held_off_ids]
    if entries:
        at = torch.tensor(entries)
        logits[at[:, 0], at[:, 1]] = float("-inf")


def _add_biases(logits: Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    entries = [(row, token_id, bias) for row, each in zip(rows, params, strict=True) for token_id, bias in each.logit_bias]
    row_ids, token_ids, biases = zip(*entries, strict=True)
    logits.index_put_((torch.tensor(row_ids), torch.tensor(token_ids)), torch.tensor(biases, dtype=logits.dtype), accumulate=True)


def _penalise(logits: Tensor, rows: list[int], ruled: list[Draw]) -> None:
    seen = [each.seen for each in ruled if each.seen is not None]
    lengths = torch.tensor([len(each.token_ids) for each in seen])

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype).repeat_interleave(lengths)

    row_ids = torch.tensor(rows).repeat_interleave(lengths)
    token_ids = torch.from_numpy(np.concatenate([each.token_ids for each in seen]))
    counts = torch.from_numpy(np.concatenate([each.output_counts for each in seen]))
    repetition = spread([each.params.repetition_penalty for each in ruled])
    values = logits[row_ids, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * spread([each.params.frequency_penalty for each in ruled])
    values -= (counts > 0) * spread([each.params.presence_penalty for each in ruled])
    logits[row_ids, token_ids] = values


class Chosen(NamedTuple):
    """A row's next token. logprobs: if its parameters ask for them. candidates: of a beam, whose search decides instead."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None


def choose(logits: Tensor, draws: Sequence[Draw], masks: PendingMasks | None = None) -> list[Chosen]:
    """One token per row of logits (R, V) fp32, which are changed: rules, then masks, then `sample`.

    Log-probabilities are of before. masks: of the draws' grammars, if there are any.
    """
    told = {row: draw.params.top_logprobs for row, draw in enumerate(draws) if draw.params.top_logprobs is not None}
    searched = {row: draw.candidate_count for row, draw in enumerate(draws) if draw.candidate_count}
    report, beams = RowLogprobs(logits, told), RowLogprobs(logits, searched)
    if beams.counts:
        logits[list(beams.counts)] = beams.logprobs  # since in beam search rules act on that
    apply_rules(logits, draws)
    if masks is not None:
        masks.apply(logits)
    token_ids = sample(logits, draws)
    logprobs = report.reports(token_ids)
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


class RowLogprobs:
    """Log-softmax of rows of a step's logits, taken before anything changes them; asked when the tokens are chosen."""

    def __init__(self, logits: Tensor, counts: Mapping[int, int]) -> None:
        """logits: (R, V) fp32. counts: by row, how many of the likeliest tokens are wanted. Copies those rows, and only those."""
        self.counts = counts
        if counts:
            self.logprobs = logits[list(counts)].log_softmax(dim=-1)

    def reports(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row. chosen: the token of every row."""
        if not self.counts:
            return {}
        picked = [chosen[row] for row in self.counts]
        own = self.logprobs[range(len(picked)), picked].tolist()
        top = self.logprobs.topk(max(self.counts.values()), dim=-1)
        reports = {}
        rows = zip(self.counts.items(), picked, own, top.indices.tolist(), top.values.tolist(), strict=True)
        for (row, count), token_id, logprob, top_ids, top_values in rows:
            best = tuple(map(TokenLogprob, top_ids[:count], top_values[:count]))
            reports[row] = TokenLogprobs(TokenLogprob(token_id, logprob), best)
        return reports

    def candidates(self, scores: Tensor, reports: Mapping[int, TokenLogprobs]) -> dict[int, Candidates]:
        """By row of a beam. scores: the same logits, after the rules. reports: of the rows that report log-probabilities."""
        if not self.counts:
            return {}
        count = min(max(self.counts.values()), scores.shape[-1])
        best = scores[list(self.counts)].topk(count, dim=-1)
        own = self.logprobs.gather(-1, best.indices)
        possible = torch.isfinite(best.values).sum(dim=-1).tolist()  # what is held off has no finite score, and comes last
        found = {}
        rows = zip(self.counts.items(), best.indices.tolist(), best.values.tolist(), own.tolist(), possible, strict=True)
        for (row, wanted), token_ids, values, logprobs, most in rows:
            end = min(wanted, most)
            top = reports[row].top if row in reports else None
            found[row] = Candidates(token_ids[:end], values[:end], logprobs[:end], top)
        return found


FIRST_RANKED_COUNT = 256  # tokens: most nuclei of real models are smaller
RANKED_GROWTH = 8  # how many times as many are ranked next
GROUPS_PER_TOKEN = 4  # of which one maximum each is looked at for the bound: hardly two of the likeliest tokens fall into one
BORDER_SLACK = 1e-3  # of a logit: min_p's border in logits is kept so far from its border in weights, whose rounding decides
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


def draw_token(row: Row, params: SamplingParams, uniform: float, ranked_count: int = FIRST_RANKED_COUNT) -> int:
    """The token that a number from [0, 1) stands for. row: (V,) logits, not all minus infinity. params: temperature above 0.

    ranked_count: how many to rank at first; changes nothing but the cost.
    """
    if params.top_k > 0 or params.top_p < 1.0:
        ids, weights = _nucleus(row, params, ranked_count)
    elif params.min_p > 0:
        border = float(row.max()) + params.temperature * math.log(params.min_p) - BORDER_SLACK
        ids = np.flatnonzero(row >= border)
        weights = _weights(row[ids], float(row.max()), params.temperature)
    else:
        return _pick(_weights(row, float(row.max()), params.temperature), uniform)
    if params.min_p > 0:  # the likeliest token's weight is 1
        weights[weights < params.min_p] = 0.0
    return int(ids[_pick(weights, uniform)])


def _nucleus(row: Row, params: SamplingParams, ranked_count: int) -> tuple[Ids, Numbers]:
    """Tokens that `top_k` and `top_p` leave, the likeliest first, and their weights. Equal ones in the order of their ids."""
    most = min(params.top_k or len(row), len(row))
    count = min(most, ranked_count) if params.top_p < 1.0 and not params.top_k else most
    largest = float(row.max())
    border: float | None = None
    while True:
        ids = _ranked(row, _likeliest(row, count))[:most]
        weights = _weights(row[ids], largest, params.temperature)
        sums = weights.cumsum()
        if border is None:
            total = sums[-1] if params.top_k else _weights(row, largest, params.temperature).sum()
            border = float(params.top_p * total)
        if sums[-1] >= border or len(ids) == most:
            # Those before which less than the border is reached; so at least the first.
            kept = 1 + int(np.searchsorted(sums[:-1], border, side="left")) if params.top_p < 1.0 else len(ids)
            return ids[:kept], weights[:kept]
        count *= RANKED_GROWTH


def _likeliest(row: Row, count: int) -> Ids:
    """Ids, ascending, of at least so many tokens, and of all that are as likely as any of them.

    Tokens are dealt into groups; of as many groups as tokens are wanted, the largest logits reach the bound.
    """
    group_tokens = len(row) // (GROUPS_PER_TOKEN * count)
    if group_tokens < 2:
        return np.arange(len(row))
    group_count = len(row) // group_tokens
    largest = row[: group_count * group_tokens].reshape(group_tokens, group_count).max(axis=0)
    bound = np.partition(largest, group_count - count)[group_count - count]
    return np.flatnonzero(row >= bound)


def _ranked(row: Row, ids: Ids) -> Ids:
    """By falling logit, equal ones by rising id: one sort of whole numbers, several times as fast as a stable one of floats."""
    bits = (row[ids] + np.float32(0.0)).view(np.int32)  # adding turns -0.0 into 0.0, which is equal to it
    rising = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    keys = (~rising << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def _weights(logits: Row, largest: float, temperature: float) -> Numbers:
    """Probabilities as multiples of the likeliest token's. fp64: a running sum in fp32 would give the last tokens a wrong share."""
    weights: Any = logits.astype(np.float64)
    weights -= largest
    weights /= temperature
    return np.exp(weights, out=weights)  # type: ignore[no-any-return]


def _pick(weights: Numbers, uniform: float) -> int:
    """Index of the first entry whose running sum passes uniform x total; never one of weight 0."""
    sums = weights.cumsum()
    index = np.searchsorted(sums, uniform * sums[-1], side="right")
    # Rounding can put the target at the total itself; the last entry with weight is then meant.
    return int(min(index, np.searchsorted(sums, sums[-1], side="left")))
