"""Every architecture and rotation scaling gives the reference's greedy tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.checkpoint.rope import DynamicScaling, RopeConfig
from inference.decoder.model import rotary_tables
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all
from tests.inference.test_reference_tokens import WAYS, choose_way, reference_greedy

ORIGINAL_CONTEXT = 128  # tokens: the longer prompts of these tests are beyond it
YARN: dict[str, float | int | str] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
DYNAMIC: dict[str, float | int | str] = {"rope_type": "dynamic", "factor": 4.0}
WINDOW = 40  # tokens: not a multiple of a block, and more than one

SHAPES = {
    "mistral, sliding window": LlamaShape(architecture="MistralForCausalLM", sliding_window=WINDOW),
    "mistral, no window, wide heads": LlamaShape(architecture="MistralForCausalLM", head_dim=32),
    "mistral, window of one block": LlamaShape(
        architecture="MistralForCausalLM", sliding_window=16, kv_head_count=1
    ),
    "qwen2": LlamaShape(architecture="Qwen2ForCausalLM", tied_embeddings=True),
    "qwen2, window in later layers": LlamaShape(
        architecture="Qwen2ForCausalLM", layer_count=3, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3, wide heads": LlamaShape(
        architecture="Qwen3ForCausalLM", head_dim=32, tied_embeddings=True
    ),
    "qwen3, biases and yarn": LlamaShape(
        architecture="Qwen3ForCausalLM",
        attention_bias=True,
        context_window_tokens=1024,
        rope_scaling=YARN,
    ),
    "llama, yarn with everything said": LlamaShape(
        context_window_tokens=1024,
        rope_scaling=YARN
        | {
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "mscale": 1.2,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
    ),
    "llama, yarn with its own attention factor": LlamaShape(
        context_window_tokens=1024, rope_scaling=YARN | {"attention_factor": 1.1}
    ),
    "qwen2, yarn beyond its positions": LlamaShape(
        architecture="Qwen2ForCausalLM",
        context_window_tokens=ORIGINAL_CONTEXT,
        rope_scaling=YARN | {"factor": 4.0},
    ),
    "mistral, linear": LlamaShape(
        architecture="MistralForCausalLM", rope_scaling={"rope_type": "linear", "factor": 4.0}
    ),
}
PROMPT_LENGTHS = (1, 17, WINDOW, 90, 130, 333)
OUTPUT_TOKENS = 24

CUT_SHAPES = {
    "sliding window": SHAPES["mistral, sliding window"],
    "windows in some layers": SHAPES["qwen2, window in later layers"],
    "yarn": SHAPES["qwen3, biases and yarn"],
    "dynamic": LlamaShape(context_window_tokens=ORIGINAL_CONTEXT, rope_scaling=DYNAMIC),
}


def reference_stepwise(
    directory: Path, prompts: Sequence[Sequence[int]], token_count: int
) -> list[list[int]]:
    """Return the greedy output of `transformers`, fed with each prompt token by token."""
    from transformers import AutoModelForCausalLM

    outputs = []
    for prompt in prompts:
        model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        tokens, cache = list(prompt), None
        for position in range(len(prompt) + token_count - 1):
            with torch.inference_mode():
                output = model(
                    torch.tensor([[tokens[position]]]), past_key_values=cache, use_cache=True
                )
            cache = output.past_key_values
            if position >= len(prompt) - 1:
                tokens.append(int(output.logits[0, -1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts on both sides of the original context and the window, batched and chunked."""
    seed = list(SHAPES).index(name)
    checkpoint = make_checkpoint(tmp_path, seed=seed, shape=SHAPES[name])
    rng = random.Random(seed)
    prompts = [random_prompt(rng, length) for length in PROMPT_LENGTHS]

    expected = reference_greedy(tmp_path, prompts, OUTPUT_TOKENS)

    for way in WAYS:
        choose_way(way, monkeypatch)
        outcomes = run_all(
            make_core(checkpoint.directory),
            [make_request(prompt, OUTPUT_TOKENS) for prompt in prompts],
        )

        assert [outcome.token_ids for outcome in outcomes] == expected, way


def test_dynamic_scaling_equals_transformers_fed_token_by_token(tmp_path: Path) -> None:
    """The reference's own rule, independent of the number of tokens computed at once."""
    checkpoint = make_checkpoint(
        tmp_path, shape=LlamaShape(context_window_tokens=ORIGINAL_CONTEXT, rope_scaling=DYNAMIC)
    )
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (20, 115, 200)]

    outcomes = run_all(
        make_core(checkpoint.directory), [make_request(prompt, OUTPUT_TOKENS) for prompt in prompts]
    )

    tokens = [outcome.token_ids for outcome in outcomes]
    assert tokens == reference_stepwise(tmp_path, prompts, OUTPUT_TOKENS)
    # From a prompt within the original context, this is ordinary generation with growth.
    assert tokens[:2] == reference_greedy(tmp_path, prompts[:2], OUTPUT_TOKENS)


def test_dynamic_scaling_changes_nothing_within_the_original_context() -> None:
    plain = rotary_tables(RopeConfig(), 32, 300, torch.float32)
    dynamic = rotary_tables(RopeConfig(scaling=DynamicScaling(4.0, 128)), 32, 300, torch.float32)

    assert torch.equal(plain[0][:128], dynamic[0][:128])
    assert not torch.equal(plain[0][128:], dynamic[0][128:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CUT_SHAPES)
def test_batched_chunked_cached_and_preempted_equal_alone(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_way(way, monkeypatch)
    directory = make_checkpoint(tmp_path, seed=7, shape=CUT_SHAPES[name]).directory
    rng = random.Random(7)
    requests = [make_request(random_prompt(rng, length), 100) for length in (60, 250, 61, 100, 62)]
    core = make_core(directory, step_token_count_max=1024)
    alone = [
        run_all(core, [replace(request, cache_salt=f"alone {number}")], number)[0].token_ids
        for number, request in enumerate(requests)
    ]
    chunked_core = make_core(directory, step_token_count_max=67)
    crowded = make_core(
        directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1
    )

    chunked = [outcome.token_ids for outcome in run_all(chunked_core, requests)]
    cached = run_all(chunked_core, requests, first_number=len(requests))
    preempted = [outcome.token_ids for outcome in run_all(crowded, requests)]

    assert chunked == alone
    assert [outcome.token_ids for outcome in cached] == alone
    assert all(outcome.cached_token_count for outcome in cached), "every prompt has a full block"
    assert crowded.statistics().preemption_count > 0
    assert preempted == alone
