"""What a checkpoint directory says about itself: sizes, positions, end tokens, default sampling.

Reads the JSON files of the Hugging Face layout, never the weights, and imports no torch: the API process uses it too. Anything
that this engine would compute wrongly is refused here by name, so that nobody gets a fluent wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.engine import ModelInfo, SamplingParams
from inference.errors import CheckpointInvalid

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
DEFAULT_ROPE_THETA = 10_000.0  # radians per position, the base of Su et al. 2021; configurations without it mean this


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 does. Lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and at most one scaling."""

    theta: float = DEFAULT_ROPE_THETA
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a Llama-family decoder. All counts are of heads, layers or floats."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    context_window_tokens: int
    end_token_ids: frozenset[int]


def read_config(directory: Path) -> DecoderConfig:
    """Read config.json and generation_config.json. Raises `CheckpointInvalid` naming the file and what to mend."""
    path = directory / "config.json"
    raw = read_json(path)
    architectures = raw.get("architectures") or ["(none)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise CheckpointInvalid(str(path), f"architecture {architectures[0]} is not supported; supported: {supported}")
    if raw.get("quantization_config"):
        raise CheckpointInvalid(str(path), "quantized checkpoints are not supported; use the unquantized one")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointInvalid(str(path), f"activation {raw['hidden_act']} is not supported; supported: silu")
    try:
        config = DecoderConfig(
            architecture=architectures[0],
            vocabulary_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layer_count=int(raw["num_hidden_layers"]),
            head_count=int(raw["num_attention_heads"]),
            kv_head_count=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw, path),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            context_window_tokens=int(raw.get("max_position_embeddings", 2048)),
            end_token_ids=_end_token_ids(directory, raw),
        )
    except KeyError as error:
        raise CheckpointInvalid(str(path), f"entry {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"an entry has a wrong type: {error}") from error
    if min(config.head_count, config.kv_head_count) < 1 or config.head_count % config.kv_head_count:
        raise CheckpointInvalid(
            str(path), f"{config.head_count} attention heads cannot share {config.kv_head_count} key-value heads evenly"
        )
    return config


def read_model_info(directory: Path, *, name: str, engine: str, context_window_tokens_max: int | None = None) -> ModelInfo:
    """What the API tells of a checkpoint before it is loaded. Raises `CheckpointInvalid`."""
    config = read_config(directory)
    window = min(config.context_window_tokens, context_window_tokens_max or config.context_window_tokens)
    return ModelInfo(
        name=name,
        architecture=config.architecture,
        engine=engine,
        context_window_tokens=window,
        vocabulary_size=config.vocabulary_size,
        directory=str(directory),
        default_sampling=_default_sampling(directory),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointInvalid` if it is absent or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointInvalid(str(path), "the file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"the file cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(str(path), "the file does not hold a JSON object")
    return value


def _read_rope(raw: Mapping[str, Any], path: Path) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5)."""
    parameters: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, linear_factor=float(parameters["factor"]))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_context_tokens=int(parameters["original_max_position_embeddings"]),
            )
            return RopeConfig(theta, llama3=scaling)
        case _:
            raise CheckpointInvalid(str(path), f"RoPE scaling {kind} is not supported; supported: default, linear, llama3")


def _end_token_ids(directory: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json wins, since instruction tuning adds end tokens there."""
    ends = _read_generation_config(directory).get("eos_token_id")
    ends = raw.get("eos_token_id") if ends is None else ends
    if ends is None:
        return frozenset()
    return frozenset(int(end) for end in (ends if isinstance(ends, list) else [ends]))


def _default_sampling(directory: Path) -> SamplingParams:
    raw = _read_generation_config(directory)
    repetition_penalty = float(raw.get("repetition_penalty") or 1.0)  # acts on greedy search too
    if not raw.get("do_sample", False):
        return SamplingParams(repetition_penalty=repetition_penalty)
    # `or` would turn an explicit temperature of 0 into 1; only an absent or null entry means the default.
    temperature = raw.get("temperature")
    return SamplingParams(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=float(raw.get("top_p") or 1.0),
        top_k=int(raw.get("top_k") or 0),
        min_p=float(raw.get("min_p") or 0.0),
        repetition_penalty=repetition_penalty,
    )


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}
