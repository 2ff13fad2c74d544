"""Architectures of decoders that Weir computes, and the entries of their configurations.

`Family` holds the differences between the supported architectures. An entry of config.json that
transformers does not read cannot change the result and is passed over: a publisher's note. An entry
that it reads, and that is not supported for the architecture, is rejected by name and value, unless
its value is the neutral one. A test compares these lists with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.errors import CheckpointInvalid

# Entries that transformers reads for decoders of any architecture, even where the configuration
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
class Family:
    """One architecture. Defaults for missing entries are those of transformers.

    `kv_head_count` is None for the number of attention heads, `head_dim` None for hidden size /
    heads. `qkv_bias` and `attention_out_bias` are None if the entry `attention_bias` decides.
    `windows` says which layers use a sliding window, `sliding_window` is its default size in
    tokens.
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
        """Entries that would change the computation, with the values besides null that do not."""
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

    `changing` maps each entry to the values besides null that have no effect.
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
    """Return whether an entry's value has the same effect as leaving the entry out."""
    if name == "layer_types" and value == ["full_attention"] * raw.get("num_hidden_layers", 0):
        return True
    if name in ("sliding_window", "attention_chunk_size") and isinstance(value, int):
        # no sequence is longer
        return bool(value >= raw.get("max_position_embeddings", math.inf))
    return value in neutral


def read_layer_windows(
    raw: Mapping[str, Any], family: Family, layer_count: int, path: Path
) -> tuple[int | None, ...]:
    """Read the attention window of each layer in tokens, including the query's own position.

    None means full attention. Raises: CheckpointInvalid.
    """
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
