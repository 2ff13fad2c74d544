"""The engine's greedy tokens are those of the reference, however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import EngineFinishReason, SamplingParams
from inference.engine_core import EngineCore, EngineOptions
from inference.limits import EngineLimits
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all

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
        layer_count=3, hidden_size=96, head_count=6, kv_head_count=3, rope_scaling={"type": "linear", "factor": 2.0}
    ),
}
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 64, 200, 333, 600)
OUTPUT_TOKENS = 24


def reference_greedy(directory: Path, prompts: Sequence[Sequence[int]], token_count: int) -> list[list[int]]:
    """What `transformers` generates greedily, one prompt at a time, with end tokens ignored."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": token_count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of all lengths at once, so that they are batched, and long ones chunked."""
    seed = list(SHAPES).index(name)
    checkpoint = make_checkpoint(tmp_path, seed=seed, shape=SHAPES[name], shard_count=1 + seed % 2)
    rng = random.Random(seed)
    prompts = [random_prompt(rng, length) for length in PROMPT_LENGTHS]

    outcomes = run_all(make_core(checkpoint.directory), [make_request(prompt, OUTPUT_TOKENS) for prompt in prompts])

    assert [outcome.token_ids for outcome in outcomes] == reference_greedy(tmp_path, prompts, OUTPUT_TOKENS)


def test_batched_equals_alone(tiny: TinyCheckpoint) -> None:
    rng = random.Random(3)
    requests = [make_request(random_prompt(rng, rng.randrange(1, 150))) for _ in range(20)]

    batched = run_all(make_core(tiny.directory), requests)
    alone = [run_all(make_core(tiny.directory), [request])[0] for request in requests]

    assert [outcome.token_ids for outcome in batched] == [outcome.token_ids for outcome in alone]


def test_cached_equals_cold(tiny: TinyCheckpoint) -> None:
    rng = random.Random(4)
    request = make_request(random_prompt(rng, 100))
    core = make_core(tiny.directory)

    cold = run_all(core, [request])[0]
    cached = run_all(core, [request], first_number=1)[0]
    other_salt = run_all(core, [make_request(request.prompt_token_ids, cache_salt="other")], first_number=2)[0]

    assert (cold.cached_token_count, cached.cached_token_count, other_salt.cached_token_count) == (0, 96, 0)
    assert cold.token_ids == cached.token_ids == other_salt.token_ids


@pytest.mark.parametrize("chunk", [64, 65, 127])
def test_chunked_equals_whole(tiny: TinyCheckpoint, chunk: int) -> None:
    rng = random.Random(5)
    request = make_request(random_prompt(rng, 500))

    whole = run_all(make_core(tiny.directory, step_token_count_max=1024), [request])[0]
    chunked = run_all(make_core(tiny.directory, step_token_count_max=chunk), [request])[0]

    assert chunked.token_ids == whole.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_equals_undisturbed(tiny: TinyCheckpoint, temperature: float) -> None:
    """A pool of one context for eight sequences that grow beyond it: several must give way and come back."""
    rng = random.Random(6)
    sampling = SamplingParams(temperature=temperature, seed=17)
    requests = [make_request(random_prompt(rng, 60), 200, sampling=sampling) for _ in range(8)]
    # The reservation for owed output would keep them from crowding; a small one lets them in.
    crowded = make_core(tiny.directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1)

    undisturbed = run_all(make_core(tiny.directory), requests)
    preempted = run_all(crowded, requests)

    assert crowded.statistics().preemption_count > 0
    assert [outcome.token_ids for outcome in preempted] == [outcome.token_ids for outcome in undisturbed]
    assert all(outcome.cached_token_count == 0 for outcome in preempted), "what is computed again is not billed as cached"


def test_bfloat16_generates_and_keeps_its_books(tiny: TinyCheckpoint) -> None:
    core = EngineCore(EngineOptions(tiny.directory, EngineLimits(512), "bfloat16", 1 << 20))

    outcome = run_all(core, [make_request(random_prompt(random.Random(1), 50), 10)])[0]

    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.LENGTH
    assert len(outcome.token_ids) == 10
