"""Execution of a step: builds the batch, runs the decoder, samples the new tokens.

Owns all tensors: the weights and the pools of keys and values. Scheduling is done elsewhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.tensors import on_device
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.scheduler import Chunk, StepPlan
from inference.core.sequence import Sequence
from inference.decoder.model import (
    NOT_FINITE,
    Batch,
    Decoder,
    DecoderWeights,
    DecodeSpan,
    LayerPool,
    Logits,
    PrefillSpan,
    Spans,
    load_weights,
    row_indices,
)
from inference.errors import EngineStartFailed, InvariantViolated
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from inference.native.decoder import NativeDecoder, open_decoder, path_for, supports
from inference.sampling.grammar import MaskWorker
from inference.sampling.sampler import Chosen, choose

# Of hidden states, keys and values. With "int8", only the weights have 8 bits; they multiply
# bfloat16.
_TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


class ModelRunner:
    """A loaded model with its KV pools. Used by one thread."""

    def __init__(self, options: EngineOptions, config: DecoderConfig, on_progress: Callable[[float], None]) -> None:
        """Load the model. on_progress: called with 0 to 1 while reading weights.

        Raises: CheckpointInvalid; EngineStartFailed if the device is missing.
        """
        directory, compute_dtype, packed = Path(options.directory), options.compute_dtype, options.packed
        context_window_tokens, block_count = options.limits.context_window_tokens, options.block_count(config)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise EngineStartFailed("the device is set to cuda, but torch finds no CUDA device")
        self._device = torch.device(options.device)
        dtype = self._dtype = _TORCH_DTYPES[compute_dtype]
        self._config = config
        self._mask_worker = MaskWorker(config.vocabulary_size)

        def load() -> DecoderWeights:
            return load_weights(directory, config, dtype, on_progress, quantize=compute_dtype == "int8")

        self._native: NativeDecoder | None = None
        if self._device.type == "cpu" and supports(config, dtype):
            self._native = open_decoder(
                path_for(packed, directory, compute_dtype),
                0 if packed is None else packed.bytes_max,
                load,
                lambda weights: NativeDecoder(config, weights, dtype, context_window_tokens, block_count),
            )
        else:
            weights = load()
            if self._device.type != "cpu":
                weights = on_device(weights, self._device)
            self._decoder = Decoder(config, weights, context_window_tokens)
            self._pools = _allocate_pools(config, dtype, block_count, self._device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> dict[Sequence, Chosen]:
        """Compute the plan's chunks. Returns the next token of each sequence whose chunk completes
        it.

        Writes the pools only at the chunks' positions. Raises: InvariantViolated if the model's
        output is not finite, since further tokens would be noise and must not be billed.
        """
        # torch computes the attention of neighbouring rows together: single-token rows first,
        # ordered by length.
        chunks = plan.chunks if self._native else sorted(plan.chunks, key=_length_class)
        finishing = [chunk.sequence for chunk in chunks if chunk.completes]
        # Most rows take the largest logit, which the decoder computes anyway; only the others are
        # sampled.
        rows = [row for row, sequence in enumerate(finishing) if not sequence.next_takes_best]
        draws = [finishing[row].draw() for row in rows]
        masks = self._mask_worker.begin([draw.grammar for draw in draws])
        copied = [chunk.copied for chunk in chunks if chunk.copied is not None]
        if copied:
            self._copy_blocks(copied)
        logits = self._decode(chunks)
        if NOT_FINITE in logits.best:
            raise InvariantViolated("the model's output is not finite; are the weights intact?")
        chosen = {sequence: Chosen(token_id) for sequence, token_id in zip(finishing, logits.best, strict=True)}
        if rows:
            ruled = logits.values if len(rows) == len(finishing) else logits.values[rows]
            chosen |= zip((finishing[row] for row in rows), choose(ruled, draws, masks), strict=True)
        return chosen

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy keys and values from the first to the second block of each pair, in order, in all
        layers.
        """
        if self._native:
            self._native.copy_blocks(pairs)
            return
        for pool in self._pools:
            for source, target in pairs:
                pool.keys[target].copy_(pool.keys[source])
                pool.values[target].copy_(pool.values[source])

    def _decode(self, chunks: list[Chunk]) -> Logits:
        """Return the logits of the chunks that complete, on the CPU."""
        if self._native:
            return self._native.forward(chunks)
        batch = self._batch(chunks)
        if self._device.type != "cpu":
            batch = on_device(batch, self._device)
        return Logits.of(self._decoder.forward(batch, self._pools).cpu())

    def _batch(self, chunks: list[Chunk]) -> Batch:
        token_ids: list[int] = []
        positions = np.empty(sum(chunk.token_count for chunk in chunks), dtype=np.int64)
        block_ids, rotary_rows = np.empty_like(positions), np.empty_like(positions)
        logit_rows: list[int] = []
        for chunk in chunks:
            row, sequence = len(token_ids), chunk.sequence
            start, end = sequence.computed_token_count, sequence.computed_token_count + chunk.token_count
            token_ids += sequence.token_ids[start:end]
            span = np.arange(start, end)
            positions[row : row + chunk.token_count] = span
            rotary_rows[row : row + chunk.token_count] = span + sequence.rotary_offset
            block_ids[row : row + chunk.token_count] = np.asarray(sequence.block_table)[span // KV_BLOCK_TOKENS]
            if chunk.completes:
                logit_rows.append(row + chunk.token_count - 1)
        position_rows = torch.from_numpy(positions)
        return Batch(
            token_ids=torch.tensor(token_ids),
            rotary_rows=torch.from_numpy(rotary_rows),
            pool_rows=row_indices(torch.from_numpy(block_ids), position_rows % KV_BLOCK_TOKENS, self._config.kv_head_count),
            spans={window: _spans(chunks, self._dtype, window) for window in set(self._config.layer_windows)},
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )


def _allocate_pools(config: DecoderConfig, dtype: torch.dtype, block_count: int, device: torch.device) -> list[LayerPool]:
    """Allocate zeroed pools that use memory only where they are written.

    Positions after a sequence's end are read with weight 0, so they must be finite. numpy gets
    zeroed pages from the operating system on first use; torch would write all of them at startup.
    """
    shape = (config.layer_count, 2, block_count, config.kv_head_count, KV_BLOCK_TOKENS, config.head_dim)
    if device.type == "cpu":
        integer = np.dtype(np.uint32 if dtype.itemsize == 4 else np.uint16)
        pools = torch.from_numpy(np.zeros(shape, dtype=integer)).view(dtype)
    else:
        pools = torch.zeros(shape, dtype=dtype, device=device)
    return [LayerPool(pools[layer, 0], pools[layer, 1]) for layer in range(config.layer_count)]


def _spans(chunks: list[Chunk], dtype: torch.dtype, window: int | None) -> Spans:
    """Return a step's rows for layers with this window: single-token chunks first, by length class."""
    decodes = _decode_spans([chunk for chunk in chunks if chunk.token_count == 1], dtype, window)
    prefills, row = [], 0
    for chunk in chunks:
        if chunk.token_count > 1:
            prefills.append(_prefill_span(row, chunk, window))
        row += chunk.token_count
    return Spans(decodes, tuple(prefills))


def _prefill_span(row: int, chunk: Chunk, window: int | None) -> PrefillSpan:
    """Return the rows of one sequence. The table begins with the first block in the first row's
    window.
    """
    start, end = chunk.sequence.computed_token_count, chunk.sequence.computed_token_count + chunk.token_count
    first_block = 0 if window is None else max(0, start + 1 - window) // KV_BLOCK_TOKENS
    table = torch.tensor(chunk.sequence.block_table[first_block : blocks_for(end)])
    mask: Tensor | None = None
    if start > 0 or (window is not None and window < end):
        covered = first_block * KV_BLOCK_TOKENS + torch.arange(len(table) * KV_BLOCK_TOKENS)
        rows = torch.arange(start, end)[:, None]
        mask = covered[None, :] <= rows
        if window is not None:
            mask &= covered[None, :] > rows - window
    return PrefillSpan(row, row + end - start, start, table, mask)


def _length_class(chunk: Chunk) -> int:
    """Return the length class. Rows of a class are padded to at most twice their length; prefill is
    last.
    """
    if chunk.token_count > 1:
        return sys.maxsize
    return (blocks_for(chunk.sequence.computed_token_count + 1) - 1).bit_length()


def _decode_spans(chunks: list[Chunk], dtype: torch.dtype, window: int | None) -> tuple[DecodeSpan, ...]:
    """Return one span per length class, so that a long context does not pad all short ones."""
    spans: list[DecodeSpan] = []
    for _, group in itertools.groupby(chunks, key=_length_class):
        row_start = spans[-1].row_end if spans else 0
        spans.append(_decode_span(row_start, list(group), dtype, window))
    return tuple(spans)


def _decode_span(row_start: int, chunks: list[Chunk], dtype: torch.dtype, window: int | None) -> DecodeSpan:
    """Return block tables of single-token rows, from the first block in each row's window.

    Padded with block 0, which always exists; the mask hides padding and positions before the
    window.
    """
    lengths = np.array([chunk.sequence.computed_token_count + 1 for chunk in chunks])
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    first_blocks = begins // KV_BLOCK_TOKENS
    counts = -(-lengths // KV_BLOCK_TOKENS) - first_blocks
    tables = np.zeros((len(chunks), int(counts.max())), dtype=np.int64)
    for row, chunk in enumerate(chunks):
        first = int(first_blocks[row])
        tables[row, : counts[row]] = chunk.sequence.block_table[first : first + int(counts[row])]
    positions = first_blocks[:, None] * KV_BLOCK_TOKENS + np.arange(tables.shape[1] * KV_BLOCK_TOKENS)[None, :]
    hidden = (positions >= lengths[:, None]) | (positions < begins[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    return DecodeSpan(row_start, row_start + len(chunks), torch.from_numpy(tables), mask)
