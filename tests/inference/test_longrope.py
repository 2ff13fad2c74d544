"""longrope: short factors within the original context, long ones beyond it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.checkpoint.checkpoint import read_config
from inference.decoder.model import rotary_tables
from inference.engine import BeamSearchParams, SamplingParams
from inference.errors import CheckpointInvalid
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all
from tests.inference.test_reference_tokens import WAYS, choose_way

ORIGINAL = 64  # tokens
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * pair for pair in range(8)],
    "long_factor": [1.5 + 0.8 * pair for pair in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
SHAPES = {
    "llama, factor from the contexts": LlamaShape(context_window_tokens=512, rope_scaling=LONGROPE),
    "qwen3, its own attention factor": LlamaShape(
        architecture="Qwen3ForCausalLM",
        context_window_tokens=512,
        rope_scaling=LONGROPE | {"attention_factor": 1.3},
    ),
    "mistral, a window and a factor": LlamaShape(
        architecture="MistralForCausalLM",
        sliding_window=40,
        context_window_tokens=512,
        rope_scaling=LONGROPE | {"factor": 4.0},
    ),
}


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(
        tmp_path_factory.mktemp("longrope"), seed=5, shape=SHAPES["llama, factor from the contexts"]
    )


def reference(
    directory: Path, prompts: Sequence[Sequence[int]], token_count: int, **options: Any
) -> list[list[int]]:
    """Return the output of `transformers` when it recomputes the whole sequence for each token.

    With its cache it would keep keys rotated by the short factors; its own Phi-3 drops the cache
    there.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=token_count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=False,
            **options,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts within the original context, beyond it, and across the border."""
    checkpoint = make_checkpoint(tmp_path, seed=list(SHAPES).index(name), shape=SHAPES[name])
    rng = random.Random(2)
    prompts = [
        random_prompt(rng, length)
        for length in (5, 40, 41, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 130)
    ]

    expected = reference(tmp_path, prompts, 24)

    for way in WAYS:
        choose_way(way, monkeypatch)
        outcomes = run_all(
            make_core(tmp_path, context_window_tokens=512),
            [make_request(prompt, 24) for prompt in prompts],
        )
        assert [outcome.token_ids for outcome in outcomes] == expected, way
    assert checkpoint.shape is SHAPES[name]


def test_the_border_changes_tokens_here(longrope: TinyCheckpoint) -> None:
    """Otherwise the tests above could not detect swapped factors."""
    prompt = random_prompt(random.Random(2), 50)

    switched = run_all(
        make_core(longrope.directory, context_window_tokens=512), [make_request(prompt, 14 + 24)]
    )[0]
    [within] = reference(longrope.directory, [prompt], 14)
    short_only = make_checkpoint(
        longrope.directory.parent / "short",
        seed=5,
        shape=replace(longrope.shape, rope_scaling=LONGROPE | {"long_factor": [1.0] * 8}),
    )
    [other] = reference(short_only.directory, [prompt], 14 + 24)

    assert switched.token_ids[:14] == within
    assert switched.token_ids != other


def test_blocks_are_not_shared_between_short_and_long_prompts(longrope: TinyCheckpoint) -> None:
    """A prompt within the border and a longer one find only their own blocks."""
    core = make_core(longrope.directory, context_window_tokens=512)
    long = random_prompt(random.Random(3), 150)
    short = long[: ORIGINAL - 10]
    requests = [make_request(prompt, 8) for prompt in (short, long, short, long)]

    outcomes = [
        run_all(core, [request], first_number=number)[0] for number, request in enumerate(requests)
    ]

    assert [outcome.cached_token_count for outcome in outcomes] == [0, 0, 48, 144]
    assert [outcome.token_ids for outcome in outcomes] == reference(
        longrope.directory, [short, long] * 2, 8
    )


def test_batched_chunked_and_preempted_equal_alone(longrope: TinyCheckpoint) -> None:
    rng = random.Random(4)
    requests = [
        make_request(random_prompt(rng, length), 60) for length in (5, 20, 30, 55, 60, 64, 65, 100)
    ]
    crowded = make_core(
        longrope.directory,
        kv_cache_bytes=1,
        context_window_tokens=256,
        owed_output_token_count_max=1,
    )

    alone = [
        run_all(make_core(longrope.directory, context_window_tokens=256), [request])[0]
        for request in requests
    ]
    chunked = run_all(
        make_core(longrope.directory, context_window_tokens=256, step_token_count_max=67), requests
    )
    preempted = run_all(crowded, requests)

    assert [one.token_ids for one in chunked] == [one.token_ids for one in alone]
    assert [one.token_ids for one in preempted] == [one.token_ids for one in alone]
    assert crowded.statistics().preemption_count > 0
    assert all(one.cached_token_count == 0 for one in alone), (
        "what is computed anew at the border is not billed as cached"
    )


def test_a_seed_means_the_same_on_both_sides(longrope: TinyCheckpoint) -> None:
    request = make_request(
        random_prompt(random.Random(5), 50),
        40,
        sampling=SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5),
    )

    alone = run_all(make_core(longrope.directory, context_window_tokens=512), [request])[0]
    beside = run_all(
        make_core(longrope.directory, context_window_tokens=512),
        [make_request([40] * 70, 30), request],
    )[1]

    assert alone.token_ids == beside.token_ids


def test_beams_cross_the_border_together(longrope: TinyCheckpoint) -> None:
    prompt = random_prompt(random.Random(6), 50)
    request = replace(make_request(prompt, 30), beam_search=BeamSearchParams(4))

    [found] = run_all(make_core(longrope.directory, context_window_tokens=512), [request])

    assert [found.token_ids] == reference(longrope.directory, [prompt], 30, num_beams=4)


def test_a_window_within_the_original_context_needs_one_table(longrope: TinyCheckpoint) -> None:
    rope = read_config(longrope.directory).rope

    short, both = (
        rotary_tables(rope, 16, count, torch.float32)[0] for count in (ORIGINAL, ORIGINAL + 1)
    )

    assert (len(short), len(both)) == (ORIGINAL, 2 * ORIGINAL + 1)
    assert torch.equal(both[:ORIGINAL], short)
    assert not torch.equal(both[ORIGINAL : 2 * ORIGINAL], short)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"short_factor": [1.0] * 7}, "short_factor"),
        ({"long_factor": [1.0] * 7 + [0.0]}, "long_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"short_mscale": 1.2}, "short_mscale"),
    ],
)
def test_unsupported_longrope_settings_are_refused_by_name(
    tmp_path: Path, scaling: dict[str, Any], words: str
) -> None:
    make_checkpoint(
        tmp_path, shape=LlamaShape(context_window_tokens=512, rope_scaling=LONGROPE | scaling)
    )

    with pytest.raises(CheckpointInvalid, match=words):
        read_config(tmp_path)
