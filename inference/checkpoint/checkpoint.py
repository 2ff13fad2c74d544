"""Configuration of a decoder checkpoint: sizes, positions, end tokens, default sampling.

Reads the JSON files of the Hugging Face layout, never the weights, and imports no torch, since the
API process uses it too. Settings that this engine would compute wrongly are rejected by name, so
that no model gives fluent wrong answers.

`Family` holds the differences between the supported architectures. An entry of config.json that
transformers does not read cannot change the result and is passed over: a publisher's note. An entry
that it reads, and that is not supported for the architecture, is rejected by name and value, unless
its value is the neutral one. A test compares these lists with transformers.

Rotary position embedding is a base with at most one scaling to longer contexts. Both spellings are
read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
`model.rotary_tables` computes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.capabilities import Capabilities
from inference.checkpoint.fingerprint import fingerprint
from inference.engine import ModelInfo, SamplingParams
from inference.errors import CheckpointInvalid
from inference.limits import sampling_fault

# radians per position, from Su et al. 2021; the default of configurations
LEVELS_MAX = 64  # of nesting in a file; parsers in the standard library are recursive
TOO_DEEP = "nested too deeply: write fewer levels"
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
# Entries that transformers reads for decoders of any architecture, also where the configuration
# class of the architecture does not have them: its masks, caches and loaders do.
_READ_BY_ALL: dict[str, tuple[object, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1,),
    "layer_types": ([],),
    "sliding_window": (),
    "attention_chunk_size": (),
    "kv_sharing_modes": ({}, []),
    "per_layer_config": ({}, []),
    "attribute_map": ({},),
    "transformers_weights": (),
    **dict.fromkeys(("text_config", "text_encoder", "decoder", "generator"), ({},)),
}
_WINDOWS = ("sliding_window", "layer_types", "attention_chunk_size")  # a layer's type replaces it
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")  # of three libraries


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Division of all positions by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Base that grows with positions beyond the original context, in tokens ("dynamic NTK")."""

    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of rotary frequencies for long contexts. Lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: slow rotations stretched, fast ones kept, attention sharpened (Peng et al. 2023).
    Lengths in tokens.

    beta_fast, beta_slow: turns within the original context above which a rotation is kept, and
    below which it is fully stretched. attention_factor: multiplies queries and keys. truncate:
    whether bounds are rounded to whole dimensions.
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
    """LongRoPE: each rotation slowed by its own factor, from one of two lists (Ding et al. 2024).
    Lengths in tokens.

    A sequence within the original context uses the short factors, a longer one the long factors,
    from its first token on. attention_factor: multiplies queries and keys in both cases; None
    derives it from factor.
    """

    factor: float
    original_context_tokens: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and at most one scaling."""

    theta: float = DEFAULT_ROPE_THETA
    scaling: RopeScaling | None = None


def read_rope(raw: Mapping[str, Any], context_window_tokens: int, path: Path) -> RopeConfig:
    """Read the RoPE entries. context_window_tokens: before scaling. Raises: CheckpointInvalid."""
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
    """Return the context window: `max_position_embeddings`, extended by the scalings."""
    match rope.scaling:
        case (
            DynamicScaling(factor=factor, original_context_tokens=original)
            | YarnScaling(factor=factor, original_context_tokens=original)
        ):
            return max(context_window_tokens, int(original * factor))
        case _:
            return context_window_tokens


def rotation_switch_tokens(rope: RopeConfig, context_window_tokens: int) -> int | None:
    """Return the length above which longrope uses other factors; None if never exceeded."""
    scaling = rope.scaling
    if (
        not isinstance(scaling, LongRopeScaling)
        or scaling.original_context_tokens >= context_window_tokens
    ):
        return None
    return scaling.original_context_tokens


def refuse_wrong_factors(rope: RopeConfig, head_dim: int, path: Path) -> None:
    """Raise CheckpointInvalid unless longrope has a positive factor per pair of dimensions."""
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


_log = logging.getLogger("weir.inference.checkpoint")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a Llama-family decoder. All counts are of heads, layers or floats.

    layer_windows: attention window of each layer in positions, including the row's own; None for
    all. qk_norm: whether each head's queries and keys are normalized before rotation.
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
    """Read config.json and generation_config.json. Raises: CheckpointInvalid with the remedy."""
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
    """Return the facts about a checkpoint before it is loaded. Raises: CheckpointInvalid."""
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
    """Return a model that another engine computes, and its end tokens.

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


def read_count(raw: Mapping[str, Any], entry: str, path: Path) -> int:
    """Return an entry that is a count. Raises: CheckpointInvalid for any other value."""
    value = raw.get(entry)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(path, f"entry {entry} = {value!r} is not a count of at least 1")
    return value


@contextlib.contextmanager
def entries_of(path: Path) -> Iterator[None]:
    """Convert errors of missing entries and wrong types to CheckpointInvalid."""
    try:
        yield
    except KeyError as error:
        raise CheckpointInvalid(path, f"entry {error.args[0]} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointInvalid(path, f"an entry has a wrong type: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises: CheckpointInvalid if missing or another type."""
    value = _read_json_value(path)
    if not isinstance(value, dict):
        raise CheckpointInvalid(path, "the file does not hold a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects from a file. Raises: CheckpointInvalid if missing or wrong."""
    value = _read_json_value(path)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise CheckpointInvalid(path, "the file does not hold a list of JSON objects")
    return value


def deep_line(text: str) -> int:
    """Return the line of a JSON or TOML text that is nested too deeply, from 1 on."""
    level = 0
    for number, line in enumerate(text.splitlines(), 1):
        level += line.count("[") + line.count("{") - line.count("]") - line.count("}")
        if level > LEVELS_MAX or line.count("[") + line.count("{") > LEVELS_MAX:
            return number
    return 1


def _read_json_value(path: Path) -> object:
    text = ""
    try:
        return json.loads(text := path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointInvalid(path, "the file is missing") from error
    except RecursionError:
        raise CheckpointInvalid(path, f"line {deep_line(text)}: {TOO_DEEP}") from None
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(path, f"the file cannot be read as JSON: {error}") from error


def read_end_token_ids(directory: Path, *configurations: Mapping[str, Any]) -> frozenset[int]:
    """Return all end tokens that these configurations and generation_config.json name.

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
    """Return the checkpoint's default sampling, without unsupported fields, which are logged.

    Raises: CheckpointInvalid for defaults out of range.
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


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. The defaults for absent entries are those of transformers.

    kv_head_count: None for the number of attention heads. head_dim: None for hidden size / heads.
    qkv_bias, attention_out_bias: None if decided by the entry `attention_bias`.
    windows: which layers use a sliding window; sliding_window: its default in tokens.
    """

    context_window_tokens: int
    kv_head_count: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    attention_out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: str = "none"
    sliding_window: int | None = None

    @property
    def changing_entries(self) -> dict[str, tuple[object, ...]]:
        """Entries that would change the computation, by their neutral values beside null."""
        supported = {"none": (), "all": ("sliding_window",), "layers": _WINDOWS}[self.windows]
        return {name: each for name, each in _READ_BY_ALL.items() if name not in supported}


ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family(2048, mlp_bias=None),
    "MistralForCausalLM": Family(
        131_072,
        kv_head_count=8,
        qkv_bias=False,
        attention_out_bias=False,
        windows="all",
        sliding_window=4096,
    ),
    "Qwen2ForCausalLM": Family(
        32_768,
        kv_head_count=32,
        qkv_bias=True,
        attention_out_bias=False,
        windows="layers",
        sliding_window=4096,
    ),
    "Qwen3ForCausalLM": Family(
        32_768,
        kv_head_count=32,
        head_dim=128,
        qk_norm=True,
        windows="layers",
        sliding_window=4096,
    ),
}


def refuse_quantized(raw: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointInvalid if the weights are stored in a quantized form."""
    if any(map(raw.get, _QUANTIZATION)):
        raise CheckpointInvalid(
            path, "quantized checkpoints are not supported; use the unquantized one"
        )


def refuse_entries(
    changing: Mapping[str, tuple[object, ...]],
    raw: Mapping[str, Any],
    architecture: str,
    path: Path,
) -> None:
    """Raise CheckpointInvalid for an entry with a value that changes the computation.

    changing: entries by their neutral values beside null.
    """
    for name, neutral in changing.items():
        value = raw.get(name)
        if value is None or _is_neutral(name, value, neutral, raw):
            continue
        raise CheckpointInvalid(
            path,
            f"entry {name} = {value!r} is not supported for {architecture}, and it changes what the"
            " model computes; use a checkpoint without it",
        )


def _is_neutral(
    name: str, value: object, neutral: tuple[object, ...], raw: Mapping[str, Any]
) -> bool:
    """Return whether an entry has a value that means what its absence means."""
    if name == "layer_types" and value == ["full_attention"] * raw.get("num_hidden_layers", 0):
        return True
    if name in ("sliding_window", "attention_chunk_size") and isinstance(value, int):
        # no sequence is longer
        return bool(value >= raw.get("max_position_embeddings", math.inf))
    return value in neutral


def read_layer_windows(
    raw: Mapping[str, Any], family: Family, layer_count: int, path: Path
) -> tuple[int | None, ...]:
    """Return each layer's attention window in positions, including the row's own; None for all."""
    window = raw.get("sliding_window", family.sliding_window)
    if (
        family.windows == "none"
        or window is None
        or (family.windows == "layers" and not raw.get("use_sliding_window", False))
    ):
        window = None
    elif int(window) < 1:
        raise CheckpointInvalid(path, f"entry sliding_window = {window!r} is not a count of tokens")
    if family.windows != "layers":
        return (window,) * layer_count
    kinds = raw.get("layer_types")
    if kinds is None:
        # Transformers' default for both Qwen families.
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if index >= first else None for index in range(layer_count))
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if len(kinds) != layer_count or not known.issuperset(kinds):
        raise CheckpointInvalid(
            path,
            f"entry layer_types = {kinds!r} is not supported for {layer_count} layers and a window"
            f" of {window} tokens",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
