"""Llama decoder as a function of a batch: computes logits and writes keys and values to the pool.

Shapes in comments: N rows (tokens of all sequences of a step), E hidden size, H heads, H_kv
key-value heads, D head size, V vocabulary. Tests compare it with `transformers` token by token.

Attention uses paged keys and values. The pool of one layer is K and V, each (blocks, H_kv, T, D)
with T = `KV_BLOCK_TOKENS`: a block's rows of one head are contiguous, so gathering a sequence's
blocks by head gives the layout for batched multiplication in one copy.

Weights are fused: query, key and value are one matrix, gate and up another, for fewer and larger
multiplications. Files are memory-mapped: tensors in the compute type stay in the file; others are
converted (type, stacking, int8) one by one, and their pages released. So a checkpoint is never in
memory twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from inference.checkpoint.checkpoint import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    rotation_switch_tokens,
)
from inference.checkpoint.tensors import LinearWeights, TensorReader, project, quantize_rows
from inference.kv_blocks import KV_BLOCK_TOKENS

# In files of older transformers versions; derived from the configuration.
IGNORED_NAMES = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; qkv stacks query, key and value rows, gate_up stacks gate and up rows.

    query_norm, key_norm: (D,), or None where heads are not normalized.
    """

    attention_norm: Tensor
    qkv: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. embedding: (vocabulary, hidden). lm_head shares its memory if tied and not
    quantized.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeights


def load_weights(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda fraction: None,
    *,
    quantize: bool = False,
) -> DecoderWeights:
    """Read all weights as `dtype`. on_progress: called with 0 to 1 after each layer. quantize: int8
    by rows.

    Raises: CheckpointInvalid, naming the file and the tensor that is missing, unexpected, or of a
    wrong shape.
    """
    reader = TensorReader(directory, dtype, quantize)
    vocabulary_shape = (config.vocabulary_size, config.hidden_size)
    embedding = reader.read("model.embed_tokens.weight", vocabulary_shape)
    layers = []
    for index in range(config.layer_count):
        layers.append(_read_layer(reader, config, f"model.layers.{index}"))
        on_progress((index + 1) / (config.layer_count + 1))
    final_norm = reader.read("model.norm.weight", (config.hidden_size,))
    if config.tied_embeddings:
        lm_head = quantize_rows(embedding) if quantize else LinearWeights(embedding, None)
        reader.drop_copy("lm_head.weight", embedding)
    else:
        lm_head = reader.read_stacked({"lm_head": config.vocabulary_size}, config.hidden_size, biased=False)
    reader.refuse_unread(config.architecture, IGNORED_NAMES)
    on_progress(1.0)
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _read_layer(reader: TensorReader, config: DecoderConfig, prefix: str) -> LayerWeights:
    hidden, q_size = config.hidden_size, config.head_count * config.head_dim
    kv_size, inner = config.kv_head_count * config.head_dim, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    head_shape = (config.head_dim,)
    return LayerWeights(
        attention_norm=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.read_stacked(qkv, hidden, config.qkv_bias),
        query_norm=reader.read(f"{attention}.q_norm.weight", head_shape) if config.qk_norm else None,
        key_norm=reader.read(f"{attention}.k_norm.weight", head_shape) if config.qk_norm else None,
        attention_out=reader.read_stacked({f"{attention}.o_proj": hidden}, q_size, config.attention_out_bias),
        mlp_norm=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.read_stacked(gate_up, hidden, config.mlp_bias),
        down=reader.read_stacked({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Keys and values of one layer: two views (blocks, H_kv, T, D) of one allocation."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows of one sequence in a batch, computed together.

    rows: start and end in the batch. table: (M,) block ids of all its positions. position: of the
    first row. mask: (rows, M * T), True for visible positions; None if the whole prompt begins at
    position 0 (causal).
    """

    row_start: int
    row_end: int
    position: int
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Rows of a batch with one new token each and contexts of similar length, computed together.

    rows: start and end in the batch, B of them. tables: (B, M) block ids, padded with any valid id.
    mask: (B, M * T), 0 for visible positions, -inf elsewhere.
    """

    row_start: int
    row_end: int
    tables: Tensor
    mask: Tensor


def write(pool: LayerPool, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store new keys and values (N, H_kv, D). rows: (N * H_kv,) from `row_indices`. Writes the pool."""
    head_dim = keys.shape[-1]
    pool.keys.view(-1, head_dim).index_copy_(0, rows, keys.reshape(-1, head_dim))
    pool.values.view(-1, head_dim).index_copy_(0, rows, values.reshape(-1, head_dim))


def row_indices(block_ids: Tensor, offsets: Tensor, kv_head_count: int) -> Tensor:
    """Return the pool rows of D floats for each token's heads: (N,), (N,) -> (N * H_kv,)."""
    heads = torch.arange(kv_head_count)
    return ((block_ids[:, None] * kv_head_count + heads) * KV_BLOCK_TOKENS + offsets[:, None]).flatten()


def gather(pool: Tensor, tables: Tensor) -> Tensor:
    """Gather the blocks of each table by head: (blocks, H_kv, T, D), (B, M) -> (B, H_kv, M * T, D).
    One copy.
    """
    block_count, kv_head_count, block_tokens, head_dim = pool.shape
    batch, width = tables.shape
    indices = tables[:, None, :] * kv_head_count + torch.arange(kv_head_count, device=tables.device)[:, None]  # (B, H_kv, M)
    flat = pool.view(block_count * kv_head_count, block_tokens * head_dim).index_select(0, indices.flatten())
    return flat.view(batch, kv_head_count, width * block_tokens, head_dim)


def attend_decode(queries: Tensor, pool: LayerPool, span: DecodeSpan) -> Tensor:
    """Compute attention of one new token per sequence over all its positions, including its own.

    Shapes: queries (B, H, D); returns (B, H, D). The pool must already hold the new token's key and
    value. Heads that share keys are query rows of one head, so grouped queries repeat no keys.
    """
    batch, head_count, head_dim = queries.shape
    kv_head_count = pool.keys.shape[1]
    grouped = queries.reshape(batch, kv_head_count, head_count // kv_head_count, head_dim)
    keys, values = gather(pool.keys, span.tables), gather(pool.values, span.tables)  # (B, H_kv, S, D)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask[:, None, None, :])
    return out.view(batch, head_count, head_dim)


def attend_prefill(queries: Tensor, pool: LayerPool, span: PrefillSpan) -> Tensor:
    """Compute attention of consecutive new tokens of one sequence, each over all positions up to
    its own.

    Shapes: queries (R, H, D); returns (R, H, D). The pool must already hold the new keys and
    values.
    """
    row_count = queries.shape[0]
    keys, values = gather(pool.keys, span.table[None]), gather(pool.values, span.table[None])  # (1, H_kv, S, D)
    if span.mask is None:
        keys, values = keys[:, :, :row_count], values[:, :, :row_count]
    out = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=span.mask, is_causal=span.mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)


NOT_FINITE = -1  # in place of a token id


@dataclass(frozen=True, slots=True)
class Logits:
    """values: (R, V) fp32, on the CPU. best: per row the first id with the largest logit, or
    `NOT_FINITE` if a logit of the row is infinite or NaN.
    """

    values: Tensor
    best: list[int]

    @classmethod
    def of(cls, values: Tensor) -> Logits:
        """Build from values, computing `best`."""
        numbers = values.numpy()  # its argmax is 7 times as fast as torch's at 50 rows
        best = numbers.argmax(axis=-1)
        best[~np.isfinite(numbers).all(axis=-1)] = NOT_FINITE
        return cls(values, best.tolist())


@dataclass(frozen=True, slots=True)
class Spans:
    """A step's rows for attention: first one row per decoding sequence, then the rows of prefilling
    ones.
    """

    decodes: tuple[DecodeSpan, ...]
    prefills: tuple[PrefillSpan, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step.

    token_ids: (N,). rotary_rows: (N,) of the rotation tables. pool_rows: (N * H_kv,) targets of
    keys and values. spans: by attention window in positions; None for all. logit_rows: (R,) rows
    whose logits are needed.
    """

    token_ids: Tensor
    rotary_rows: Tensor
    pool_rows: Tensor
    spans: Mapping[int | None, Spans]
    logit_rows: Tensor


class Decoder:
    """Weights with their configuration. Stateless between calls; the runner owns the pool."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, context_window_tokens: int) -> None:
        self._config = config
        self._weights = weights
        tables = rotary_tables(config.rope, config.head_dim, context_window_tokens, weights.embedding.dtype)
        self._cosines, self._sines = (table.to(weights.embedding.device) for table in tables)

    def forward(self, batch: Batch, pools: list[LayerPool]) -> Tensor:
        """Return logits (R, V) in fp32 for `batch.logit_rows`. Writes the keys and values of all
        rows to the pools.
        """
        hidden = embedding(batch.token_ids, self._weights.embedding)  # (N, E)
        rotation = (self._cosines[batch.rotary_rows][:, None, :], self._sines[batch.rotary_rows][:, None, :])  # (N, 1, D)
        for layer, pool, window in zip(self._weights.layers, pools, self._config.layer_windows, strict=True):
            spans = batch.spans[window]
            normed = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attention(normed, layer, pool, batch.pool_rows, spans, rotation)
            hidden = hidden + self._mlp(self._norm(hidden, layer.mlp_norm), layer)
        wanted = self._norm(hidden[batch.logit_rows], self._weights.final_norm)
        return project(wanted, self._weights.lm_head).float()

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values, (values.shape[-1],), weight, self._config.rms_norm_eps)

    def _attention(
        self,
        hidden: Tensor,
        layer: LayerWeights,
        pool: LayerPool,
        pool_rows: Tensor,
        spans: Spans,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self._config
        head_count, kv_head_count = config.head_count, config.kv_head_count
        mixed = project(hidden, layer.qkv).view(-1, head_count + 2 * kv_head_count, config.head_dim)
        # Queries and keys are adjacent in the stacked rows, so they are rotated together.
        turning = mixed[:, : head_count + kv_head_count]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = turning[:, :head_count], turning[:, head_count:]
            turning = torch.cat((self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)), dim=1)
        rotated = rotate(turning, *rotation)
        queries, keys = rotated[:, :head_count], rotated[:, head_count:]
        write(pool, pool_rows, keys, mixed[:, head_count + kv_head_count :])
        attended = torch.empty_like(queries)  # (N, H, D)
        for decode in spans.decodes:
            rows = slice(decode.row_start, decode.row_end)
            attended[rows] = attend_decode(queries[rows], pool, decode)
        for prefill in spans.prefills:
            rows = slice(prefill.row_start, prefill.row_end)
            attended[rows] = attend_prefill(queries[rows], pool, prefill)
        return project(attended.flatten(1), layer.attention_out)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = project(hidden, layer.gate_up).chunk(2, dim=-1)
        return project(silu(gate) * up, layer.down)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate (N, heads, D) by (N, 1, D) tables: dimensions i and i + D/2 are a pair, as in Llama
    checkpoints.
    """
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines + turned * sines


def rotary_tables(rope: RopeConfig, head_dim: int, position_count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (rows, D), computed in fp32. Source: Su et al. 2021, and each
    scaling's paper.

    A row depends only on its position, so keys do not depend on chunking, caching or continuation.
    Longrope beyond its original context has two tables: first that for sequences within it, and
    from row `rotation_switch_tokens` on that for longer ones.
    """
    scaling, switch = rope.scaling, rotation_switch_tokens(rope, position_count)
    if isinstance(scaling, LongRopeScaling) and switch is not None:
        short = rotary_tables(rope, head_dim, switch, dtype)
        slower = replace(
            scaling,
            short_factors=scaling.long_factors,
            original_context_tokens=position_count,
            attention_factor=_longrope_sharpening(scaling),
        )
        long = rotary_tables(replace(rope, scaling=slower), head_dim, position_count, dtype)
        return torch.cat((short[0], long[0])), torch.cat((short[1], long[1]))
    positions = torch.arange(position_count, dtype=torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents  # (D/2,), radians per position
    sharpening = 1.0
    match rope.scaling:
        case LinearScaling(factor=factor):
            frequencies = frequencies / factor
        case DynamicScaling() as dynamic:
            frequencies = _grow(rope.theta, dynamic, positions, exponents)  # (positions, D/2)
        case Llama3Scaling() as llama3:
            frequencies = _stretch(frequencies, llama3)
        case YarnScaling() as yarn:
            frequencies, sharpening = _stretch_slow(rope.theta, yarn, exponents), _sharpening(yarn)
        case LongRopeScaling() as longrope:
            frequencies = 1.0 / (torch.tensor(longrope.short_factors) * rope.theta**exponents)
            sharpening = _longrope_sharpening(longrope)
    angles = positions[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * sharpening).to(dtype), (angles.sin() * sharpening).to(dtype)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow down slow rotations by `factor`, keep fast ones, and blend those between by turns in the
    old context.
    """
    turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def _grow(theta: float, scaling: DynamicScaling, positions: Tensor, exponents: Tensor) -> Tensor:
    """Return (positions, D/2) frequencies: each position rotates as in a sequence that ends with
    it.

    This equals transformers for tokens generated one by one. For a prompt beyond the original
    context, transformers uses the prompt's length for all of its tokens, which is incompatible with
    prefix caching.
    """
    lengths = (positions + 1).clamp_min(float(scaling.original_context_tokens))
    dimensions = 2 * len(exponents)
    growth = scaling.factor * lengths / scaling.original_context_tokens - (scaling.factor - 1)
    bases = theta * growth ** (dimensions / (dimensions - 2))
    return 1.0 / bases[:, None] ** exponents


def _stretch_slow(theta: float, scaling: YarnScaling, exponents: Tensor) -> Tensor:
    """Return frequencies with a ramp from kept to slowed dimensions; Peng et al. 2023, section 3.2."""
    pair_count = len(exponents)

    def pair_that_turns(turns: float) -> float:
        """Return the fractional dimension that makes this number of turns within the original
        context.
        """
        return pair_count * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pair_count - 1)
    if first == last:
        last += 0.001  # avoids a division by zero; the ramp is a step
    slowed = ((torch.arange(pair_count, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    bases = theta**exponents
    return (1.0 / (scaling.factor * bases)) * slowed + (1.0 / bases) * (1.0 - slowed)


def _longrope_sharpening(scaling: LongRopeScaling) -> float:
    """Return the factor for queries and keys at all lengths; Ding et al. 2024, as in Phi-3."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context_tokens))


def _sharpening(scaling: YarnScaling) -> float:
    """Return the factor for queries and keys that keeps attention sharp over longer contexts."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = math.log(max(scaling.factor, 1.0))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1.0) / (0.1 * scaling.mscale_all_dim * growth + 1.0)
    return 0.1 * growth + 1.0
