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

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    rotation_switch_tokens,
)
from inference.checkpoint.tensors import LinearWeights, TensorReader, project, quantize_rows
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for

# In files of older transformers versions; derived from the configuration.
IGNORED_NAMES = re.compile(r".*\.rotary_emb\.inv_freq")
Entries = np.ndarray[Any, np.dtype[np.int32]]

NOT_FINITE = -1  # in place of a token id


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer. `qkv` stacks the rows of query, key and value, `gate_up` those
    of gate and up.

    `query_norm` and `key_norm` are (D,), or None where heads are not normalized.
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
    """All weights. `embedding` is (vocabulary, hidden); `lm_head` may share its memory."""

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
    """Read all weights as `dtype`, or with `quantize` as int8 by rows. `on_progress` is called with
    0 to 1 after each layer.

    Raises CheckpointInvalid, naming the file and the tensor that is missing, unexpected, or of a
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
        lm_head = reader.read_stacked(
            {"lm_head": config.vocabulary_size}, config.hidden_size, biased=False
        )
    reader.refuse_unread(config.architecture, IGNORED_NAMES)
    on_progress(1.0)
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _read_layer(reader: TensorReader, config: DecoderConfig, prefix: str) -> LayerWeights:
    hidden, q_size = config.hidden_size, config.head_count * config.head_dim
    kv_size, inner = config.kv_head_count * config.head_dim, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {
        f"{attention}.q_proj": q_size,
        f"{attention}.k_proj": kv_size,
        f"{attention}.v_proj": kv_size,
    }
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    head_shape = (config.head_dim,)
    return LayerWeights(
        attention_norm=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.read_stacked(qkv, hidden, config.qkv_bias),
        query_norm=reader.read(f"{attention}.q_norm.weight", head_shape)
        if config.qk_norm
        else None,
        key_norm=reader.read(f"{attention}.k_norm.weight", head_shape) if config.qk_norm else None,
        attention_out=reader.read_stacked(
            {f"{attention}.o_proj": hidden}, q_size, config.attention_out_bias
        ),
        mlp_norm=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.read_stacked(gate_up, hidden, config.mlp_bias),
        down=reader.read_stacked({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Keys and values of one layer: two views (blocks, H_kv, T, D) of one allocation.

    Those of int8 have scales (blocks, H_kv, T); other types have none.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values (N, H_kv, D) of the positions `slots`."""
        blocks, offsets = slots // KV_BLOCK_TOKENS, slots % KV_BLOCK_TOKENS
        for pool, scales, heads in (
            (self.keys, self.key_scales, keys),
            (self.values, self.value_scales, values),
        ):
            if scales is None:
                pool[blocks, :, offsets] = heads.to(pool.dtype)
                continue
            scale = (heads.float().abs().amax(dim=-1) / 127).to(scales.dtype)
            scales[blocks, :, offsets] = scale
            whole = heads.float() / scale.float()[..., None].clamp_min(torch.finfo().tiny)
            pool[blocks, :, offsets] = whole.round().to(pool.dtype)

    def gather(self, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of blocks by head: (B, M) -> two (B, H_kv, M * T, D)."""
        return (
            _gathered(self.keys, self.key_scales, tables, dtype),
            _gathered(self.values, self.value_scales, tables, dtype),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, as int32 tensors on the decoder's device.

    `token_ids` (N,) are the tokens, `rotary_rows` (N,) their rows in the rotation tables, and
    `slots` (N,) the targets of keys and values, block id * T + offset. `spans` (S, 4) has rows of
    one sequence each: first row, row count, position of the first row, start of its blocks in
    `tables`. `logit_rows` (R,) are the rows whose logits are needed. `tables` (X,) has block ids.
    The first `single_count` spans have one row; the others have at most `row_count_max`.
    """

    token_ids: Tensor
    rotary_rows: Tensor
    slots: Tensor
    spans: Tensor
    logit_rows: Tensor
    tables: Tensor
    single_count: int
    row_count_max: int


# Attention of a step's queries (N, H, D) -> (N, H, D). The pool already holds the new keys and
# values.
Attend = Callable[[Tensor, LayerPool], Tensor]


class TorchKernels:
    """Operations of a decoder between its matrix products, for CPUs without native code.

    `TritonKernels` computes the same for CUDA. `captures` tells whether steps are captured as CUDA
    graphs.
    """

    captures = False

    def add_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add two tensors (N, E); return the sum and its RMS norm."""
        total = hidden if update is None else hidden + update
        return total, rms_norm(total, weight.shape, weight, eps)

    def rotate_and_write(
        self,
        mixed: Tensor,
        layer: LayerWeights,
        eps: float,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        pool: LayerPool,
    ) -> Tensor:
        """Normalize and rotate queries and keys, and write keys and values to the pool. Return the
        queries (N, H, D). `mixed` is (N, (H + 2 H_kv) * D), `rotation` has the tables of cosines
        and sines.
        """
        _, kv_head_count, _, head_dim = pool.keys.shape
        heads = mixed.view(len(mixed), -1, head_dim)
        head_count = heads.shape[1] - 2 * kv_head_count
        # Queries and keys are adjacent in the stacked rows, so they are rotated together.
        turning = heads[:, : head_count + kv_head_count]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = rms_norm(turning[:, :head_count], (head_dim,), layer.query_norm, eps)
            keys = rms_norm(turning[:, head_count:], (head_dim,), layer.key_norm, eps)
            turning = torch.cat((queries, keys), dim=1)
        rotated = rotate(turning, *(table[batch.rotary_rows][:, None, :] for table in rotation))
        pool.write(batch.slots, rotated[:, head_count:], heads[:, head_count + kv_head_count :])
        return rotated[:, :head_count]

    def attention(self, batch: Batch, window: int | None) -> Attend:
        """Build the attention function for layers with this window in positions; None for all.
        Single rows of similar lengths are computed together.
        """
        spans, tables = batch.spans.numpy(), batch.tables.numpy()
        singles = spans[: batch.single_count]
        decodes = [
            _decode_span(np.array([*group]), tables, window)
            for _, group in itertools.groupby(singles, key=lambda span: length_class(int(span[2])))
        ]
        prefills = [_prefill_span(span, tables, window) for span in spans[len(singles) :].tolist()]

        def attend(queries: Tensor, pool: LayerPool) -> Tensor:
            attended = torch.empty_like(queries)
            for decode in decodes:
                attended[decode.rows] = attend_decode(queries[decode.rows], pool, decode)
            for prefill in prefills:
                attended[prefill.rows] = attend_prefill(queries[prefill.rows], pool, prefill)
            return attended

        return attend

    def gated(self, gate_up: Tensor) -> Tensor:
        """Multiply SiLU of the first half of each row by the second: (N, 2 I) -> (N, I)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def best(self, logits: Tensor) -> Tensor:
        """Find per row the first id with the largest logit, or `NOT_FINITE`: (R, V) -> (R,)."""
        numbers = logits.numpy()  # its argmax is 7 times as fast as torch's at 50 rows
        best = numbers.argmax(axis=-1)
        best[~np.isfinite(numbers).all(axis=-1)] = NOT_FINITE
        return torch.from_numpy(best)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a batch whose attention is computed together, over blocks in the pool.

    `tables` (B, M) has block ids, padded with any valid id. `mask` is (B, M * T) for B sequences
    with one row each, (rows, M * T) for one sequence, and True for visible positions; None for a
    whole prompt.
    """

    rows: slice
    tables: Tensor
    mask: Tensor | None


def length_class(position: int) -> int:
    """Compute a single row's class: rows of a span are padded to at most twice their length."""
    return (position // KV_BLOCK_TOKENS).bit_length()


def _decode_span(rows: Entries, entries: Entries, window: int | None) -> Span:
    """Build a span of single rows, each from the first block in its window. `rows` are entries of
    `Batch.spans`.

    The span is padded with block 0, which always exists; the mask hides padding and positions
    before the window.
    """
    lengths = rows[:, 2] + 1
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    first_blocks = begins // KV_BLOCK_TOKENS
    counts = -(-lengths // KV_BLOCK_TOKENS) - first_blocks
    tables = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
    for table, start, count in zip(tables, rows[:, 3] + first_blocks, counts, strict=True):
        table[:count] = entries[start : start + count]
    positions = (
        first_blocks[:, None] * KV_BLOCK_TOKENS
        + np.arange(tables.shape[1] * KV_BLOCK_TOKENS)[None, :]
    )
    visible = (positions < lengths[:, None]) & (positions >= begins[:, None])
    first_row = int(rows[0, 0])
    return Span(
        slice(first_row, first_row + len(rows)),
        torch.from_numpy(tables),
        torch.from_numpy(visible),
    )


def _prefill_span(span: list[int], entries: Entries, window: int | None) -> Span:
    """Build the span of one sequence's rows. Its table begins in the first row's window."""
    row, row_count, start, table_start = span
    end = start + row_count
    first_block = 0 if window is None else max(0, start + 1 - window) // KV_BLOCK_TOKENS
    table = torch.from_numpy(entries[table_start + first_block : table_start + blocks_for(end)])
    mask: Tensor | None = None
    if start > 0 or (window is not None and window < end):
        covered = first_block * KV_BLOCK_TOKENS + torch.arange(len(table) * KV_BLOCK_TOKENS)
        rows = torch.arange(start, end)[:, None]
        mask = covered[None, :] <= rows
        if window is not None:
            mask &= covered[None, :] > rows - window
    return Span(slice(row, row + row_count), table[None], mask)


def gather(pool: Tensor, tables: Tensor) -> Tensor:
    """Gather blocks by head in one copy: (blocks, H_kv, T, D), (B, M) -> (B, H_kv, M * T, D)."""
    block_count, kv_head_count, block_tokens, head_dim = pool.shape
    batch, width = tables.shape
    # (B, H_kv, M).
    indices = tables[:, None, :] * kv_head_count + torch.arange(kv_head_count)[:, None]
    flat = pool.view(block_count * kv_head_count, block_tokens * head_dim).index_select(
        0, indices.flatten()
    )
    return flat.view(batch, kv_head_count, width * block_tokens, head_dim)


def _gathered(pool: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = gather(pool, tables).to(dtype)
    return numbers if scales is None else numbers * gather(scales[..., None], tables).to(dtype)


def attend_decode(queries: Tensor, pool: LayerPool, span: Span) -> Tensor:
    """Compute attention of one new token per sequence over all its positions, including its own.

    Shapes: queries (B, H, D); returns (B, H, D). Heads that share keys are query rows of one head,
    so grouped queries repeat no keys.
    """
    batch, head_count, head_dim = queries.shape
    kv_head_count = pool.keys.shape[1]
    grouped = queries.reshape(batch, kv_head_count, head_count // kv_head_count, head_dim)
    # (B, H_kv, S, D).
    keys, values = pool.gather(span.tables, queries.dtype)
    assert span.mask is not None, "single rows have one"
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask[:, None, None, :])
    return out.view(batch, head_count, head_dim)


def attend_prefill(queries: Tensor, pool: LayerPool, span: Span) -> Tensor:
    """Compute attention of consecutive new tokens of one sequence, each over all positions up to
    its own.

    Shapes: queries (R, H, D); returns (R, H, D).
    """
    row_count = queries.shape[0]
    # (1, H_kv, S, D).
    keys, values = pool.gather(span.tables, queries.dtype)
    if span.mask is None:
        keys, values = keys[:, :, :row_count], values[:, :, :row_count]
    out = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of a step: `values` is (R, V) in fp32. `best` has for each row the first id with the
    largest logit, or `NOT_FINITE` if one is infinite or NaN.
    """

    values: Tensor
    best: list[int]

    def take(self, rows: list[int]) -> Tensor:
        """Select rows on their device, without a copy if all are wanted."""
        return self.values if len(rows) == len(self.values) else self.values[rows]


class Decoder:
    """Forward pass of a model. Stateless between calls; the caller owns the pools."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        context_window_tokens: int,
        kernels: TorchKernels,
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        cosines, sines = rotary_tables(
            config.rope, config.head_dim, context_window_tokens, weights.embedding.dtype
        )
        device = weights.embedding.device
        self._rotation = cosines.to(device), sines.to(device)

    def forward(self, batch: Batch, pools: list[LayerPool]) -> Tensor:
        """Compute logits (R, V) in fp32 for `batch.logit_rows`; write all rows' keys and values."""
        weights, kernels, eps = self._weights, self._kernels, self._config.rms_norm_eps
        windows = self._config.layer_windows
        attends = {window: kernels.attention(batch, window) for window in set(windows)}
        hidden = embedding(batch.token_ids, weights.embedding)  # (N, E)
        update: Tensor | None = None
        for layer, pool, window in zip(weights.layers, pools, windows, strict=True):
            hidden, normed = kernels.add_norm(hidden, update, layer.attention_norm, eps)
            queries = kernels.rotate_and_write(
                project(normed, layer.qkv), layer, eps, self._rotation, batch, pool
            )
            attended = attends[window](queries, pool)
            update = project(attended.flatten(1), layer.attention_out)
            hidden, normed = kernels.add_norm(hidden, update, layer.mlp_norm, eps)
            update = project(kernels.gated(project(normed, layer.gate_up)), layer.down)
        assert update is not None, "a decoder has layers"
        rows = batch.logit_rows
        _, outputs = kernels.add_norm(hidden[rows], update[rows], weights.final_norm, eps)
        return project(outputs, weights.lm_head).float()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate (N, heads, D) by (N, 1, D) tables: dimensions i and i + D/2 are a pair."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines + turned * sines


def rotary_tables(
    rope: RopeConfig, head_dim: int, position_count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines (rows, D) in fp32, by Su et al. 2021 and each scaling's paper.

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
    """Slow down slow rotations by `factor`, keep fast ones, and blend those between."""
    rotations = scaling.original_context_tokens * frequencies / (2 * math.pi)
    blend = (
        (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def _grow(theta: float, scaling: DynamicScaling, positions: Tensor, exponents: Tensor) -> Tensor:
    """Compute frequencies (positions, D/2): each position rotates as in a sequence that ends with
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
    """Compute frequencies with a ramp from kept to slowed dimensions; Peng et al. 2023, 3.2."""
    pair_count = len(exponents)

    def rotating_pair(rotations: float) -> float:
        """Find the fractional dimension with this number of turns in the original context."""
        return (
            pair_count
            * math.log(scaling.original_context_tokens / (rotations * 2 * math.pi))
            / math.log(theta)
        )

    first, last = rotating_pair(scaling.beta_fast), rotating_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pair_count - 1)
    if first == last:
        last += 0.001  # avoids a division by zero; the ramp is a step
    slowed = ((torch.arange(pair_count, dtype=torch.float32) - first) / (last - first)).clamp(
        0.0, 1.0
    )
    bases = theta**exponents
    return (1.0 / (scaling.factor * bases)) * slowed + (1.0 / bases) * (1.0 - slowed)


def _longrope_sharpening(scaling: LongRopeScaling) -> float:
    """Compute the factor for queries and keys at all lengths; Ding et al. 2024, as in Phi-3."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context_tokens))


def _sharpening(scaling: YarnScaling) -> float:
    """Compute the factor for queries and keys that keeps attention sharp over long contexts."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = math.log(max(scaling.factor, 1.0))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1.0) / (0.1 * scaling.mscale_all_dim * growth + 1.0)
    return 0.1 * growth + 1.0
