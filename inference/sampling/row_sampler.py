"""Draws one token from one row of logits, at the cost of looking at the likely tokens only.

The cuts `top_k`, `top_p` and `min_p` are of a ranked list, and ranking a whole vocabulary costs more than a small model's forward
pass. So a bound is found first that at least so many tokens reach; only those are ranked, and more if the nucleus turns out to be
larger. The result is the one that ranking all of them gives, bit for bit: sums run from the likeliest token on, so they do not
depend on how many follow, and what they are compared with is summed over the whole row in either case.

numpy, row by row: a row's numbers stay in the processor's cache, and what a row draws cannot depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from inference.engine import SamplingParams

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
