"""Least work of a decoder: bytes that it must read, operations that it must do, and their time.

The time is that of the bandwidth and of the rate of matrix products which the machine shows in the
same minute. A benchmark prints how near an engine comes to it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.shapes import Precision, Shape
from inference.core.options import ComputeDtype

WEIGHT_BYTES: dict[ComputeDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_BYTES: dict[ComputeDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of a device. On a GPU reading and computing `overlap`."""

    bytes_per_s: float
    flop_per_s: float
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and floating-point operations to do."""

    read_bytes: float
    flop: float

    def __add__(self, other: Work) -> Work:
        return Work(self.read_bytes + other.read_bytes, self.flop + other.flop)

    def floor_s(self, limits: Limits) -> float:
        """Compute the least time for this work, in seconds."""
        read_s, compute_s = self.read_bytes / limits.bytes_per_s, self.flop / limits.flop_per_s
        return max(read_s, compute_s) if limits.overlap else read_s + compute_s


def decode_step(
    shape: Shape, dtype: ComputeDtype, contexts: Sequence[int], shared_tokens: int = 0
) -> Work:
    """Compute the work of a step that decodes one token for each context.

    All weights are read once, and so are the keys and values of a prefix that all share.
    """
    read_tokens = sum(contexts) - shared_tokens * (len(contexts) - 1)
    kv_bytes = read_tokens * shape.kv_count_per_token * KV_BYTES[dtype]
    return Work(
        shape.decode_weight_count * WEIGHT_BYTES[dtype] + kv_bytes,
        2 * len(contexts) * shape.decode_weight_count + attention_flop(shape, sum(contexts)),
    )


def prefill(shape: Shape, dtype: ComputeDtype, end: int, start: int = 0) -> Work:
    """Compute the work of a prompt's tokens from `start` to `end`, and of one row of logits."""
    attended = (end**2 - start**2) / 2
    layers = shape.layer_count * shape.layer_weight_count
    return Work(
        shape.decode_weight_count * WEIGHT_BYTES[dtype],
        2 * (end - start) * layers + 2 * shape.head_weight_count + attention_flop(shape, attended),
    )


def attention_flop(shape: Shape, attended: float) -> float:
    """Compute the operations of attention for the number of attended positions of all rows."""
    return 4 * attended * shape.layer_count * shape.head_count * shape.head_dim


def measure_linear(
    shape: Shape, precision: Precision, token_count: int, thread_count: int
) -> float:
    """Measure the FLOP/s of `torch.nn.Linear` with a prompt's rows over one layer's matrices.

    Query, key and value matrices are one product, gate and up matrices too, as engines join them.
    Runs in a process of its own, whose threads do not wait beside the engine's.
    """
    sizes = list(shape.layer_matrices.values())
    joined = [sizes[0:3], sizes[3:4], sizes[4:6], sizes[6:7]]
    products = [(sum(rows for rows, _ in group), group[0][1]) for group in joined]
    program = f"""
import time, torch
torch.set_num_threads({thread_count})
total_s = operations = 0
with torch.inference_mode():
    for rows, columns in {products}:
        layer = torch.nn.Linear(columns, rows, bias=False, dtype=torch.{precision})
        left = torch.ones({token_count}, columns, dtype=torch.{precision})
        best_s = 1e9
        for _ in range(8):
            began_s = time.perf_counter()
            layer(left)
            best_s = min(best_s, time.perf_counter() - began_s)
        total_s += best_s
        operations += 2 * {token_count} * rows * columns
print(operations / total_s)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(ended.stdout)
