"""What sets the supported architectures apart, and which entries of config.json each of them knows.

An entry that is not known here might change what the model computes. It is refused by name rather than passed over, unless it is
null or false, which turns a feature off. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.errors import CheckpointInvalid


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

# Read by `checkpoint.py` and `rope_config.py` for every architecture.
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


def refuse_unknown_entries(raw: Mapping[str, Any], architecture: str, path: Path) -> None:
    """Raises `CheckpointInvalid` with the first entry that this engine does not understand, and its value."""
    refuse_entries_beside(_COMMON_ENTRIES | ARCHITECTURES[architecture].entries, raw, architecture, path)


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
