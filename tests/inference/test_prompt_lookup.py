"""Prompt-lookup speculation: drafts change the number of steps and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from inference.core import prompt_lookup
from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.prompt_lookup import RepeatedText, RowTime
from inference.engine import (
    BeamSearchParams,
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
)
from inference.limits import EngineLimits
from inference.native import loader
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import (
    SMALL_KV_BYTES,
    Outcome,
    check_deeply,
    collect,
    make_request,
    random_prompt,
    run_all,
)

LIBRARY = loader.load()
LEVELS = [] if LIBRARY is None else [*loader.available_levels(LIBRARY, is_bfloat16=True)]
pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="no native library on this machine, or switched off"
)


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on the time that steps take."""
    monkeypatch.setattr(RowTime, "share", lambda self, row_count: 1e-9)


def make_core(
    directory: Path,
    draft_token_count_max: int,
    *,
    dtype: ComputeDtype = "float32",
    kv_cache_bytes: int = SMALL_KV_BYTES,
    **limits: int,
) -> EngineCore:
    bounds = {"context_window_tokens": 2048, "step_token_count_max": 256} | limits
    options = EngineOptions(
        str(directory),
        EngineLimits(**bounds),
        dtype,
        kv_cache_bytes,
        draft_token_count_max=draft_token_count_max,
    )
    return EngineCore(options)


def repeating_prompt(rng: random.Random, token_count: int = 60) -> list[int]:
    """A prompt of few tokens in many orders: every pattern has occurred, drafts often err."""
    few = random_prompt(rng, 6)
    return [rng.choice(few) for _ in range(token_count)]


def biased(prompt: Sequence[int], seed: int, temperature: float) -> SamplingParams:
    """The tokens of the prompt are likely, so that patterns of it occur in the output."""
    bias = tuple((token_id, 6.0) for token_id in sorted(set(prompt)))
    return SamplingParams(temperature=temperature, seed=seed, logit_bias=bias)


def varied_requests(count: int, output_token_count: int = 60) -> list[GenerationRequest]:
    rng = random.Random(5)
    requests = []
    for seed in range(count):
        prompt = repeating_prompt(rng)
        sampling = (
            SamplingParams(),
            biased(prompt, seed, 0.0),
            biased(prompt, seed, 0.5),
            SamplingParams(temperature=0.9, top_p=0.8, seed=seed, top_logprobs=2),
        )[seed % 4]
        requests.append(make_request(prompt, output_token_count, sampling=sampling))
    return requests


def drafted(core: EngineCore) -> tuple[int, int]:
    """Drafted tokens, and those that were right."""
    statistics = core.statistics()
    return statistics.draft_token_count, statistics.accepted_token_count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_drafts_change_no_token_text_or_log_probability(
    level: str, dtype: ComputeDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.SWITCH, level)
    make_checkpoint(tmp_path, shape=LlamaShape(head_dim=64))
    requests = varied_requests(8)
    plain, drafting = make_core(tmp_path, 0, dtype=dtype), make_core(tmp_path, 7, dtype=dtype)

    for number, request in enumerate(requests):  # alone: as many drafts as possible
        [expected], [found] = (run_all(core, [request], number) for core in (plain, drafting))
        assert contents(found) == contents(expected)
    together = [
        [contents(outcome) for outcome in run_all(core, requests[:5], 100)]
        for core in (plain, drafting)
    ]

    assert together[0] == together[1]
    assert drafted(plain) == (0, 0)
    count, right_count = drafted(drafting)
    assert count > right_count > 50, "some drafts are right, and some err"
    assert drafting.statistics().step_count < plain.statistics().step_count - right_count // 2
    assert drafting.statistics().output_token_count == plain.statistics().output_token_count


def contents(outcome: Outcome) -> tuple[object, ...]:
    """Everything but the times."""
    finished = outcome.finished
    assert finished is not None
    counts = finished.prompt_token_count, finished.generated_token_count
    return outcome.token_ids, outcome.text, outcome.logprobs, finished.reason, *counts


def test_a_window_and_a_preemption_change_nothing_either(tmp_path: Path) -> None:
    shape = LlamaShape(architecture="MistralForCausalLM", sliding_window=40, head_dim=16)
    make_checkpoint(tmp_path, shape=shape)
    requests = varied_requests(8, 120)
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4

    plain = make_core(tmp_path, 0)
    crowded = make_core(
        tmp_path,
        7,
        kv_cache_bytes=40 * block_bytes,
        context_window_tokens=320,
        owed_output_token_count_max=16,
    )
    expected, found = run_all(plain, requests), run_all(crowded, requests)

    assert [contents(each) for each in found] == [contents(each) for each in expected]
    assert crowded.statistics().preemption_count > 0
    assert drafted(crowded)[1] > 0


def test_ends_in_the_middle_of_a_draft_are_obeyed(tiny: TinyCheckpoint) -> None:
    """By a stop token, a stop sequence, the length; nothing after the end is told or billed."""
    prompt = repeating_prompt(random.Random(3))
    free = run_all(make_core(tiny.directory, 0), [make_request(prompt, 80)])[0]
    text_end = free.text[len(free.text) // 2 :][:3]
    requests = [
        make_request(prompt, 80, stop_token_ids=frozenset({token_id}))
        for token_id in set(free.token_ids)
    ]
    requests += [
        make_request(prompt, 80, stop_sequences=(text_end,), min_output_tokens=count)
        for count in (0, 30)
    ]
    requests += [make_request(prompt, count) for count in range(1, 30)]
    plain, drafting = make_core(tiny.directory, 0), make_core(tiny.directory, 7)

    for number, request in enumerate(requests):
        [expected], [found] = (run_all(core, [request], number) for core in (plain, drafting))
        assert contents(found) == contents(expected)
    assert drafted(drafting)[1] > 100
    assert plain.statistics().output_token_count == drafting.statistics().output_token_count


def test_a_cancelled_sequence_leaves_nothing_behind(tiny: TinyCheckpoint) -> None:
    rng = random.Random(4)
    core = make_core(tiny.directory, 7)
    for number in range(12):
        outcome = Outcome()
        assert core.add(number, make_request(repeating_prompt(rng), 200))
        while len(outcome.token_ids) < 3 * number:
            collect(core.step(), {number: outcome})
        core.cancel(number)
        collect(core.step(), {number: outcome})
        check_deeply(core.pool, [])
        assert outcome.finished is not None
        assert outcome.finished.reason is EngineFinishReason.CANCELLED
        assert outcome.finished.generated_token_count == len(outcome.token_ids)
    assert core.pool.block_count_held == 0
    assert drafted(core)[0] > drafted(core)[1] > 0


def test_cached_blocks_hold_what_was_accepted(tiny: TinyCheckpoint) -> None:
    """A prompt that continues an output finds its blocks, and gives the tokens of a cold engine:
    no rejected draft has left its keys and values there.
    """
    rng = random.Random(6)
    drafting = make_core(tiny.directory, 7)
    for number in range(0, 20, 2):
        prompt = repeating_prompt(rng, 50)
        first = run_all(drafting, [make_request(prompt, 70)], number)[0]
        longer = make_request([*prompt, *first.token_ids, *random_prompt(rng, 3)], 30)
        warm = run_all(drafting, [longer], number + 1)[0]
        cold = run_all(make_core(tiny.directory, 0), [longer])[0]

        assert warm.token_ids == cold.token_ids
        # the last token's keys and values are never computed
        assert warm.cached_token_count == (50 + 70 - 1) // 16 * 16
    assert drafted(drafting)[0] > drafted(drafting)[1] > 0


def test_rules_that_depend_on_the_output_go_without_drafts(tiny: TinyCheckpoint) -> None:
    prompt = repeating_prompt(random.Random(7))
    digits = ResponseFormat(GrammarKind.REGEX, "[0-9]{40}")
    requests = [
        make_request(prompt, 40, sampling=SamplingParams(repetition_penalty=1.3)),
        make_request(
            prompt, 40, sampling=SamplingParams(presence_penalty=0.5, temperature=0.5, seed=1)
        ),
        make_request(prompt, 40, response_format=digits),
        make_request(prompt, 40, min_output_tokens=40),
    ]
    beams = GenerationRequest(
        tuple(prompt), SamplingParams(), requests[0].stop, beam_search=BeamSearchParams(3)
    )
    plain, drafting = make_core(tiny.directory, 0), make_core(tiny.directory, 7)

    for number, request in enumerate([*requests, beams]):
        [expected], [found] = (run_all(core, [request], number) for core in (plain, drafting))
        assert contents(found) == contents(expected)
    assert drafted(drafting) == (0, 0)


def test_a_step_with_a_prompt_or_many_sequences_has_no_drafts(tiny: TinyCheckpoint) -> None:
    rng = random.Random(8)
    core = make_core(tiny.directory, 7)
    for number in range(prompt_lookup.ROW_COUNT_MAX // 2 + 1):
        core.add(number, make_request(repeating_prompt(rng), 30))
    while (
        len(core.scheduler.running) > prompt_lookup.ROW_COUNT_MAX // 2 or not core.scheduler.running
    ):
        core.step()
        if len(core.scheduler.running) > prompt_lookup.ROW_COUNT_MAX // 2:
            assert drafted(core) == (0, 0)


def test_text_that_repeats_is_predicted_from_its_last_occurrence() -> None:
    text = RepeatedText()
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3]

    assert text.predict(tokens, 3)[0] == [5, 6, 1]
    tokens += [5, 6, 9]
    assert text.predict(tokens, 3)[0] == [], "9 is new"
    tokens += [4]
    assert text.predict(tokens, 2)[0] == [1, 2], "by a single token"


def test_predictions_are_trusted_as_far_as_they_came_true() -> None:
    text, rng = RepeatedText(), random.Random(1)
    tokens = [1, 2, 3, 4] * 5
    for _ in range(60):
        _, sure = text.predict(tokens, 3)
        tokens.append(tokens[-4])
    for _ in range(60):
        _, unsure = text.predict(tokens, 3)
        tokens.append(rng.choice([1, 2, 3, 4]))

    assert sure > 0.95
    assert unsure < 0.6


@pytest.mark.parametrize(("base_s", "row_s"), [(1.0, 0.0), (1.0, 0.1), (0.0, 0.5)])
def test_the_time_of_a_row_is_found_from_steps_of_several_sizes(
    base_s: float, row_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # of the fixture
    rng, time = random.Random(2), RowTime()
    for _ in range(200):
        rows = rng.choice([2, 2, 2, 8])
        time.note(rows, (base_s + row_s * rows) * rng.uniform(0.95, 1.05))

    expected = max(row_s / (base_s + row_s * 2), prompt_lookup.ROW_SHARE_MIN)
    assert time.share(2) == pytest.approx(expected, abs=0.02)


def test_rows_that_cost_as_much_as_others_get_no_drafts(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowTime, "share", lambda self, row_count: 1 / row_count)
    core = make_core(tiny.directory, 7)

    run_all(core, [make_request(repeating_prompt(random.Random(9)), 40)])

    assert drafted(core) == (0, 0)
