"""Computation of an encoder, from token ids to one vector per text, and its weights.

Tensors already in the compute type stay in the mapped file.

Nothing is padded. All tokens of a batch are rows of one matrix, so each multiplication by weights
covers the whole batch; attention, which must separate texts, covers all texts of equal length at
once. So batching changes a text's vector only by the rounding of matrix products.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, normalize, relu, scaled_dot_product_attention

from inference.checkpoint.tensors import LinearWeights, TensorReader, on_device, project
from inference.encoder.config import RELATIVE_BUCKETS, EncoderConfig, Pooling

# Tensor names by family: of the layers, and within a layer by field of `EncoderLayerWeights`.
_BERT_NAMES = {
    "layer": "encoder.layer",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}
_DISTIL_NAMES = {
    "layer": "transformer.layer",
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
_MPNET_NAMES = _BERT_NAMES | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
_NAMES = {"distilbert": _DISTIL_NAMES, "mpnet": _MPNET_NAMES}
# Heads of other tasks, and values derived from the configuration: vectors do not depend on them.
_IGNORED_NAMES = re.compile(
    r"(.*\.)?(embeddings\.(position_ids|token_type_ids)|pooler\..*|cls\..*|lm_head\..*|vocab_\w+\..*)"
)
FARTHEST = 128  # tokens: all larger distances share a bucket
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": lambda rows: gelu(rows, approximate="tanh"),
    "gelu_pytorch_tanh": lambda rows: gelu(rows, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of a layer normalization: (hidden,) each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """Weights of one layer: attention with its output, and feed-forward network with its output."""

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
    """All weights. `words` is (vocabulary, hidden), `positions` (position_count, hidden), and
    `token_type` (hidden,) or None.

    `distance_biases` (distance buckets, heads) are added to attention scores; None without relative
    positions.
    """

    words: Tensor
    positions: Tensor
    token_type: Tensor | None
    embedding_norm: NormWeights
    layers: tuple[EncoderLayerWeights, ...]
    distance_biases: Tensor | None


def load_encoder_weights(
    config: EncoderConfig,
    dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda fraction: None,
    *,
    quantize: bool = False,
) -> EncoderWeights:
    """Read all weights as `dtype`, or with `quantize` as int8 by rows. `on_progress` is called with
    0 to 1 after each layer.

    Raises CheckpointInvalid, naming the file and the tensor that is missing, unexpected, or of a
    wrong shape.
    """
    reader = TensorReader(config.directory, dtype, quantize)
    prefix = (
        config.prefix if f"{config.prefix}embeddings.word_embeddings.weight" in reader.names else ""
    )
    tables = f"{prefix}embeddings"
    hidden = config.hidden_size
    words = reader.read(f"{tables}.word_embeddings.weight", (config.vocabulary_size, hidden))
    positions = reader.read(f"{tables}.position_embeddings.weight", (config.position_count, hidden))
    token_type = None
    if config.token_type_count:
        token_type = reader.read(
            f"{tables}.token_type_embeddings.weight", (config.token_type_count, hidden)
        )[0]
    embedding_norm = _read_norm(reader, f"{tables}.LayerNorm", hidden)
    distance_biases = None
    if config.has_relative_positions:
        distance_biases = reader.read(
            f"{prefix}encoder.relative_attention_bias.weight", (RELATIVE_BUCKETS, config.head_count)
        )
    names = _NAMES.get(config.model_type, _BERT_NAMES)
    layers = []
    for index in range(config.layer_count):
        layers.append(_read_layer(reader, config, names, f"{prefix}{names['layer']}.{index}"))
        on_progress((index + 1) / config.layer_count)
    reader.refuse_unread(config.architecture, _IGNORED_NAMES)
    return EncoderWeights(
        words, positions, token_type, embedding_norm, tuple(layers), distance_biases
    )


def _read_layer(
    reader: TensorReader, config: EncoderConfig, names: Mapping[str, str], prefix: str
) -> EncoderLayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(part: str, rows: int, columns: int) -> LinearWeights:
        return reader.read_stacked({f"{prefix}.{names[part]}": rows}, columns, biased=True)

    return EncoderLayerWeights(
        query=linear("query", hidden, hidden),
        key=linear("key", hidden, hidden),
        value=linear("value", hidden, hidden),
        attention_out=linear("attention_out", hidden, hidden),
        attention_norm=_read_norm(reader, f"{prefix}.{names['attention_norm']}", hidden),
        up=linear("up", inner, hidden),
        down=linear("down", hidden, inner),
        output_norm=_read_norm(reader, f"{prefix}.{names['output_norm']}", hidden),
    )


def _read_norm(reader: TensorReader, name: str, size: int) -> NormWeights:
    return NormWeights(reader.read(f"{name}.weight", (size,)), reader.read(f"{name}.bias", (size,)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts of equal length in a batch. The rows [begin, end) hold them one after another."""

    begin: int
    end: int
    text_count: int
    length: int


class EncoderNetwork:
    """A loaded encoder. Only one thread may use it."""

    def __init__(
        self, config: EncoderConfig, weights: EncoderWeights, device: torch.device
    ) -> None:
        self._config = config
        self._device = device
        self._weights = on_device(weights, device)
        self._activation = _ACTIVATIONS[config.activation]

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute vectors (texts, hidden) in fp32 for texts of 1 to `input_tokens_max` tokens."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        groups = _groups([len(texts[index]) for index in order])
        rows = self._embed_tokens([texts[index] for index in order])
        biases = self._distance_biases(groups)
        for layer in self._weights.layers:
            rows = self._run_layer(layer, rows, groups, biases)
        pooled = torch.cat(
            [self._pool(rows[group.begin : group.end].float(), group) for group in groups]
        )
        if self._config.normalized:
            pooled = normalize(pooled, dim=-1)
        vectors = torch.empty(pooled.shape, dtype=torch.float32)
        vectors[torch.tensor(order)] = pooled.cpu()
        return vectors

    def _embed_tokens(self, texts: list[Sequence[int]]) -> Tensor:
        """Add up word, position and token type embeddings of each token: (tokens, hidden)."""
        weights, offset = self._weights, self._config.position_offset
        token_ids = torch.tensor(
            [token_id for text in texts for token_id in text], device=self._device
        )
        positions = torch.cat([torch.arange(offset, offset + len(text)) for text in texts]).to(
            self._device
        )
        rows = weights.words[token_ids] + weights.positions[positions]
        if weights.token_type is not None:
            rows += weights.token_type
        return self._norm(rows, weights.embedding_norm)

    def _distance_biases(self, groups: list[_Group]) -> Tensor | None:
        """Compute attention biases (heads, longest, longest); None without relative positions."""
        weights = self._weights.distance_biases
        if weights is None:
            return None
        positions = torch.arange(groups[-1].length, device=self._device)
        return (
            weights[distance_buckets(positions[None, :] - positions[:, None])]
            .permute(2, 0, 1)
            .contiguous()
        )

    def _run_layer(
        self, layer: EncoderLayerWeights, rows: Tensor, groups: list[_Group], biases: Tensor | None
    ) -> Tensor:
        """Run one layer on rows (tokens, hidden); return rows of the same shape."""
        attended = project(self._attend(layer, rows, groups, biases), layer.attention_out)
        rows = self._norm(attended + rows, layer.attention_norm)
        widened = self._activation(project(rows, layer.up))
        return self._norm(project(widened, layer.down) + rows, layer.output_norm)

    def _attend(
        self, layer: EncoderLayerWeights, rows: Tensor, groups: list[_Group], biases: Tensor | None
    ) -> Tensor:
        """Compute the attention output (tokens, hidden) of each token over its own text."""
        query, key, value = (
            project(rows, weights) for weights in (layer.query, layer.key, layer.value)
        )
        mixed = torch.empty_like(query)
        for group in groups:
            q, k, v = (
                self._heads(each[group.begin : group.end], group) for each in (query, key, value)
            )
            bias = None if biases is None else biases[None, :, : group.length, : group.length]
            # (texts, heads, length, head size).
            heads = scaled_dot_product_attention(q, k, v, attn_mask=bias)
            mixed[group.begin : group.end] = heads.transpose(1, 2).reshape(
                group.end - group.begin, -1
            )
        return mixed

    def _heads(self, rows: Tensor, group: _Group) -> Tensor:
        """Reshape (texts x length, hidden) -> (texts, heads, length, head size)."""
        return rows.view(group.text_count, group.length, self._config.head_count, -1).transpose(
            1, 2
        )

    def _pool(self, rows: Tensor, group: _Group) -> Tensor:
        """Reduce token vectors (texts x length, hidden) to one per text: (texts, hidden)."""
        by_text = rows.view(group.text_count, group.length, -1)
        return by_text[:, 0] if self._config.pooling is Pooling.CLS else by_text.mean(dim=1)

    def _norm(self, rows: Tensor, norm: NormWeights) -> Tensor:
        return layer_norm(
            rows, rows.shape[-1:], norm.weight, norm.bias, self._config.layer_norm_eps
        )


def distance_buckets(distances: Tensor) -> Tensor:
    """Assign token distances to buckets: small distances have their own, large ones share one.

    Distances are in tokens, positive to later tokens. The scheme is T5's as used by MPNet, with 32
    buckets and a maximum of 128 tokens.
    """
    half = RELATIVE_BUCKETS // 2
    exact = half // 2
    far = distances.abs()
    shared = (
        exact
        + (
            torch.log(far.float().clamp(min=1) / exact)
            / math.log(FARTHEST / exact)
            * (half - exact)
        ).long()
    )
    return torch.where(far < exact, far, shared.clamp(max=half - 1)) + (distances > 0) * half


def _groups(lengths: list[int]) -> list[_Group]:
    """Group texts of equal length; `lengths` must be sorted."""
    groups: list[_Group] = []
    begin = 0
    for length, same in groupby(lengths):
        text_count = len(list(same))
        groups.append(_Group(begin, begin + text_count * length, text_count, length))
        begin += text_count * length
    return groups
