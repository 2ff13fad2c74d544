"""Execution on another device: checks without a GPU that no tensor stays on the CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.checkpoint.checkpoint import read_config
from inference.checkpoint.tensors import on_device
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.decoder.model import Batch, Decoder, DecodeSpan, LayerPool, PrefillSpan, Spans, load_weights, row_indices
from inference.errors import EngineStartFailed
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import make_request, random_prompt, run_all


def test_a_device_that_is_not_there_is_named(tiny: TinyCheckpoint) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it is there")

    with pytest.raises(EngineStartFailed, match="set to cuda, but torch finds no CUDA device"):
        EngineCore(EngineOptions(str(tiny.directory), EngineLimits(512), device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_tokens_of_the_cpu(tiny: TinyCheckpoint) -> None:
    rng = random.Random(1)
    requests = [make_request(random_prompt(rng, length)) for length in (1, 40, 300)]
    cores = [EngineCore(EngineOptions(str(tiny.directory), EngineLimits(2048), device=device)) for device in ("cpu", "cuda")]

    cpu, cuda = ([outcome.token_ids for outcome in run_all(core, requests)] for core in cores)

    assert cpu == cuda


@pytest.mark.parametrize("quantize", [False, True])
def test_a_forward_pass_mixes_no_devices(tmp_path: Path, quantize: bool) -> None:
    """The meta device computes shapes alone, and its tensors refuse to meet those of another."""
    make_checkpoint(tmp_path, shape=LlamaShape(architecture="Qwen3ForCausalLM"))
    config, meta = read_config(tmp_path), torch.device("meta")
    rows = torch.arange(5)
    spans = Spans(
        (DecodeSpan(0, 2, torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, KV_BLOCK_TOKENS, dtype=torch.bfloat16)),),
        (PrefillSpan(2, 5, 1, torch.zeros(1, dtype=torch.int64), torch.ones(3, KV_BLOCK_TOKENS, dtype=torch.bool)),),
    )
    batch = Batch(rows, rows, row_indices(rows, rows, config.kv_head_count), {None: spans}, rows[:3])
    pool_shape = (5, config.kv_head_count, KV_BLOCK_TOKENS, config.head_dim)

    weights = on_device(load_weights(tmp_path, config, torch.bfloat16, quantize=quantize), meta)
    decoder = Decoder(config, weights, 64)
    pools = [LayerPool(*torch.zeros(2, *pool_shape, dtype=torch.bfloat16, device=meta)) for _ in config.layer_windows]

    with torch.inference_mode():
        logits = decoder.forward(on_device(batch, meta), pools)

        assert (logits.device.type, tuple(logits.shape)) == ("meta", (3, config.vocabulary_size))
        faults: list[dict[str, Any]] = [{"pool_rows": batch.pool_rows}, {"spans": batch.spans}]
        for planted in faults:
            with pytest.raises((RuntimeError, NotImplementedError)):
                decoder.forward(replace(on_device(batch, meta), **planted), pools)
