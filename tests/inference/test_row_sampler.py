"""Ranking only likely tokens draws the same token as ranking the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.engine import SamplingParams
from inference.sampling import sampler as row_sampler
from inference.sampling.sampler import (
    ROWS_TOGETHER,
    Draw,
    Row,
    draw_together,
    draw_token,
    sample,
)

EDGES = (0.0, 2.0**-53, 0.5, 1 - 2.0**-53)


def ranking_all(row: Row, params: SamplingParams, uniform: float) -> int:
    """Draw by the definition in plain torch: all tokens ranked, cut, summed."""
    probabilities = (torch.from_numpy(row).double() / params.temperature).softmax(dim=-1)
    ranked, ids = probabilities, torch.arange(len(row))
    if params.top_k > 0 or params.top_p < 1.0:
        ranked, ids = probabilities.sort(descending=True, stable=True)
        ranked = ranked.masked_fill(torch.arange(len(row)) >= (params.top_k or len(row)), 0.0)
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= params.top_p * ranked.sum(), 0.0)
    ranked = ranked.masked_fill(ranked < params.min_p * ranked.max(), 0.0)
    sums = ranked.cumsum(dim=-1)
    index = int(torch.searchsorted(sums, uniform * sums[-1], right=True))
    return int(ids[min(index, int((sums < sums[-1]).sum()))])


def cases(seed: int, count: int) -> Iterator[tuple[Row, SamplingParams, float]]:
    """Return rows of all kinds: flat, peaked, with ties, masked, of one token."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        size = int(rng.choice([1, 2, 3, 65, 400, 3000]))
        row = (rng.standard_normal(size) * rng.choice([0.1, 1.0, 4.0])).astype(np.float32)
        if index % 3 == 0:
            row = np.round(row * 2) / np.float32(2)  # ties, and zeros of both signs
        if index % 4 == 0:
            row[rng.random(size) < rng.choice([0.1, 0.95])] = -np.inf
            row[rng.integers(size)] = 1.0
        params = SamplingParams(
            temperature=float(rng.choice([0.05, 0.7, 1.0, 2.0])),
            top_p=float(rng.choice([1.0, 1e-6, 0.3, 0.9, 0.999, 1 - 1e-12])),
            top_k=int(rng.choice([0, 0, 1, 2, 40, 5000])),
            min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5, 1.0])),
        )
        yield row, params, EDGES[index % 4] if index % 5 == 0 else float(rng.random())


@pytest.mark.parametrize("ranked_count", [1, 2, 7, 256, 10**6])
def test_how_many_are_ranked_first_changes_nothing(ranked_count: int) -> None:
    """Exactly: both ways round alike, so even numbers on a border draw the same."""
    for row, params, uniform in cases(1, 1500):
        assert draw_token(row, params, uniform, ranked_count) == draw_token(row, params, uniform)


def test_it_draws_what_ranking_all_in_torch_draws() -> None:
    """Except at borders that rounding moves, met once in some 10^12 draws."""
    for row, params, uniform in cases(2, 3000):
        if 0 < uniform < 1 - 1e-9 and params.top_p < 1 - 1e-9:
            assert draw_token(row, params, uniform) == ranking_all(row, params, uniform)


def test_rows_drawn_together_are_those_drawn_one_by_one() -> None:
    """Draw rows of all kinds in one batch, greedy ones too, except on borders moved by rounding."""
    alike = [case for case in cases(5, 4000) if len(case[0]) == 400 and 0 < case[2] < 1 - 1e-9]
    rows = torch.from_numpy(np.stack([row for row, _, _ in alike]))
    draws = [
        Draw(replace(params, temperature=0.0) if index % 7 == 0 else params, index, 3)
        for index, (_, params, _) in enumerate(alike)
        if params.top_p < 1 - 1e-9 or params.top_p == 1
    ]
    rows = rows[[draw.seed for draw in draws]]
    assert len(draws) > 3 * ROWS_TOGETHER

    assert draw_together(rows, draws) == sample(rows, draws)


def test_a_large_vocabulary_is_not_ranked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts instead of times the work: a peaked row of 150,000 tokens ranks only hundreds."""
    ranked: list[int] = []
    rank = row_sampler._ranked

    def counting(row: Row, ids: row_sampler.Ids) -> row_sampler.Ids:
        ranked.append(len(ids))
        return rank(row, ids)

    monkeypatch.setattr(row_sampler, "_ranked", counting)
    rng = np.random.default_rng(3)
    row = (rng.standard_normal(150_000) * 2).astype(np.float32)
    row[:40] += 14

    for params in (
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=50),
    ):
        draw_token(row, params, 0.3)

    assert len(ranked) == 2
    assert max(ranked) < 1000


def test_forbidden_tokens_are_never_drawn() -> None:
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[7, 500]] = 0.0

    drawn = {
        draw_token(row, SamplingParams(temperature=1.0, top_p=p, top_k=k, min_p=m), uniform)
        for p in (1.0, 0.99)
        for k in (0, 900)
        for m in (0.0, 0.1)
        for uniform in EDGES
    }

    assert drawn == {7, 500}
