"""Decoders with random weights that are made on the device, and sequences to run on them.

A decoder's work does not depend on the values of its weights, so nothing is downloaded or written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from bench.shapes import Shape
from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.rope import RopeConfig
from inference.checkpoint.tensors import LinearWeights
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.torch_decoder import TorchDecoder
from inference.decoder.model import DecoderWeights, LayerWeights, Logits, TorchKernels
from inference.kv_blocks import blocks_for
from inference.limits import EngineLimits

DTYPES: dict[ComputeDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST_PLAIN_TOKEN = 16


SHAPES = {
    "tiny": Shape(64, 96, 2, 4, 2, 16, 300),
    "tiny-window": Shape(64, 96, 2, 6, 2, 24, 300, window=20, qk_norm=True),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256),  # Llama 3.2 1B
    "8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256),  # Llama 3.1 8B
}


def config_of(shape: Shape, context_window_tokens: int) -> DecoderConfig:
    """Build the configuration of a checkpoint of this shape."""
    windows = (None, shape.window) * shape.layer_count
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocabulary_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        layer_count=shape.layer_count,
        head_count=shape.head_count,
        kv_head_count=shape.kv_head_count,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500_000.0, None),
        tied_embeddings=False,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=shape.qk_norm,
        layer_windows=windows[: shape.layer_count],
        context_window_tokens=context_window_tokens,
        end_token_ids=frozenset(),
    )


def random_weights(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> DecoderWeights:
    """Draw weights that keep the spread of hidden states and give logits that are not flat."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> LinearWeights:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return LinearWeights(weight.normal_(0, spread * columns**-0.5, generator=generator), None)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, heads = shape.hidden_size, shape.head_count * shape.head_dim
    norm = ones(shape.head_dim) if shape.qk_norm else None
    layers = tuple(
        LayerWeights(
            attention_norm=ones(hidden),
            qkv=matrix(heads + 2 * shape.kv_head_count * shape.head_dim, hidden),
            query_norm=norm,
            key_norm=norm,
            attention_out=matrix(hidden, heads),
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * shape.intermediate_size, hidden),
            down=matrix(hidden, shape.intermediate_size),
        )
        for _ in range(shape.layer_count)
    )
    embedding = matrix(shape.vocabulary_size, hidden, math.sqrt(hidden)).weight
    head = matrix(shape.vocabulary_size, hidden, 4.0)
    return DecoderWeights(embedding, layers, ones(hidden), head)


def open_decoder(
    shape: Shape,
    weights: DecoderWeights,
    limits: EngineLimits,
    *,
    block_count: int | None = None,
    kernels: TorchKernels | None = None,
) -> TorchDecoder:
    """Open a decoder on the weights' device. A `block_count` of None takes the free memory."""
    dtype = weights.embedding.dtype
    name = next(name for name, each in DTYPES.items() if each == dtype)
    config = config_of(shape, limits.context_window_tokens)
    options = EngineOptions("", limits, name)
    kv_bytes = None if block_count is None else block_count * options.block_bytes(config)
    options = EngineOptions("", limits, name, kv_bytes)
    return TorchDecoder(config, weights, options, kernels)


@dataclass(slots=True)
class Text:
    """Sequence with the fields that a decoder reads. Implements `CachedTokens`."""

    token_ids: list[int]
    block_table: list[int]
    computed_token_count: int = 0
    rotary_offset: int = 0


@dataclass(slots=True)
class Part:
    """Next tokens of a text to compute. Implements `Rows`."""

    sequence: Text
    token_count: int
    draft: tuple[int, ...] = ()

    @property
    def logit_row_count(self) -> int:
        """1 if this part ends with the text's last token, else 0."""
        text = self.sequence
        return int(text.computed_token_count + self.token_count == len(text.token_ids))


@dataclass(slots=True)
class Run:
    """Texts on a decoder, each with its own blocks."""

    decoder: TorchDecoder
    texts: list[Text] = field(default_factory=list)
    used_block_count: int = 0

    def add(self, token_ids: Sequence[int], output_token_count: int) -> Text:
        """Add a text with blocks for its output."""
        first = self.used_block_count
        self.used_block_count += blocks_for(len(token_ids) + output_token_count)
        assert self.used_block_count <= self.decoder.block_count, "the pool is too small"
        text = Text(list(token_ids), list(range(first, self.used_block_count)))
        self.texts.append(text)
        return text

    def step(self, token_count_max: int) -> Logits:
        """Compute up to this many tokens of each text, and append the likeliest next ones."""
        parts = [
            Part(text, min(len(text.token_ids) - text.computed_token_count, token_count_max))
            for text in self.texts
        ]
        with torch.inference_mode():
            logits = self.decoder.forward(parts)
        best = iter(logits.best)
        for part in parts:
            completes = part.logit_row_count
            part.sequence.computed_token_count += part.token_count
            if completes:
                part.sequence.token_ids.append(next(best))
        return logits

    def fill(self, context_token_count: int) -> None:
        """Mark all but the last of this many tokens of each text as computed."""
        for text in self.texts:
            text.token_ids = [FIRST_PLAIN_TOKEN] * context_token_count
            text.computed_token_count = context_token_count - 1


def open_device(name: str) -> torch.device:
    """Open the device to run on. Raises: SystemExit without a GPU, or without an interpreter."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; --device cpu tries this program out")
    if name == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("--device cpu needs TRITON_INTERPRET=1 in the environment")
    return torch.device(name)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Describe the device and the versions of the software."""
    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if device.type != "cuda":
        return facts | {"device": "cpu, Triton's interpreter: no measurement"}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both programs."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="directory for the results as JSON")


def write_results(out: Path | None, name: str, results: Any) -> None:
    """Write results as JSON into the directory `out`, unless it is None."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
