"""Tiny random checkpoints in Hugging Face layout: weights, byte-level BPE tokenizer, chat template.

They have the layout of published checkpoints and a tiny size, so a test loads one in milliseconds.
Generated text is noise; its numbers are exact. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
# Tokens: 256 bytes, 7 special ones, and merges enough that words split unevenly.
TOKENIZER_VOCABULARY_SIZE = 400

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

_TRAINING_TEXT = (
    (
        "The hotel near the old harbour has a quiet garden, breakfast until ten and rooms with a"
        " view of the sea."
    ),
    (
        "Which hotel is close to the station and allows dogs? The second one, it costs 120 euros a"
        " night."
    ),
    "A weir regulates and measures a stream; this one does so for tokens, one step at a time.",
    "Zoë's café naïvely served 北京 dumplings 🙂 and crème brûlée — 25 % off, 3 for 2!",
    'def step(batch):\n    return {"tokens": [1, 2, 3], "done": False}\n',
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Parameters of a test decoder. Sizes are counts of floats; the defaults give about 0.1 M
    parameters.

    architecture: one of `MODEL_TYPES`. max_window_layers: Qwen's number of first layers that see
    everything.
    """

    architecture: str = "LlamaForCausalLM"
    hidden_size: int = 64
    intermediate_size: int = 160
    layer_count: int = 2
    head_count: int = 4
    kv_head_count: int = 2
    head_dim: int | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    context_window_tokens: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    max_window_layers: int = 0

    @property
    def qk_norm(self) -> bool:
        """True if heads are normalized."""
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def qkv_bias(self) -> bool:
        """True for Qwen2, which has these biases and no others in any configuration."""
        return self.attention_bias or self.architecture == "Qwen2ForCausalLM"


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """Directory and model of a test checkpoint."""

    directory: Path
    shape: LlamaShape = field(default_factory=LlamaShape)
    vocabulary_size: int = TOKENIZER_VOCABULARY_SIZE


def make_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    shape: LlamaShape | None = None,
    shard_count: int = 1,
    dtype: str = "float32",
    generation_config: Mapping[str, object] | None = None,
    chat_template: str = CHAT_TEMPLATE,
) -> TinyCheckpoint:
    """Write a random checkpoint that `inference` and `transformers` both load.

    seed: equal seeds and shapes give equal files. shard_count: above 1 writes a sharded index.
    dtype: "float32" or "float16". generation_config: entries added to generation_config.json, for
    example a default temperature.
    """
    shape = shape or LlamaShape()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _random_tensors(shape, seed, np.dtype(dtype))
    if shard_count == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_sharded(directory, tensors, shard_count)
    _write_json(directory / "config.json", _config(shape, dtype))
    ends = {"bos_token_id": 1, "eos_token_id": [2, 6], "pad_token_id": 0}
    _write_json(directory / "generation_config.json", ends | dict(generation_config or {}))
    write_tokenizer(directory, chat_template)
    return TinyCheckpoint(directory, shape)


def write_tokenizer(directory: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json (byte-level BPE, BOS first) and tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "chat_template": chat_template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )


@lru_cache(maxsize=1)
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer=trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_VOCABULARY_SIZE, (
        "the training text is too short for this vocabulary"
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
    )
    return tokenizer.to_str()


def _config(shape: LlamaShape, dtype: str) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": MODEL_TYPES[shape.architecture],
        "hidden_act": "silu",
        "vocab_size": TOKENIZER_VOCABULARY_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count,
        "max_position_embeddings": shape.context_window_tokens,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": [2, 6],
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }
    if shape.architecture == "LlamaForCausalLM":
        config |= {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    elif shape.architecture == "MistralForCausalLM":
        config["sliding_window"] = shape.sliding_window
    else:
        config |= {
            "use_sliding_window": shape.sliding_window is not None,
            "sliding_window": shape.sliding_window or 4096,
        }
        config["max_window_layers"] = shape.max_window_layers
    if shape.qk_norm:
        config |= {
            "attention_bias": shape.attention_bias,
            "head_dim": shape.hidden_size // shape.head_count,
        }
    if shape.head_dim is not None:
        config["head_dim"] = shape.head_dim
    if shape.rope_scaling is not None:
        config["rope_scaling"] = dict(shape.rope_scaling)
    return config


def _random_tensors(
    shape: LlamaShape, seed: int, dtype: np.dtype[Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return all weights by name, spread so that greedy choices are clear."""
    rng = np.random.default_rng(seed)
    hidden, head_dim = shape.hidden_size, shape.head_dim or shape.hidden_size // shape.head_count
    q_size, kv_size = shape.head_count * head_dim, shape.kv_head_count * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return np.asarray(
            rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns), dtype=dtype
        )

    def vector(size: int, mean: float) -> np.ndarray[Any, Any]:
        return np.asarray(mean + 0.1 * rng.standard_normal(size), dtype=dtype)

    tensors = {
        "model.embed_tokens.weight": np.asarray(
            rng.standard_normal((TOKENIZER_VOCABULARY_SIZE, hidden)), dtype
        )
    }
    tensors["model.norm.weight"] = vector(hidden, 1.0)
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = matrix(TOKENIZER_VOCABULARY_SIZE, hidden)
    linear_shapes = {
        "self_attn.q_proj": (q_size, hidden, shape.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, shape.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, shape.attention_bias),
        "mlp.gate_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
        "mlp.up_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, shape.intermediate_size, shape.mlp_bias),
    }
    for layer in range(shape.layer_count):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, biased) in linear_shapes.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
            if biased:
                tensors[f"{prefix}.{name}.bias"] = vector(rows, 0.0)
        if shape.qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = vector(head_dim, 1.0)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = vector(head_dim, 1.0)
        tensors[f"{prefix}.input_layernorm.weight"] = vector(hidden, 1.0)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = vector(hidden, 1.0)
    return tensors


def _save_sharded(
    directory: Path, tensors: dict[str, np.ndarray[Any, Any]], shard_count: int
) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(shard_count):
        file_name = f"model-{shard + 1:05d}-of-{shard_count:05d}.safetensors"
        part = {
            name: tensor
            for index, (name, tensor) in enumerate(tensors.items())
            if index % shard_count == shard
        }
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
