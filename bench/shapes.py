"""Random-weight Llama checkpoints of the measured sizes, in Hugging Face layout.

An engine's work does not depend on the values of its weights, so random ones of the right shape and
scale measure as well as trained ones, without a download. Weights are written in the measured
precision: no engine converts.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Precision = Literal["float32", "bfloat16"]

VOCABULARY_SIZE = 32_000
CONTEXT_TOKENS = 2048
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
RMS_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama decoder, in floats, layers and heads. Half the layers have the `window`."""

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocabulary_size: int = VOCABULARY_SIZE
    tied_embeddings: bool = False
    window: int | None = None
    qk_norm: bool = False

    @property
    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """List names and (rows, columns) of one layer's weights."""
        size, kv_size = (count * self.head_dim for count in (self.head_count, self.kv_head_count))
        return {
            "self_attn.q_proj": (size, self.hidden_size),
            "self_attn.k_proj": (kv_size, self.hidden_size),
            "self_attn.v_proj": (kv_size, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, size),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    @property
    def layer_weight_count(self) -> int:
        """Number of weights in one layer's matrices."""
        return sum(rows * columns for rows, columns in self.layer_matrices.values())

    @property
    def decode_weight_count(self) -> int:
        """Number of weights that every decoding step reads: all except the input embedding."""
        return self.layer_count * self.layer_weight_count + self.head_weight_count

    @property
    def head_weight_count(self) -> int:
        """Number of weights of the output layer."""
        return self.vocabulary_size * self.hidden_size

    @property
    def kv_count_per_token(self) -> int:
        """Number of floats of keys and values per position."""
        return 2 * self.layer_count * self.kv_head_count * self.head_dim


SHAPES = {
    "S": Shape(288, 768, 6, 6, 6, 48, tied_embeddings=True),  # 15M, as stories15M
    "M": Shape(768, 2048, 12, 12, 4, 64),  # 125M with grouped queries
    "L": Shape(2048, 5632, 22, 32, 4, 64),  # 1.1B, as TinyLlama
}


def write_checkpoint(directory: Path, shape: Shape, precision: Precision) -> None:
    """Write a checkpoint unless it exists. Equal arguments give equal weights."""
    done = directory / "config.json"
    if done.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    _write_tensors(directory / "model.safetensors", shape, precision)
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    done.write_text(json.dumps(_config(shape, precision), indent=2), encoding="utf-8")


def _tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, shape.hidden_size)
    for layer in range(shape.layer_count):
        for name, sizes in shape.layer_matrices.items():
            yield f"model.layers.{layer}.{name}.weight", sizes
        yield f"model.layers.{layer}.input_layernorm.weight", (shape.hidden_size,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (shape.hidden_size,)
    yield "model.norm.weight", (shape.hidden_size,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (VOCABULARY_SIZE, shape.hidden_size)


def _write_tensors(path: Path, shape: Shape, precision: Precision) -> None:
    """Write the safetensors format directly, since numpy lacks bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    float_bytes, end = {"float32": 4, "bfloat16": 2}[precision], 0
    for name, sizes in _tensor_shapes(shape):
        start, end = end, end + float_bytes * math.prod(sizes)
        header[name] = {
            "dtype": {"float32": "F32", "bfloat16": "BF16"}[precision],
            "shape": sizes,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, sizes in _tensor_shapes(shape):
            file.write(_stored(_values(rng, name, sizes), precision))


def _values(rng: np.random.Generator, name: str, sizes: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Draw weights: norms are one, embeddings have a spread of 1, matrices preserve the spread."""
    if len(sizes) == 1:
        return np.ones(sizes, dtype=np.float32)
    spread = 1.0 if name == "model.embed_tokens.weight" else sizes[1] ** -0.5
    return rng.standard_normal(sizes, dtype=np.float32) * np.float32(spread)


def _stored(values: npt.NDArray[np.float32], precision: Precision) -> bytes:
    if precision == "float32":
        return values.tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return rounded.astype(np.uint16).tobytes()


def _config(shape: Shape, precision: Precision) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": precision,
    }


def _tokenizer() -> Tokenizer:
    """Build a tokenizer with byte-level tokens of one, two and three letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    names = [*SPECIAL_TOKENS, *alphabet]
    names += [first + second for first in letters for second in letters]
    names += [
        first + second + third for first in letters for second in letters for third in letters
    ]
    vocabulary = {name: index for index, name in enumerate(names[:VOCABULARY_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
