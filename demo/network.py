"""Decoder for training: Llama's architecture, in few enough operations for a CPU.

The parameter names are those of `LlamaForCausalLM`, so a state dict is a checkpoint. Serving never
uses this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5
# Components of an embedding: one that all tokens share, one that marks a listing's number.
_EVERY, _NUMBER = 0, 1
# Slow rotations leave half of each head free to match content a thousand tokens away.
ROPE_THETA = 500_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network."""

    vocab_size: int
    hidden_size: int = 256
    layer_count: int = 6
    head_count: int = 4
    kv_head_count: int = 2
    head_size: int = 64
    mlp_size: int = 640
    position_count_max: int = 4096

    def config(self, token_ids: dict[str, int]) -> dict[str, object]:
        """Return the `config.json` of this network."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layer_count,
            "num_attention_heads": self.head_count,
            "num_key_value_heads": self.kv_head_count,
            "head_dim": self.head_size,
            "max_position_embeddings": self.position_count_max,
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **token_ids,
        }


class Norm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPSILON)


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key-value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = (
            shape.head_count * shape.head_size,
            shape.kv_head_count * shape.head_size,
        )
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        # (B, Q + 2K, T, D).
        heads = F.linear(x, weight).view(batch, length, -1, shape.head_size).transpose(1, 2)
        turned, v = torch.split(
            heads, [shape.head_count + shape.kv_head_count, shape.kv_head_count], dim=1
        )
        half = shape.head_size // 2
        turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), dim=-1) * sin
        q, k = torch.split(turned, [shape.head_count, shape.kv_head_count], dim=1)
        repeat = shape.head_count // shape.kv_head_count
        y = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(repeat, dim=1),
            v.repeat_interleave(repeat, dim=1),
            is_causal=True,
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight))).chunk(
            2, dim=-1
        )
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Layer(nn.Module):
    """One decoder layer, norms first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _attention_of(layer: nn.Module) -> Attention:
    assert isinstance(layer, Layer)
    return layer.self_attn


class Body(nn.Module):
    """Everything below the output projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layer_count))
        self.norm = Norm(shape.hidden_size)

    def forward(self, token_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids).to(cos.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Network(nn.Module):
    """Network from token ids to hidden states; `logits` projects them with the tied embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        frequencies = ROPE_THETA ** -(torch.arange(0, shape.head_size, 2) / shape.head_size)
        angles = torch.arange(shape.position_count_max)[:, None] * frequencies[None, :]
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin(), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self, listing_numbers: Sequence[tuple[int, ...]] = ()) -> None:
        """Set random weights, except for a copying circuit, which training need not discover.

        Nearly every word of an answer is copied from one listing, which a network of this size
        takes long to learn. So it begins with heads that attend one and two tokens back and to the
        number of the listing, with a layer of heads that find earlier occurrences of the current
        token in the listing under discussion, and with outputs that tend to repeat the attended
        token. `listing_numbers` holds, for each number, the token ids that print it.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05 if "embed" in name else 0.04)
            if name.endswith("down_proj.weight"):
                parameter.mul_(0.2)
        for layer in self.model.layers:
            attention = _attention_of(layer)
            nn.init.orthogonal_(attention.v_proj.weight)
            attention.o_proj.weight.copy_(0.05 * self._per_query_head(attention.v_proj.weight).T)
        embedding = self.model.embed_tokens.weight
        embedding[:, _EVERY] = 0.4  # about a fifth of an embedding's energy
        embedding[:, _NUMBER] = 0.0
        for token_ids in listing_numbers:
            embedding[list(token_ids)] = embedding[token_ids[0]].clone()
            embedding[list(token_ids), _NUMBER] = 0.5
        basis = torch.zeros(2 * self.shape.head_size, self.shape.hidden_size)
        nn.init.orthogonal_(basis[:, 2:])
        own, before, before_that, listing = basis.chunk(4)
        first, second = _attention_of(self.model.layers[0]), _attention_of(self.model.layers[1])
        self._look_back(first, own, before, before_that)
        self._look_for_listing(first, own, listing)
        self._look_for_repeats(second, own, before, listing)

    def _per_query_head(self, weight: Tensor) -> Tensor:
        """Return rows of a key-value projection, repeated for each query head that shares them."""
        shape = self.shape
        heads = weight.view(shape.kv_head_count, shape.head_size, -1)
        return heads.repeat_interleave(shape.head_count // shape.kv_head_count, dim=0).flatten(0, 1)

    def _query_rows(self, attention: Attention, head: int) -> Tensor:
        """Scale a query head's projection down and return a view, whose new values dominate."""
        rows = attention.q_proj.weight[
            head * self.shape.head_size : (head + 1) * self.shape.head_size
        ]
        rows *= 0.1
        return rows

    def _look_back(
        self, attention: Attention, own: Tensor, before: Tensor, before_that: Tensor
    ) -> None:
        """Let two heads attend one and two tokens back, and write these into separate components.

        All embeddings share one component; the queries turn it by minus one or two positions.
        """
        size = self.shape.head_size
        half = size // 2
        angles = ROPE_THETA ** -(torch.arange(0, size, 2) / size)
        # Slower rotations cannot distinguish neighbours.
        strength = torch.where(angles > 0.02, 1.0, 0.0)
        attention.k_proj.weight[:size] *= 0.1
        attention.k_proj.weight[:half, _EVERY] = strength
        attention.v_proj.weight[:half] = 0.4 * own
        for head, (distance, place) in enumerate(((1, before), (2, before_that))):
            rows = self._query_rows(attention, head)
            rows[:half, _EVERY] = strength * torch.cos(distance * angles)
            rows[half:, _EVERY] = -strength * torch.sin(distance * angles)
            attention.o_proj.weight[:, head * size : head * size + half] = 0.4 * place.T

    def _look_for_listing(self, attention: Attention, own: Tensor, listing: Tensor) -> None:
        """Let a head attend to the last listing number and write it."""
        size, head = self.shape.head_size, self.shape.head_count // self.shape.kv_head_count
        half = size // 2
        attention.k_proj.weight[size : 2 * size] *= 0.1
        attention.k_proj.weight[size : size + half, _NUMBER] = 0.7
        attention.v_proj.weight[size : size + half] = 0.4 * own
        self._query_rows(attention, head)[:half, _EVERY] = 0.7
        attention.o_proj.weight[:, head * size : head * size + half] = 0.4 * listing.T

    def _look_for_repeats(
        self, attention: Attention, own: Tensor, before: Tensor, listing: Tensor
    ) -> None:
        """Let heads attend to earlier successors of the current token, its listing, or both.

        Only the slow rotations are used, which hardly turn within a prompt: five in eight for
        tokens, three for listings.
        """
        half = self.shape.head_size // 2
        planes = torch.arange(half // 2, half)
        for_token, for_listing = planes[: len(planes) * 5 // 8], planes[len(planes) * 5 // 8 :]
        token_rows = torch.cat((for_token, for_token + half))
        listing_rows = torch.cat((for_listing, for_listing + half))
        attention.k_proj.weight[: self.shape.head_size] *= 0.1
        attention.k_proj.weight[token_rows] = 2.2 * before[: len(token_rows)]
        attention.k_proj.weight[listing_rows] = 1.8 * listing[: len(listing_rows)]
        for head, (token_gain, listing_gain) in enumerate(((2.2, 1.2), (0.8, 2.0))):
            rows = self._query_rows(attention, head)
            rows[token_rows] = token_gain * own[: len(token_rows)]
            rows[listing_rows] = listing_gain * listing[: len(listing_rows)]
        attention.o_proj.weight *= 3.0
        self._look_for_words(attention, token_rows, listing_rows, own, before, listing)

    def _look_for_words(
        self,
        attention: Attention,
        many_rows: Tensor,
        few_rows: Tensor,
        own: Tensor,
        before: Tensor,
        listing: Tensor,
    ) -> None:
        """Let heads find the last one or two words in a listing, and favour its number."""
        size, head = self.shape.head_size, self.shape.head_count // self.shape.kv_head_count
        half = size // 2
        attention.k_proj.weight[size : 2 * size] *= 0.1
        attention.k_proj.weight[size + many_rows] = 2.2 * own[: len(many_rows)]
        attention.k_proj.weight[size + few_rows] = 1.8 * before[: len(few_rows)]
        self._query_rows(attention, head)[many_rows] = 2.2 * before[: len(many_rows)]
        pair = self._query_rows(attention, head + 1)
        pair[many_rows] = 2.0 * own[: len(many_rows)]
        pair[few_rows] = 2.0 * before[: len(few_rows)]
        attention.v_proj.weight[size : size + half] = listing
        for one in (head, head + 1):
            attention.o_proj.weight[:, one * size : one * size + half] = 0.12 * own.T

    def forward(self, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return hidden states (B, T, hidden_size). token_ids: (B, T), from position 0."""
        length = token_ids.shape[1]
        cos, sin = (
            self.get_buffer("cos")[:length].to(dtype),
            self.get_buffer("sin")[:length].to(dtype),
        )
        out: Tensor = self.model(token_ids, cos, sin)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
