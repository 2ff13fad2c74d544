"""Finds the tensors of a checkpoint, in one safetensors file or in the shards of an index, in the type that is computed with.

A tensor in its own type stays where it lies in the mapped file. One that is missing, of another shape or type, or not finite is
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from inference.checkpoint.checkpoint import read_json
from inference.checkpoint.mapped_file import MappedFile
from inference.decoder.linear import LinearWeights, quantize_rows
from inference.errors import CheckpointInvalid

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorReader:
    """Finds tensors by name in one file or in the shards of an index, and knows which have been asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, quantize: bool) -> None:
        self._directory = directory
        self._dtype = dtype
        self._quantize = quantize
        self._files: dict[str, MappedFile] = {}
        self._file_by_name = self._locate()
        self._unread = dict.fromkeys(self._file_by_name)

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._file_by_name.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, converted. Raises `CheckpointInvalid` if it is not there or has another shape."""
        file = self._find(name, shape)
        tensor = self._finite(file, name)
        if tensor.dtype == self._dtype:
            return tensor
        converted = tensor.to(self._dtype)
        file.give_back(name)
        return converted

    def read_stacked(self, rows_by_name: dict[str, int], columns: int, biased: bool) -> LinearWeights:
        """Several linear layers with the same input as one."""
        shapes = [(f"{name}.weight", (rows, columns)) for name, rows in rows_by_name.items()]
        weight = self._read_rows(shapes)
        bias = self._read_rows([(f"{name}.bias", (rows,)) for name, rows in rows_by_name.items()]) if biased else None
        if not self._quantize:
            return LinearWeights(weight, bias)
        quantized = quantize_rows(weight, bias)
        for name, shape in shapes:
            self._find(name, shape).give_back(name)
        return quantized

    def drop_copy(self, name: str, original: Tensor) -> None:
        """Take a tensor for read that must equal another, if it is there at all."""
        if name in self._file_by_name and not torch.equal(self.read(name, tuple(original.shape)), original):
            raise CheckpointInvalid(str(self._directory), f"tensor {name} differs from the embedding that config.json ties it to")

    def refuse_unread(self, architecture: str, ignored: re.Pattern[str]) -> None:
        """A weight without a place means that the model is another one than config.json says. ignored: names that need none."""
        for name in self._unread:
            if not ignored.fullmatch(name):
                raise CheckpointInvalid(
                    str(self._directory / self._file_by_name[name]), f"tensor {name} has no place in {architecture} as configured"
                )

    def _read_rows(self, shape_by_name: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Tensors one below the other: in place where they lie so in one file, else as a copy."""
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
        """A tensor whose numbers all are some, in the type that is computed with too.

        One that is not would end the engine at the first prompt that meets it, and again after every restart. Reading runs at the
        speed of memory, and the pages are given back.
        """
        tensor = file.tensor(name)
        lowest, highest = torch.aminmax(tensor)  # NaN if there is one
        limit = torch.finfo(self._dtype).max
        if not (-limit <= float(lowest) and float(highest) <= limit):
            raise CheckpointInvalid(str(file.path), f"tensor {name} holds values that are not finite; is the file intact?")
        file.give_back(name)
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> MappedFile:
        file_name = self._file_by_name.get(name)
        if file_name is None:
            raise CheckpointInvalid(str(self._directory), f"tensor {name} is missing")
        file = self._open(file_name)
        actual = file.shape(name)
        if actual is None:
            raise CheckpointInvalid(str(file.path), f"tensor {name} is missing")
        if actual != shape:
            raise CheckpointInvalid(str(file.path), f"tensor {name} has shape {actual}, config.json says {shape}")
        self._unread.pop(name, None)
        return file

    def _locate(self) -> dict[str, str]:
        index_path = self._directory / INDEX_FILE
        if (self._directory / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).names, SINGLE_FILE)
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointInvalid(str(index_path), "entry weight_map is missing")
            return {str(name): str(file_name) for name, file_name in weight_map.items()}
        pickled = " (weights in pickle files are not loaded: convert them)" if any(self._directory.glob("*.bin")) else ""
        raise CheckpointInvalid(str(self._directory), f"neither {SINGLE_FILE} nor {INDEX_FILE} is there{pickled}")

    def _open(self, file_name: str) -> MappedFile:
        if file_name not in self._files:
            path = self._directory / file_name
            # An index is input: it must not reach files outside its own directory.
            if Path(file_name).name != file_name or not path.exists():
                raise CheckpointInvalid(str(path), "the weights file is missing")
            self._files[file_name] = MappedFile(path)
        return self._files[file_name]
