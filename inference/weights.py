"""Reads safetensors into the fused layout that the decoder computes with.

Files are memory-mapped: a tensor in its own type stays where it lies in the file, and what must be changed (another type, rows
brought together, int8) is changed tensor by tensor, whose pages are then given back. So a checkpoint is never in memory twice.
Query, key and value become one matrix, gate and up another: one large multiplication instead of three or two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inference.checkpoint import DecoderConfig, read_json
from inference.errors import CheckpointInvalid
from inference.linear import LinearWeights, quantize_rows
from inference.mapped_file import MappedFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Left in files by older versions of transformers; follows from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


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


def move_weights(weights: DecoderWeights, device: torch.device) -> DecoderWeights:
    """The same on another device. Tensors that lie in a file are copied straight from there."""

    def moved(linear: LinearWeights) -> LinearWeights:
        bias = None if linear.bias is None else linear.bias.to(device)
        scales = None if linear.scales is None else linear.scales.to(device)
        return LinearWeights(linear.weight.to(device), bias, scales)

    layers = tuple(
        LayerWeights(
            attention_norm=layer.attention_norm.to(device),
            qkv=moved(layer.qkv),
            query_norm=None if layer.query_norm is None else layer.query_norm.to(device),
            key_norm=None if layer.key_norm is None else layer.key_norm.to(device),
            attention_out=moved(layer.attention_out),
            mlp_norm=layer.mlp_norm.to(device),
            gate_up=moved(layer.gate_up),
            down=moved(layer.down),
        )
        for layer in weights.layers
    )
    return DecoderWeights(weights.embedding.to(device), layers, weights.final_norm.to(device), moved(weights.lm_head))


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
    reader = _TensorReader(directory, dtype, quantize)
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
    reader.refuse_unread(config.architecture)
    on_progress(1.0)
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _read_layer(reader: _TensorReader, config: DecoderConfig, prefix: str) -> LayerWeights:
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


class _TensorReader:
    """Finds tensors by name in one file or in the shards of an index, and knows which have been asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, quantize: bool) -> None:
        self._directory = directory
        self._dtype = dtype
        self._quantize = quantize
        self._files: dict[str, MappedFile] = {}
        self._file_by_name = self._locate()
        self._unread = dict.fromkeys(self._file_by_name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, converted. Raises `CheckpointInvalid` if it is not there or has another shape."""
        file = self._find(name, shape)
        tensor = self._finite(file, name)
        if tensor.dtype == self._dtype:
            return tensor
        converted = tensor.to(self._dtype)
        file.give_back(name)
        return converted

    def read_stacked(self, rows_by_name: dict[str, int], columns: int, biased: bool) -> LinearWeights:
        """Several linear layers with the same input as one."""
        shapes = [(f"{name}.weight", (rows, columns)) for name, rows in rows_by_name.items()]
        weight = self._read_rows(shapes)
        bias = self._read_rows([(f"{name}.bias", (rows,)) for name, rows in rows_by_name.items()]) if biased else None
        if not self._quantize:
            return LinearWeights(weight, bias)
        quantized = quantize_rows(weight, bias)
        for name, shape in shapes:
            self._find(name, shape).give_back(name)
        return quantized

    def drop_copy(self, name: str, original: Tensor) -> None:
        """Take a tensor for read that must equal another, if it is there at all."""
        if name in self._file_by_name and not torch.equal(self.read(name, tuple(original.shape)), original):
            raise CheckpointInvalid(str(self._directory), f"tensor {name} differs from the embedding that config.json ties it to")

    def refuse_unread(self, architecture: str) -> None:
        """A weight without a place means that the model is another one than config.json says."""
        for name in self._unread:
            if not name.endswith(IGNORED_SUFFIXES):
                raise CheckpointInvalid(
                    str(self._directory / self._file_by_name[name]), f"tensor {name} has no place in {architecture} as configured"
                )

    def _read_rows(self, shape_by_name: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Tensors one below the other: in place where they lie so in one file, else as a copy."""
        files = [self._find(name, shape) for name, shape in shape_by_name]
        names = [name for name, _ in shape_by_name]
        if all(file is files[0] for file in files) and files[0].dtype(names[0]) == self._dtype:
            in_place = files[0].adjacent(names)
            if in_place is not None:
                for name in names:
                    self._finite(files[0], name)
                return in_place
        row_counts = [shape[0] for _, shape in shape_by_name]
        joined = torch.empty((sum(row_counts), *shape_by_name[0][1][1:]), dtype=self._dtype)
        for part, file, name in zip(torch.split(joined, row_counts), files, names, strict=True):
            part.copy_(self._finite(file, name))
            file.give_back(name)
        return joined

    def _finite(self, file: MappedFile, name: str) -> Tensor:
        """A tensor whose numbers all are some, in the type that is computed with too.

        One that is not would end the engine at the first prompt that meets it, and again after every restart. Reading runs at the
        speed of memory, and the pages are given back.
        """
        tensor = file.tensor(name)
        lowest, highest = torch.aminmax(tensor)  # NaN if there is one
        limit = torch.finfo(self._dtype).max
        if not (-limit <= float(lowest) and float(highest) <= limit):
            raise CheckpointInvalid(str(file.path), f"tensor {name} holds values that are not finite; is the file intact?")
        file.give_back(name)
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> MappedFile:
        file_name = self._file_by_name.get(name)
        if file_name is None:
            raise CheckpointInvalid(str(self._directory), f"tensor {name} is missing")
        file = self._open(file_name)
        actual = file.shape(name)
        if actual is None:
            raise CheckpointInvalid(str(file.path), f"tensor {name} is missing")
        if actual != shape:
            raise CheckpointInvalid(str(file.path), f"tensor {name} has shape {actual}, config.json says {shape}")
        self._unread.pop(name, None)
        return file

    def _locate(self) -> dict[str, str]:
        index_path = self._directory / INDEX_FILE
        if (self._directory / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).names, SINGLE_FILE)
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointInvalid(str(index_path), "entry weight_map is missing")
            return {str(name): str(file_name) for name, file_name in weight_map.items()}
        pickled = " (weights in pickle files are not loaded: convert them)" if any(self._directory.glob("*.bin")) else ""
        raise CheckpointInvalid(str(self._directory), f"neither {SINGLE_FILE} nor {INDEX_FILE} is there{pickled}")

    def _open(self, file_name: str) -> MappedFile:
        if file_name not in self._files:
            path = self._directory / file_name
            # An index is input: it must not reach files outside its own directory.
            if Path(file_name).name != file_name or not path.exists():
                raise CheckpointInvalid(str(path), "the weights file is missing")
            self._files[file_name] = MappedFile(path)
        return self._files[file_name]
