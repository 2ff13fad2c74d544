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
PROGRAMS_PER_PROCESSOR = 4  # to hide the latency of memory
PROMPT_TILE, SINGLE_TILE, KEY_TILE = 128, 16, 64  # query heads and positions of a program
WIDE_HEAD = 128  # floats: larger heads, and fp32, need smaller tiles to fit the shared memory
BEST_TILE, GATE_TILE = 4096, 1024


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
    BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Compute one head of one row; TILE covers half of a head."""
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, TILE)
    inside = at < half
    source = mixed + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    kv_head = (head - HEADS) % KV_HEADS
    place = (((slot // BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK) * DIM
    if head >= HEADS + KV_HEADS:
        writes = inside & (slot >= 0)
        tl.store(values + place + at, low, mask=writes)
        tl.store(values + place + half + at, high, mask=writes)
    else:
        if NORMS:
            scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, axis=0) / DIM + eps)
            norm = query_norm if head < HEADS else key_norm
            low *= scale * tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
            high *= scale * tl.load(norm + half + at, mask=inside, other=0.0).to(tl.float32)
        turn = tl.load(rotary_rows + row).to(tl.int64) * DIM + at
        cosine = tl.load(cosines + turn, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + turn, mask=inside, other=0.0).to(tl.float32)
        turned_low, turned_high = low * cosine - high * sine, high * cosine + low * sine
        if head < HEADS:
            target = queries + (row.to(tl.int64) * HEADS + head) * DIM
            tl.store(target + at, turned_low, mask=inside)
            tl.store(target + half + at, turned_high, mask=inside)
        else:
            writes = inside & (slot >= 0)
            tl.store(keys + place + at, turned_low, mask=writes)
            tl.store(keys + place + half + at, turned_high, mask=writes)


@triton.jit
def attention_kernel(
    queries, keys, values, spans, tables, out, part_sums, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from up to ROWS rows of a span, for all query heads of one key head, to one part of
    their context. scale: of scores, times log2(e).

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
        place = (first_row + row) * HEADS + head
        turned = tl.load(
            queries + place[:, None] * DIM + dim[None, :],
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
        for tile in range(start, end, KEY_TILE):
            at = tile + tl.arange(0, KEY_TILE)
            is_key = at < end
            block = tl.load(table + at // BLOCK, mask=is_key, other=0).to(tl.int64)
            entry = ((block * KV_HEADS + kv_head) * BLOCK + at % BLOCK) * DIM
            key = tl.load(
                keys + entry[None, :] + dim[:, None],
                mask=is_key[None, :] & is_dim[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(turned, key, input_precision=PRECISION) * scale
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
                values + entry[:, None] + dim[None, :],
                mask=is_key[:, None] & is_dim[None, :], other=0.0,
            )  # fmt: skip
            result = result * shrink[:, None]
            result += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)

        total = tl.where(total > 0.0, total, 1.0)  # a part may be empty
        result = result / total[:, None]
        if SPLITS > 1:
            place = place * SPLITS + split
            tl.store(part_sums + place, largest + tl.log2(total), mask=is_query)
        tl.store(
            out + place[:, None] * DIM + dim[None, :], result,
            mask=is_query[:, None] & is_dim[None, :],
        )  # fmt: skip


@triton.jit
def combine_kernel(
    parts, part_sums, spans, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of one row."""
    span = tl.program_id(1)
    if tl.program_id(0) < tl.load(spans + span * 4 + 1):
        row = tl.load(spans + span * 4).to(tl.int64) + tl.program_id(0)
        place = row * HEADS + tl.program_id(2)
        split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM_TILE)
        sums = tl.load(part_sums + place * SPLITS + split)
        weights = tl.exp2(sums - tl.max(sums, axis=0))
        weights = weights / tl.sum(weights, axis=0)
        part = tl.load(
            parts + (place * SPLITS + split)[:, None] * DIM + dim[None, :],
            mask=(dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        result = tl.sum(part * weights[:, None], axis=0)
        tl.store(out + place * DIM + dim, result, mask=dim < DIM)


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
    """Find the first of a row's largest logits, or BROKEN if one is infinite or NaN."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    largest, best, finite_count = float("-inf"), 0, 0
    for start in range(0, SIZE, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < SIZE
        values = tl.load(logits + row + at, mask=inside, other=float("-inf"))
        finite_count += tl.sum((tl.abs(values) < float("inf")).to(tl.int32), axis=0)
        top = tl.max(values, axis=0)
        place = start + tl.argmax(values, axis=0)
        best = tl.where(top > largest, place, best)
        largest = tl.maximum(largest, top)
    tl.store(out + tl.program_id(0), tl.where(finite_count == SIZE, best, BROKEN))


class TritonKernels(TorchKernels):
    """Operations of `TorchKernels` for CUDA."""

    captures = True

    def __init__(self, processor_count: int) -> None:
        """processor_count: multiprocessors of the GPU, over which contexts are split."""
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
        rotate_and_write_kernel[(row_count, head_count + 2 * kv_head_count)](
            mixed, *rotation, batch.rotary_rows, batch.slots,
            layer.query_norm if norms else mixed, layer.key_norm if norms else mixed,
            queries, pool.keys, pool.values, eps, head_count, kv_head_count, head_dim,
            triton.next_power_of_2(head_dim // 2), KV_BLOCK_TOKENS, norms, num_warps=1,
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
        """Compute the rows of some spans, each of at most row_count_max rows."""
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
        """Return a power of four, since each is compiled, that gives every multiprocessor some
        programs.
        """
        wanted = self._processor_count * PROGRAMS_PER_PROCESSOR // program_count
        least = SINGLE_SPLITS_MIN if row_count_max == 1 else 1
        return 1 << ((min(max(wanted, least), SPLITS_MAX).bit_length() - 1) & ~1)

    def gated(self, gate_up: Tensor) -> Tensor:
        row_count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(row_count, size)
        gate_kernel[(row_count, triton.cdiv(size, GATE_TILE))](gate_up, out, size, GATE_TILE)
        return out

    def best(self, logits: Tensor) -> Tensor:
        row_count, size = logits.shape
        best = torch.empty(row_count, dtype=torch.int32, device=logits.device)
        best_kernel[(row_count,)](logits, best, size, BEST_TILE, NOT_FINITE, num_warps=8)
        return best


def tile_sizes(
    group: int, head_dim: int, row_count_max: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the sizes of the attention kernel's tiles, and its compiler options."""
    is_wide = head_dim > WIDE_HEAD or dtype == torch.float32
    least = SINGLE_TILE if row_count_max == 1 else PROMPT_TILE // 2 if is_wide else PROMPT_TILE
    query_tile = max(triton.next_power_of_2(group), least)
    sizes = {
        "DIM_TILE": max(triton.next_power_of_2(head_dim), 16),
        "ROWS": query_tile // group,
        "QUERY_TILE": query_tile,
        "KEY_TILE": KEY_TILE // 2 if is_wide else KEY_TILE,
        # Without it fp32 is multiplied with the 10 bits of TF32.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return sizes, {"num_warps": 8 if query_tile > 64 else 4, "num_stages": 2 if is_wide else 3}
