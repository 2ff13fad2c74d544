"""Rotary position embedding of a checkpoint: its scaling, and the context that it allows.

It is a base with at most one scaling to longer contexts. Both spellings are read: `rope_theta` +
`rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). `model.rotary_tables`
computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.errors import CheckpointInvalid

# radians per position, from Su et al. 2021; the default of configurations
DEFAULT_ROPE_THETA = 10_000.0
# Entries that each kind of scaling reads; unknown ones could change the computation.
_ENTRIES = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": (
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale"
        " mscale_all_dim truncate"
    ),
    "longrope": (
        "factor original_max_position_embeddings attention_factor short_factor long_factor"
    ),
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: all positions are divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK scaling: the base grows with positions beyond the original context, in tokens."""

    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of Llama 3.1: slow rotary frequencies are stretched. Lengths are in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN scaling: slow rotations are stretched, fast ones kept, attention sharpened (Peng et al.
    2023). Lengths are in tokens.

    A rotation with more than `beta_fast` turns within the original context is kept, one with fewer
    than `beta_slow` is fully stretched. `attention_factor` multiplies queries and keys. `truncate`
    rounds the bounds to whole dimensions.
    """

    factor: float
    original_context_tokens: int
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE scaling: each rotation is slowed by its own factor, from one of two lists (Ding et
    al. 2024). Lengths are in tokens.

    A sequence within the original context uses the short factors, a longer one the long factors
    from its first token on. `attention_factor` multiplies queries and keys in both cases; None
    derives it from `factor`.
    """

    factor: float
    original_context_tokens: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base, with at most one scaling."""

    theta: float = DEFAULT_ROPE_THETA
    scaling: RopeScaling | None = None


def read_rope(raw: Mapping[str, Any], context_window_tokens: int, path: Path) -> RopeConfig:
    """Read and validate the RoPE entries of a configuration.

    `context_window_tokens` is the window before scaling: the original context of a scaling that
    does not name one. Raises CheckpointInvalid for unsupported or invalid entries.
    """
    for entry in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(entry) or {}, Mapping):
            raise CheckpointInvalid(path, f"entry {entry} = {raw[entry]!r} is not an object")
    parameters: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(
        raw.get("rope_parameters") or {}
    )
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ENTRIES:
        raise CheckpointInvalid(
            path, f"RoPE scaling {kind} is not supported; supported: {', '.join(_ENTRIES)}"
        )
    # Entries of other kinds have no effect, nor has the note of the YaRN authors.
    known = {*" ".join(_ENTRIES.values()).split(), "rope_theta", "rope_type", "type", "finetuned"}
    for name, value in parameters.items():
        neutral = name == "partial_rotary_factor" and value == 1
        if name not in known and not (value is None or isinstance(value, str) or neutral):
            raise CheckpointInvalid(
                path, f"RoPE scaling {kind} has an unsupported entry: {name} = {value!r}"
            )
    # The top-level entry overrides the parameters, as in transformers.
    original = raw.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    scaling = _read_scaling(kind, parameters, original, context_window_tokens)
    if not (theta > 0 and math.isfinite(theta)) or (
        scaling is not None and not (scaling.factor > 0 and math.isfinite(scaling.factor))
    ):
        raise CheckpointInvalid(
            path, f"rope_theta = {theta} and the factor of a RoPE scaling must be above 0"
        )
    return RopeConfig(theta, scaling)


def stretched_context_tokens(rope: RopeConfig, context_window_tokens: int) -> int:
    """Compute the context window: `max_position_embeddings`, extended by the scaling."""
    match rope.scaling:
        case (
            DynamicScaling(factor=factor, original_context_tokens=original)
            | YarnScaling(factor=factor, original_context_tokens=original)
        ):
            return max(context_window_tokens, int(original * factor))
        case _:
            return context_window_tokens


def rotation_switch_tokens(rope: RopeConfig, context_window_tokens: int) -> int | None:
    """Find the length above which longrope uses other factors; None if it is never exceeded."""
    scaling = rope.scaling
    if (
        not isinstance(scaling, LongRopeScaling)
        or scaling.original_context_tokens >= context_window_tokens
    ):
        return None
    return scaling.original_context_tokens


def refuse_wrong_factors(rope: RopeConfig, head_dim: int, path: Path) -> None:
    """Raise CheckpointInvalid unless longrope has a positive factor for each pair of dimensions."""
    if not isinstance(rope.scaling, LongRopeScaling):
        return
    for name, factors in (
        ("short_factor", rope.scaling.short_factors),
        ("long_factor", rope.scaling.long_factors),
    ):
        if len(factors) != head_dim // 2 or not all(
            factor > 0 and math.isfinite(factor) for factor in factors
        ):
            raise CheckpointInvalid(
                path,
                f"RoPE scaling longrope needs {head_dim // 2} values above 0 as {name}, not"
                f" {list(factors)!r:.200}",
            )


def _read_scaling(
    kind: str, parameters: Mapping[str, Any], original: int | None, context_window_tokens: int
) -> RopeScaling | None:
    match kind:
        case "linear":
            return LinearScaling(float(parameters["factor"]))
        case "dynamic":
            return DynamicScaling(float(parameters["factor"]), context_window_tokens)
        case "llama3":
            return Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_context_tokens=int(original or context_window_tokens),
            )
        case "yarn":
            original_tokens = int(original or context_window_tokens)
            return YarnScaling(
                factor=float(parameters.get("factor") or context_window_tokens / original_tokens),
                original_context_tokens=original_tokens,
                attention_factor=_optional(parameters, "attention_factor"),
                mscale=_optional(parameters, "mscale"),
                mscale_all_dim=_optional(parameters, "mscale_all_dim"),
                # the paper's value for Llama models
                beta_fast=_optional(parameters, "beta_fast") or 32.0,
                beta_slow=_optional(parameters, "beta_slow") or 1.0,
                truncate=bool(parameters.get("truncate", True)),
            )
        case "longrope":
            original_tokens = int(original or context_window_tokens)
            return LongRopeScaling(
                factor=float(parameters.get("factor") or context_window_tokens / original_tokens),
                original_context_tokens=original_tokens,
                short_factors=tuple(map(float, parameters["short_factor"])),
                long_factors=tuple(map(float, parameters["long_factor"])),
                attention_factor=_optional(parameters, "attention_factor"),
            )
        case _:
            return None


def _optional(parameters: Mapping[str, Any], name: str) -> float | None:
    value = parameters.get(name)
    return None if value is None else float(value)
