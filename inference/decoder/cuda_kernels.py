"""Triton kernels of the decoder on CUDA: everything but the matrix products.

`TorchKernels` in `model.py` describes the operations and computes the same with torch.
Attention reads keys and values where they are in the pool, for prompts and for single tokens, with
grouped heads and windows: nothing is gathered, and no mask is stored. Long contexts are split over
programs, whose partial results a second kernel combines. The number of parts depends on the shape
of the batch alone, so that a step can be captured in a CUDA graph.

With TRITON_INTERPRET=1 the kernels run on a CPU, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.decoder.model import (
    NOT_FINITE,
    Attend,
    Batch,
    LayerPool,
    LayerWeights,
    TorchKernels,
)
from inference.kv_blocks import KV_BLOCK_TOKENS

LOG2_E = 1.4426950408889634
SPLITS_MAX = 64  # parts of a context; 128k positions are 2,048 per part
SINGLE_SPLITS_MIN = 4  # a long context beside short ones must not be one program's
SINGLE_PROGRAMS, PROMPT_PROGRAMS = 4, 2  # per multiprocessor: to hide the latency of memory
PROMPT_TILE, SINGLE_TILE, KEY_TILE = 128, 16, 64  # query heads and positions of a program
SHORT_PROMPT_ROWS, NARROW_HEAD = 512, 64  # their tiles and warps were the fastest on an H200
WIDE_HEAD = 128  # floats: larger heads, and fp32, need smaller tiles to fit the shared memory
BEST_TILE, GATE_TILE = 8192, 1024
HEAD_TILE = 16  # heads of a row that are rotated together


@triton.jit
def add_norm_kernel(
    hidden, update, weight, out, normed, eps, SIZE: tl.constexpr, TILE: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, TILE)
    inside = at < SIZE
    wide = tl.load(hidden + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(update + row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row + at, wide, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, wide * scale * factors, mask=inside)


@triton.jit
def rotate_and_write_kernel(
    mixed, cosines, sines, rotary_rows, slots, query_norm, key_norm, queries, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and write HEAD_TILE heads of one row: queries, then keys, then values. TILE
    covers half of a head.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, TILE)
    is_half = at < half
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & is_half[None, :]
    source = mixed + ((row * (HEADS + 2 * KV_HEADS) + head) * DIM)[:, None] + at[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, axis=1) / DIM + eps)
        scale = tl.where(is_value, 1.0, scale[:, None])
        own, other = query_norm + at, key_norm + at
        for_low = tl.where(
            is_query,
            tl.load(own, mask=is_half, other=0.0).to(tl.float32)[None, :],
            tl.load(other, mask=is_half, other=0.0).to(tl.float32)[None, :],
        )
        for_high = tl.where(
            is_query,
            tl.load(own + half, mask=is_half, other=0.0).to(tl.float32)[None, :],
            tl.load(other + half, mask=is_half, other=0.0).to(tl.float32)[None, :],
        )
        low *= scale * tl.where(is_value, 1.0, for_low)
        high *= scale * tl.where(is_value, 1.0, for_high)
    angle = tl.load(rotary_rows + row).to(tl.int64) * DIM + at
    cosine = tl.load(cosines + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
    turned_low, turned_high = low * cosine - high * sine, high * cosine + low * sine
    target = queries + ((row * HEADS + head) * DIM)[:, None] + at[None, :]
    tl.store(target, turned_low, mask=inside & is_query)
    tl.store(target + half, turned_high, mask=inside & is_query)
    slot = tl.load(slots + row).to(tl.int64)
    kv_head = (head - HEADS) % KV_HEADS
    offset = (((slot // BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK) * DIM
    offset = offset[:, None] + at[None, :]
    is_new_key = inside & (slot >= 0) & ~is_query & ~is_value
    tl.store(keys + offset, turned_low, mask=is_new_key)
    tl.store(keys + offset + half, turned_high, mask=is_new_key)
    is_new_value = inside & (slot >= 0) & is_value
    tl.store(values + offset, low, mask=is_new_value)
    tl.store(values + offset + half, high, mask=is_new_value)


@triton.jit
def attend_tile(
    tile, end, turned, own, largest, total, result, table, keys, values, kv_head, scale, dim,
    is_dim, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    KEY_TILE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add KEY_TILE positions to the largest score, the sum of weights and the weighted values. With
    MASKED, a row may not see all of them; masks took nearly half the time of a long prompt's
    attention.
    """
    at = tile + tl.arange(0, KEY_TILE)
    is_key = (at < end) if MASKED else (at >= 0)
    block = tl.load(table + at // BLOCK, mask=is_key, other=0).to(tl.int64)
    entry = ((block * KV_HEADS + kv_head) * BLOCK + at % BLOCK) * DIM
    key = tl.load(
        keys + entry[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
    )
    scores = tl.dot(turned, key, input_precision=PRECISION) * scale
    if MASKED:
        visible = is_key[None, :] & (at[None, :] <= own[:, None])
        if WINDOW > 0:
            visible &= at[None, :] > own[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    before, largest = largest, tl.maximum(largest, tl.max(scores, axis=1))
    # A row may see nothing of a tile, and nothing before it.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(before - base)
    total = total * shrink + tl.sum(weights, axis=1)
    value = tl.load(
        values + entry[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
    )
    result = result * shrink[:, None]
    result += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return largest, total, result


@triton.jit
def attention_kernel(
    queries, keys, values, spans, tables, out, part_sums, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from up to ROWS rows of a span to one part of their context, for all query heads of
    one key head. `scale` is the scale of scores times log2(e).

    With SPLITS > 1, `out` is (N, HEADS, SPLITS, DIM) in fp32, and part_sums (N, HEADS, SPLITS) gets
    the binary logarithms of the parts' sums of weights.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    span, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    row_count = tl.load(spans + span * 4 + 1)
    begin = tl.program_id(0) * ROWS
    if begin < row_count:
        first_row = tl.load(spans + span * 4).to(tl.int64)
        position = tl.load(spans + span * 4 + 2)
        table = tables + tl.load(spans + span * 4 + 3)
        query = tl.arange(0, QUERY_TILE)
        row = begin + query // group
        head = kv_head * group + query % group
        is_query = (query < ROWS * group) & (row < row_count)
        dim = tl.arange(0, DIM_TILE)
        is_dim = dim < DIM
        offset = (first_row + row) * HEADS + head
        turned = tl.load(
            queries + offset[:, None] * DIM + dim[None, :],
            mask=is_query[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        own = position + row

        # Positions that a row of this program sees, and the part of them that is computed here.
        high = position + tl.minimum(begin + ROWS, row_count)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(position + begin + 1 - WINDOW, 0) // KEY_TILE * KEY_TILE
        part = tl.cdiv(tl.cdiv(high - low, KEY_TILE), SPLITS) * KEY_TILE
        start = low + split * part
        end = tl.minimum(start + part, high)

        largest = tl.full((QUERY_TILE,), float("-inf"), tl.float32)
        total = tl.zeros((QUERY_TILE,), tl.float32)
        result = tl.zeros((QUERY_TILE, DIM_TILE), tl.float32)
        # Every row sees all of the tiles before that of the first row.
        seen_end = tl.minimum((position + begin + 1) // KEY_TILE * KEY_TILE, end)
        masked_start = start if WINDOW > 0 else tl.maximum(seen_end, start)
        for tile in range(start, masked_start, KEY_TILE):
            largest, total, result = attend_tile(
                tile, end, turned, own, largest, total, result, table, keys, values, kv_head, scale,
                dim, is_dim, KV_HEADS, DIM, BLOCK, WINDOW, KEY_TILE, PRECISION, MASKED=False,
            )  # fmt: skip
        for tile in range(masked_start, end, KEY_TILE):
            largest, total, result = attend_tile(
                tile, end, turned, own, largest, total, result, table, keys, values, kv_head, scale,
                dim, is_dim, KV_HEADS, DIM, BLOCK, WINDOW, KEY_TILE, PRECISION, MASKED=True,
            )  # fmt: skip

        total = tl.where(total > 0.0, total, 1.0)  # a part may be empty
        result = result / total[:, None]
        if SPLITS > 1:
            offset = offset * SPLITS + split
            tl.store(part_sums + offset, largest + tl.log2(total), mask=is_query)
        tl.store(
            out + offset[:, None] * DIM + dim[None, :], result,
            mask=is_query[:, None] & is_dim[None, :],
        )  # fmt: skip


@triton.jit
def combine_kernel(
    parts, part_sums, spans, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one head of one row."""
    span = tl.program_id(1)
    if tl.program_id(0) < tl.load(spans + span * 4 + 1):
        row = tl.load(spans + span * 4).to(tl.int64) + tl.program_id(0)
        offset = row * HEADS + tl.program_id(2)
        split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM_TILE)
        sums = tl.load(part_sums + offset * SPLITS + split)
        weights = tl.exp2(sums - tl.max(sums, axis=0))
        weights = weights / tl.sum(weights, axis=0)
        part = tl.load(
            parts + (offset * SPLITS + split)[:, None] * DIM + dim[None, :],
            mask=(dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        result = tl.sum(part * weights[:, None], axis=0)
        tl.store(out + offset * DIM + dim, result, mask=dim < DIM)


@triton.jit
def gate_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def best_kernel(logits, out, SIZE: tl.constexpr, TILE: tl.constexpr, BROKEN: tl.constexpr):
    """Find the first of a row's largest logits; BROKEN if a logit is infinite or NaN."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    # Per place in a tile, and reduced only once.
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    best, finite_count = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for start in range(0, SIZE, TILE):
        at = start + tl.arange(0, TILE)
        values = tl.load(logits + row + at, mask=at < SIZE, other=float("-inf"))
        finite_count += (tl.abs(values) < float("inf")).to(tl.int32)
        best = tl.where(values > largest, at, best)
        largest = tl.maximum(largest, values)
    first = tl.min(tl.where(largest == tl.max(largest, axis=0), best, SIZE), axis=0)
    is_finite = tl.sum(finite_count, axis=0) == SIZE
    tl.store(out + tl.program_id(0), tl.where(is_finite, first, BROKEN))


class TritonKernels(TorchKernels):
    """CUDA implementation of the operations of `TorchKernels`."""

    captures = True

    def __init__(self, processor_count: int) -> None:
        """`processor_count` is the GPU's number of multiprocessors, which share long contexts."""
        self._processor_count = processor_count

    def add_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        row_count, size = hidden.shape
        out = hidden if update is None else torch.empty_like(hidden)
        normed = torch.empty_like(hidden)
        add_norm_kernel[(row_count,)](
            hidden, hidden if update is None else update, weight, out, normed, eps,
            size, triton.next_power_of_2(size), update is not None, num_warps=8,
        )  # fmt: skip
        return out, normed

    def rotate_and_write(
        self,
        mixed: Tensor,
        layer: LayerWeights,
        eps: float,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        pool: LayerPool,
    ) -> Tensor:
        row_count, width = mixed.shape
        _, kv_head_count, _, head_dim = pool.keys.shape
        head_count = width // head_dim - 2 * kv_head_count
        queries = mixed.new_empty(row_count, head_count, head_dim)
        norms = layer.query_norm is not None and layer.key_norm is not None
        tiles = triton.cdiv(head_count + 2 * kv_head_count, HEAD_TILE)
        rotate_and_write_kernel[(row_count, tiles)](
            mixed, *rotation, batch.rotary_rows, batch.slots,
            layer.query_norm if norms else mixed, layer.key_norm if norms else mixed,
            queries, pool.keys, pool.values, eps, head_count, kv_head_count, head_dim,
            triton.next_power_of_2(head_dim // 2), HEAD_TILE, KV_BLOCK_TOKENS, norms, num_warps=4,
        )  # fmt: skip
        return queries

    def attention(self, batch: Batch, window: int | None) -> Attend:
        single_count = batch.single_count

        def attend(queries: Tensor, pool: LayerPool) -> Tensor:
            attended = torch.empty_like(queries)
            for spans, row_count in (
                (batch.spans[:single_count], 1),
                (batch.spans[single_count:], batch.row_count_max),
            ):
                if len(spans):
                    self._attend(queries, pool, spans, batch.tables, row_count, window, attended)
            return attended

        return attend

    def _attend(
        self,
        queries: Tensor,
        pool: LayerPool,
        spans: Tensor,
        tables: Tensor,
        row_count_max: int,
        window: int | None,
        attended: Tensor,
    ) -> None:
        """Compute attention for the rows of some spans, at most `row_count_max` rows each."""
        row_count, head_count, head_dim = queries.shape
        kv_head_count = pool.keys.shape[1]
        sizes, options = tile_sizes(
            head_count // kv_head_count, head_dim, row_count_max, queries.dtype
        )
        tiles = triton.cdiv(row_count_max, sizes["ROWS"])
        splits = self._split_count(tiles * kv_head_count * len(spans), row_count_max)
        target, sums = attended, attended
        if splits > 1:
            shape = (row_count, head_count, splits)
            target = queries.new_empty((*shape, head_dim), dtype=torch.float32)
            sums = queries.new_empty(shape, dtype=torch.float32)
        attention_kernel[(tiles, kv_head_count, len(spans) * splits)](
            queries, pool.keys, pool.values, spans, tables, target, sums,
            head_dim**-0.5 * LOG2_E, HEADS=head_count, KV_HEADS=kv_head_count, DIM=head_dim,
            BLOCK=KV_BLOCK_TOKENS, WINDOW=window or 0, SPLITS=splits, **sizes, **options,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(row_count_max, len(spans), head_count)](
                target, sums, spans, attended, head_count, head_dim, sizes["DIM_TILE"], splits,
                num_warps=1,
            )  # fmt: skip

    def _split_count(self, program_count: int, row_count_max: int) -> int:
        """Choose the number of splits so that every multiprocessor gets several programs.

        It is always a power of four, to limit the kernel variants that are compiled.
        """
        is_single = row_count_max == 1
        each, least = (SINGLE_PROGRAMS, SINGLE_SPLITS_MIN) if is_single else (PROMPT_PROGRAMS, 1)
        wanted = self._processor_count * each // program_count
        return 1 << ((min(max(wanted, least), SPLITS_MAX).bit_length() - 1) & ~1)

    def gated(self, gate_up: Tensor) -> Tensor:
        row_count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(row_count, size)
        gate_kernel[(row_count, triton.cdiv(size, GATE_TILE))](gate_up, out, size, GATE_TILE)
        return out

    def best(self, logits: Tensor) -> Tensor:
        row_count, size = logits.shape
        best = torch.empty(row_count, dtype=torch.int32, device=logits.device)
        best_kernel[(row_count,)](logits, best, size, BEST_TILE, NOT_FINITE, num_warps=16)
        return best


def tile_sizes(
    group: int, head_dim: int, row_count_max: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Choose the sizes of the attention kernel's tiles, and its compiler options."""
    is_wide = head_dim > WIDE_HEAD or dtype == torch.float32
    if row_count_max == 1:
        least, warp_count, stage_count = SINGLE_TILE, 2, 2
    elif is_wide or row_count_max <= SHORT_PROMPT_ROWS:
        least, warp_count, stage_count = PROMPT_TILE // 2, 4, 3
    else:
        least, warp_count, stage_count = PROMPT_TILE, 8 if head_dim <= NARROW_HEAD else 4, 3
    query_tile = max(triton.next_power_of_2(group), least)
    sizes = {
        "DIM_TILE": max(triton.next_power_of_2(head_dim), 16),
        "ROWS": query_tile // group,
        "QUERY_TILE": query_tile,
        "KEY_TILE": KEY_TILE // 2 if is_wide else KEY_TILE,
        # Without it fp32 is multiplied with the 10 bits of TF32.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    if is_wide:
        warp_count, stage_count = 8 if query_tile > 64 else 4, 2
    return sizes, {"num_warps": warp_count, "num_stages": stage_count}
