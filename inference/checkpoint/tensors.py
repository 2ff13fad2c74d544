"""Checkpoint tensors: memory-mapped files read by name, and linear layers, plain or in 8 bits.

`project` is the only multiplication by weights in the torch path, so a faster kernel can be added
there.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from inference.checkpoint.json_files import read_json
from inference.errors import CheckpointInvalid

# Types that convert to each other by value. Other types (float8, integers) indicate an unsupported
# quantization.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LFS_POINTER = b"version https://git-lfs"

INT8_MAX = 127  # symmetric: -128 stays unused, so that negating a row is exact
# input rows up to which torch's int8 kernel is faster than widening (measured, 2048 x 4096)
PACKED_ROWS_MAX = 128
# values that torch's int8 kernel loads at once; without a whole number of these per row it reads
# beyond the rows and crashes
PACKED_INNER = 16
WIDEN_COUNT = 1 << 20  # weights widened at once: bounds the extra memory and fits server caches
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype_name: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class MappedFile:
    """Memory-mapped file whose tensors are read by name."""

    def __init__(self, path: Path) -> None:
        """Map and validate the file. Raises: CheckpointInvalid if it is not intact safetensors."""
        self.path = path
        try:
            with safe_open(path, framework="pt", device="cpu"):
                # the library validates the header: tensors are within the file and do not overlap
                pass
            with path.open("rb") as file:
                # torch requires a writable buffer; nothing writes to it, so no page is copied.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (SafetensorError, OSError, ValueError) as error:
            if _begins_with(path, _LFS_POINTER):
                raise CheckpointInvalid(
                    path, "a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
                ) from error
            raise CheckpointInvalid(
                path, f"not a safetensors file, or truncated: {error}"
            ) from error
        header_bytes = int.from_bytes(self._mapping[:8], "little")
        header = json.loads(self._mapping[8 : 8 + header_bytes])
        start = 8 + header_bytes
        self._entries = {
            str(name): _Entry(
                str(entry["dtype"]),
                tuple(entry["shape"]),
                *(start + offset for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Look up a tensor's shape; None if it is not in this file."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Look up a tensor's type. Raises CheckpointInvalid for types other than plain floats."""
        dtype_name = self._entries[name].dtype_name
        if dtype_name not in _DTYPES:
            raise CheckpointInvalid(
                self.path,
                f"tensor {name} has type {dtype_name}, which is not supported; supported:"
                f" {', '.join(_DTYPES)}",
            )
        return _DTYPES[dtype_name]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapping; the caller must not write to it."""
        entry = self._entries[name]
        return self._view(name, entry.begin, entry.end).view(entry.shape)

    def adjacent(self, names: list[str]) -> Tensor | None:
        """Stack adjacent tensors of one type by rows, without a copy; None if not adjacent."""
        entries = [self._entries[name] for name in names]
        first = entries[0]
        for before, after in itertools.pairwise(entries):
            if before.end != after.begin or (after.dtype_name, after.shape[1:]) != (
                first.dtype_name,
                first.shape[1:],
            ):
                return None
        return self._view(names[0], first.begin, entries[-1].end).view(-1, *first.shape[1:])

    def give_back(self, name: str) -> None:
        """Release a tensor's pages from memory; later reads load them from the file."""
        entry = self._entries[name]
        # whole pages only: edges contain other tensors' data
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, length)

    def _view(self, name: str, begin: int, end: int) -> Tensor:
        dtype = self.dtype(name)
        if begin == end:
            return torch.empty(0, dtype=dtype)
        if begin % dtype.itemsize:  # legal, but never written by the library itself
            return torch.frombuffer(bytearray(self._mapping[begin:end]), dtype=dtype)
        return torch.frombuffer(
            self._mapping, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin
        )


def _begins_with(path: Path, beginning: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Linear layer: weight (out, in), bias (out,) or None. An int8 weight has scales (out,)."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None


Held = TypeVar("Held")


def on_device(held: Held, device: torch.device) -> Held:
    """Move all tensors in a dataclass, tuple or mapping to a device, where needed."""
    value: Any = held
    kind: Any = type(held)
    if isinstance(value, Tensor):
        value = value.to(device)
    elif isinstance(value, tuple):
        value = tuple(on_device(each, device) for each in value)
    elif isinstance(value, Mapping):
        value = {key: on_device(each, device) for key, each in value.items()}
    elif is_dataclass(value):
        value = kind(*(on_device(getattr(value, each.name), device) for each in fields(value)))
    return value  # type: ignore[no-any-return]


def project(rows: Tensor, weights: LinearWeights) -> Tensor:
    """Multiply rows (N, in) by the weights to (N, out), in the type of the rows."""
    if weights.scales is None:
        return linear(rows, weights.weight, weights.bias)
    product = _multiply_int8(rows, weights.weight, weights.scales)
    return product if weights.bias is None else product + weights.bias


def quantize_rows(weight: Tensor, bias: Tensor | None = None) -> LinearWeights:
    """Quantize a matrix to symmetric int8 by output channel: the largest magnitude of a row becomes
    127. Scales keep the weight's type.

    Processes a few rows at a time, so that a large matrix is never entirely in fp32.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=weight.dtype)
    row_count = _widened_row_count(weight)
    scratch = torch.empty((min(row_count, weight.shape[0]), weight.shape[1]), dtype=torch.float32)
    for start in range(0, weight.shape[0], row_count):
        rows = slice(start, min(start + row_count, weight.shape[0]))
        wide = scratch[: rows.stop - start].copy_(weight[rows])
        lowest, highest = torch.aminmax(wide, dim=1)
        # Round the scale to its stored type first, since the integers are multiplied by the rounded
        # scale.
        scales[rows] = (torch.maximum(-lowest, highest) / INT8_MAX).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        quantized[rows] = (
            wide.div_(scales[rows].float()[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
        )
    return LinearWeights(quantized, bias, scales)


def _multiply_int8(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows (N, in) by an int8 weight to (N, out). bfloat16 represents int8 exactly."""
    if (
        rows.device.type == "cpu"
        and rows.dtype is torch.bfloat16
        and len(rows) <= PACKED_ROWS_MAX
        and rows.shape[1] % PACKED_INNER == 0
    ):
        return torch._weight_int8pack_mm(rows, weight, scales)
    row_count = _widened_row_count(weight)
    product = torch.cat(
        [linear(rows, part.to(rows.dtype)) for part in torch.split(weight, row_count)], dim=-1
    )
    return product.mul_(scales)


def _widened_row_count(weight: Tensor) -> int:
    return max(1, WIDEN_COUNT // weight.shape[1])


class TensorReader:
    """Reader of tensors by name, from one file or the shards of an index; tracks unread tensors."""

    def __init__(self, directory: Path, dtype: torch.dtype, quantize: bool) -> None:
        self._directory = directory
        self._dtype = dtype
        self._quantize = quantize
        self._files: dict[str, MappedFile] = {}
        self._file_by_name = self._locate()
        self._unread = dict.fromkeys(self._file_by_name)

    @property
    def names(self) -> Collection[str]:
        return self._file_by_name.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read and convert one tensor. Raises CheckpointInvalid if missing or of another shape."""
        file = self._find(name, shape)
        tensor = self._finite(file, name)
        if tensor.dtype == self._dtype:
            return tensor
        converted = tensor.to(self._dtype)
        file.give_back(name)
        return converted

    def read_stacked(
        self, rows_by_name: dict[str, int], columns: int, biased: bool
    ) -> LinearWeights:
        """Read several linear layers with the same input, and stack their rows into one layer."""
        shapes = [(f"{name}.weight", (rows, columns)) for name, rows in rows_by_name.items()]
        weight = self._read_rows(shapes)
        bias = (
            self._read_rows([(f"{name}.bias", (rows,)) for name, rows in rows_by_name.items()])
            if biased
            else None
        )
        if not self._quantize:
            return LinearWeights(weight, bias)
        quantized = quantize_rows(weight, bias)
        for name, shape in shapes:
            self._find(name, shape).give_back(name)
        return quantized

    def drop_copy(self, name: str, original: Tensor) -> None:
        """Mark a copy as read. Raises CheckpointInvalid unless it equals the original tensor."""
        if name in self._file_by_name and not torch.equal(
            self.read(name, tuple(original.shape)), original
        ):
            raise CheckpointInvalid(
                self._directory,
                f"tensor {name} differs from the embedding that config.json ties it to",
            )

    def refuse_unread(self, architecture: str, ignored: re.Pattern[str]) -> None:
        """Raise CheckpointInvalid for unread weights, which config.json does not describe."""
        for name in self._unread:
            if not ignored.fullmatch(name):
                raise CheckpointInvalid(
                    self._directory / self._file_by_name[name],
                    f"tensor {name} has no place in {architecture} as configured",
                )

    def _read_rows(self, shape_by_name: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Stack tensors by rows: without a copy if they are adjacent in one file."""
        files = [self._find(name, shape) for name, shape in shape_by_name]
        names = [name for name, _ in shape_by_name]
        if all(file is files[0] for file in files) and files[0].dtype(names[0]) == self._dtype:
            in_place = files[0].adjacent(names)
            if in_place is not None:
                for name in names:
                    self._finite(files[0], name)
                return in_place
        row_counts = [shape[0] for _, shape in shape_by_name]
        joined = torch.empty((sum(row_counts), *shape_by_name[0][1][1:]), dtype=self._dtype)
        for part, file, name in zip(torch.split(joined, row_counts), files, names, strict=True):
            part.copy_(self._finite(file, name))
            file.give_back(name)
        return joined

    def _finite(self, file: MappedFile, name: str) -> Tensor:
        """Read a tensor and check that all its values are finite in the compute type.

        Other values would fail the engine at some prompt, and again after every restart. The check
        runs at memory speed, and the pages are released.
        """
        tensor = file.tensor(name)
        lowest, highest = torch.aminmax(tensor)  # NaN if a value is NaN
        limit = torch.finfo(self._dtype).max
        if not (-limit <= float(lowest) and float(highest) <= limit):
            raise CheckpointInvalid(
                file.path,
                f"tensor {name} holds values that are not finite; check that the file is intact",
            )
        file.give_back(name)
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> MappedFile:
        file_name = self._file_by_name.get(name)
        if file_name is None:
            raise CheckpointInvalid(self._directory, f"tensor {name} is missing")
        file = self._open(file_name)
        actual = file.shape(name)
        if actual is None:
            raise CheckpointInvalid(file.path, f"tensor {name} is missing")
        if actual != shape:
            raise CheckpointInvalid(
                file.path, f"tensor {name} has shape {actual}, config.json says {shape}"
            )
        self._unread.pop(name, None)
        return file

    def _locate(self) -> dict[str, str]:
        index_path = self._directory / INDEX_FILE
        if (self._directory / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).names, SINGLE_FILE)
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointInvalid(index_path, "entry weight_map is missing")
            return {str(name): str(file_name) for name, file_name in weight_map.items()}
        pickled = (
            " (weights in pickle files are not loaded: convert them)"
            if any(self._directory.glob("*.bin"))
            else ""
        )
        raise CheckpointInvalid(
            self._directory, f"neither {SINGLE_FILE} nor {INDEX_FILE} is there{pickled}"
        )

    def _open(self, file_name: str) -> MappedFile:
        if file_name not in self._files:
            path = self._directory / file_name
            # An index is untrusted: it must not reach files outside its directory.
            if Path(file_name).name != file_name or not path.exists():
                raise CheckpointInvalid(path, "the weights file is missing")
            self._files[file_name] = MappedFile(path)
        return self._files[file_name]
