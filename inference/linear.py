"""Linear layers: plain, or with int8 weights and a scale per output channel.

The one place that multiplies by weights in the torch path, so that a faster kernel has one place to go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

INT8_MAX = 127  # symmetric: -128 stays unused, so that negating a row is exact
PACKED_ROWS_MAX = 64  # rows of input: measured, torch's int8 kernel beats widening the weights below, and loses above
WIDEN_ROWS = 4096  # rows of weights widened at once: bounds the extra memory, and keeps it within the caches of a server


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

    Works on `WIDEN_ROWS` rows at a time, so that a large matrix is never there in fp32 as a whole.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=weight.dtype)
    for start in range(0, weight.shape[0], WIDEN_ROWS):
        rows = slice(start, start + WIDEN_ROWS)
        # Rounded to its stored type first: the integers must fit the scale that will be multiplied.
        scales[rows] = (weight[rows].float().abs().amax(dim=1) / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = weight[rows].float() / scales[rows].float()[:, None]
        quantized[rows] = scaled.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return LinearWeights(quantized, bias, scales)


def _multiply_int8(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """(N, in), (out, in) int8, (out,) -> (N, out). Integers up to 127 are exact in bfloat16, so only the scale is rounded."""
    if rows.device.type == "cpu" and rows.dtype is torch.bfloat16 and len(rows) <= PACKED_ROWS_MAX:
        return torch._weight_int8pack_mm(rows, weight, scales)
    parts = [
        linear(rows, part.to(rows.dtype)) * scale
        for part, scale in zip(torch.split(weight, WIDEN_ROWS), torch.split(scales, WIDEN_ROWS), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
