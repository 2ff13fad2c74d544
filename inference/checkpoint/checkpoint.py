"""What a checkpoint directory says about itself: sizes, positions, end tokens, default sampling.

Reads the JSON files of the Hugging Face layout, never the weights, and imports no torch: the API process uses it too. Anything
that this engine would compute wrongly is refused here by name, so that nobody gets a fluent wrong answer.

`Architecture` has what sets the supported architectures apart. An entry of config.json that it does not know might change what
the model computes. It is refused by name rather than passed over, unless it is null or false, which turns a feature off. No
torch.

Rotary position embedding is the base and at most one scaling to longer contexts. Both spellings are read: `rope_theta` +
`rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). Every entry is either understood or refused by name;
`model.rotary_tables` computes what this says."""

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
from inference.engine import ModelInfo, SamplingParams
from inference.errors import CheckpointInvalid
from inference.limits import sampling_fault

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
_COMMON_ROPE_ENTRIES = frozenset({"rope_theta", "rope_type", "type"})


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
        if name not in _ENTRIES[kind] | _COMMON_ROPE_ENTRIES and value is not None and not neutral:
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


_log = logging.getLogger("weir.inference.checkpoint")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a Llama-family decoder. All counts are of heads, layers or floats.

    layer_windows: positions that each layer looks back on, the row's own included; None where it sees all.
    qk_norm: each head's queries and keys are normalized before they are rotated.
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
    """Read config.json and generation_config.json. Raises `CheckpointInvalid` naming the file and what to mend."""
    path = directory / "config.json"
    raw = read_json(path)
    named = raw.get("architectures") or ["(none)"]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointInvalid(str(path), f"architecture {architecture} is not supported; supported: {supported}")
    if raw.get("quantization_config"):
        raise CheckpointInvalid(str(path), "quantized checkpoints are not supported; use the unquantized one")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointInvalid(str(path), f"activation {raw['hidden_act']} is not supported; supported: silu")
    refuse_entries_beside(_COMMON_ENTRIES | ARCHITECTURES[architecture].entries, raw, architecture, path)
    for name in _SIZES:
        value = raw.get(name)
        if isinstance(value, int | float) and value < 1:
            raise CheckpointInvalid(str(path), f"entry {name} = {value!r} is not a count of at least 1")
    with entries_of(path):
        config = _read_sizes(raw, architecture, read_end_token_ids(directory, raw), path)
    if min(config.head_count, config.kv_head_count) < 1 or config.head_count % config.kv_head_count:
        raise CheckpointInvalid(
            str(path), f"{config.head_count} attention heads cannot share {config.kv_head_count} key-value heads evenly"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise CheckpointInvalid(str(path), f"head_dim = {config.head_dim} is not even, and rotations turn pairs")
    refuse_wrong_factors(config.rope, config.head_dim, path)
    if any(not 0 <= end < config.vocabulary_size for end in config.end_token_ids):
        raise CheckpointInvalid(
            str(path), f"eos_token_id {sorted(config.end_token_ids)} is not within vocab_size {config.vocabulary_size}"
        )
    return config


def _read_sizes(raw: Mapping[str, Any], architecture: str, end_token_ids: frozenset[int], path: Path) -> DecoderConfig:
    family = ARCHITECTURES[architecture]
    head_count, layer_count = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    # An explicit null means the plain value in all families; an absent entry means the family's own.
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
        attention_out_bias=attention_bias if family.attention_out_bias is None else family.attention_out_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        layer_windows=read_layer_windows(raw, family, layer_count, path),
        context_window_tokens=stretched_context_tokens(rope, positions),
        end_token_ids=end_token_ids,
    )


def read_model_info(
    directory: Path,
    *,
    name: str,
    engine: str,
    context_window_tokens_max: int | None = None,
    capabilities: Capabilities | None = None,
) -> ModelInfo:
    """What the API tells of a checkpoint before it is loaded. Raises `CheckpointInvalid`."""
    config = read_config(directory)
    window = min(config.context_window_tokens, context_window_tokens_max or config.context_window_tokens)
    capabilities = capabilities or Capabilities()
    return ModelInfo(
        name=name,
        architecture=config.architecture,
        engine=engine,
        context_window_tokens=window,
        vocabulary_size=config.vocabulary_size,
        directory=str(directory),
        default_sampling=read_default_sampling(directory, config.vocabulary_size, capabilities, engine),
        capabilities=capabilities,
    )


@contextlib.contextmanager
def entries_of(path: Path) -> Iterator[None]:
    """Read entries of a file. Raises `CheckpointInvalid` for one that is missing or has a wrong type."""
    try:
        yield
    except KeyError as error:
        raise CheckpointInvalid(str(path), f"entry {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"an entry has a wrong type: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointInvalid` if it is absent or not an object."""
    value = _read_json_value(path)
    if not isinstance(value, dict):
        raise CheckpointInvalid(str(path), "the file does not hold a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """A list of JSON objects from a file. Raises `CheckpointInvalid` if it is absent or something else."""
    value = _read_json_value(path)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise CheckpointInvalid(str(path), "the file does not hold a list of JSON objects")
    return value


def _read_json_value(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointInvalid(str(path), "the file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"the file cannot be read as JSON: {error}") from error


def read_end_token_ids(directory: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that end an output. raw: of config.json. generation_config.json wins, since instruction tuning adds some there."""
    ends = _read_generation_config(directory).get("eos_token_id")
    ends = raw.get("eos_token_id") if ends is None else ends
    if ends is None:
        return frozenset()
    return frozenset(int(end) for end in (ends if isinstance(ends, list) else [ends]))


def read_default_sampling(directory: Path, vocabulary_size: int, capabilities: Capabilities, engine: str) -> SamplingParams:
    """Return the checkpoint's own defaults, without those that the engine would ignore: these are logged.

    Raises `CheckpointInvalid` for defaults that no request could be run with.
    """
    path = directory / "generation_config.json"
    with entries_of(path):
        sampling = _read_sampling(_read_generation_config(directory))
    if (fault := sampling_fault(sampling, vocabulary_size)) is not None:
        raise CheckpointInvalid(str(path), fault)
    sampling, left_out = capabilities.honoured(sampling)
    if left_out:
        _log.warning("%s: the engine %s does not honour %s: requests run without", path, engine, ", ".join(sorted(left_out)))
    return sampling


def _read_sampling(raw: Mapping[str, Any]) -> SamplingParams:
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


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. The defaults are what transformers takes an absent entry for.

    kv_head_count: None means as many as there are attention heads. head_dim: None means hidden size / heads.
    qkv_bias, attention_out_bias: None means that the entry `attention_bias` decides.
    windows: whether layers may look at a sliding window; sliding_window: its default in tokens.
    """

    kv_head_count: int | None
    head_dim: int | None
    context_window_tokens: int
    qkv_bias: bool | None
    attention_out_bias: bool | None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: str = "none"
    sliding_window: int | None = None
    entries: frozenset[str] = frozenset()


_WINDOW_ENTRIES = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        None, None, 2048, None, None, mlp_bias=None, entries=frozenset({"attention_bias", "mlp_bias", "head_dim"})
    ),
    "MistralForCausalLM": Family(
        8, None, 131_072, False, False, windows="all", sliding_window=4096, entries=frozenset({"sliding_window", "head_dim"})
    ),
    "Qwen2ForCausalLM": Family(
        32, None, 32_768, True, False, windows="layers", sliding_window=4096, entries=_WINDOW_ENTRIES | {"head_dim"}
    ),
    "Qwen3ForCausalLM": Family(
        32,
        128,
        32_768,
        None,
        None,
        qk_norm=True,
        windows="layers",
        sliding_window=4096,
        entries=_WINDOW_ENTRIES | {"attention_bias", "head_dim"},
    ),
}

# Read for every architecture.
_READ = """
    architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act
    rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings original_max_position_embeddings
    tie_word_embeddings eos_token_id quantization_config
"""

# Says how the model was made or trained, or is to be run elsewhere, and nothing about what it computes; at the end the defaults of
# generation from the time before generation_config.json.
_WITHOUT_EFFECT = """
    model_type torch_dtype dtype transformers_version name_or_path initializer_range use_cache attention_dropout pretraining_tp
    bos_token_id pad_token_id sep_token_id tokenizer_class id2label label2id problem_type finetuning_task task_specific_params
    return_dict output_attentions output_hidden_states use_return_dict chunk_size_feed_forward attn_implementation
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    remove_invalid_values return_dict_in_generate output_scores max_new_tokens
"""

_ENTRIES_WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
_COMMON_ENTRIES = frozenset(_READ.split())


def refuse_entries_beside(known: frozenset[str], raw: Mapping[str, Any], architecture: str, path: Path) -> None:
    """Raises `CheckpointInvalid` with the first entry that is neither known nor without effect on what a model computes."""
    known |= _ENTRIES_WITHOUT_EFFECT
    for name, value in raw.items():
        # Empty objects and lists configure nothing, and a leading underscore marks a note of the library to itself.
        off = value is None or value is False or value in ({}, [])
        neutral = name == "partial_rotary_factor" and value == 1
        if not (name in known or name.startswith("_") or off or neutral):
            raise CheckpointInvalid(
                str(path), f"entry {name} = {value!r} is not supported for {architecture}; it may change what the model computes"
            )


def read_layer_windows(raw: Mapping[str, Any], family: Family, layer_count: int, path: Path) -> tuple[int | None, ...]:
    """Positions that each layer looks back on, the row's own included; None where it sees all of them."""
    window = raw.get("sliding_window", family.sliding_window)
    if family.windows == "none" or window is None or (family.windows == "layers" and not raw.get("use_sliding_window", False)):
        window = None
    elif int(window) < 1:
        raise CheckpointInvalid(str(path), f"entry sliding_window = {window!r} is not a count of tokens")
    if family.windows != "layers":
        return (window,) * layer_count
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))  # transformers' default for both Qwen families
        return tuple(window if index >= first else None for index in range(layer_count))
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if len(kinds) != layer_count or not known.issuperset(kinds):
        raise CheckpointInvalid(
            str(path), f"entry layer_types = {kinds!r} is not supported for {layer_count} layers and a window of {window} tokens"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
