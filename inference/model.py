"""The Llama decoder as one function of a batch: hidden states in, logits out, keys and values into the pool.

Shapes on the lines: N rows (tokens of all sequences of a step), E hidden size, H heads, H_kv key-value heads, D head size,
V vocabulary. Checked token for token against `transformers` in the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from inference.attention import DecodeSpan, LayerPool, PrefillSpan, attend_decode, attend_prefill, write
from inference.checkpoint import DecoderConfig, Llama3Scaling, RopeConfig
from inference.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows: first one row per decoding sequence, then the runs of those in prefill.

    token_ids, positions: (N,). pool_rows: (N * H_kv,) where the rows' keys and values go. logit_rows: (R,) rows whose next token
    is wanted.
    """

    token_ids: Tensor
    positions: Tensor
    pool_rows: Tensor
    decodes: tuple[DecodeSpan, ...]
    prefills: tuple[PrefillSpan, ...]
    logit_rows: Tensor


class Decoder:
    """Weights with their configuration. Holds no state between calls; the pool belongs to the runner."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, context_window_tokens: int) -> None:
        self._config = config
        self._weights = weights
        self._cosines, self._sines = rotary_tables(config.rope, config.head_dim, context_window_tokens, weights.embedding.dtype)

    def forward(self, batch: Batch, pools: list[LayerPool]) -> Tensor:
        """Logits (R, V) in fp32 for `batch.logit_rows`. Writes the keys and values of all rows into the pools."""
        hidden = embedding(batch.token_ids, self._weights.embedding)  # (N, E)
        rotation = (self._cosines[batch.positions][:, None, :], self._sines[batch.positions][:, None, :])  # (N, 1, D)
        for layer, pool in zip(self._weights.layers, pools, strict=True):
            hidden = hidden + self._attention(self._norm(hidden, layer.attention_norm), layer, pool, batch, rotation)
            hidden = hidden + self._mlp(self._norm(hidden, layer.mlp_norm), layer)
        wanted = self._norm(hidden[batch.logit_rows], self._weights.final_norm)
        return linear(wanted, self._weights.lm_head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, (hidden.shape[-1],), weight, self._config.rms_norm_eps)

    def _attention(
        self, hidden: Tensor, layer: LayerWeights, pool: LayerPool, batch: Batch, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        config = self._config
        head_count, kv_head_count = config.head_count, config.kv_head_count
        mixed = linear(hidden, layer.qkv.weight, layer.qkv.bias).view(-1, head_count + 2 * kv_head_count, config.head_dim)
        # Queries and keys are neighbours in the stacked rows, so one rotation serves both.
        rotated = rotate(mixed[:, : head_count + kv_head_count], *rotation)
        queries, keys = rotated[:, :head_count], rotated[:, head_count:]
        write(pool, batch.pool_rows, keys, mixed[:, head_count + kv_head_count :])
        attended = torch.empty_like(queries)  # (N, H, D)
        for decode in batch.decodes:
            rows = slice(decode.row_start, decode.row_end)
            attended[rows] = attend_decode(queries[rows], pool, decode)
        for prefill in batch.prefills:
            rows = slice(prefill.row_start, prefill.row_end)
            attended[rows] = attend_prefill(queries[rows], pool, prefill)
        return linear(attended.flatten(1), layer.attention_out.weight, layer.attention_out.bias)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = linear(hidden, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down.weight, layer.down.bias)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of (N, heads, D) by (N, 1, D) tables: dimension i turns with i + D/2, as Llama checkpoints store it."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines + turned * sines


def rotary_tables(rope: RopeConfig, head_dim: int, position_count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (positions, D), computed in fp32. Source: Su et al. 2021; Llama 3.1's scaling of frequencies."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    frequencies = frequencies / rope.linear_factor
    angles = torch.outer(torch.arange(position_count, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended by how often they turn in the old context."""
    turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)
