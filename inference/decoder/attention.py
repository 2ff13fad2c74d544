"""Attention over paged keys and values, in plain torch.

The pool of one layer is K and V, each (blocks, H_kv, T, D) with T = `KV_BLOCK_TOKENS`: a block's rows of one head lie together,
so that gathering a sequence's blocks head by head yields the layout which batched multiplication wants, in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inference.kv_blocks import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Keys and values of one layer: two views (blocks, H_kv, T, D) of one allocation."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence's rows in a batch, to be computed at once.

    rows: start and end in the batch. table: (M,) block ids that cover all its positions. position: of the first row.
    mask: (rows, M * T) True where a row may look, or None if the whole prompt begins at position 0 (plain causal).
    """

    row_start: int
    row_end: int
    position: int
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Rows of a batch that have one new token each and contexts of similar length, to be computed at once.

    rows: start and end in the batch, B of them. tables: (B, M) block ids, padded with any valid id. mask: (B, M * T), 0 where the
    row may look, -inf elsewhere.
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
    """Where in the pool, seen as rows of D floats, the heads of each token lie: (N,), (N,) -> (N * H_kv,)."""
    heads = torch.arange(kv_head_count)
    return ((block_ids[:, None] * kv_head_count + heads) * KV_BLOCK_TOKENS + offsets[:, None]).flatten()


def gather(pool: Tensor, tables: Tensor) -> Tensor:
    """Blocks of each table, head by head: (blocks, H_kv, T, D), (B, M) -> (B, H_kv, M * T, D). One copy."""
    block_count, kv_head_count, block_tokens, head_dim = pool.shape
    batch, width = tables.shape
    indices = tables[:, None, :] * kv_head_count + torch.arange(kv_head_count, device=tables.device)[:, None]  # (B, H_kv, M)
    flat = pool.view(block_count * kv_head_count, block_tokens * head_dim).index_select(0, indices.flatten())
    return flat.view(batch, kv_head_count, width * block_tokens, head_dim)


def attend_decode(queries: Tensor, pool: LayerPool, span: DecodeSpan) -> Tensor:
    """Attention of one new token per sequence over all its positions, this one included.

    Shapes: queries (B, H, D); returns (B, H, D). Reads the pool, which must hold the new token's key and value already.
    The heads that share keys stand as query rows of one head, so grouped queries cost no repeated keys.
    """
    batch, head_count, head_dim = queries.shape
    kv_head_count = pool.keys.shape[1]
    grouped = queries.reshape(batch, kv_head_count, head_count // kv_head_count, head_dim)
    keys, values = gather(pool.keys, span.tables), gather(pool.values, span.tables)  # (B, H_kv, S, D)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask[:, None, None, :])
    return out.view(batch, head_count, head_dim)


def attend_prefill(queries: Tensor, pool: LayerPool, span: PrefillSpan) -> Tensor:
    """Attention of a run of new tokens of one sequence over all its positions up to each of them.

    Shapes: queries (R, H, D); returns (R, H, D). Reads the pool, which must hold the new keys and values already.
    """
    row_count = queries.shape[0]
    keys, values = gather(pool.keys, span.table[None]), gather(pool.values, span.table[None])  # (1, H_kv, S, D)
    if span.mask is None:
        keys, values = keys[:, :, :row_count], values[:, :, :row_count]
    out = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=span.mask, is_causal=span.mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)
