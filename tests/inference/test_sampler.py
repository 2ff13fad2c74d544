"""Sampling follows the requested distribution, and a seed's result does not depend on the batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from inference.engine import SamplingParams
from inference.sampling.sampler import Draw, sample
from inference.sequences import uniform
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all

DRAW_COUNT = 20_000

CUTS = [
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.6, top_p=0.93),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=25, min_p=0.08),
    SamplingParams(temperature=1.0, top_p=0.95, min_p=0.03),
    SamplingParams(temperature=1.4, top_k=30, top_p=0.9, min_p=0.05),
]


def frequencies(logits: torch.Tensor, params: SamplingParams, seed: int = 5) -> torch.Tensor:
    """Count the samples of each token over the output positions of one sequence."""
    rows = logits.expand(DRAW_COUNT, -1)
    tokens = sample(rows, [Draw(params, seed, index) for index in range(DRAW_COUNT)])
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Sum of (observed - expected)^2 / expected over the tokens that are possible."""
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0, "an impossible token was drawn"
    expected = probabilities[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "keep"),
    [
        (SamplingParams(temperature=1.0), 12),
        (SamplingParams(temperature=0.6), 12),
        (SamplingParams(temperature=1.3, top_k=5), 5),
        (SamplingParams(temperature=1.0, top_k=1), 1),
        (SamplingParams(temperature=1.0, min_p=0.25), 9),
        (SamplingParams(temperature=1.0, min_p=0.25, top_k=3), 3),
        (SamplingParams(temperature=0.7, min_p=0.25), 7),
    ],
)
def test_frequencies_follow_the_softmax(params: SamplingParams, keep: int) -> None:
    """Chi-square with 11 degrees of freedom exceeds 31.3 once in a thousand; seeded."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    exact = (logits.double() / params.temperature).softmax(-1)
    threshold = exact.sort(descending=True).values[keep - 1]
    exact = exact.where(exact >= threshold, torch.zeros_like(exact))

    assert chi_square(frequencies(logits, params), exact / exact.sum()) < 31.3


def exact_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Return the exact distribution: `top_k`, then `top_p` of the rest, then `min_p`."""
    weights = [math.exp(logit / params.temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda token: -weights[token])[: params.top_k or None]
    total, reached, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if reached >= params.top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def chi_square_bound(possible_count: int) -> float:
    """Return the 99.9 % quantile of chi-square: Wilson and Hilferty 1931."""
    freedom = max(possible_count - 1, 1)
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "params",
    CUTS,
    ids=lambda params: f"t{params.temperature} k{params.top_k} p{params.top_p} m{params.min_p}",
)
def test_frequencies_follow_the_definition_of_all_cuts(params: SamplingParams) -> None:
    """The nearest other definitions are rejected by the same test."""
    logits = torch.randn(60, generator=torch.Generator().manual_seed(6)) * 1.5
    drawn = frequencies(logits, params)

    exact = torch.tensor(exact_distribution(logits.tolist(), params), dtype=torch.float64)
    possible = int((exact > 0).sum())
    assert 5 < possible < 60, "else nothing is cut, or all"
    assert chi_square(drawn, exact) < chi_square_bound(possible)
    assert int((drawn > 0).sum()) == possible
    hotter = torch.tensor(
        exact_distribution(logits.tolist(), replace(params, temperature=params.temperature * 1.06))
    )
    same = (hotter > 0) == (exact > 0)
    assert not bool(same.all()) or chi_square(drawn, hotter) > chi_square_bound(possible), (
        "a temperature of 6 % more is seen"
    )


def test_the_chi_square_sees_a_wrong_temperature() -> None:
    """A planted fault: one part in ten suffices."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))

    drawn = frequencies(logits, SamplingParams(temperature=0.9))

    assert chi_square(drawn, logits.double().softmax(-1)) > 31.3


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    kept = {
        p: set(
            frequencies(logits, SamplingParams(temperature=1.0, top_p=p))
            .nonzero()
            .flatten()
            .tolist()
        )
        for p in (0.3, 0.6, 0.75)
    }

    assert kept == {0.3: {0}, 0.6: {0, 1}, 0.75: {0, 1, 2}}


def test_top_p_counts_within_what_top_k_left() -> None:
    """0.4 is 57 % of 0.4 and 0.3, so p = 0.5 keeps one token, not two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    counts = frequencies(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5))

    assert counts.nonzero().flatten().tolist() == [0]


def test_temperature_zero_is_greedy_in_a_mixed_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    mixed = [
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=2.0, top_k=3),
    ] * 2

    tokens = sample(logits, [Draw(params, 1, 0) for params in mixed])

    assert tokens[0] == int(logits[0].argmax())
    assert tokens[3] == int(logits[3].argmax())


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(3))
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=20),
    ]
    draws = [Draw(kinds[row % 3], seed=row, index=row * 7) for row in range(8)]

    together = sample(logits, draws)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(8)]

    assert together == alone


def test_uniform_numbers_are_in_range_spread_and_repeatable() -> None:
    numbers = [uniform(seed, index) for seed in (0, -1, 1 << 62) for index in range(2000)]

    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(12, 34) == uniform(12, 34)


def test_a_seeded_sequence_is_independent_of_concurrent_sequences(tiny: TinyCheckpoint) -> None:
    rng = random.Random(8)
    seeded = make_request(
        random_prompt(rng, 40), sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=1234)
    )
    others = [
        make_request(
            random_prompt(rng, rng.randrange(1, 90)), sampling=SamplingParams(temperature=1.0)
        )
        for _ in range(9)
    ]

    alone = run_all(make_core(tiny.directory), [seeded])[0]
    crowded = run_all(make_core(tiny.directory), [*others, seeded])[-1]

    assert crowded.token_ids == alone.token_ids


def test_sequences_without_a_seed_differ(tiny: TinyCheckpoint) -> None:
    request = make_request(
        random_prompt(random.Random(9), 20), sampling=SamplingParams(temperature=1.5)
    )

    outcomes = run_all(make_core(tiny.directory), [request] * 4)

    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 4
