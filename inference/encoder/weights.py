"""Reads an encoder's safetensors, each tensor where it lies in the mapped file if it has the type that is computed with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.checkpoint.tensor_reader import TensorReader
from inference.decoder.linear import LinearWeights
from inference.encoder.config import RELATIVE_BUCKETS, EncoderConfig


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A layer normalization: (hidden,) each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """One layer: attention and what follows it, the network and what follows it."""

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    attention_out: LinearWeights
    attention_norm: NormWeights
    up: LinearWeights
    down: LinearWeights
    output_norm: NormWeights


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights. words (vocabulary, hidden), positions (position_count, hidden); token_type (hidden,), or None without any.

    distance_biases (buckets of distances, heads): what is added to attention's scores; None where distances do not matter.
    """

    words: Tensor
    positions: Tensor
    token_type: Tensor | None
    embedding_norm: NormWeights
    layers: tuple[EncoderLayerWeights, ...]
    distance_biases: Tensor | None


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family calls its tensors; those of a layer without its prefix."""

    layer: str
    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


_BERT_NAMES = _Names(
    layer="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    output_norm="output.LayerNorm",
)
_DISTIL_NAMES = _Names(
    layer="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)
_MPNET_NAMES = replace(
    _BERT_NAMES,
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
_NAMES = {"distilbert": _DISTIL_NAMES, "mpnet": _MPNET_NAMES}
# Heads of other tasks, and what follows from the configuration: no vector depends on them.
_IGNORED_NAMES = re.compile(r"(.*\.)?(embeddings\.(position_ids|token_type_ids)|pooler\..*|cls\..*|lm_head\..*|vocab_\w+\..*)")


def load_encoder_weights(
    config: EncoderConfig,
    dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda fraction: None,
    *,
    quantize: bool = False,
) -> EncoderWeights:
    """Read all weights as `dtype`. on_progress: called with 0 to 1 after each layer. quantize: matrices become int8, by rows.

    Raises: CheckpointInvalid, naming the file and the tensor that is missing, not to be used, or has a wrong shape.
    """
    reader = TensorReader(config.directory, dtype, quantize)
    prefix = config.prefix if f"{config.prefix}embeddings.word_embeddings.weight" in reader.names else ""
    tables = f"{prefix}embeddings"
    hidden = config.hidden_size
    words = reader.read(f"{tables}.word_embeddings.weight", (config.vocabulary_size, hidden))
    positions = reader.read(f"{tables}.position_embeddings.weight", (config.position_count, hidden))
    token_type = None
    if config.token_type_count:
        token_type = reader.read(f"{tables}.token_type_embeddings.weight", (config.token_type_count, hidden))[0]
    embedding_norm = _read_norm(reader, f"{tables}.LayerNorm", hidden)
    distance_biases = None
    if config.has_relative_positions:
        distance_biases = reader.read(f"{prefix}encoder.relative_attention_bias.weight", (RELATIVE_BUCKETS, config.head_count))
    names = _NAMES.get(config.model_type, _BERT_NAMES)
    layers = []
    for index in range(config.layer_count):
        layers.append(_read_layer(reader, config, names, f"{prefix}{names.layer}.{index}"))
        on_progress((index + 1) / config.layer_count)
    reader.refuse_unread(config.architecture, _IGNORED_NAMES)
    return EncoderWeights(words, positions, token_type, embedding_norm, tuple(layers), distance_biases)


def _read_layer(reader: TensorReader, config: EncoderConfig, names: _Names, prefix: str) -> EncoderLayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(name: str, rows: int, columns: int) -> LinearWeights:
        return reader.read_stacked({f"{prefix}.{name}": rows}, columns, biased=True)

    return EncoderLayerWeights(
        query=linear(names.query, hidden, hidden),
        key=linear(names.key, hidden, hidden),
        value=linear(names.value, hidden, hidden),
        attention_out=linear(names.attention_out, hidden, hidden),
        attention_norm=_read_norm(reader, f"{prefix}.{names.attention_norm}", hidden),
        up=linear(names.up, inner, hidden),
        down=linear(names.down, hidden, inner),
        output_norm=_read_norm(reader, f"{prefix}.{names.output_norm}", hidden),
    )


def _read_norm(reader: TensorReader, name: str, size: int) -> NormWeights:
    return NormWeights(reader.read(f"{name}.weight", (size,)), reader.read(f"{name}.bias", (size,)))
