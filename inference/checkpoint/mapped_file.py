"""One safetensors file in the address space: tensors that lie where they lie on disk.

Tensors are views of the mapping, which lives as long as any of them does. Their pages belong to the system's file cache: shared by
all processes that serve the same checkpoint, and taken back under pressure without being written anywhere.
"""

from __future__ import annotations

import itertools
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference.errors import CheckpointInvalid

# Types that convert into each other by value. Others (float8, integers) mean a quantization that is not undone here.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype_name: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class MappedFile:
    """The tensors of one file by name."""

    def __init__(self, path: Path) -> None:
        """Map and check. Raises `CheckpointInvalid` if it is not an intact safetensors file."""
        self.path = path
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # the library has checked the header: every tensor within the file, none over another
            with path.open("rb") as file:
                # Private and writable, as torch asks of a buffer; nobody writes, so no page is ever copied.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (SafetensorError, OSError, ValueError) as error:
            if _begins_with(path, _LFS_POINTER):
                raise CheckpointInvalid(str(path), "a Git LFS pointer, not the weights: fetch them with `git lfs pull`") from error
            raise CheckpointInvalid(str(path), f"not a safetensors file, or torn: {error}") from error
        header_bytes = int.from_bytes(self._mapping[:8], "little")
        header = json.loads(self._mapping[8 : 8 + header_bytes])
        start = 8 + header_bytes
        self._entries = {
            str(name): _Entry(str(entry["dtype"]), tuple(entry["shape"]), *(start + offset for offset in entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor; None if it is not in this file."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there. Raises `CheckpointInvalid` for one that holds other than plain floats."""
        dtype_name = self._entries[name].dtype_name
        if dtype_name not in _DTYPES:
            raise CheckpointInvalid(
                str(self.path), f"tensor {name} has type {dtype_name}, which is not supported; supported: {', '.join(_DTYPES)}"
            )
        return _DTYPES[dtype_name]

    def tensor(self, name: str) -> Tensor:
        """A view of the mapping, not to be written."""
        entry = self._entries[name]
        return self._view(name, entry.begin, entry.end).view(entry.shape)

    def adjacent(self, names: list[str]) -> Tensor | None:
        """Tensors of one type and row length as one, stacked along the first dimension; None if they do not lie so."""
        entries = [self._entries[name] for name in names]
        first = entries[0]
        for before, after in itertools.pairwise(entries):
            if before.end != after.begin or (after.dtype_name, after.shape[1:]) != (first.dtype_name, first.shape[1:]):
                return None
        return self._view(names[0], first.begin, entries[-1].end).view(-1, *first.shape[1:])

    def give_back(self, name: str) -> None:
        """Take a tensor's pages out of memory; whoever reads it again gets them from the file."""
        entry = self._entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE  # only whole pages: the edges hold others' data too
        length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, length)

    def _view(self, name: str, begin: int, end: int) -> Tensor:
        dtype = self.dtype(name)
        if begin == end:
            return torch.empty(0, dtype=dtype)
        if begin % dtype.itemsize:  # legal, and never written by the library itself
            return torch.frombuffer(bytearray(self._mapping[begin:end]), dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)


def _begins_with(path: Path, beginning: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning
    except OSError:
        return False
