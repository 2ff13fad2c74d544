"""Execution on another device: checks without a GPU that no tensor stays on the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.checkpoint.checkpoint import read_config
from inference.checkpoint.tensors import on_device
from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions
from inference.decoder.model import (
    Attend,
    Batch,
    Decoder,
    LayerPool,
    LayerWeights,
    TorchKernels,
    load_weights,
)
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
    cores = [
        EngineCore(EngineOptions(str(tiny.directory), EngineLimits(2048), device=device))
        for device in ("cpu", "cuda")
    ]

    cpu, cuda = ([outcome.token_ids for outcome in run_all(core, requests)] for core in cores)

    assert cpu == cuda


class ShapeKernels(TorchKernels):
    """Kernels that compute shapes and devices alone."""

    def add_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = hidden if update is None else hidden + update
        return total, total * weight

    def rotate_and_write(
        self,
        mixed: Tensor,
        layer: LayerWeights,
        eps: float,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        pool: LayerPool,
    ) -> Tensor:
        _, kv_head_count, _, head_dim = pool.keys.shape
        heads = mixed.view(len(mixed), -1, head_dim)
        cosines, sines = (table[batch.rotary_rows][:, None] for table in rotation)
        pool.keys.view(-1, kv_head_count, head_dim)[batch.slots] = heads[:, :kv_head_count]
        return (heads * cosines + heads * sines)[:, : -2 * kv_head_count]

    def attention(self, batch: Batch, window: int | None) -> Attend:
        return lambda queries, pool: queries + batch.spans.sum() + batch.tables.sum()

    def gated(self, gate_up: Tensor) -> Tensor:
        return gate_up.chunk(2, dim=-1)[0]

    def best(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)


def test_a_forward_pass_mixes_no_devices(tmp_path: Path) -> None:
    """The meta device computes only shapes, and rejects tensors of another device."""
    make_checkpoint(tmp_path, shape=LlamaShape(architecture="Qwen3ForCausalLM"))
    config, meta = read_config(tmp_path), torch.device("meta")
    rows = torch.arange(5, dtype=torch.int32, device=meta)
    spans = torch.zeros(5, 4, dtype=torch.int32, device=meta)
    batch = Batch(rows, rows, rows, spans, rows[:3], rows, single_count=5, row_count_max=1)
    pool_shape = (5, config.kv_head_count, KV_BLOCK_TOKENS, config.head_dim)

    weights = on_device(load_weights(tmp_path, config, torch.bfloat16), meta)
    decoder = Decoder(config, weights, 64, ShapeKernels())
    pools = [
        LayerPool(*torch.zeros(2, *pool_shape, dtype=torch.bfloat16, device=meta))
        for _ in config.layer_windows
    ]

    with torch.inference_mode():
        logits = decoder.forward(batch, pools)

        assert (logits.device.type, tuple(logits.shape)) == ("meta", (3, config.vocabulary_size))
        decoder._rotation = decoder._rotation[0], torch.ones(64, config.head_dim)
        with pytest.raises(RuntimeError, match="device"):
            decoder.forward(batch, pools)


def test_a_kv_cache_without_kernels_is_named(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = EngineOptions(
        str(tiny.directory), EngineLimits(512), "bfloat16", None, "cuda", kv_dtype="int8"
    )

    with pytest.raises(EngineStartFailed, match="of type int8 has no kernels on cuda: use auto"):
        EngineCore(options)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "int8"])
def test_a_gpu_that_is_too_small_or_a_type_without_kernels_is_named(
    tiny: TinyCheckpoint, compute_dtype: ComputeDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def on_full_device(weights: Any, device: torch.device) -> Any:
        assert device.type == "cuda"
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    monkeypatch.setattr("inference.core.model_runner.on_device", on_full_device)
    words = {
        "bfloat16": r"too little memory for the model \(CUDA out of memory\): use a smaller",
        "int8": "int8 has no kernels on cuda: use bfloat16",
    }[compute_dtype]

    with pytest.raises(EngineStartFailed, match=words):
        EngineCore(
            EngineOptions(str(tiny.directory), EngineLimits(512), compute_dtype, None, "cuda")
        )
