"""Decoder on torch: owns the pool of keys and values, and computes a step on a CPU or a GPU.

Same interface as the native decoder. The inputs of a step are packed into one array of integers:

    token ids | rotary rows | slots | spans | logit rows | block tables

so that a GPU gets them in one copy from pinned memory. It finds the best token of each row itself;
reading those ids is the only wait of a step without sampled rows. Steps that only decode are
captured as CUDA graphs at start, for some numbers of rows; other numbers are padded with rows that
write no keys and have no attention.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inference.checkpoint.checkpoint import DecoderConfig
from inference.core.options import EngineOptions
from inference.core.scheduler import SCORED_COUNT_MAX
from inference.decoder.model import (
    Batch,
    Decoder,
    DecoderWeights,
    Entries,
    LayerPool,
    Logits,
    TorchKernels,
    length_class,
)
from inference.engine import SamplingParams
from inference.errors import EngineStartFailed
from inference.kv_blocks import KV_BLOCK_TOKENS, KvType, blocks_for
from inference.limits import EngineLimits
from inference.native.decoder import Rows, TableRows
from inference.sampling.sampler import Draw, choose

ALIGNED = 4  # integers: kernels are compiled again for addresses that are not a multiple of 16
# Share of a GPU's memory left after weights and activations; graphs and fragments need the rest.
KV_CACHE_SHARE = 0.9
GIB = 1 << 30

PADDING = (0, 0, -1, 0, 0, 0)  # of the parts: rows that write no keys, in spans without rows
KV_DTYPES: dict[KvType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_NONE = np.zeros(0, dtype=np.int32)


class TorchDecoder:
    """A loaded model with its KV pools. Only one thread may use it."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        options: EngineOptions,
        kernels: TorchKernels | None = None,
    ) -> None:
        """Allocate the pools on the device of the weights, and capture graphs there.

        `kernels` is None for those of the device. Raises EngineStartFailed if a GPU's memory does
        not hold one context, or torch.OutOfMemoryError.
        """
        self._device = weights.embedding.device
        self.level = "torch" if self._device.type == "cpu" else self._device.type
        self._kv_type = options.kv_type
        self._config = config
        self._limits = options.limits
        self._kernels = kernels or kernels_of(self._device)
        context_token_count = options.limits.context_window_tokens
        self._decoder = Decoder(config, weights, context_token_count, self._kernels)
        self._tables = TableRows(blocks_for(context_token_count))
        self._graphs: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._make_inputs(0)
        if options.kv_cache_bytes is None:
            self.block_count = self._fitting_block_count(options.block_bytes(config))
        else:
            self.block_count = options.block_count(config)
        self._pools = self._allocate(self.block_count)
        if self._kernels.captures:
            self._capture_graphs()

    def forward(self, chunks: Sequence[Rows]) -> Logits:
        """Compute the logits (R, V) of the last `logit_row_count` rows of each chunk, in order;
        they are valid until the next call.

        Writes the pools only at the chunks' positions.
        """
        order = sorted(chunks, key=_span_order)
        parts = self._parts(order, chunks)
        lengths = [len(part) for part in parts]
        single_count = sum(chunk.token_count == 1 for chunk in order)
        sizes = self._graphs if single_count == len(order) else ()
        size = next((size for size in sizes if size >= len(order)), None)
        if size is not None:
            lengths = [*_lengths(size), lengths[-1]]
        self._upload(parts, lengths)
        if size is None:
            longest = max(chunk.token_count for chunk in order)
            batch = self._batch(lengths, single_count, longest)
            values, best = self._compute(batch, self._pools)
        else:
            values, best = self._graphs[size]()
        wanted_count = len(parts[4])
        if not wanted_count and self._device.type == "cuda":
            # Nothing is read below, but the caller measures the time of a step.
            torch.cuda.current_stream().synchronize()
        return Logits(values[:wanted_count], best[:wanted_count].tolist())

    def _compute(self, batch: Batch, pools: list[LayerPool]) -> tuple[Tensor, Tensor]:
        values = self._decoder.forward(batch, pools)
        return values, self._kernels.best(values)

    def _parts(self, order: Sequence[Rows], chunks: Sequence[Rows]) -> list[Entries]:
        """Build the six parts of a step's inputs. `order` lists the spans, single rows first."""
        token_ids: list[int] = []
        numbers = np.empty((4, len(order)), dtype=np.int64)
        for index, chunk in enumerate(order):
            sequence, count = chunk.sequence, chunk.token_count
            position = sequence.computed_token_count
            token_ids += sequence.token_ids[position : position + count]
            numbers[:3, index] = count, position, sequence.rotary_offset
        numbers[3] = self._tables.starts(order)
        counts, positions, offsets, starts = numbers
        entries = self._tables.entries
        first_rows = counts.cumsum() - counts
        blocks = -(-(positions + counts) // KV_BLOCK_TOKENS)
        first_blocks = blocks.cumsum() - blocks
        tables = entries[(starts - first_blocks).repeat(blocks) + np.arange(blocks.sum())]
        at = (positions - first_rows).repeat(counts) + np.arange(counts.sum())
        targets = entries[starts.repeat(counts) + at // KV_BLOCK_TOKENS].astype(np.int64)
        slots = targets * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
        spans = np.stack((first_rows, counts, positions, first_blocks), axis=1).ravel()
        ends = dict(zip(map(id, order), (first_rows + counts).tolist(), strict=True))
        logit_rows = [
            row
            for chunk in chunks
            for row in range(ends[id(chunk)] - chunk.logit_row_count, ends[id(chunk)])
        ]
        parts = (token_ids, at + offsets.repeat(counts), slots, spans, logit_rows, tables)
        return [np.asarray(part, dtype=np.int32) for part in parts]

    def _upload(self, parts: Sequence[Entries], lengths: Sequence[int]) -> None:
        """Copy the parts of a step's inputs to the device, each padded to its length."""
        starts = _starts(lengths)
        if self._copied is not None:  # the GPU may be behind, and read pinned memory only later
            self._copied.synchronize()
        if starts[-1] > len(self._inputs):
            self._make_inputs(2 * starts[-1])
            if self._graphs:  # which read the old memory
                self._capture_graphs()
        for part, start, length, fill in zip(parts, starts, lengths, PADDING, strict=False):
            self._packed[start : start + len(part)] = part
            self._packed[start + len(part) : start + length] = fill
        if self._inputs is not self._pinned:
            self._inputs[: starts[-1]].copy_(self._pinned[: starts[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _batch(self, lengths: Sequence[int], single_count: int, row_count_max: int) -> Batch:
        """Build a batch from views of the inputs. `lengths` are those of the parts."""
        token_ids, rotary_rows, slots, spans, logit_rows, tables = (
            self._inputs[start : start + length]
            for start, length in zip(_starts(lengths), lengths, strict=False)
        )
        return Batch(
            *(token_ids, rotary_rows, slots, spans.view(-1, 4), logit_rows, tables),
            *(single_count, row_count_max),
        )

    def _make_inputs(self, count: int) -> None:
        """Allocate memory for at least `count` integers, and always enough for the largest step."""
        limits = self._limits
        table_width = blocks_for(limits.context_window_tokens)
        largest = 4 * limits.step_token_count_max
        largest += limits.running_sequence_count_max * (table_width + 2 * len(PADDING))
        on_gpu = self._device.type == "cuda"
        self._pinned = torch.zeros(max(count, largest), dtype=torch.int32, pin_memory=on_gpu)
        self._packed = self._pinned.numpy()
        self._inputs = self._pinned.to(self._device)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def _capture_graphs(self) -> None:
        """Capture steps that only decode. Without a GPU, as in tests, they are only computed."""
        row_count = 2
        while row_count <= self._limits.step_token_count_max:
            self._idle([row_count, row_count, row_count, 4, 1, 1], 0, self._pools)()
            row_count *= 4  # compiles the attention of prompts for every number of parts
        on_gpu = self._device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        captured: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        # The largest graph comes first: the others reuse its memory.
        for size in reversed(graph_sizes(self._limits.running_sequence_count_max)):
            compute = self._idle([*_lengths(size), 1], size, self._pools)
            outputs = compute()  # compiles the kernels
            if on_gpu:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    outputs = compute()
                compute = partial(_replay, graph, outputs)
            captured[size] = compute
        self._graphs = dict(sorted(captured.items()))

    def _idle(
        self, lengths: Sequence[int], single_count: int, pools: list[LayerPool]
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Build a step that consists of padding, with its inputs on the device."""
        self._upload([_NONE] * len(PADDING), lengths)
        batch = self._batch(lengths, single_count, 1 if single_count else lengths[0])
        return partial(self._compute, batch, pools)

    def _allocate(self, block_count: int) -> list[LayerPool]:
        """Allocate zeroed pools of all layers that use memory only where they are written.

        Positions after a sequence's end are read with weight 0, so they must be finite. numpy gets
        zeroed pages from the operating system on first use; torch would write all of them at
        startup.
        """
        config, dtype = self._config, KV_DTYPES[self._kv_type]
        # (layers, 2, blocks, H_kv, T)
        sizes = (config.layer_count, 2, block_count, config.kv_head_count, KV_BLOCK_TOKENS)
        pool = self._zeros((*sizes, config.head_dim), dtype)
        if self._kv_type != "int8":
            return [LayerPool(*layer) for layer in pool]
        scales = self._zeros(sizes, torch.bfloat16)
        return [LayerPool(*layer, *scale) for layer, scale in zip(pool, scales, strict=True)]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        return torch.from_numpy(np.zeros(shape, np.dtype(f"u{dtype.itemsize}"))).view(dtype)

    def _fitting_block_count(self, block_bytes: int) -> int:
        """Count the blocks that fit the GPU's free memory, less the needs of the largest step.

        Raises EngineStartFailed if they do not hold one context.
        """
        row_count = self._limits.step_token_count_max
        logit_count = min(row_count, self._limits.running_sequence_count_max + SCORED_COUNT_MAX)
        lengths = [row_count, row_count, row_count, 4, logit_count, 1]
        pools = self._allocate(1)
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        values, _ = self._idle(lengths, 0, pools)()
        draw = Draw(SamplingParams(temperature=1.0, top_p=0.5, top_logprobs=1), 0, 0)
        choose(torch.zeros_like(values), [draw] * logit_count)
        torch.cuda.synchronize()
        step_bytes = torch.cuda.max_memory_allocated() - before_bytes
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        return fitting_block_count(free_bytes - step_bytes, block_bytes, self._limits)


def kernels_of(device: torch.device) -> TorchKernels:
    """Choose the kernels for a device. Raises EngineStartFailed if a GPU's are not installed."""
    if device.type == "cpu":
        return TorchKernels()
    try:
        from inference.decoder.cuda_kernels import TritonKernels
    except ImportError as error:
        raise EngineStartFailed(
            f"the device cuda needs the package triton ({error}), which torch's builds for CUDA on"
            " Linux bring: install one of those, or use the device cpu"
        ) from error
    return TritonKernels(torch.cuda.get_device_properties(device).multi_processor_count)


def graph_sizes(row_count_max: int) -> list[int]:
    """List the numbers of rows for which steps are captured. From 32 rows on, padding costs at most
    an eighth.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < row_count_max:
        sizes.append(sizes[-1] + 8 * max(sizes[-1] // 64, 1))
    return [size for size in sizes if size < row_count_max] + [row_count_max]


def fitting_block_count(spare_bytes: int, block_bytes: int, limits: EngineLimits) -> int:
    """Count the KV blocks that fit. Raises EngineStartFailed if one context does not fit."""
    count = int(spare_bytes * KV_CACHE_SHARE) // block_bytes
    needed_count = blocks_for(limits.context_window_tokens)
    if count < needed_count:
        raise EngineStartFailed(
            f"the GPU has {max(spare_bytes, 0) / GIB:.1f} GiB left for the KV cache, but one"
            f" context of {limits.context_window_tokens:,} tokens needs"
            f" {needed_count * block_bytes / KV_CACHE_SHARE / GIB:.1f}: use a smaller checkpoint, a"
            " GPU with more memory, or one that no other process uses"
        )
    return count


def _lengths(size: int) -> tuple[int, ...]:
    """List the lengths of the parts before the tables, in a graph of `size` rows."""
    return size, size, size, 4 * size, size


def _starts(lengths: Sequence[int]) -> list[int]:
    """Compute the offset at which each part begins, and the end of the last."""
    padded = (-(-length // ALIGNED) * ALIGNED for length in lengths)
    return list(itertools.accumulate(padded, initial=0))


def _span_order(chunk: Rows) -> int:
    """Sort key of a chunk: single rows first, by class of length, as `TorchKernels` needs them."""
    is_single = chunk.token_count == 1
    return length_class(chunk.sequence.computed_token_count) if is_single else sys.maxsize


def _replay(graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    graph.replay()
    return outputs
