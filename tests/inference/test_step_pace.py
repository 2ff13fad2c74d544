"""The pace learns the cost of a prompt token and keeps steps within the target."""

from __future__ import annotations

import random

import pytest

from inference.core.engine_core import PROMPT_TOKENS_MIN, EngineCore, StepPace
from inference.core.options import EngineOptions
from inference.limits import EngineLimits
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request, random_prompt

DECODE_S = 0.030


def learnt(target_s: float, prompt_token_s: float) -> StepPace:
    """Return a pace that has seen many steps of a machine."""
    pace = StepPace(target_s)
    for _ in range(40):
        pace.note(50, 0, DECODE_S)
        pace.note(50, 200, DECODE_S + 200 * prompt_token_s)
    return pace


@pytest.mark.parametrize("prompt_token_s", [0.00005, 0.0002, 0.0005])
def test_a_step_with_prompts_takes_the_time_that_is_aimed_at(prompt_token_s: float) -> None:
    count = learnt(0.1, prompt_token_s).prompt_token_count_max()

    assert count is not None
    assert DECODE_S + count * prompt_token_s == pytest.approx(0.1, rel=0.05)


def test_prompts_get_on_however_slow_the_machine_is() -> None:
    assert learnt(0.1, 0.01).prompt_token_count_max() == PROMPT_TOKENS_MIN
    assert StepPace(0.1).prompt_token_count_max() == PROMPT_TOKENS_MIN


def test_without_a_target_there_is_no_limit() -> None:
    assert StepPace(None).prompt_token_count_max() is None


def test_a_pause_of_the_machine_is_forgotten() -> None:
    pace = learnt(0.1, 0.0002)
    before = pace.prompt_token_count_max()

    pace.note(50, 200, 3.0)
    for _ in range(40):
        pace.note(50, 200, DECODE_S + 200 * 0.0002)

    assert before is not None
    assert pace.prompt_token_count_max() == pytest.approx(before, rel=0.05)


def test_a_prompt_waits_for_streams_only(tiny: TinyCheckpoint) -> None:
    """With an impossible target: the full budget while idle, then the minimum."""
    limits = EngineLimits(2048, step_token_count_max=256, step_time_target_s=1e-9)
    core = EngineCore(EngineOptions(str(tiny.directory), limits, kv_cache_bytes=8 << 20))
    rng = random.Random(5)
    core.add(0, make_request(random_prompt(rng, 300), 40))
    computed = []
    for step in range(8):
        if step == 2:
            core.add(1, make_request(random_prompt(rng, 300), 40))
        before = sum(sequence.computed_token_count for sequence in core.scheduler.running)
        core.step()
        computed.append(
            sum(sequence.computed_token_count for sequence in core.scheduler.running) - before
        )

    assert computed == [256, 44, *[1 + PROMPT_TOKENS_MIN] * 4, 1 + 300 - 4 * PROMPT_TOKENS_MIN, 2]
