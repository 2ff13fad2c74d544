"""Configuration of a decoder checkpoint: sizes, positions, end tokens, default sampling.

Reads the JSON files of the Hugging Face layout, never the weights, and imports no torch, since the
API process uses it too. Settings that this engine would compute wrongly are rejected by name, so
that no model gives fluent wrong answers.

`families.py` holds the differences between the supported architectures, `rope.py` the position
embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.capabilities import Capabilities
from inference.checkpoint.families import (
    ARCHITECTURES,
    read_layer_windows,
    refuse_entries,
    refuse_quantized,
)
from inference.checkpoint.fingerprint import fingerprint
from inference.checkpoint.json_files import entries_of, read_count, read_json
from inference.checkpoint.rope import (
    RopeConfig,
    read_rope,
    refuse_wrong_factors,
    stretched_context_tokens,
)
from inference.engine import ModelInfo, SamplingParams
from inference.errors import CheckpointInvalid
from inference.limits import sampling_fault

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Entries of `text_config` that published checkpoints leave to the defaults of transformers.
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
NO_TOKEN = (None, -1)  # as some converters write a token that a model does not have
_log = logging.getLogger("weir.inference.checkpoint")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a Llama-family decoder, in heads, layers or floats.

    `layer_windows` is the attention window of each layer in positions, including the query's own;
    None means full attention. `qk_norm` tells whether each head's queries and keys are normalized
    before rotation.
    """

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
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    context_window_tokens: int
    end_token_ids: frozenset[int]


def read_config(directory: Path) -> DecoderConfig:
    """Read config.json and generation_config.json. Raises CheckpointInvalid with the remedy."""
    path = directory / "config.json"
    raw = read_json(path)
    named = raw.get("architectures") or ["(none)"]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointInvalid(
            path, f"architecture {architecture} is not supported; supported: {supported}"
        )
    refuse_quantized(raw, path)
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointInvalid(
            path, f"activation {raw['hidden_act']} is not supported; supported: silu"
        )
    with entries_of(path):
        refuse_entries(ARCHITECTURES[architecture].changing_entries, raw, architecture, path)
    for name in _SIZES:
        value = raw.get(name)
        if isinstance(value, int | float) and value < 1:
            raise CheckpointInvalid(path, f"entry {name} = {value!r} is not a count of at least 1")
    with entries_of(path):
        config = _read_sizes(raw, architecture, read_end_token_ids(directory, raw), path)
    if min(config.head_count, config.kv_head_count) < 1 or config.head_count % config.kv_head_count:
        raise CheckpointInvalid(
            path,
            f"{config.head_count} attention heads cannot share {config.kv_head_count} key-value"
            " heads evenly",
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise CheckpointInvalid(
            path, f"head_dim = {config.head_dim} must be even, since rotations apply to pairs"
        )
    refuse_wrong_factors(config.rope, config.head_dim, path)
    if any(not 0 <= end < config.vocabulary_size for end in config.end_token_ids):
        raise CheckpointInvalid(
            path,
            f"eos_token_id {sorted(config.end_token_ids)} is not within vocab_size"
            f" {config.vocabulary_size}",
        )
    return config


def _read_sizes(
    raw: Mapping[str, Any], architecture: str, end_token_ids: frozenset[int], path: Path
) -> DecoderConfig:
    family = ARCHITECTURES[architecture]
    head_count, layer_count = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    # An explicit null means the generic default; an absent entry means the architecture's default.
    kv_head_count = raw.get("num_key_value_heads", family.kv_head_count) or head_count
    head_dim = raw.get("head_dim", family.head_dim) or int(raw["hidden_size"]) // head_count
    positions = int(raw.get("max_position_embeddings", family.context_window_tokens))
    rope = read_rope(raw, positions, path)
    attention_bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocabulary_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=int(kv_head_count),
        head_dim=int(head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=(
            attention_bias if family.attention_out_bias is None else family.attention_out_bias
        ),
        mlp_bias=bool(raw.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        layer_windows=read_layer_windows(raw, family, layer_count, path),
        context_window_tokens=stretched_context_tokens(rope, positions),
        end_token_ids=end_token_ids,
    )


def read_model_info(
    directory: Path, *, name: str, engine: str, context_window_tokens_max: int | None = None
) -> ModelInfo:
    """Read the facts about a checkpoint without loading it. Raises: CheckpointInvalid."""
    config = read_config(directory)
    window, size = config.context_window_tokens, config.vocabulary_size
    return ModelInfo(
        name=name,
        architecture=config.architecture,
        engine=engine,
        context_window_tokens=min(window, context_window_tokens_max or window),
        vocabulary_size=size,
        directory=str(directory),
        default_sampling=read_default_sampling(directory, size, Capabilities(), engine),
        fingerprint=fingerprint(directory, engine),
    )


def read_external_model(
    directory: Path,
    *,
    name: str,
    engine: str,
    context_window_tokens_max: int | None,
    capabilities: Capabilities,
) -> tuple[ModelInfo, frozenset[int]]:
    """Read the facts about a model that another engine computes; return them and its end tokens.

    Architecture, quantization and parallelism are the engine's concern. Raises: CheckpointInvalid.
    """
    path = directory / "config.json"
    raw = read_json(path)
    text = raw.get("text_config") or raw  # for multimodal models
    with entries_of(path):
        text = _TEXT_DEFAULTS.get(str(text.get("model_type")), {}) | text
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        vocabulary_size = read_count(text, "vocab_size", path)
        window = read_count(text, "max_position_embeddings", path)
        if (rope.get("rope_type") or rope.get("type")) == "yarn" and rope.get("factor"):
            # some checkpoints state the window before scaling, others the one after it
            original = rope.get("original_max_position_embeddings") or window
            window = max(window, int(original * rope["factor"]))
        window = min(window, context_window_tokens_max or window)
    try:
        ends = read_end_token_ids(directory, raw, text)
    except (TypeError, ValueError) as error:
        raise CheckpointInvalid(path, f"eos_token_id is not a token id: {error}") from error
    if any(not 0 <= end < vocabulary_size for end in ends):
        raise CheckpointInvalid(
            path, f"eos_token_id {sorted(ends)} is not within vocab_size {vocabulary_size}"
        )
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=window,
        vocabulary_size=vocabulary_size,
        directory=str(directory),
        default_sampling=read_default_sampling(directory, vocabulary_size, capabilities, engine),
        capabilities=capabilities,
        continues_output=True,
        fingerprint=fingerprint(directory, engine),
    )
    return model, ends


def read_end_token_ids(directory: Path, *configurations: Mapping[str, Any]) -> frozenset[int]:
    """Collect all end tokens that these configurations and generation_config.json name.

    `Tokenizer.end_token_ids` has those of the tokenizer: fine-tunes often change only some files.
    """
    ends: list[Any] = []
    for raw in (*configurations, _read_generation_config(directory)):
        named = raw.get("eos_token_id")
        ends += named if isinstance(named, list) else [named]
    return frozenset(int(each) for each in ends if each not in NO_TOKEN)


def read_default_sampling(
    directory: Path, vocabulary_size: int, capabilities: Capabilities, engine: str
) -> SamplingParams:
    """Read the checkpoint's default sampling; unsupported fields are removed and logged.

    Raises CheckpointInvalid for defaults out of range.
    """
    path = directory / "generation_config.json"
    with entries_of(path):
        sampling = _read_sampling(_read_generation_config(directory))
    if (fault := sampling_fault(sampling, vocabulary_size)) is not None:
        raise CheckpointInvalid(path, fault)
    sampling, left_out = capabilities.honoured(sampling)
    if left_out:
        _log.warning(
            "%s: the engine %s does not support %s: requests run without",
            path,
            engine,
            ", ".join(sorted(left_out)),
        )
    return sampling


def _read_sampling(raw: Mapping[str, Any]) -> SamplingParams:
    # also applies to greedy decoding
    repetition_penalty = float(raw.get("repetition_penalty") or 1.0)
    if not raw.get("do_sample", False):
        return SamplingParams(repetition_penalty=repetition_penalty)
    # `or` would turn an explicit 0 into 1; only an absent or null entry means 1.
    temperature, top_p = (
        1.0 if raw.get(name) is None else float(raw[name]) for name in ("temperature", "top_p")
    )
    if top_p == 0:  # only the most likely token is left
        return SamplingParams(repetition_penalty=repetition_penalty)
    top_k = int(raw.get("top_k") or 0)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k == -1 else top_k,  # vLLM and SGLang write -1 for all tokens
        min_p=float(raw.get("min_p") or 0.0),
        repetition_penalty=repetition_penalty,
    )


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}
