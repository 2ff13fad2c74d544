"""Rotary position embedding as config.json describes it: the base, and at most one scaling to longer contexts.

Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). Every entry is
either understood or refused by name. No torch; `model.rotary_tables` computes what this says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.errors import CheckpointInvalid

DEFAULT_ROPE_THETA = 10_000.0  # radians per position, the base of Su et al. 2021; configurations without it mean this


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A base that grows with the position once that is beyond the original context, in tokens ("dynamic NTK")."""

    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 does. Lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow rotations stretched, fast ones kept, and attention sharpened (Peng et al. 2023). Lengths in tokens.

    beta_fast, beta_slow: turns within the original context above which a rotation is kept, and below which it is stretched in full.
    attention_factor: on queries and keys alike. truncate: whether the bounds are rounded to whole dimensions.
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
    """Each rotation slowed by a factor of its own, by one of two lists (Ding et al. 2024). Lengths in tokens.

    A sequence within the original context is turned by the short factors, a longer one by the long factors, from its first token
    on. attention_factor: on queries and keys alike, in both; None: it follows from factor.
    """

    factor: float
    original_context_tokens: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling

# What each kind of scaling may say; anything else could change what is computed.
_ENTRIES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}),
}
_COMMON_ENTRIES = frozenset({"rope_theta", "rope_type", "type"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and at most one scaling."""

    theta: float = DEFAULT_ROPE_THETA
    scaling: RopeScaling | None = None


def read_rope(raw: Mapping[str, Any], context_window_tokens: int, path: Path) -> RopeConfig:
    """context_window_tokens: `max_position_embeddings`. Raises `CheckpointInvalid`, and KeyError for a missing entry."""
    for entry in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(entry) or {}, Mapping):
            raise CheckpointInvalid(str(path), f"entry {entry} = {raw[entry]!r} is not an object")
    parameters: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ENTRIES:
        raise CheckpointInvalid(str(path), f"RoPE scaling {kind} is not supported; supported: {', '.join(_ENTRIES)}")
    for name, value in parameters.items():
        neutral = name == "partial_rotary_factor" and value == 1
        if name not in _ENTRIES[kind] | _COMMON_ENTRIES and value is not None and not neutral:
            raise CheckpointInvalid(str(path), f"RoPE scaling {kind} has an unsupported entry: {name} = {value!r}")
    # Next to the parameters it wins, as it does in transformers.
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    scaling = _read_scaling(kind, parameters, original, context_window_tokens)
    if not (theta > 0 and math.isfinite(theta)) or (
        scaling is not None and not (scaling.factor > 0 and math.isfinite(scaling.factor))
    ):
        raise CheckpointInvalid(str(path), f"rope_theta = {theta} and the factor of a RoPE scaling must be above 0")
    return RopeConfig(theta, scaling)


def stretched_context_tokens(rope: RopeConfig, context_window_tokens: int) -> int:
    """Positions that a model serves: `max_position_embeddings`, which two scalings extend rather than include."""
    match rope.scaling:
        case (
            DynamicScaling(factor=factor, original_context_tokens=original)
            | YarnScaling(factor=factor, original_context_tokens=original)
        ):
            return max(context_window_tokens, int(original * factor))
        case _:
            return context_window_tokens


def rotation_switch_tokens(rope: RopeConfig, context_window_tokens: int) -> int | None:
    """The length beyond which all positions of a sequence are turned otherwise, if the window reaches there."""
    scaling = rope.scaling
    if not isinstance(scaling, LongRopeScaling) or scaling.original_context_tokens >= context_window_tokens:
        return None
    return scaling.original_context_tokens


def refuse_wrong_factors(rope: RopeConfig, head_dim: int, path: Path) -> None:
    """Raises `CheckpointInvalid` unless longrope has one factor above 0 for each pair of a head's dimensions."""
    if not isinstance(rope.scaling, LongRopeScaling):
        return
    for name, factors in (("short_factor", rope.scaling.short_factors), ("long_factor", rope.scaling.long_factors)):
        if len(factors) != head_dim // 2 or not all(factor > 0 and math.isfinite(factor) for factor in factors):
            raise CheckpointInvalid(
                str(path), f"RoPE scaling longrope needs {head_dim // 2} values above 0 as {name}, not {list(factors)!r:.200}"
            )


def _read_scaling(kind: str, parameters: Mapping[str, Any], original: int | None, context_window_tokens: int) -> RopeScaling | None:
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
                beta_fast=_optional(parameters, "beta_fast") or 32.0,  # the paper's choice for Llama models
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
