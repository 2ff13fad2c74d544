"""Beam search equals the reference on shared KV blocks, with one end for all beams."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from inference import engine
from inference.adapters.torch_beams import BeamSearches
from inference.core.engine_core import EngineCore, NumberedEvent
from inference.core.scheduler import StepPlan
from inference.core.sequence import Sequence
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.sampling.sampler import Chosen
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import check_deeply, make_core, make_request, random_prompt, run_all

ENDS = frozenset(range(7, 30))  # so many that outputs of a random model end now and then
REFERENCE_STOPPING: dict[engine.EarlyStopping, bool | str] = {
    engine.EarlyStopping.HEURISTIC: False,
    engine.EarlyStopping.WHEN_FULL: True,
    engine.EarlyStopping.NEVER: "never",
}


@dataclass(slots=True)
class Found:
    """All events of one request. reported: tokens before the step that ended it."""

    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, engine.EngineFinishReason] = field(default_factory=dict)
    finished: engine.SequenceFinished | None = None
    reported: int = 0


def collect(events: Iterable[NumberedEvent], found: dict[int, Found]) -> None:
    for number, event in events:
        one = found[number]
        assert one.finished is None, "nothing follows the last event"
        match event:
            case engine.TokensGenerated():
                assert event.choice_index not in one.ends
                one.token_ids[event.choice_index] += event.token_ids
                one.texts[event.choice_index] += event.text
                one.logprobs[event.choice_index] += [
                    report.chosen.logprob for report in event.logprobs
                ]
            case engine.ChoiceFinished():
                one.ends[event.choice_index] = event.reason
                one.texts[event.choice_index] += event.text
            case engine.SequenceFinished():
                one.finished = event
                one.texts[0] += event.text
            case engine.Scheduled():
                pass
            case engine.SequenceRefused():
                raise AssertionError(event.message)


def search(core: EngineCore, requests: list[engine.GenerationRequest]) -> list[Found]:
    """Run all at once; check the blocks after every step."""
    found = {number: Found() for number in range(len(requests))}
    searches = BeamSearches(core)
    for number, request in enumerate(requests):
        assert core.request_fault(request) is None
        assert searches.add(number, request)
    while not searches.idle:
        before = {number: sum(map(len, one.token_ids.values())) for number, one in found.items()}
        ended = {number for number, one in found.items() if one.finished is not None}
        collect(searches.step(), found)
        for number, one in found.items():
            if one.finished is not None and number not in ended:
                one.reported = before[number]
        check_deeply(core.pool, [sequence.block_table for sequence in core.scheduler.running])
        assert len(core.scheduler.running) <= core._limits.running_sequence_count_max
    assert core.pool.block_count_held == 0
    return list(found.values())


@lru_cache(maxsize=4)
def reference_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)


def reference(directory: Path, request: engine.GenerationRequest) -> list[list[int]]:
    """Return the outputs of `transformers` for the same search, without padding."""
    params, prompt, stop = request.beam_search, list(request.prompt_token_ids), request.stop
    assert params is not None
    ids = torch.tensor([prompt])
    biases = {(token_id,): bias for token_id, bias in request.sampling.logit_bias} or None
    generated = reference_model(directory).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=stop.max_output_tokens,
        min_new_tokens=stop.min_output_tokens or None,
        num_beams=params.width,
        num_return_sequences=request.choice_count,
        length_penalty=params.length_penalty,
        early_stopping=REFERENCE_STOPPING[params.early_stopping],
        repetition_penalty=request.sampling.repetition_penalty,
        sequence_bias=biases,
        eos_token_id=sorted(stop.stop_token_ids) or None,
        pad_token_id=0,
    )
    outputs = []
    for row in generated[:, len(prompt) :].tolist():
        last = next(
            (index for index, token_id in enumerate(row) if token_id in stop.stop_token_ids),
            len(row) - 1,
        )
        outputs.append(row[: last + 1])
    return outputs


def beam_request(
    prompt: list[int],
    width: int,
    max_output_tokens: int = 24,
    *,
    choice_count: int = 1,
    length_penalty: float = 1.0,
    early_stopping: engine.EarlyStopping = engine.EarlyStopping.HEURISTIC,
    ends: frozenset[int] = ENDS,
    min_output_tokens: int = 0,
    sampling: engine.SamplingParams | None = None,
) -> engine.GenerationRequest:
    plain = make_request(
        prompt,
        max_output_tokens,
        stop_token_ids=ends,
        min_output_tokens=min_output_tokens,
        choice_count=choice_count,
        sampling=sampling,
    )
    return replace(
        plain, beam_search=engine.BeamSearchParams(width, length_penalty, early_stopping)
    )


def outputs(found: Found) -> list[list[int]]:
    return [found.token_ids[index] for index in sorted(found.token_ids)]


@pytest.mark.parametrize("early_stopping", list(engine.EarlyStopping))
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_outputs_equal_transformers(
    tiny: TinyCheckpoint,
    early_stopping: engine.EarlyStopping,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths, penalties and prompt lengths on both sides of a block border, in one batch."""
    if not native:
        monkeypatch.setattr("inference.core.model_runner.supports", lambda config, dtype: False)
    rng = random.Random(4)
    requests = []
    for width, choice_count in ((2, 1), (3, 3), (4, 2), (8, 5)):
        for length_penalty in (-1.0, 0.0, 0.6, 1.0, 2.5):
            requests.append(
                beam_request(
                    random_prompt(rng, rng.choice((1, 7, 15, 16, 17, 40))),
                    width,
                    rng.choice((1, 9, 24)) if length_penalty else 24,
                    choice_count=choice_count,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                    ends=ENDS if rng.random() < 0.8 else frozenset(),
                )
            )

    found = search(make_core(tiny.directory), requests)

    for one, request in zip(found, requests, strict=True):
        assert outputs(one) == reference(tiny.directory, request)


def test_the_three_ways_to_stop_differ_as_in_transformers(tiny: TinyCheckpoint) -> None:
    requests = {
        early_stopping: [
            beam_request(
                random_prompt(random.Random(seed), 20), 3, 40, early_stopping=early_stopping
            )
            for seed in range(12)
        ]
        for early_stopping in engine.EarlyStopping
    }

    found = {
        early_stopping: search(make_core(tiny.directory), each)
        for early_stopping, each in requests.items()
    }

    texts = [{one: outputs(found[one][row]) for one in engine.EarlyStopping} for row in range(12)]
    distinguishing = [
        row
        for row in range(12)
        if texts[row][engine.EarlyStopping.HEURISTIC] != texts[row][engine.EarlyStopping.NEVER]
    ]
    assert distinguishing, "else one could be taken for another unseen"
    assert any(
        texts[row][engine.EarlyStopping.HEURISTIC] != texts[row][engine.EarlyStopping.WHEN_FULL]
        for row in range(12)
    )
    for row in distinguishing:
        for early_stopping in engine.EarlyStopping:
            assert texts[row][early_stopping] == reference(
                tiny.directory, requests[early_stopping][row]
            )


@pytest.mark.parametrize(
    "sampling",
    [
        engine.SamplingParams(repetition_penalty=1.4),
        engine.SamplingParams(
            repetition_penalty=0.7, logit_bias=((50, 4.0), (60, -30.0), (61, 5.5))
        ),
    ],
    ids=["penalty", "reward and bias"],
)
def test_rules_change_log_likelihoods_alike(
    tiny: TinyCheckpoint, sampling: engine.SamplingParams
) -> None:
    rng = random.Random(8)
    requests = [
        beam_request(
            random_prompt(rng, 30),
            width,
            24,
            choice_count=2,
            sampling=sampling,
            min_output_tokens=least,
        )
        for width, least in ((2, 0), (4, 0), (4, 10))
    ]

    found = search(make_core(tiny.directory), requests)

    for one, request in zip(found, requests, strict=True):
        assert outputs(one) == reference(tiny.directory, request)
        assert all(
            not ENDS & set(output[: request.stop.min_output_tokens]) for output in outputs(one)
        )


def test_a_sliding_window_and_head_norms_change_nothing_about_it(tmp_path: Path) -> None:
    """Blocks that left the window are shared and copied like any others."""
    for index, architecture in enumerate(("MistralForCausalLM", "Qwen3ForCausalLM")):
        shape = LlamaShape(architecture=architecture, sliding_window=20)
        checkpoint = make_checkpoint(tmp_path / architecture, seed=index, shape=shape)
        request = beam_request(random_prompt(random.Random(index), 45), 4, 30, choice_count=4)

        [found] = search(make_core(checkpoint.directory), [request])

        assert outputs(found) == reference(checkpoint.directory, request)


def test_company_chunks_and_preemption_change_nothing(tiny: TinyCheckpoint) -> None:
    """A pool of little more than one search: sequences are preempted, cached blocks evicted."""
    rng = random.Random(9)
    requests = []
    for row in range(8):
        prompt = random_prompt(rng, rng.randrange(1, 90))
        if row % 2:
            requests.append(
                make_request(prompt, 240, sampling=engine.SamplingParams(temperature=1.0, seed=row))
            )
        else:
            sampling, ends = (
                engine.SamplingParams(repetition_penalty=1.1),
                frozenset() if row % 4 else ENDS,
            )
            requests.append(
                beam_request(prompt, 3 + row % 3, 60, choice_count=2, sampling=sampling, ends=ends)
            )
    crowded = make_core(
        tiny.directory,
        kv_cache_bytes=1,
        context_window_tokens=560,
        owed_output_token_count_max=1,
        step_token_count_max=64,
    )

    alone = [search(make_core(tiny.directory), [request])[0] for request in requests]
    together = search(crowded, requests)

    assert crowded.statistics().preemption_count >= 3
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.texts for one in together] == [one.texts for one in alone]
    beams = [
        one
        for one, request in zip(together, requests, strict=True)
        if request.beam_search is not None
    ]
    assert all(
        one.finished is not None and one.finished.cached_token_count == 0 for one in together
    )
    assert any(len(one.token_ids[0]) == 60 for one in beams)


def test_beams_that_are_computed_again_wait_for_each_other(tiny: TinyCheckpoint) -> None:
    """Preempt at every fifth token, with steps too small for the tokens of all beams."""
    request = beam_request(
        random_prompt(random.Random(14), 20), 8, 40, choice_count=8, ends=frozenset()
    )
    core = make_core(tiny.directory, running_sequence_count_max=8, step_token_count_max=8)
    found, searches, preempted_at, apart = {0: Found()}, BeamSearches(core), 0, 0
    searches.add(0, request)

    while not searches.idle:
        collect(searches.step(), found)
        beams = core.scheduler.running + core.scheduler.waiting
        apart += 0 < len(beams) < 8
        running = core.scheduler.running
        if running and running[0].output_token_count >= preempted_at + 5:
            preempted_at = running[0].output_token_count
            core.scheduler._preempt(running[-1])

    assert preempted_at > 20, "else none was computed again"
    assert apart > 3, "else none had to wait"
    assert outputs(found[0]) == reference(tiny.directory, request)


def test_beams_share_all_full_blocks(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tiny.directory)
    searches = BeamSearches(core)
    prompt = random_prompt(random.Random(3), 200)  # 12 full blocks, and half a block
    searches.add(0, beam_request(prompt, 6, 40, ends=frozenset()))
    held: list[int] = []
    computed: list[int] = []
    run = core._runner.run

    def observed(plan: StepPlan) -> dict[Sequence, Chosen]:
        held.append(core.pool.block_count_held)
        computed.append(plan.token_count)
        return run(plan)

    monkeypatch.setattr(core._runner, "run", observed)
    while not searches.idle:
        searches.step()
        assert not core.pool.block_count_held, "between two rounds a search holds none"

    full_blocks = len(prompt) // KV_BLOCK_TOKENS
    assert computed[0] == 200
    assert held[0] == full_blocks + 1
    assert max(held) <= full_blocks + 6 * 4
    assert max(held[1:8]) <= full_blocks + 6, "one block of its own each, as long as it has room"
    assert max(computed[1:]) <= 6 * KV_BLOCK_TOKENS, "full blocks are found in the cache"


def test_a_prompt_in_the_cache_is_found_and_counted(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    prompt = random_prompt(random.Random(12), 100)
    request = beam_request(prompt, 4, 20, choice_count=3)

    first = run_events(core, request, 0)
    second = run_events(core, request, 1)

    assert first.finished is not None
    assert second.finished is not None
    assert (first.finished.cached_token_count, second.finished.cached_token_count) == (0, 96)
    assert outputs(first) == outputs(second)
    assert core.statistics().prompt_token_count == 200


def run_events(core: EngineCore, request: engine.GenerationRequest, number: int) -> Found:
    found, searches = {number: Found()}, BeamSearches(core)
    assert searches.add(number, request)
    while not searches.idle:
        collect(searches.step(), found)
    return found[number]


def test_a_final_state_is_sent_at_once(tiny: TinyCheckpoint) -> None:
    """Certain tokens are reported before the search ends; see `search`."""
    prompts = [random_prompt(random.Random(seed), 20) for seed in range(8)]
    requests = [
        beam_request(prompt, 2, 40, choice_count=1 + index % 2)
        for index, prompt in enumerate(prompts)
    ]

    found = search(make_core(tiny.directory), requests)

    assert sum(one.reported for one in found) > 0.2 * sum(
        len(ids) for one in found for ids in one.token_ids.values()
    )
    tokenizer = Tokenizer(tiny.directory)
    for one, request in zip(found, requests, strict=True):
        assert outputs(one) == reference(tiny.directory, request)
        for index, ids in one.token_ids.items():
            assert one.texts[index] == tokenizer.decode(
                [token_id for token_id in ids if token_id not in ENDS]
            )


def test_ends_and_counts_are_of_the_choices_and_of_all_beams(tiny: TinyCheckpoint) -> None:
    requests = [
        beam_request(random_prompt(random.Random(seed), 20), 4, 30, choice_count=3)
        for seed in range(8)
    ]
    core = make_core(tiny.directory)

    found = search(core, requests)

    reasons = set()
    for one in found:
        assert one.finished is not None
        assert set(one.ends) == {0, 1, 2}
        for index, reason in one.ends.items():
            reasons.add(reason)
            assert (one.token_ids[index][-1] in ENDS) == (reason is engine.EngineFinishReason.STOP)
        delivered = sum(map(len, outputs(one)))
        steps = max(map(len, outputs(one)))
        assert one.finished.generated_token_count >= max(delivered, 4 * (steps - 1))
        assert one.finished.reason is one.ends[0]
    assert reasons == {engine.EngineFinishReason.STOP, engine.EngineFinishReason.LENGTH}
    assert core.statistics().output_token_count == sum(
        one.finished.generated_token_count for one in found if one.finished
    )


def test_log_probabilities_are_the_models_own(tiny: TinyCheckpoint) -> None:
    """They are reported for each output, independent of the bias in its score."""
    sampling = engine.SamplingParams(top_logprobs=3, logit_bias=((50, 4.0),))
    request = beam_request(
        random_prompt(random.Random(2), 30), 3, 12, choice_count=2, sampling=sampling
    )

    [found] = search(make_core(tiny.directory), [request])

    for index, output in enumerate(outputs(found)):
        with torch.inference_mode():
            ids = torch.tensor([[*request.prompt_token_ids, *output]])
            exact = (
                reference_model(tiny.directory)(ids)
                .logits[0, len(request.prompt_token_ids) - 1 : -1]
                .log_softmax(-1)
            )
        own = exact[range(len(output)), output]
        assert torch.allclose(torch.tensor(found.logprobs[index]), own, atol=1e-4)


@pytest.mark.parametrize("step_count", [0, 1, 2, 3, 12])
def test_a_cancel_ends_all_beams(tiny: TinyCheckpoint, step_count: int) -> None:
    core = make_core(tiny.directory, step_token_count_max=64)
    found = {0: Found()}
    searches = BeamSearches(core)
    searches.add(
        0,
        beam_request(
            random_prompt(random.Random(1), 100), 4, 100, choice_count=2, ends=frozenset()
        ),
    )
    for _ in range(step_count):
        collect(searches.step(), found)

    searches.cancel(0)

    assert searches.idle
    assert core.pool.block_count_held == 0
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    collect(searches.step(), found)
    assert found[0].ends == dict.fromkeys(range(2), engine.EngineFinishReason.CANCELLED)
    assert found[0].finished is not None
    assert found[0].finished.generated_token_count >= sum(map(len, outputs(found[0])))


def test_beams_take_turns_in_a_full_batch(tiny: TinyCheckpoint) -> None:
    """Ten places for three searches of four and two sequences; `search` counts them."""
    core = make_core(tiny.directory, running_sequence_count_max=10, step_token_count_max=256)
    rng = random.Random(7)
    requests = [beam_request(random_prompt(rng, 10), 4, 30, ends=frozenset()) for _ in range(3)]
    requests[2:2] = [make_request(random_prompt(rng, 10), 30) for _ in range(2)]

    found = search(core, requests)

    assert all(len(one.token_ids[0]) == 30 for one in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beam_search": engine.BeamSearchParams(1)}, "width must be from 2"),
        ({"beam_search": engine.BeamSearchParams(17)}, "to 16"),
        ({"beam_search": engine.BeamSearchParams(4, float("nan"))}, "length_penalty"),
        ({"beam_search": engine.BeamSearchParams(2), "choice_count": 3}, "choice_count"),
        ({"sampling": engine.SamplingParams(temperature=0.5)}, "temperature"),
        ({"beam_search": engine.BeamSearchParams(16)}, "KV blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_searches_are_refused(tiny: TinyCheckpoint, change: dict[str, Any], words: str) -> None:
    core = make_core(tiny.directory, kv_cache_bytes=1)
    request = replace(beam_request([40] * 30, 4, 200), **change)

    assert words in str(core.request_fault(request))


def test_a_search_that_just_fits_the_pool_comes_to_its_end(tiny: TinyCheckpoint) -> None:
    """The bound of the refusal is the exact need: nothing else can be preempted."""
    core = make_core(tiny.directory, kv_cache_bytes=1, context_window_tokens=512)  # 32 blocks
    request = beam_request(
        random_prompt(random.Random(5), 40), 5, 88, ends=frozenset(), choice_count=5
    )

    assert (
        core.request_fault(replace(request, stop=replace(request.stop, max_output_tokens=89)))
        is not None
    )
    assert len(search(core, [request])[0].token_ids[0]) == 88
    assert run_all(core, [make_request([40], 3)], first_number=1)[0].finished is not None
