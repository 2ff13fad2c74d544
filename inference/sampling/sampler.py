"""Sampling of next tokens: greedy or random, row by row, after the rules were applied to the batch.

Random numbers are counter-based: the number for output token i of a sequence is a hash of its seed
and i. So results depend on the seed alone, not on other rows, the step, or preemption and
recomputation.

`RowLogprobs` computes the requested log-probabilities of output tokens. As in OpenAI's API, they
are the log-softmax of the model's logits before bias, penalties, constraints, temperature and
truncation, so they do not depend on the sampling parameters.

`draw_token` samples one token from a row of logits, looking at the likely tokens only. `top_k`,
`top_p` and `min_p` need ranked tokens, and ranking a whole vocabulary costs more than a small
model's forward pass. So a lower bound of the likely logits is computed first; only tokens above it
are ranked, and more if the nucleus is larger. The result equals that of a full ranking, bit for
bit: sums run from the most likely token on, so they do not depend on the number of ranked tokens,
and the total is summed over the whole row in either case.

It uses numpy row by row: a row fits the processor's cache, and results cannot depend on other rows.
Logits on a GPU stay there: `draw_together` ranks and sums whole rows, since each of these rows
would occupy a CPU for 2 ms with 128,000 tokens. Its sums differ by rounding alone.

Rules that change logits (bias, penalties, suppressed tokens) are applied to the whole batch at
once, only to the affected entries: rows without rules cost nothing.

Formulas, in the order of application (as in `transformers`, whose greedy search gives the same
tokens):
- bias: logit + bias, as in OpenAI's `logit_bias`;
- repetition penalty r over prompt and output: logit / r if positive, else logit * r (Keskar et al.
  2019, section 4.1, with the sign rule of `transformers` and vLLM);
- frequency and presence penalty over the output: logit - count * frequency - (count > 0) * presence
  (OpenAI);
- suppressed tokens: minus infinity, for end tokens before `min_output_tokens`.
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
from inference.sampling.grammar import Grammar, PendingMasks
from inference.sequences import uniform

ROWS_TOGETHER = 64  # with 128,000 tokens each, numbers in fp64 are 66 MB
RANKED_COUNT_MAX = 2**31  # of a row without `top_k`
FIRST_RANKED_COUNT = 256  # tokens: larger than most nuclei of real models
RANKED_GROWTH = 8  # factor by which the ranking is extended
GROUPS_PER_TOKEN = 4  # groups, whose maxima give the bound: the likely tokens rarely share a group
# in logits: tolerance for rounding differences between logits and weights at min_p's border
BORDER_SLACK = 1e-3


class SeenTokens:
    """Distinct token ids of a sequence, with the count of each in its output."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slots = {
            token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))
        }
        capacity = max(2 * len(self._slots), 64)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(capacity, dtype=np.float32)

    @property
    def token_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Distinct ids, as a view that is valid until the next `add`."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Counts in the output of each of `token_ids`; 0 for tokens that are in the prompt only."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of one row. `seed` is any integer, and `index` that of the output token,
    from 0.

    `seen` is set if there are penalties. `held_off_ids` are suppressed token ids. `grammar` is in
    its current state. `candidate_count` is the number of candidates wanted; 0 to sample one token.
    """

    params: SamplingParams
    seed: int
    index: int
    seen: SeenTokens | None = None
    held_off_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    candidate_count: int = 0


def apply_rules(logits: Tensor, rows: Sequence[Draw]) -> None:
    """Apply each row's rules to logits (R, V) fp32, in place."""
    biased = [row for row, ruled in enumerate(rows) if ruled.params.logit_bias]
    if biased:
        _add_biases(logits, biased, [rows[row].params for row in biased])
    penalised = [row for row, ruled in enumerate(rows) if ruled.seen is not None]
    if penalised:
        _penalise(logits, penalised, [rows[row] for row in penalised])
    entries = [(row, token_id) for row, ruled in enumerate(rows) for token_id in ruled.held_off_ids]
    if entries:
        at = torch.tensor(entries, device=logits.device)
        logits[at[:, 0], at[:, 1]] = float("-inf")


def _add_biases(logits: Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    entries = [
        (row, token_id, bias)
        for row, each in zip(rows, params, strict=True)
        for token_id, bias in each.logit_bias
    ]
    row_ids, token_ids, biases = (
        torch.tensor(each, device=logits.device) for each in zip(*entries, strict=True)
    )
    logits.index_put_((row_ids, token_ids), biases.to(logits.dtype), accumulate=True)


def _penalise(logits: Tensor, rows: list[int], ruled: list[Draw]) -> None:
    seen = [each.seen for each in ruled if each.seen is not None]
    lengths = torch.tensor([len(each.token_ids) for each in seen])

    def spread(values: list[float]) -> Tensor:
        return placed(torch.tensor(values, dtype=logits.dtype).repeat_interleave(lengths))

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(logits.device)

    row_ids = placed(torch.tensor(rows).repeat_interleave(lengths))
    token_ids = placed(torch.from_numpy(np.concatenate([each.token_ids for each in seen])))
    counts = placed(torch.from_numpy(np.concatenate([each.output_counts for each in seen])))
    repetition = spread([each.params.repetition_penalty for each in ruled])
    values = logits[row_ids, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * spread([each.params.frequency_penalty for each in ruled])
    values -= (counts > 0) * spread([each.params.presence_penalty for each in ruled])
    logits[row_ids, token_ids] = values


@dataclass(frozen=True, slots=True)
class Candidates:
    """Best next tokens of one sequence, in descending order; only tokens with finite scores.

    `scores` are log-probabilities after bias and penalties, `logprobs` the model's own. `top` has
    the most likely tokens if requested.
    """

    token_ids: Sequence[int]
    scores: Sequence[float]
    logprobs: Sequence[float]
    top: tuple[TokenLogprob, ...] | None = None


class Chosen(NamedTuple):
    """A row's next token. `logprobs` is set if requested, `candidates` for a scored sequence;
    `following` has the tokens after it where drafts were right.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None
    following: tuple[Chosen, ...] = ()


def choose(
    logits: Tensor, draws: Sequence[Draw], masks: PendingMasks | None = None
) -> list[Chosen]:
    """Choose one token per row of logits (R, V) fp32, which are modified in place by rules, then
    masks, then `sample`.

    Log-probabilities are computed before the modifications. `masks` are those of the draws'
    grammars, None without any.
    """
    top_counts = {
        row: draw.params.top_logprobs
        for row, draw in enumerate(draws)
        if draw.params.top_logprobs is not None
    }
    scored = {row: draw.candidate_count for row, draw in enumerate(draws) if draw.candidate_count}
    report, scores = RowLogprobs(logits, top_counts), RowLogprobs(logits, scored)
    if scores.counts:
        # For candidates, rules apply to log-probabilities.
        logits[list(scores.counts)] = scores.logprobs
    apply_rules(logits, draws)
    if masks is not None:
        masks.apply(logits)
    token_ids = sample(logits, draws)
    logprobs = report.reports(token_ids)
    candidates = scores.candidates(logits, logprobs)
    return [
        Chosen(token_id, logprobs.get(row), candidates.get(row))
        for row, token_id in enumerate(token_ids)
    ]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token id per row of logits (R, V) fp32.

    Logits are divided by the temperature, then `top_k` keeps the k largest, `top_p` the smallest
    set of those that reaches probability p, and `min_p` those at least that fraction as likely as
    the most likely one. Ties at the border of top_k go to the lower id.
    """
    if logits.device.type == "cuda":
        return draw_together(logits, draws)
    rows = logits.numpy()
    chosen = []
    for row, draw in zip(rows, draws, strict=True):
        if draw.params.temperature > 0:
            chosen.append(draw_token(row, draw.params, uniform(draw.seed, draw.index)))
        else:
            chosen.append(int(row.argmax()))
    return chosen


def prompt_logprobs(
    logits: Tensor, token_ids: Sequence[int], top_count: int
) -> list[TokenLogprobs]:
    """Compute the log-probabilities of one token per row of logits (R, V) fp32."""
    report = RowLogprobs(logits, dict.fromkeys(range(len(token_ids)), top_count))
    return list(report.reports(token_ids).values())


class RowLogprobs:
    """Log-softmax of rows of a step's logits, computed before these are modified."""

    def __init__(self, logits: Tensor, counts: Mapping[int, int]) -> None:
        """Copy the rows of logits (R, V) in `counts`, which has the number of top tokens by row."""
        self.counts = counts
        if counts:
            self.logprobs = logits[list(counts)].log_softmax(dim=-1)

    def reports(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Compute the log-probabilities by row. `chosen` has the token of every row."""
        if not self.counts:
            return {}
        picked = [chosen[row] for row in self.counts]
        own = self.logprobs[range(len(picked)), picked].tolist()
        top = self.logprobs.topk(max(self.counts.values()), dim=-1)
        reports = {}
        rows = zip(
            self.counts.items(), picked, own, top.indices.tolist(), top.values.tolist(), strict=True
        )
        for (row, count), token_id, logprob, top_ids, top_values in rows:
            best = tuple(map(TokenLogprob, top_ids[:count], top_values[:count]))
            reports[row] = TokenLogprobs(TokenLogprob(token_id, logprob), best)
        return reports

    def candidates(
        self, scores: Tensor, reports: Mapping[int, TokenLogprobs]
    ) -> dict[int, Candidates]:
        """Select the candidates by row. `scores` are the logits after the rules."""
        if not self.counts:
            return {}
        count = min(max(self.counts.values()), scores.shape[-1])
        best = scores[list(self.counts)].topk(count, dim=-1)
        own = self.logprobs.gather(-1, best.indices)
        # suppressed tokens have infinite scores and sort last
        possible = torch.isfinite(best.values).sum(dim=-1).tolist()
        found = {}
        rows = zip(
            self.counts.items(),
            best.indices.tolist(),
            best.values.tolist(),
            own.tolist(),
            possible,
            strict=True,
        )
        for (row, requested_count), token_ids, values, logprobs, possible_count in rows:
            end = min(requested_count, possible_count)
            top = reports[row].top if row in reports else None
            found[row] = Candidates(token_ids[:end], values[:end], logprobs[:end], top)
        return found


def draw_together(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample like `sample`, for many rows at once and on the device of the logits."""
    found: dict[int, int] = {}
    for ranks in (False, True):
        rows = [row for row, draw in enumerate(draws) if _is_ranked(draw.params) is ranks]
        for start in range(0, len(rows), ROWS_TOGETHER):
            some = rows[start : start + ROWS_TOGETHER]
            drawn = _draw_rows(logits[some], [draws[row] for row in some], ranks)
            found |= zip(some, drawn.tolist(), strict=True)
    return [found[row] for row in range(len(draws))]


def _is_ranked(params: SamplingParams) -> bool:
    """Return whether sampling needs the tokens in the order of logits, not in that of ids."""
    return params.temperature == 0 or params.top_k > 0 or params.top_p < 1.0


def _draw_rows(logits: Tensor, draws: Sequence[Draw], ranks: bool) -> Tensor:
    """Sample one token per row: (R, V) -> (R,). `ranks` is `_is_ranked`, equal for all rows."""
    numbers = []
    for draw in draws:
        params = draw.params
        if params.temperature > 0:
            top_p = params.top_p if params.top_p < 1.0 else math.inf
            top_k, chance = params.top_k or RANKED_COUNT_MAX, uniform(draw.seed, draw.index)
            numbers.append((params.temperature, top_k, top_p, params.min_p, chance))
        else:
            numbers.append((1.0, 1, math.inf, 0.0, 0.0))
    temperatures, top_k, top_p, min_p, chances = torch.tensor(
        numbers, dtype=torch.float64, device=logits.device
    ).T[:, :, None]
    ids: Tensor | None = None
    if ranks:
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = logits.double().sub_(largest).div_(temperatures).exp_()
    if ranks:
        weights *= torch.arange(weights.shape[-1], device=logits.device) < top_k
        sums = weights.cumsum(dim=-1)
        # The first token is kept in any case.
        weights[:, 1:] *= sums[:, :-1] < top_p * sums[:, -1:]
    weights *= weights >= min_p  # the most likely token has weight 1
    sums = weights.cumsum(dim=-1)
    totals = sums[:, -1:].contiguous()
    # As `_pick`.
    index = torch.minimum(
        torch.searchsorted(sums, chances * totals, right=True), torch.searchsorted(sums, totals)
    ).clamp_max_(sums.shape[-1] - 1)
    return (index if ids is None else ids.gather(-1, index)).flatten()


Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


def draw_token(
    row: Row, params: SamplingParams, uniform: float, ranked_count: int = FIRST_RANKED_COUNT
) -> int:
    """Pick the token for a random number from [0, 1). `row` (V,) has logits, not all minus
    infinity; `params` has a temperature above 0.

    `ranked_count` tokens are ranked first; the number affects only the speed.
    """
    if params.top_k > 0 or params.top_p < 1.0:
        ids, weights = _nucleus(row, params, ranked_count)
    elif params.min_p > 0:
        border = float(row.max()) + params.temperature * math.log(params.min_p) - BORDER_SLACK
        ids = np.flatnonzero(row >= border)
        weights = _weights(row[ids], float(row.max()), params.temperature)
    else:
        return _pick(_weights(row, float(row.max()), params.temperature), uniform)
    if params.min_p > 0:  # the most likely token has weight 1
        weights[weights < params.min_p] = 0.0
    return int(ids[_pick(weights, uniform)])


def _nucleus(row: Row, params: SamplingParams, ranked_count: int) -> tuple[Ids, Numbers]:
    """Select the tokens that `top_k` and `top_p` keep, with weights, ranked by weight, then id."""
    limit = min(params.top_k or len(row), len(row))
    count = min(limit, ranked_count) if params.top_p < 1.0 and not params.top_k else limit
    largest = float(row.max())
    border: float | None = None
    while True:
        ids = _ranked(row, _likeliest(row, count))[:limit]
        weights = _weights(row[ids], largest, params.temperature)
        sums = weights.cumsum()
        if border is None:
            total = sums[-1] if params.top_k else _weights(row, largest, params.temperature).sum()
            border = float(params.top_p * total)
        if sums[-1] >= border or len(ids) == limit:
            # Keep tokens until the border is reached, at least one.
            kept = (
                1 + int(np.searchsorted(sums[:-1], border, side="left"))
                if params.top_p < 1.0
                else len(ids)
            )
            return ids[:kept], weights[:kept]
        count *= RANKED_GROWTH


def _likeliest(row: Row, count: int) -> Ids:
    """Find at least `count` most likely tokens, including ties; return their ids in ascending
    order.

    Tokens are dealt into groups; the `count` largest group maxima give the bound.
    """
    group_tokens = len(row) // (GROUPS_PER_TOKEN * count)
    if group_tokens < 2:
        return np.arange(len(row))
    group_count = len(row) // group_tokens
    largest = row[: group_count * group_tokens].reshape(group_tokens, group_count).max(axis=0)
    bound = np.partition(largest, group_count - count)[group_count - count]
    return np.flatnonzero(row >= bound)


def _ranked(row: Row, ids: Ids) -> Ids:
    """Sort ids by descending logit, then id. Integers sort several times as fast as floats."""
    bits = (row[ids] + np.float32(0.0)).view(np.int32)  # the addition turns -0.0 into the equal 0.0
    rising = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    keys = (~rising << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def _weights(logits: Row, largest: float, temperature: float) -> Numbers:
    """Compute fp64 weights relative to the most likely token's; fp32 sums would distort them."""
    weights: Any = logits.astype(np.float64)
    weights -= largest
    weights /= temperature
    return np.exp(weights, out=weights)  # type: ignore[no-any-return]


def _pick(weights: Numbers, uniform: float) -> int:
    """Find the first entry with weight whose running sum exceeds `uniform` times the total."""
    sums = weights.cumsum()
    index = np.searchsorted(sums, uniform * sums[-1], side="right")
    # Rounding can make the target equal to the total, which means the last entry with weight.
    return int(min(index, np.searchsorted(sums, sums[-1], side="left")))
