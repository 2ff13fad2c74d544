"""Greedy tokens equal the reference's, however the work is split.

Both decoders, native and torch, in all types where that holds: natively a row's numbers are
independent of the batch, so batching, chunks and cached prompts change no token in bfloat16 and
int8 either. In torch this holds only in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions
from inference.engine import EngineFinishReason, GenerationRequest, SamplingParams
from inference.limits import EngineLimits
from inference.native import loader
from inference.native.decoder import supports
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import SMALL_KV_BYTES, make_core, make_request, random_prompt, run_all

LLAMA3_SCALING: dict[str, float | int | str] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SHAPES = {
    "grouped heads": LlamaShape(),
    "tied embeddings, wide heads": LlamaShape(tied_embeddings=True, head_dim=32),
    "no groups, biases": LlamaShape(kv_head_count=4, attention_bias=True, mlp_bias=True),
    "one key head, llama3 scaling": LlamaShape(kv_head_count=1, rope_scaling=LLAMA3_SCALING),
    "linear scaling, odd sizes": LlamaShape(
        layer_count=3,
        hidden_size=96,
        head_count=6,
        kv_head_count=3,
        rope_scaling={"type": "linear", "factor": 2.0},
    ),
}
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 64, 200, 333, 600)
OUTPUT_TOKENS = 24
ORIGINAL_CONTEXT = 128  # tokens
# Every rotation with every architecture; `test_architectures.py` has the other pairs.
ROTATIONS: dict[str, dict[str, float | int | str]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3_SCALING | {"original_max_position_embeddings": 64},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
ROTATED = [
    *(("MistralForCausalLM", rotation) for rotation in ("llama3", "yarn", "dynamic")),
    *(("Qwen2ForCausalLM", rotation) for rotation in ("linear", "llama3", "dynamic")),
    *(("Qwen3ForCausalLM", rotation) for rotation in ("linear", "llama3", "dynamic")),
]
WAYS = ("native", "torch")  # without a compiler both are torch


def levels(*, is_bfloat16: bool) -> list[str]:
    """Instruction sets of the native code that this machine can run, best first."""
    library = loader.load()
    return [] if library is None else [*loader.available_levels(library, is_bfloat16=is_bfloat16)]


# Ways in which the batch changes no token.
STEADY: list[tuple[str, ComputeDtype]] = [
    *((level, "float32") for level in levels(is_bfloat16=False)),
    *((level, "bfloat16") for level in levels(is_bfloat16=True)),
    *((level, "int8") for level in levels(is_bfloat16=True)),
    ("torch", "float32"),
]


def choose_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the code of the decoder: torch, native, or native for one level."""
    monkeypatch.setattr(
        "inference.core.model_runner.supports",
        supports if way != "torch" else lambda config, dtype: False,
    )
    if way not in WAYS:
        monkeypatch.setenv(loader.SWITCH, way)


def typed_core(
    directory: Path, dtype: ComputeDtype, *, step_token_count_max: int = 256
) -> EngineCore:
    """Return a core that computes in a type."""
    limits = EngineLimits(2048, step_token_count_max=step_token_count_max)
    return EngineCore(EngineOptions(str(directory), limits, dtype, SMALL_KV_BYTES))


def tokens_alone(
    directory: Path, dtype: ComputeDtype, requests: Sequence[GenerationRequest]
) -> list[list[int]]:
    """Return the tokens of each request, run alone and without the cache of those before."""
    core = typed_core(directory, dtype)
    return [
        run_all(core, [replace(request, cache_salt=f"alone {number}")], number)[0].token_ids
        for number, request in enumerate(requests)
    ]


def reference_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], token_count: int
) -> list[list[int]]:
    """Return the greedy output of `transformers`, one prompt at a time, ignoring end tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        options = {
            "max_new_tokens": token_count,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of all lengths at once, so that they are batched, and long ones chunked."""
    seed = list(SHAPES).index(name)
    checkpoint = make_checkpoint(tmp_path, seed=seed, shape=SHAPES[name], shard_count=1 + seed % 2)
    rng = random.Random(seed)
    prompts = [random_prompt(rng, length) for length in PROMPT_LENGTHS]

    expected = reference_greedy(tmp_path, prompts, OUTPUT_TOKENS)

    for way in (*levels(is_bfloat16=False), "torch"):
        choose_way(way, monkeypatch)
        outcomes = run_all(
            make_core(checkpoint.directory),
            [make_request(prompt, OUTPUT_TOKENS) for prompt in prompts],
        )
        assert [outcome.token_ids for outcome in outcomes] == expected, way


@pytest.mark.parametrize(("architecture", "rotation"), ROTATED)
def test_every_rotation_goes_with_every_architecture(
    architecture: str, rotation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral also with a window. The longest prompt outgrows its context."""
    shape = LlamaShape(
        architecture=architecture,
        context_window_tokens=ORIGINAL_CONTEXT if rotation == "dynamic" else 512,
        rope_scaling=ROTATIONS[rotation],
        sliding_window=50 if architecture == "MistralForCausalLM" else None,
    )
    directory = make_checkpoint(
        tmp_path, seed=ROTATED.index((architecture, rotation)), shape=shape
    ).directory
    rng = random.Random(21)
    prompts = [random_prompt(rng, length) for length in (16, 33, 115)]

    expected = reference_greedy(directory, prompts, OUTPUT_TOKENS)

    for way in WAYS:
        choose_way(way, monkeypatch)
        core = make_core(directory, context_window_tokens=512)
        outcomes = run_all(core, [make_request(prompt, OUTPUT_TOKENS) for prompt in prompts])
        assert [outcome.token_ids for outcome in outcomes] == expected, way


@pytest.mark.parametrize("window", [16, 17, 31])
def test_windows_cross_block_borders_at_every_offset(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts on both sides of every border, each continued over two more."""
    shape = LlamaShape(architecture="MistralForCausalLM", sliding_window=window)
    directory = make_checkpoint(tmp_path, seed=window, shape=shape).directory
    rng = random.Random(window)
    prompts = [random_prompt(rng, length) for length in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)]

    expected = reference_greedy(directory, prompts, 34)

    for way in WAYS:
        choose_way(way, monkeypatch)
        for chunk in (16, 256):  # whole prompts, and chunks that begin within the window
            core = make_core(directory, step_token_count_max=chunk, running_sequence_count_max=10)
            outcomes = run_all(core, [make_request(prompt, 34) for prompt in prompts])
            assert [outcome.token_ids for outcome in outcomes] == expected, (way, chunk)


@pytest.mark.parametrize("stretched", [False, True])
def test_a_context_is_served_to_its_last_position(
    stretched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and output fill the window to the token; one more is refused."""
    scaling = ROTATIONS["yarn"] if stretched else None
    window = ORIGINAL_CONTEXT * (4 if stretched else 1)
    shape = LlamaShape(context_window_tokens=window, rope_scaling=scaling)
    directory = make_checkpoint(tmp_path, seed=3, shape=shape).directory
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (window - 1, window - 16, window - 40)]

    expected = [
        reference_greedy(directory, [prompt], window - len(prompt))[0] for prompt in prompts
    ]

    for way in WAYS:
        choose_way(way, monkeypatch)
        core = make_core(directory, context_window_tokens=window)
        requests = [make_request(prompt, window - len(prompt)) for prompt in prompts]
        outcomes = run_all(core, requests)
        again = run_all(core, requests, first_number=10)
        assert [outcome.token_ids for outcome in outcomes] == expected, way
        assert [outcome.token_ids for outcome in again] == expected, way
        assert core.request_fault(make_request(prompts[0], 2)) is not None


@pytest.mark.parametrize(("way", "dtype"), STEADY)
def test_batched_equals_alone(
    way: str, dtype: ComputeDtype, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_way(way, monkeypatch)
    rng = random.Random(3)
    requests = [make_request(random_prompt(rng, rng.randrange(1, 150))) for _ in range(20)]

    batched = run_all(typed_core(tiny.directory, dtype), requests)

    assert [outcome.token_ids for outcome in batched] == tokens_alone(
        tiny.directory, dtype, requests
    )


@pytest.mark.parametrize(("way", "dtype"), STEADY)
def test_cached_equals_cold(
    way: str, dtype: ComputeDtype, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that end before, on and after a block border."""
    choose_way(way, monkeypatch)
    rng = random.Random(4)
    requests = [
        make_request(random_prompt(rng, length)) for length in (15, 16, 17, 31, 32, 33, 96, 100)
    ]
    core = typed_core(tiny.directory, dtype)

    cold = run_all(core, requests)
    cached = run_all(core, requests, first_number=10)
    salted = [make_request(request.prompt_token_ids, cache_salt="other") for request in requests]
    other_salt = run_all(core, salted, first_number=20)

    expected = tokens_alone(tiny.directory, dtype, requests)
    assert [outcome.token_ids for outcome in cold] == expected
    assert [outcome.token_ids for outcome in cached] == expected
    assert [outcome.token_ids for outcome in other_salt] == expected
    assert [outcome.cached_token_count for outcome in cached] == [0, 0, 16, 16, 16, 32, 80, 96]
    assert {outcome.cached_token_count for outcome in cold + other_salt} == {0}


@pytest.mark.parametrize(("way", "dtype"), STEADY)
def test_chunked_equals_whole(
    way: str, dtype: ComputeDtype, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_way(way, monkeypatch)
    request = make_request(random_prompt(random.Random(5), 500))

    whole = run_all(typed_core(tiny.directory, dtype, step_token_count_max=1024), [request])[0]

    for chunk in (64, 65, 127):
        chunked = run_all(typed_core(tiny.directory, dtype, step_token_count_max=chunk), [request])[
            0
        ]
        assert chunked.token_ids == whole.token_ids, chunk


@pytest.mark.parametrize(
    ("way", "dtype"), [case for case in STEADY if case[0] != "torch" and case[1] != "int8"]
)
def test_a_kv_cache_in_eight_bits_keeps_every_equality(
    way: str, dtype: ComputeDtype, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched, preempted and cached are as alone, because a token's scale is its own."""
    choose_way(way, monkeypatch)
    rng = random.Random(9)
    requests = [make_request(random_prompt(rng, 60 + number), 100) for number in range(6)]
    core = make_core(tiny.directory, compute_dtype=dtype, kv_dtype="int8")
    crowded = make_core(
        tiny.directory,
        compute_dtype=dtype,
        kv_dtype="int8",
        kv_cache_bytes=1,
        context_window_tokens=256,
        owed_output_token_count_max=1,
    )

    alone = [run_all(core, [request], number)[0] for number, request in enumerate(requests)]
    cached = run_all(core, requests, first_number=10)
    preempted = run_all(crowded, requests)

    assert crowded.statistics().preemption_count > 0
    assert all(outcome.cached_token_count for outcome in cached)
    for outcomes in (cached, preempted):
        assert [each.token_ids for each in outcomes] == [each.token_ids for each in alone]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_equals_undisturbed(
    way: str, temperature: float, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight growing sequences in a pool of one context: several are preempted."""
    choose_way(way, monkeypatch)
    rng = random.Random(6)
    # With another seed, one of 1,600 draws may lie between the roundings of two batch sizes: some
    # CPUs compute other products for several rows than for one.
    sampling = SamplingParams(temperature=temperature, seed=18)
    requests = [make_request(random_prompt(rng, 60), 200, sampling=sampling) for _ in range(8)]
    # The reservation for owed output would prevent crowding; a small one allows it.
    crowded = make_core(
        tiny.directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1
    )

    undisturbed = run_all(make_core(tiny.directory), requests)
    preempted = run_all(crowded, requests)

    assert crowded.statistics().preemption_count > 0
    assert [outcome.token_ids for outcome in preempted] == [
        outcome.token_ids for outcome in undisturbed
    ]
    assert all(outcome.cached_token_count == 0 for outcome in preempted), (
        "what is computed again is not billed as cached"
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_small_types_round_trip_and_keep_their_invariants(
    way: str, dtype: ComputeDtype, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal concurrent requests give equal tokens, in every type and on both decoders."""
    choose_way(way, monkeypatch)
    rng = random.Random(1)
    requests = [
        make_request(random_prompt(rng, length), 10, sampling=SamplingParams(temperature=t, seed=5))
        for length, t in ((50, 0.0), (16, 1.0), (90, 0.7))
    ]

    first, second = (run_all(typed_core(tiny.directory, dtype), requests) for _ in range(2))

    assert [outcome.token_ids for outcome in first] == [outcome.token_ids for outcome in second]
    for outcome in first:
        assert outcome.finished is not None
        assert outcome.finished.reason is EngineFinishReason.LENGTH
        assert len(outcome.token_ids) == 10
