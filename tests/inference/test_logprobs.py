"""Log-probabilities are the log-softmax of raw logits, independent of sampling."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference.core import model_runner, scheduler
from inference.core.scheduler import StepPlan
from inference.engine import SamplingParams, TokenLogprobs
from inference.sampling.sampler import Draw, choose
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import (
    Outcome,
    collect,
    make_core,
    make_request,
    random_prompt,
    run_all,
)

HARD = SamplingParams(
    temperature=1.7,
    seed=3,
    top_k=4,
    min_p=0.1,
    repetition_penalty=1.5,
    logit_bias=((30, -50.0),),
    top_logprobs=20,
)


def reports(outcome: Outcome) -> list[TokenLogprobs]:
    assert len(outcome.logprobs) == len(outcome.token_ids)
    return outcome.logprobs


def reference(tiny: TinyCheckpoint, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the log-softmax of `transformers` at each output token's place."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny.directory), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.as_tensor(logits).log_softmax(-1)


def test_they_equal_the_reference_for_any_sampling(tiny: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(1), 40)

    outcome = run_all(make_core(tiny.directory), [make_request(prompt, 20, sampling=HARD)])[0]

    for exact, report in zip(
        reference(tiny, prompt, outcome.token_ids), reports(outcome), strict=True
    ):
        assert math.isclose(
            report.chosen.logprob, float(exact[report.chosen.token_id]), abs_tol=1e-4
        )
        assert [token.token_id for token in report.top] == exact.topk(20).indices.tolist()
        for token in report.top:
            assert math.isclose(token.logprob, float(exact[token.token_id]), abs_tol=1e-4)
    assert [report.chosen.token_id for report in reports(outcome)] == outcome.token_ids


def test_the_likeliest_come_first_and_sum_to_at_most_one(tiny: TinyCheckpoint) -> None:
    request = make_request(
        random_prompt(random.Random(2), 40),
        30,
        sampling=SamplingParams(temperature=1.0, seed=1, top_logprobs=20),
    )

    outcome = run_all(make_core(tiny.directory), [request])[0]

    for report in reports(outcome):
        values = [token.logprob for token in report.top]
        assert values == sorted(values, reverse=True)
        assert len({token.token_id for token in report.top}) == 20
        assert 0 < sum(map(math.exp, values)) <= 1 + 1e-6
        assert report.chosen.logprob <= values[0]


def check_prompt(tiny: TinyCheckpoint, prompt: list[int], outcome: Outcome, top: int) -> None:
    """Compare the log-probabilities of a prompt with those of `transformers`."""
    first, *others = outcome.prompt_logprobs

    assert (first.chosen.token_id, first.chosen.logprob, first.top) == (prompt[0], 0.0, ())
    assert [report.chosen.token_id for report in others] == prompt[1:]
    for exact, report in zip(reference(tiny, prompt[:1], prompt[1:]), others, strict=True):
        token = report.chosen
        assert math.isclose(token.logprob, float(exact[token.token_id]), abs_tol=1e-4)
        assert len(report.top) == top
        if top:
            assert math.isclose(report.top[0].logprob, float(exact.max()), abs_tol=1e-4)


@pytest.mark.parametrize("native", ["1", "0"])
def test_those_of_prompts_equal_the_reference_in_any_batch(
    tiny: TinyCheckpoint, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts share a cached prefix, take several steps each, and run beside others."""
    if native == "0":
        monkeypatch.setattr(model_runner, "supports", lambda *_: False)
    rng = random.Random(3)
    shared = random_prompt(rng, 64)
    prompts = [shared + random_prompt(rng, count) for count in (1, 70, 200)] + [[9]]
    core = make_core(tiny.directory, step_token_count_max=300)
    run_all(core, [make_request(prompts[1], 2)])
    scored = [
        make_request(prompt, 6, sampling=SamplingParams(prompt_logprobs=top))
        for top, prompt in enumerate(prompts)
    ]

    outcomes = run_all(core, [*scored, *(make_request(each, 6) for each in prompts)], 1)

    for top, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=False)):
        check_prompt(tiny, prompt, outcome, top)
        assert outcome.cached_token_count == 0
        plain = outcomes[len(prompts) + top]
        assert (outcome.token_ids, plain.prompt_logprobs) == (plain.token_ids, [])
    assert outcomes[5].cached_token_count, "others use the cache"


def test_those_of_prompts_survive_preemption(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory, step_token_count_max=32, running_sequence_count_max=1)
    prompts = [random_prompt(random.Random(seed), 100) for seed in range(2)]
    outcomes = {number: Outcome() for number in range(2)}
    sampling = SamplingParams(prompt_logprobs=0)

    assert core.add(0, make_request(prompts[0], 4, sampling=sampling))
    for _ in range(2):
        collect(core.step(), outcomes)
    assert core.add(1, make_request(prompts[1], 4, sampling=sampling, rank=-1000.0))
    while not core.idle:
        collect(core.step(), outcomes)

    assert core.scheduler.preemption_count == 1
    for number, prompt in enumerate(prompts):
        check_prompt(tiny, prompt, outcomes[number], 0)


def test_a_step_computes_logits_of_few_prompt_tokens(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 150,000 tokens in the vocabulary, the logits of a step would take gigabytes."""
    monkeypatch.setattr(scheduler, "SCORED_COUNT_MAX", 10)
    core = make_core(tiny.directory)
    counts = []
    plan = core.scheduler.schedule

    def recorded(*limits: int | None) -> StepPlan:
        planned = plan(*limits)
        counts.append(sum(chunk.scored_count for chunk in planned.chunks))
        return planned

    monkeypatch.setattr(core.scheduler, "schedule", recorded)
    prompts = [random_prompt(random.Random(seed), 40) for seed in range(3)]

    outcomes = run_all(
        core,
        [make_request(each, 2, sampling=SamplingParams(prompt_logprobs=1)) for each in prompts],
    )

    assert max(counts) == 10
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        check_prompt(tiny, prompt, outcome, 1)


@pytest.mark.parametrize("vocabulary_size", [1, 20, 5000])
def test_all_of_a_vocabulary_sum_to_one_and_the_chosen_one_is_exact(vocabulary_size: int) -> None:
    """They are computed from the raw logits, before bias, penalties and truncation."""
    logits = torch.randn(6, vocabulary_size, generator=torch.Generator().manual_seed(4)) * 5
    exact = logits.double().log_softmax(-1)
    plain, ruled = (
        SamplingParams(temperature=1.0, top_logprobs=vocabulary_size),
        replace(HARD, top_logprobs=vocabulary_size),
    )
    draws = [Draw(plain, row, 0) for row in range(3)] + [
        Draw(replace(ruled, logit_bias=((0, 3.0),)), row, 0) for row in range(3)
    ]

    chosen = choose(logits, draws)

    for row, each in enumerate(chosen):
        assert each.logprobs is not None
        assert math.isclose(
            math.fsum(math.exp(token.logprob) for token in each.logprobs.top), 1.0, abs_tol=1e-5
        )
        assert each.logprobs.chosen.token_id == each.token_id
        assert math.isclose(
            each.logprobs.chosen.logprob, float(exact[row, each.token_id]), abs_tol=1e-5
        )
        assert {token.token_id for token in each.logprobs.top} == set(range(vocabulary_size))


def test_rows_get_what_they_requested(tiny: TinyCheckpoint) -> None:
    """None, only the chosen one, and a few, in one batch, without changing tokens."""
    prompt = random_prompt(random.Random(3), 30)
    sampling = [
        SamplingParams(temperature=1.0, seed=9, top_logprobs=count) for count in (None, 0, 3)
    ]

    silent, alone, three = run_all(
        make_core(tiny.directory), [make_request(prompt, 12, sampling=each) for each in sampling]
    )

    assert silent.logprobs == []
    assert {len(report.top) for report in reports(alone)} == {0}
    assert {len(report.top) for report in reports(three)} == {3}
    assert silent.token_ids == alone.token_ids == three.token_ids
    assert [report.chosen for report in reports(alone)] == [
        report.chosen for report in reports(three)
    ]
