"""Reads safetensors into the fused layout that the decoder computes with.

Files are memory-mapped and read tensor by tensor, so loading never holds the checkpoint twice. Query, key and value become one
matrix, gate and up another: one large multiplication instead of three or two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference.checkpoint import DecoderConfig, read_json
from inference.errors import CheckpointInvalid

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; qkv stacks query, key and value rows, gate_up stacks gate and up rows."""

    attention_norm: Tensor
    qkv: LinearWeights
    attention_out: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. lm_head (vocabulary, hidden) is the same tensor as embedding when they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor


def load_weights(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, on_progress: Callable[[float], None] = lambda fraction: None
) -> DecoderWeights:
    """Read all weights as `dtype`. on_progress: called with 0 to 1 after each layer.

    Raises: CheckpointInvalid, naming the file and the tensor that is missing or has a wrong shape.
    """
    with ExitStack() as stack:
        reader = _TensorReader(directory, dtype, stack)
        embedding = reader.read("model.embed_tokens.weight", (config.vocabulary_size, config.hidden_size))
        layers = []
        for index in range(config.layer_count):
            layers.append(_read_layer(reader, config, f"model.layers.{index}"))
            on_progress((index + 1) / (config.layer_count + 1))
        final_norm = reader.read("model.norm.weight", (config.hidden_size,))
        lm_head = embedding
        if not config.tied_embeddings:
            lm_head = reader.read("lm_head.weight", (config.vocabulary_size, config.hidden_size))
        on_progress(1.0)
        return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _read_layer(reader: _TensorReader, config: DecoderConfig, prefix: str) -> LayerWeights:
    hidden, q_size = config.hidden_size, config.head_count * config.head_dim
    kv_size, inner = config.kv_head_count * config.head_dim, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    return LayerWeights(
        attention_norm=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.read_stacked(qkv, hidden, config.attention_bias),
        attention_out=reader.read_stacked({f"{attention}.o_proj": hidden}, q_size, config.attention_bias),
        mlp_norm=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.read_stacked(gate_up, hidden, config.mlp_bias),
        down=reader.read_stacked({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


class _TensorReader:
    """Finds tensors by name in one file or in the shards of an index; files stay open while `stack` is."""

    def __init__(self, directory: Path, dtype: torch.dtype, stack: ExitStack) -> None:
        self._directory = directory
        self._dtype = dtype
        self._stack = stack
        self._files: dict[str, Any] = {}
        self._file_by_name = self._locate()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, converted. Raises `CheckpointInvalid` if it is not there or has another shape."""
        file_name = self._file_by_name.get(name)
        if file_name is None:
            raise CheckpointInvalid(str(self._directory), f"tensor {name} is missing")
        try:
            tensor: Tensor = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointInvalid(str(self._directory / file_name), f"tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointInvalid(
                str(self._directory / file_name), f"tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        return tensor.to(self._dtype)

    def read_stacked(self, rows_by_name: dict[str, int], columns: int, biased: bool) -> LinearWeights:
        """Several linear layers with the same input as one."""
        weight = torch.cat([self.read(f"{name}.weight", (rows, columns)) for name, rows in rows_by_name.items()])
        if not biased:
            return LinearWeights(weight, None)
        return LinearWeights(weight, torch.cat([self.read(f"{name}.bias", (rows,)) for name, rows in rows_by_name.items()]))

    def _locate(self) -> dict[str, str]:
        index_path = self._directory / INDEX_FILE
        if (self._directory / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointInvalid(str(index_path), "entry weight_map is missing")
            return {str(name): str(file_name) for name, file_name in weight_map.items()}
        raise CheckpointInvalid(str(self._directory), f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self._directory / file_name
            # An index is input: it must not reach files outside its own directory.
            if Path(file_name).name != file_name or not path.exists():
                raise CheckpointInvalid(str(path), "the weights file is missing")
            try:
                self._files[file_name] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointInvalid(str(path), f"not a safetensors file: {error}") from error
        return self._files[file_name]
