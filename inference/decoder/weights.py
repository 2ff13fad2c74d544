"""Reads safetensors into the fused layout that the decoder computes with.

Files are memory-mapped: a tensor in its own type stays where it lies in the file, and what must be changed (another type, rows
brought together, int8) is changed tensor by tensor, whose pages are then given back. So a checkpoint is never in memory twice.
Query, key and value become one matrix, gate and up another: one large multiplication instead of three or two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.tensors import LinearWeights, TensorReader, quantize_rows

# Left in files by older versions of transformers; follows from the configuration.
IGNORED_NAMES = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; qkv stacks query, key and value rows, gate_up stacks gate and up rows.

    query_norm, key_norm: (D,), or None where heads are not normalized.
    """

    attention_norm: Tensor
    qkv: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. embedding: (vocabulary, hidden). lm_head has the same memory when they are tied, unless it is quantized."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeights


def load_weights(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda fraction: None,
    *,
    quantize: bool = False,
) -> DecoderWeights:
    """Read all weights as `dtype`. on_progress: called with 0 to 1 after each layer. quantize: matrices become int8, by rows.

    Raises: CheckpointInvalid, naming the file and the tensor that is missing, not to be used, or has a wrong shape.
    """
    reader = TensorReader(directory, dtype, quantize)
    vocabulary_shape = (config.vocabulary_size, config.hidden_size)
    embedding = reader.read("model.embed_tokens.weight", vocabulary_shape)
    layers = []
    for index in range(config.layer_count):
        layers.append(_read_layer(reader, config, f"model.layers.{index}"))
        on_progress((index + 1) / (config.layer_count + 1))
    final_norm = reader.read("model.norm.weight", (config.hidden_size,))
    if config.tied_embeddings:
        lm_head = quantize_rows(embedding) if quantize else LinearWeights(embedding, None)
        reader.drop_copy("lm_head.weight", embedding)
    else:
        lm_head = reader.read_stacked({"lm_head": config.vocabulary_size}, config.hidden_size, biased=False)
    reader.refuse_unread(config.architecture, IGNORED_NAMES)
    on_progress(1.0)
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _read_layer(reader: TensorReader, config: DecoderConfig, prefix: str) -> LayerWeights:
    hidden, q_size = config.hidden_size, config.head_count * config.head_dim
    kv_size, inner = config.kv_head_count * config.head_dim, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    head_shape = (config.head_dim,)
    return LayerWeights(
        attention_norm=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.read_stacked(qkv, hidden, config.qkv_bias),
        query_norm=reader.read(f"{attention}.q_norm.weight", head_shape) if config.qk_norm else None,
        key_norm=reader.read(f"{attention}.k_norm.weight", head_shape) if config.qk_norm else None,
        attention_out=reader.read_stacked({f"{attention}.o_proj": hidden}, q_size, config.attention_out_bias),
        mlp_norm=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.read_stacked(gate_up, hidden, config.mlp_bias),
        down=reader.read_stacked({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )
