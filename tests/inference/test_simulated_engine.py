"""Engine for load tests: description and timing; answers say that it is simulated."""

from __future__ import annotations

import pytest

from inference.adapters.torch_engine import TorchEngine
from inference.core.engine_core import EngineCore
from inference.core.options import CostModel, EngineOptions
from inference.core.simulated_runner import SENTENCE, SimulatedRunner
from inference.engine import EngineFinishReason, GrammarKind, ResponseFormat, SamplingParams
from inference.errors import RequestImpossible
from inference.limits import EngineLimits
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request, run_all
from tests.inference.worker_engines import prompt, run, serving, settings_for

INSTANT = CostModel(time_scale=0.0)
# Tokens in and out, and output tokens per second of two H200: see `inference.core.options`.
PUBLISHED = [(1000, 1000, 2 * 2587), (1024, 8192, 2 * 2009), (8192, 1024, 2 * 537)]


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_s += seconds


def simulated_core(
    tiny: TinyCheckpoint, cost: CostModel, time: FakeTime, step_token_count_max: int = 256
) -> EngineCore:
    core = EngineCore(
        EngineOptions(
            str(tiny.directory), EngineLimits(2048, step_token_count_max), simulation=cost
        )
    )
    core._runner = SimulatedRunner(
        cost, Tokenizer(tiny.directory), clock=time.clock, sleep=time.sleep
    )
    return core


@pytest.mark.parametrize(("input_count", "output_count", "published"), PUBLISHED)
def test_the_default_costs_are_those_that_were_published(
    input_count: int, output_count: int, published: int
) -> None:
    """At full batches, where computing takes longer than reading the weights."""
    cost = CostModel()
    computed_us = (input_count + output_count) * cost.token_us
    attended_us = output_count * (input_count + output_count / 2) * cost.context_token_us

    assert output_count * 1e6 / (computed_us + attended_us) == pytest.approx(published, rel=0.01)


def test_steps_take_the_time_of_the_cost_model(tiny: TinyCheckpoint) -> None:
    """A prompt in three chunks, then single tokens, timed by hand calculation."""
    cost, time = CostModel(token_us=1000.0, weights_ms=5.0, context_token_us=10.0), FakeTime()
    core = simulated_core(tiny, cost, time, step_token_count_max=64)

    [outcome] = run_all(core, [make_request(prompt(1, 150), 4)])

    prefill_s = (0.064 + 0.0) + (0.064 + 0.00064) + (0.022 + 0.00128)
    decode_s = sum(0.005 + context * 1e-5 for context in (150, 151, 152))
    assert len(outcome.token_ids) == 4
    assert time.now_s - 100.0 == pytest.approx(prefill_s + decode_s, abs=1e-9)


def test_a_cached_prefix_is_free_and_a_batch_reads_weights_once(tiny: TinyCheckpoint) -> None:
    cost, time = CostModel(token_us=1000.0, weights_ms=5.0, context_token_us=0.0), FakeTime()
    core = simulated_core(tiny, cost, time)
    run_all(core, [make_request(prompt(1, 160), 1)])
    cold_s = time.now_s - 100.0

    warm = run_all(core, [make_request(prompt(1, 160), 1) for _ in range(3)], first_number=1)

    assert cold_s == pytest.approx(0.160)
    assert [outcome.cached_token_count for outcome in warm] == [144, 144, 144]
    assert time.now_s - 100.0 - cold_s == pytest.approx(3 * 0.016)


def test_scheduling_time_is_hidden_behind_the_simulated_step(tiny: TinyCheckpoint) -> None:
    cost, time = CostModel(token_us=1000.0, weights_ms=5.0, context_token_us=0.0), FakeTime()
    core = simulated_core(tiny, cost, time)
    core.add(0, make_request(prompt(1, 20), 5))
    steps = 0

    while not core.idle:
        core.step()
        time.now_s += 0.003
        steps += 1

    assert steps == 5
    assert time.now_s - 100.0 == pytest.approx(0.020 + 4 * 0.005 + 0.003), (
        "the last 3 ms hide behind nothing"
    )


def test_answers_depend_on_the_seed_and_scatter_around_the_mean(tiny: TinyCheckpoint) -> None:
    cost = CostModel(time_scale=0.0, output_token_count_mean=20.0, kv_block_count=256)
    seeds = [
        make_request(prompt(1), 1000, ignore_eos=False, sampling=SamplingParams(seed=seed))
        for seed in range(200)
    ]

    first, second = (run_all(simulated_core(tiny, cost, FakeTime()), seeds) for _ in range(2))

    assert [outcome.token_ids for outcome in first] == [outcome.token_ids for outcome in second]
    assert {outcome.finished and outcome.finished.reason for outcome in first} == {
        EngineFinishReason.STOP
    }
    lengths = [len(outcome.token_ids) for outcome in first]
    assert 15 < sum(lengths) / len(lengths) < 25
    assert len(set(lengths)) > 20


async def test_answers_and_model_say_that_it_is_simulated(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny, simulation=INSTANT)) as engine:
        outcome = await run(engine, make_request(prompt(1), 200))

    assert outcome.text.startswith(SENTENCE)
    assert "simulated" in SENTENCE
    assert engine.model.engine == "simulated"
    assert TorchEngine(settings_for(tiny)).model.engine == "torch"
    assert settings_for(tiny).simulation is None


async def test_a_response_format_is_refused_by_its_field(tiny: TinyCheckpoint) -> None:
    request = make_request(
        prompt(1), 5, ignore_eos=False, response_format=ResponseFormat(GrammarKind.REGEX, "[0-9]+")
    )
    async with serving(settings_for(tiny, simulation=INSTANT)) as engine:
        with pytest.raises(RequestImpossible, match="simulated") as refused:
            await run(engine, request)

    assert refused.value.field == "response_format.regex"


def test_it_reports_the_certainty_of_its_tokens(tiny: TinyCheckpoint) -> None:
    core = simulated_core(tiny, INSTANT, FakeTime())

    [outcome] = run_all(core, [make_request(prompt(1), 5, sampling=SamplingParams(top_logprobs=2))])

    assert [(logprob.chosen.logprob, len(logprob.top)) for logprob in outcome.logprobs] == [
        (0.0, 1)
    ] * 5
