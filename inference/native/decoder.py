"""Native decoder: owns packed weights and a KV pool, and computes a step in one call.

Same interface and results as the torch decoder: equal tokens in fp32. In bfloat16 the residual
stream and all sums are in fp32, so it is more exact than torch, which rounds after every operator.

`open_decoder` uses a file of packed weights if there is one, else packs the checkpoint's and stores
them.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.tensors import LinearWeights
from inference.decoder.model import DecoderWeights, Logits, rotary_tables
from inference.errors import InvariantViolated
from inference.kv_blocks import KV_BITS, KvType, blocks_for
from inference.native import loader
from inference.native.packed_file import (
    PackedFile,
    PackedTarget,
    Part,
    open_packed,
    packed_path,
    trim_packed,
    write_packed,
)

PANEL_COLUMNS = 64  # as in decoder.cpp: rows of logits are padded to whole panels
DTYPES = (torch.float32, torch.bfloat16)

# Fields of `LayerWeights` and `DecoderWeights`, as `Decoder::set` in decoder.h numbers them.
_LINEARS = ("qkv", "attention_out", "gate_up", "down", "lm_head")
_NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm", "final_norm")
_KINDS = (*_LINEARS, *_NORMS, "embedding")
# Kinds of parts, as `with_part` in decoder.h numbers them: those of the linear layers, the norms,
# the embedding.
_LINEAR_PARTS = 4
_EMBEDDING_KIND = len(_LINEARS) * _LINEAR_PARTS + len(_NORMS)

# of checkpoint weights: packing fewer takes less time than importing torch varies
PACKED_BYTES_MIN = 64 << 20


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "hidden_size",
                "intermediate_size",
                "layer_count",
                "head_count",
                "kv_head_count",
                "head_dim",
                "vocabulary_size",
                "block_count",
            )
        ),
        ("rms_norm_eps", ctypes.c_float),
        ("thread_count", ctypes.c_int32),
        ("kv_bits", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "windows")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("row_count", "span_count", "wanted_count")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "spans", "tables", "wanted_rows")),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("best", ctypes.c_void_p),
    ]


def supports(config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Return whether the native code computes this model; else torch does. Loads the library."""
    return dtype in DTYPES and supports_shape(config) and loader.load() is not None


def supports_shape(config: DecoderConfig) -> bool:
    """Return whether the native code is written for a model of these sizes."""
    even = config.hidden_size % 2 == 0 and config.intermediate_size % 2 == 0
    return config.head_dim % 16 == 0 and even


class CachedTokens(Protocol):
    """Interface of a sequence: the fields that this decoder reads."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def computed_token_count(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def rotary_offset(self) -> int: ...


class Rows(Protocol):
    """Interface of a chunk: uncomputed tokens of a sequence, and its draft, for this step."""

    @property
    def sequence(self) -> CachedTokens: ...
    @property
    def token_count(self) -> int: ...
    @property
    def draft(self) -> tuple[int, ...]: ...
    @property
    def logit_row_count(self) -> int: ...


class NativeDecoder:
    """A loaded model with its KV pool. Called by one thread; computes with torch's thread count."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights | PackedFile,
        dtype: torch.dtype,
        context_window_tokens: int,
        block_count: int,
        kv_dtype: KvType,
    ) -> None:
        """Pack the weights, which can be freed afterwards, and allocate `block_count` blocks.
        Requires `supports`.

        If `weights` is a file of packed weights, it is used in place. Raises ValueError if it does
        not fit this model.
        """
        library = loader.load()
        assert library is not None, "supports() is true"
        self._library = library
        self._config = config
        self.block_count = block_count
        self._thread_count = torch.get_num_threads()
        tables = rotary_tables(config.rope, config.head_dim, context_window_tokens, torch.float32)
        self._rotation = tuple(table.contiguous() for table in tables)
        windows = array("q", (window or 0 for window in config.layer_windows))
        shape = _Shape(
            config.hidden_size,
            config.intermediate_size,
            config.layer_count,
            config.head_count,
            config.kv_head_count,
            config.head_dim,
            config.vocabulary_size,
            block_count,
            config.rms_norm_eps,
            self._thread_count,
            KV_BITS[kv_dtype],
            *(table.data_ptr() for table in self._rotation),
            windows.buffer_info()[0],
        )
        is_bfloat16 = dtype == torch.bfloat16
        self.level, number = next(
            iter(loader.available_levels(library, is_bfloat16=is_bfloat16).items())
        )
        self._handle = library.weir_decoder_open(number, ctypes.byref(shape), int(is_bfloat16))
        if not self._handle:
            raise MemoryError("no memory for the native decoder")
        weakref.finalize(self, library.weir_decoder_close, self._handle)
        self._file: PackedFile | None = None  # must outlive the decoder
        if isinstance(weights, PackedFile):
            self.adopt(weights)
        else:
            self._pack(weights)
        self._tables = TableRows(blocks_for(context_window_tokens))
        self._logits_stride = -(-config.vocabulary_size // PANEL_COLUMNS) * PANEL_COLUMNS
        self._logits = self._logits_memory = torch.empty(0, self._logits_stride)
        self._step = _Step(logits_stride=self._logits_stride)

    def forward(self, chunks: Sequence[Rows]) -> Logits:
        """Compute the logits (R, V) of the last `logit_row_count` rows of each chunk, in order;
        they are valid until the next call.

        Writes the pool only at the chunks' positions. Raises: MemoryError.
        """
        token_ids = array("i")
        # per chunk: first row, row count, position, table start, rotation table row
        spans = array("i")
        wanted = array("i")
        row = 0
        for chunk, start in zip(chunks, self._tables.starts(chunks), strict=True):
            sequence, count, draft = chunk.sequence, chunk.token_count, chunk.draft
            position, tokens = sequence.computed_token_count, sequence.token_ids
            row_count = count + len(draft)
            spans.extend((row, row_count, position, start, position + sequence.rotary_offset))
            token_ids.extend(tokens[position : position + count])
            token_ids.extend(draft)
            row += row_count
            wanted.extend(range(row - chunk.logit_row_count, row))
        if len(wanted) != len(self._logits):
            self._make_logits(len(wanted))
        best = array("i", wanted)
        step = self._step
        step.row_count, step.span_count = len(token_ids), len(chunks)
        step.wanted_count = len(wanted)
        step.token_ids, step.spans, step.wanted_rows, step.best = (
            values.buffer_info()[0] for values in (token_ids, spans, wanted, best)
        )
        step.tables = self._tables.address
        step.logits = self._logits_memory.data_ptr()
        if self._library.weir_decoder_forward(self._handle, ctypes.byref(step)):
            raise MemoryError("no memory for a step")
        return Logits(self._logits, best.tolist())

    def parts(self) -> Iterator[Part]:
        """Yield the buffers of packed weights, which are valid as long as this decoder."""
        byte_count = ctypes.c_int64()
        for layer in range(self._config.layer_count + 1):
            for kind in range(_EMBEDDING_KIND + (layer == self._config.layer_count)):
                # the embedding belongs to no layer
                address = self._library.weir_decoder_part(
                    self._handle, layer, kind, ctypes.byref(byte_count)
                )
                if address and byte_count.value:
                    yield Part(layer, kind, address, byte_count.value)

    def adopt(self, file: PackedFile) -> None:
        """Use the weights in a file and free those packed here. Raises ValueError if they do not
        fit.
        """
        if missing := self._needed_parts() - {
            (part.layer, part.kind - part.kind % 2) for part in file.parts()
        }:
            raise ValueError(f"{len(missing)} parts of this model are missing")
        for part in file.parts():
            if (
                not 0 <= part.layer <= self._config.layer_count
                or not 0 <= part.kind <= _EMBEDDING_KIND
            ):
                raise ValueError(f"no part {part.kind} of layer {part.layer} in this model")
            if self._library.weir_decoder_adopt(
                self._handle, part.layer, part.kind, part.address, part.byte_count
            ):
                raise ValueError(
                    f"part {part.kind} of layer {part.layer} has {part.byte_count} bytes, which"
                    " does not fit this model"
                )
        self._file = file

    def _needed_parts(self) -> set[tuple[int, int]]:
        """List layer and kind of the required parts: matrices and the embedding."""
        above = self._config.layer_count
        head = len(_LINEARS) - 1
        matrices = {(layer, kind * _LINEAR_PARTS) for layer in range(above) for kind in range(head)}
        return matrices | {
            (above, head * _LINEAR_PARTS),
            (above, _EMBEDDING_KIND - _EMBEDDING_KIND % 2),
        }

    def _make_logits(self, row_count: int) -> None:
        """Make a view of `row_count` rows without padding; reuse it for equal counts."""
        if row_count > len(self._logits_memory):
            self._logits_memory = torch.empty(row_count, self._logits_stride)
        self._logits = self._logits_memory[:row_count, : self._config.vocabulary_size]

    def _pack(self, weights: DecoderWeights) -> None:
        for layer, held in enumerate((*weights.layers, weights)):
            # parts above all layers come last
            for name in _KINDS:
                if (value := getattr(held, name, None)) is not None:
                    self._set(layer, name, value)

    def _set(self, layer: int, name: str, value: LinearWeights | Tensor) -> None:
        if isinstance(value, Tensor):
            value = LinearWeights(value if name == "embedding" else value.float(), None)
        tensors = (value.weight.contiguous(), _in_fp32(value.scales), _in_fp32(value.bias))
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._library.weir_decoder_set(self._handle, layer, _KINDS.index(name), *addresses):
            raise MemoryError("no memory for the native decoder's weights")


def _in_fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


class TableRows:
    """Block tables as one array (rows, M), kept between steps, since sequences rarely add a block.

    A row belongs to one list: tables only grow, and a preempted sequence gets a new list.
    """

    def __init__(self, width: int) -> None:
        """Create an empty array. `width` is the maximum number of blocks per table."""
        self._width = width
        self._rows = np.zeros((0, width), dtype=np.int32)
        # table id -> row, blocks written, table
        self._kept: dict[int, tuple[int, int, list[int]]] = {}
        self._free: list[int] = []

    @property
    def address(self) -> int:
        """Memory address of the first row; valid until the next call of `starts`."""
        return self._rows.ctypes.data

    @property
    def entries(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """All rows as one flat array; valid until the next call of `starts`."""
        return self._rows.reshape(-1)

    def starts(self, chunks: Sequence[Rows]) -> list[int]:
        """Write the block tables of all chunks; return each start, in entries from `address`."""
        tables = [chunk.sequence.block_table for chunk in chunks]
        if sum(id(table) not in self._kept for table in tables) > len(self._free):
            self._make_room(tables)
        starts = []
        for table in tables:
            row, count, _ = self._kept.get(id(table)) or (self._free.pop(), 0, table)
            if count != len(table):
                if len(table) > self._width:
                    raise InvariantViolated(
                        f"a sequence holds {len(table)} KV blocks, its context has {self._width}"
                    )
                first = min(count, len(table))
                self._rows[row, first : len(table)] = table[first:]
                self._kept[id(table)] = (row, len(table), table)  # a reference keeps the id unique
            starts.append(row * self._width)
        return starts

    def _make_room(self, wanted: Sequence[list[int]]) -> None:
        """Drop tables that this step does not read; grow the array if more rows are needed."""
        ids = set(map(id, wanted))
        self._kept = {key: kept for key, kept in self._kept.items() if key in ids}
        row_count = max(len(self._rows), 2 * len(ids))
        if row_count > len(self._rows):
            self._rows = np.concatenate(
                [self._rows, np.zeros((row_count - len(self._rows), self._width), dtype=np.int32)]
            )
        used = {row for row, _, _ in self._kept.values()}
        self._free = [row for row in range(row_count) if row not in used]


_log = logging.getLogger("weir.inference.native")


def open_decoder(
    path: Path | None,
    bytes_max: int,
    load: Callable[[], DecoderWeights],
    make: Callable[[DecoderWeights | PackedFile], NativeDecoder],
) -> NativeDecoder:
    """Open a decoder on the packed file at `path`, which is written if missing. On failure, or
    without a path, the decoder has private weights.

    `bytes_max` limits all files in the directory: old ones are removed. `load` reads the
    checkpoint, and `make` builds a decoder.
    """
    if path is None:
        return make(load())
    decoder, file = None, open_packed(path)
    if file is not None:
        try:
            decoder = make(file)
        except ValueError as error:
            _log.warning("packed weights in %s are not used: %s", path, error)
    if decoder is None:
        decoder = make(load())
        try:
            write_packed(path, decoder.parts())
            if (file := open_packed(path)) is not None:
                decoder.adopt(file)
        except OSError as error:
            _log.warning("packed weights are not stored, each worker has its own copy: %s", error)
    trim_packed(path.parent, bytes_max)
    return decoder


def path_for(packed: PackedTarget | None, checkpoint: Path, compute_dtype: str) -> Path | None:
    """Choose the path of a checkpoint's packed weights; None if disabled or the model is small."""
    if packed is None:
        return None
    try:
        stored_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        if stored_bytes < PACKED_BYTES_MIN:
            return None
        layout = loader.layout_name(is_bfloat16=compute_dtype != "float32")
        return packed_path(Path(packed.directory), checkpoint, compute_dtype, layout)
    except OSError as error:
        _log.warning("packed weights are not stored: %s", error)
        return None
