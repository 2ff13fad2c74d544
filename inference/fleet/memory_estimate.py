"""What an engine host of a checkpoint takes of the machine's memory, before there is one. Reads headers only. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

# Of Python, torch and the tokenizer, per process; measured as what a host of a tiny model has for itself, rounded up.
HOST_BYTES = 192 << 20
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPUTED_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SAME_TYPE = {"float32": "F32", "bfloat16": "BF16"}


def torch_memory_bytes(directory: Path, compute_dtype: Literal["float32", "bfloat16", "int8"], kv_cache_bytes: int) -> int:
    """The most that a host of the torch engine takes: of its weights while it loads, of its KV cache when all of it is in use."""
    weights_bytes = 0
    for dtype, count in _tensors(directory):
        converted = dtype != _SAME_TYPE.get(compute_dtype)
        # Packing reads one copy and writes another; a tensor in its own type is read from the file and takes no memory there.
        weights_bytes += count * _COMPUTED_BYTES[compute_dtype] * (2 if converted else 1)
    return weights_bytes + kv_cache_bytes + HOST_BYTES


def stored_bytes(directory: Path) -> int:
    """The weights as they are in the checkpoint's files."""
    return sum(count * _STORED_BYTES.get(dtype, 1) for dtype, count in _tensors(directory))


def _tensors(directory: Path) -> list[tuple[str, int]]:
    """Type and number of elements of each tensor. A file that is not what it should be counts nothing: loading will say so."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            header = _header(path)
            found += [(str(entry["dtype"]), math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
        return header
