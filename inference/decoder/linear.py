"""Linear layers: plain, or with int8 weights and a scale per output channel.

The one place that multiplies by weights in the torch path, so that a faster kernel has one place to go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

INT8_MAX = 127  # symmetric: -128 stays unused, so that negating a row is exact
PACKED_ROWS_MAX = 128  # rows of input: up to here torch's int8 kernel costs less than widening weights (measured, 2048 x 4096)
WIDEN_COUNT = 1 << 20  # weights widened at once: bounds the extra memory, and keeps it within the caches of a server


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """weight (out, in), bias (out,) or None. scales: (out,), and weight is int8 to be multiplied by them; None: it is plain."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None


def project(rows: Tensor, weights: LinearWeights) -> Tensor:
    """rows (N, in) -> (N, out), in the type of the rows."""
    if weights.scales is None:
        return linear(rows, weights.weight, weights.bias)
    product = _multiply_int8(rows, weights.weight, weights.scales)
    return product if weights.bias is None else product + weights.bias


def quantize_rows(weight: Tensor, bias: Tensor | None = None) -> LinearWeights:
    """Symmetric int8 by output channel: the largest magnitude of a row becomes 127. Scales keep the type of the weight.

    Works on some rows at a time, so that a large matrix is never there in fp32 as a whole.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=weight.dtype)
    row_count = _widened_row_count(weight)
    scratch = torch.empty((min(row_count, weight.shape[0]), weight.shape[1]), dtype=torch.float32)
    for start in range(0, weight.shape[0], row_count):
        rows = slice(start, min(start + row_count, weight.shape[0]))
        wide = scratch[: rows.stop - start].copy_(weight[rows])
        lowest, highest = torch.aminmax(wide, dim=1)
        # Rounded to its stored type first: the integers must fit the scale that will be multiplied.
        scales[rows] = (torch.maximum(-lowest, highest) / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        quantized[rows] = wide.div_(scales[rows].float()[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return LinearWeights(quantized, bias, scales)


def _multiply_int8(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """(N, in), (out, in) int8, (out,) -> (N, out). Integers up to 127 are exact in bfloat16, so only the scale is rounded."""
    if rows.device.type == "cpu" and rows.dtype is torch.bfloat16 and len(rows) <= PACKED_ROWS_MAX:
        return torch._weight_int8pack_mm(rows, weight, scales)
    row_count = _widened_row_count(weight)
    product = torch.cat([linear(rows, part.to(rows.dtype)) for part in torch.split(weight, row_count)], dim=-1)
    return product.mul_(scales)


def _widened_row_count(weight: Tensor) -> int:
    return max(1, WIDEN_COUNT // weight.shape[1])
