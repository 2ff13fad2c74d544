"""One engine without a process: ends, cancellation, counts, shared prefixes."""

from __future__ import annotations

import random

import pytest
import torch

from inference.core.model_runner import ModelRunner
from inference.core.options import ComputeDtype
from inference.engine import EngineFinishReason, GenerationRequest, SamplingParams
from inference.errors import InvariantViolated
from inference.native.decoder import NativeDecoder
from inference.native.loader import load
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import (
    Outcome,
    collect,
    make_core,
    make_request,
    random_prompt,
    run_all,
)

RNG_SEED = 20


def finish_reason(outcome: Outcome) -> EngineFinishReason:
    assert outcome.finished is not None
    return outcome.finished.reason


def test_length_ends_a_sequence_at_exactly_the_limit(tiny: TinyCheckpoint) -> None:
    outcomes = run_all(
        make_core(tiny.directory), [make_request([50, 51], count) for count in (1, 2, 17)]
    )

    assert [len(outcome.token_ids) for outcome in outcomes] == [1, 2, 17]
    assert {finish_reason(outcome) for outcome in outcomes} == {EngineFinishReason.LENGTH}


def test_text_is_the_decoded_output(tiny: TinyCheckpoint) -> None:
    tokenizer = Tokenizer(tiny.directory)
    rng = random.Random(RNG_SEED)

    outcomes = run_all(
        make_core(tiny.directory), [make_request(random_prompt(rng, 30), 40) for _ in range(6)]
    )

    assert [outcome.text for outcome in outcomes] == [
        tokenizer.decode(outcome.token_ids) for outcome in outcomes
    ]


def test_an_end_token_ends_the_sequence_is_counted_and_adds_no_text(tiny: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(RNG_SEED), 30)
    free = run_all(make_core(tiny.directory), [make_request(prompt, 20)])[0]
    end = free.token_ids[7]
    first = free.token_ids.index(end)

    stopped = run_all(
        make_core(tiny.directory), [make_request(prompt, 20, stop_token_ids=frozenset({end}))]
    )[0]

    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == Tokenizer(tiny.directory).decode(free.token_ids[:first])
    assert finish_reason(stopped) is EngineFinishReason.STOP
    assert stopped.finished is not None
    assert stopped.finished.generated_token_count == first + 1


def test_the_models_end_token_ends_the_output_unless_ignored(tiny: TinyCheckpoint) -> None:
    """Hot samples may end with an end token; with `ignore_eos` none does."""
    requests = [
        make_request(
            [9, 10], 120, sampling=SamplingParams(temperature=3.0, seed=seed), ignore_eos=False
        )
        for seed in range(12)
    ]
    obeyed = run_all(make_core(tiny.directory), requests)
    ignored = run_all(
        make_core(tiny.directory),
        [
            make_request([9, 10], 120, sampling=request.sampling, ignore_eos=True)
            for request in requests
        ],
    )

    assert EngineFinishReason.STOP in {finish_reason(outcome) for outcome in obeyed}
    assert {finish_reason(outcome) for outcome in ignored} == {EngineFinishReason.LENGTH}
    for short, long in zip(obeyed, ignored, strict=True):
        assert long.token_ids[: len(short.token_ids)] == short.token_ids
        assert not {2, 6} & set(short.token_ids[:-1])


def test_a_stop_sequence_across_token_borders_is_cut_off(tiny: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(RNG_SEED), 30)
    free = run_all(make_core(tiny.directory), [make_request(prompt, 40)])[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 5]

    stopped = run_all(
        make_core(tiny.directory), [make_request(prompt, 40, stop_sequences=("never", stop))]
    )[0]

    assert stopped.text == free.text[: free.text.index(stop)]
    assert finish_reason(stopped) is EngineFinishReason.STOP_SEQUENCE
    assert len(stopped.token_ids) < 40


def test_an_unmatched_stop_sequence_loses_no_text(tiny: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(RNG_SEED), 30)
    free = run_all(make_core(tiny.directory), [make_request(prompt, 20)])[0]

    held = run_all(
        make_core(tiny.directory),
        [make_request(prompt, 20, stop_sequences=(free.text[-3:] + "!",))],
    )[0]

    assert held.text == free.text
    assert finish_reason(held) is EngineFinishReason.LENGTH


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_a_cancel_frees_the_blocks_before_the_next_step(tiny: TinyCheckpoint, phase: str) -> None:
    rng = random.Random(RNG_SEED)
    core = make_core(tiny.directory, step_token_count_max=64, running_sequence_count_max=2)
    outcomes = {number: Outcome() for number in range(3)}
    prompts = {"waiting": 30, "prefill": 600, "decode": 30}
    if phase == "waiting":
        for number in range(2):
            core.add(number, make_request(random_prompt(rng, 30), 500))
    core.add(2, make_request(random_prompt(rng, prompts[phase]), 500))
    for _ in range(3):
        collect(core.step(), outcomes)
    was_held = core.pool.block_count_held
    others = sum(
        len(sequence.block_table) for sequence in core.scheduler.running if sequence.number != 2
    )

    core.cancel(2)
    core.cancel(2)

    assert core.pool.block_count_held == others
    assert (was_held > others) == (phase != "waiting")
    collect(core.step(), outcomes)
    assert finish_reason(outcomes[2]) is EngineFinishReason.CANCELLED
    assert outcomes[2].finished is not None
    assert outcomes[2].finished.generated_token_count == len(outcomes[2].token_ids)
    assert bool(outcomes[2].token_ids) == (phase == "decode")


def test_a_cancelled_stream_gets_the_text_that_was_held_back(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    outcomes = {0: Outcome()}
    core.add(0, make_request(random_prompt(random.Random(RNG_SEED), 30), 100))
    for _ in range(20):
        collect(core.step(), outcomes)

    core.cancel(0)
    collect(core.step(), outcomes)

    assert outcomes[0].text == Tokenizer(tiny.directory).decode(outcomes[0].token_ids)


def test_a_burst_with_a_common_prefix_computes_it_once(tiny: TinyCheckpoint) -> None:
    rng = random.Random(RNG_SEED)
    system = random_prompt(rng, 200)
    core = make_core(tiny.directory, kv_cache_bytes=32 << 20)

    outcomes = run_all(
        core, [make_request([*system, *random_prompt(rng, 60)], 5) for _ in range(50)]
    )

    assert [outcome.cached_token_count for outcome in outcomes] == [0] + [192] * 49
    statistics = core.statistics()
    assert statistics.cached_token_count == 49 * 192
    assert statistics.prompt_token_count == 50 * 260
    assert statistics.output_token_count == 50 * 5
    assert statistics.kv_block_count_held == 0


def test_a_second_turn_finds_the_output_of_the_first(tiny: TinyCheckpoint) -> None:
    rng = random.Random(RNG_SEED)
    core = make_core(tiny.directory)
    prompt = random_prompt(rng, 40)
    first = run_all(core, [make_request(prompt, 41)])[0]

    second = run_all(
        core,
        [make_request([*prompt, *first.token_ids, *random_prompt(rng, 10)], 5)],
        first_number=1,
    )[0]

    assert second.cached_token_count == 80, (
        "all 80 computed tokens: 40 of the prompt, 40 of the output but its last"
    )


def test_timings_cover_the_lifetime_of_a_sequence(tiny: TinyCheckpoint) -> None:
    outcome = run_all(make_core(tiny.directory), [make_request([9] * 300, 10)])[0]

    assert outcome.finished is not None
    timings = outcome.finished.timings
    assert timings.queue_ms >= 0
    assert timings.prefill_ms > 0
    assert timings.decode_ms > 0


def test_the_queue_is_bounded(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory, waiting_sequence_count_max=2)

    assert [core.add(number, make_request([9], 1)) for number in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request([], 5), "no tokens"),
        (make_request([400], 5), "token ids must be from 0 to 399"),
        (make_request([-1], 5), "token ids"),
        (make_request([9], 0), "max_output_tokens"),
        (make_request([9] * 2000, 49), "exceed the context window of 2048"),
        (make_request([9], 5, stop_sequences=("",)), "stop sequence is empty"),
        (make_request([9], 5, sampling=SamplingParams(temperature=-0.1)), "temperature"),
        (make_request([9], 5, sampling=SamplingParams(temperature=float("nan"))), "temperature"),
        (make_request([9], 5, sampling=SamplingParams(top_p=0.0)), "top_p"),
        (make_request([9], 5, sampling=SamplingParams(seed=1 << 63)), "seed"),
        (make_request([9], 5, sampling=SamplingParams(min_p=1.5)), "min_p"),
        (
            make_request([9], 5, sampling=SamplingParams(repetition_penalty=0.0)),
            "repetition_penalty",
        ),
        (
            make_request([9], 5, sampling=SamplingParams(presence_penalty=float("nan"))),
            "presence_penalty",
        ),
        (make_request([9], 5, sampling=SamplingParams(logit_bias=((400, 1.0),))), "logit_bias"),
        (make_request([9], 5, sampling=SamplingParams(top_logprobs=21)), "top_logprobs"),
        (make_request([9], 5, stop_token_ids=frozenset({400})), "stop_token_ids"),
        (make_request([9], 5, min_output_tokens=6), "min_output_tokens"),
        (make_request([9], 5, choice_count=17), "choice_count"),
    ],
)
def test_a_request_that_can_never_run_has_a_fault(
    tiny: TinyCheckpoint, request_: GenerationRequest, words: str
) -> None:
    fault = make_core(tiny.directory).request_fault(request_)

    assert fault is not None
    assert words in fault


@pytest.mark.parametrize(
    ("native", "dtype"), [(True, "float32"), (True, "bfloat16"), (True, "int8"), (False, "float32")]
)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_output_that_is_not_finite_is_an_error_and_not_a_token(
    native: bool,
    dtype: ComputeDtype,
    broken: float,
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault planted in the weights, for each decoder."""
    if native and load() is None:
        pytest.skip("no native library on this machine, or switched off")
    if not native:
        monkeypatch.setattr("inference.core.model_runner.supports", lambda config, dtype: False)
    core = make_core(tiny.directory, compute_dtype=dtype)
    assert isinstance(core._runner, ModelRunner)
    decoder = core._runner._decoder
    if isinstance(decoder, NativeDecoder):
        weight = torch.ones(decoder._config.hidden_size)
        weight[3] = broken
        decoder._set(decoder._config.layer_count, "final_norm", weight)
    else:
        decoder._decoder._weights.final_norm[3] = broken
    core.add(0, make_request([9], 5))

    with pytest.raises(InvariantViolated, match="not finite"):
        core.step()
