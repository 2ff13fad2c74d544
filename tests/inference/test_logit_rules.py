"""Bias, penalties and suppressed tokens: formulas, distribution, other rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import EngineFinishReason, SamplingParams
from inference.sampling.sampler import Draw, SeenTokens, choose
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all
from tests.inference.test_sampler import DRAW_COUNT, chi_square

PROMPT = (0, 1, 1, 4)
OUTPUT = (1, 2, 2, 2, 9)

RULES = [
    SamplingParams(temperature=1.0, logit_bias=((3, 1.5), (5, -2.0))),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, repetition_penalty=0.7),
    SamplingParams(temperature=1.0, presence_penalty=0.8),
    SamplingParams(temperature=1.0, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, frequency_penalty=-0.2, presence_penalty=-0.3),
    SamplingParams(
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias=((1, 1.0), (7, -0.5)),
    ),
]


def seen_of(prompt: tuple[int, ...] = PROMPT, output: tuple[int, ...] = OUTPUT) -> SeenTokens:
    seen = SeenTokens(prompt)
    for token_id in output:
        seen.add(token_id)
    return seen


def expected_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Compute the formulas, one token at a time, in double precision."""
    wanted = logits.double().clone()
    for token_id, bias in params.logit_bias:
        wanted[token_id] += bias
    for token_id in {*PROMPT, *OUTPUT}:
        value = float(wanted[token_id])
        wanted[token_id] = (
            value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        )
    for token_id in set(OUTPUT):
        wanted[token_id] -= (
            OUTPUT.count(token_id) * params.frequency_penalty + params.presence_penalty
        )
    return wanted


@pytest.mark.parametrize("params", RULES, ids=lambda params: repr(params)[15:60])
def test_frequencies_follow_the_softmax_of_the_changed_logits(params: SamplingParams) -> None:
    """Chi-square with 11 degrees of freedom exceeds 31.3 once in a thousand; seeded."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    exact = (expected_logits(logits, params) / params.temperature).softmax(-1)
    rows = logits.repeat(DRAW_COUNT, 1)

    seen = seen_of() if params.penalises else None
    chosen = choose(rows, [Draw(params, 5, index, seen) for index in range(DRAW_COUNT)])

    counts = torch.bincount(torch.tensor([each.token_id for each in chosen]), minlength=12)
    assert chi_square(counts, exact) < 31.3
    assert chi_square(counts, logits.double().softmax(-1)) > 31.3, (
        "a rule that does nothing would be seen"
    )


def test_a_rule_changes_its_own_row_and_no_other() -> None:
    logits = torch.randn(len(RULES) + 2, 12, generator=torch.Generator().manual_seed(2))
    draws = [Draw(params, 3, 0, seen_of() if params.penalises else None) for params in RULES]
    before, changed = logits.clone(), logits.clone()

    choose(changed, [Draw(SamplingParams(), 3, 0), *draws, Draw(SamplingParams(), 3, 0)])

    assert torch.equal(changed[0], before[0])
    assert torch.equal(changed[-1], before[-1])
    for row, params in enumerate(RULES, 1):
        assert torch.allclose(
            changed[row].double(), expected_logits(before[row], params), atol=1e-5
        )


def test_held_off_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[9.0, 8.0, 0.0]])

    assert choose(logits, [Draw(SamplingParams(), 0, 0, held_off_ids=(0, 1))])[0].token_id == 2


def test_seen_tokens_are_counted_beyond_the_first_capacity() -> None:
    seen = SeenTokens([5, 5, 6])
    output = [token_id for _ in range(2) for token_id in range(300)]

    for token_id in output:
        seen.add(token_id)

    counts = dict(zip(seen.token_ids.tolist(), seen.output_counts.tolist(), strict=True))
    assert counts == dict.fromkeys(range(300), 2.0)


def reference(
    directory: Path, prompt: list[int], token_count: int, params: SamplingParams
) -> list[int]:
    """Return the greedy output of `transformers` with its own logits processors."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    ids = torch.tensor([prompt])
    biases = {(token_id,): bias for token_id, bias in params.logit_bias} or None
    options = {
        "max_new_tokens": token_count,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        repetition_penalty=params.repetition_penalty,
        sequence_bias=biases,
        **options,
    )
    return list(generated[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(repetition_penalty=1.2, logit_bias=((50, 4.0), (60, -30.0), (61, 5.5))),
    ],
    ids=["penalty", "reward", "penalty and bias"],
)
def test_greedy_tokens_equal_transformers(tiny: TinyCheckpoint, params: SamplingParams) -> None:
    """Repetition penalty and bias have equal definitions there."""
    prompt = random_prompt(random.Random(31), 60)

    plain = run_all(make_core(tiny.directory), [make_request(prompt, 40)])[0]
    ruled = run_all(make_core(tiny.directory), [make_request(prompt, 40, sampling=params)])[0]

    assert ruled.token_ids == reference(tiny.directory, prompt, 40, params)
    assert ruled.token_ids != plain.token_ids


def test_penalties_survive_preemption_and_company(tiny: TinyCheckpoint) -> None:
    """A preempted sequence is recomputed; its seen tokens are counted once."""
    rng = random.Random(6)
    params = SamplingParams(
        temperature=1.0,
        seed=17,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    )
    requests = [
        make_request(random_prompt(rng, 60), 150, sampling=params if row % 2 else SamplingParams())
        for row in range(8)
    ]
    crowded = make_core(
        tiny.directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1
    )

    alone = [run_all(make_core(tiny.directory), [request])[0] for request in requests]
    together = run_all(crowded, requests)

    assert crowded.statistics().preemption_count > 0
    assert [outcome.token_ids for outcome in together] == [outcome.token_ids for outcome in alone]


def test_nothing_ends_the_output_before_its_least_length(tiny: TinyCheckpoint) -> None:
    """Hot samples meet an end token soon; suppressed, they continue to the minimum."""
    ends = frozenset(range(7, 60))
    requests = [
        make_request(
            [9, 10],
            60,
            sampling=SamplingParams(temperature=2.0, seed=seed),
            stop_token_ids=ends,
            min_output_tokens=12,
        )
        for seed in range(8)
    ]

    outcomes = run_all(make_core(tiny.directory), requests)

    for outcome in outcomes:
        assert not ends & set(outcome.token_ids[:12])
        assert len(outcome.token_ids) > 12
        assert outcome.finished is not None
        assert outcome.finished.reason is EngineFinishReason.STOP


def test_a_stop_sequence_is_not_searched_before_the_least_length(tiny: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(20), 30)
    free = run_all(make_core(tiny.directory), [make_request(prompt, 40)])[0]
    stop = free.text[3:5]

    early, late = run_all(
        make_core(tiny.directory),
        [
            make_request(prompt, 40, stop_sequences=(stop,)),
            make_request(prompt, 40, stop_sequences=(stop,), min_output_tokens=40),
        ],
    )

    assert len(early.token_ids) < 40
    assert (late.token_ids, late.text) == (free.token_ids, free.text)
