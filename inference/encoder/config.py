"""Configuration of an encoder checkpoint: sizes, positions and pooling.

Reads the JSON files of the Hugging Face layout and of sentence-transformers, never the weights, and
imports no torch. Unsupported settings are rejected by name, since a wrong vector looks as good as a
right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from inference.checkpoint.families import refuse_entries, refuse_quantized
from inference.checkpoint.json_files import entries_of, read_json, read_json_list
from inference.engine import ModelInfo
from inference.errors import CheckpointInvalid

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

_BERT_SIZES = {
    name: name
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "type_vocab_size",
    )
}
_DISTIL_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}
_MPNET_SIZES = {name: entry for name, entry in _BERT_SIZES.items() if name != "type_vocab_size"}
RELATIVE_BUCKETS = 32  # of token distances: fixed in the reference implementation
# Entries that change what transformers computes, by their neutral values beside null.
_CHANGING: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("is_causal", "is_decoder", "is_encoder_decoder"), (False,)),
    "add_cross_attention": (False,),
    "per_layer_config": ({}, []),
    "transformers_weights": (),
}


class Pooling(StrEnum):
    """Method that reduces a text's token vectors to one vector."""

    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One architecture: names of its config.json entries and tensors, and its position numbering.

    `prefix` begins the tensor names if the file holds a larger model. `sizes` maps BERT's names of
    entries to this architecture's. With `skips_padding_positions`, positions begin after that of
    the padding token, otherwise at `position_offset`. With `relative_positions`, attention also
    depends on token distances.
    """

    prefix: str
    sizes: Mapping[str, str]
    skips_padding_positions: bool = False
    position_offset: int = 0
    relative_positions: bool = False


FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily("bert.", _BERT_SIZES),
    "roberta": EncoderFamily("roberta.", _BERT_SIZES, skips_padding_positions=True),
    "xlm-roberta": EncoderFamily("roberta.", _BERT_SIZES, skips_padding_positions=True),
    "distilbert": EncoderFamily("distilbert.", _DISTIL_SIZES),
    "mpnet": EncoderFamily(
        "mpnet.",
        _MPNET_SIZES,
        position_offset=2,
        relative_positions=True,
    ),
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes of an encoder, in heads, layers, floats and tokens.

    `directory` contains tokenizer and weights. `input_tokens_max` limits a text, including special
    tokens. `position_offset` is the table row of the first position. With `has_relative_positions`,
    attention depends on token distances. `token_type_count` is the number of rows of the token type
    table, 0 without one.
    """

    directory: Path
    architecture: str
    model_type: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    activation: str
    layer_norm_eps: float
    position_count: int
    position_offset: int
    has_relative_positions: bool
    token_type_count: int
    input_tokens_max: int
    pooling: Pooling
    normalized: bool

    @property
    def prefix(self) -> str:
        """Prefix of the tensor names if the file holds a larger model."""
        return FAMILIES[self.model_type].prefix


def read_encoder_config(directory: Path) -> EncoderConfig:
    """Read a directory in sentence-transformers layout. Raises: CheckpointInvalid."""
    transformer, pooling_path, normalized = _read_modules(directory)
    pooling, dimension = _read_pooling(pooling_path)
    _refuse_prompt(directory / "config_sentence_transformers.json")
    limit, path = _read_input_limit(transformer), transformer / "config.json"
    raw = read_json(path)
    with entries_of(path):
        config = _read_config(raw, path, pooling, limit, normalized=normalized)
    if config.hidden_size % config.head_count:
        raise CheckpointInvalid(
            path, f"{config.head_count} heads cannot share {config.hidden_size} floats evenly"
        )
    if dimension not in (None, config.hidden_size):
        raise CheckpointInvalid(
            pooling_path, f"dimension {dimension} is not hidden_size {config.hidden_size}"
        )
    return config


def read_encoder_info(directory: Path, *, name: str) -> ModelInfo:
    """Read the facts about an encoder without loading it. Raises CheckpointInvalid."""
    config = read_encoder_config(directory)
    return ModelInfo(
        name=name,
        architecture=config.architecture,
        engine="torch",
        context_window_tokens=config.input_tokens_max,
        vocabulary_size=config.vocabulary_size,
        directory=str(config.directory),
        embedding_dimension=config.hidden_size,
    )


def _read_config(
    raw: Mapping[str, Any], path: Path, pooling: Pooling, limit: int | None, *, normalized: bool
) -> EncoderConfig:
    """Convert the entries. `limit` is the checkpoint's limit of tokens per text, or None."""
    model_type = raw.get("model_type", "(none)")
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointInvalid(
            path, f"model_type {model_type} is not supported; supported: {', '.join(FAMILIES)}"
        )
    refuse_quantized(raw, path)
    refuse_entries(_CHANGING, raw, model_type, path)
    # Only learned absolute positions are supported; other kinds change the attention.
    if raw.get("position_embedding_type", "absolute") != "absolute" or raw.get(
        "sinusoidal_pos_embds"
    ):
        kind = raw.get("position_embedding_type", "sinusoidal")
        raise CheckpointInvalid(
            path,
            f"position embeddings of the kind {kind!r} are not supported; supported: 'absolute'",
        )
    activation = str(raw[family.sizes["hidden_act"]])
    if activation not in ACTIVATIONS:
        raise CheckpointInvalid(
            path,
            f"activation {activation} is not supported; supported: {', '.join(ACTIVATIONS)}",
        )
    sizes = _read_sizes(raw, family, path)
    if raw.get("relative_attention_num_buckets", RELATIVE_BUCKETS) != RELATIVE_BUCKETS:
        wrong = (
            f"entry relative_attention_num_buckets = {raw['relative_attention_num_buckets']!r} is"
            " not supported"
        )
        raise CheckpointInvalid(path, f"{wrong}; supported: {RELATIVE_BUCKETS}")
    offset = (
        int(raw["pad_token_id"]) + 1 if family.skips_padding_positions else family.position_offset
    )
    positions = sizes["max_position_embeddings"] - offset
    if positions < 1:
        raise CheckpointInvalid(
            path, f"max_position_embeddings leaves {positions} positions behind the padding"
        )
    named = raw.get("architectures") or [model_type]
    return EncoderConfig(
        directory=path.parent,
        architecture=str(named[0]),
        model_type=model_type,
        vocabulary_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        layer_count=sizes["num_hidden_layers"],
        head_count=sizes["num_attention_heads"],
        activation=activation,
        layer_norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        position_count=sizes["max_position_embeddings"],
        position_offset=offset,
        has_relative_positions=family.relative_positions,
        token_type_count=(
            int(raw.get("type_vocab_size", 2)) if "type_vocab_size" in family.sizes else 0
        ),
        input_tokens_max=min(limit or positions, positions),
        pooling=pooling,
        normalized=normalized,
    )


def _read_sizes(raw: Mapping[str, Any], family: EncoderFamily, path: Path) -> dict[str, int]:
    """Read the entries that are counts, by the names that BERT has for them."""
    sizes = {
        name: int(raw[entry])
        for name, entry in family.sizes.items()
        if name not in ("hidden_act", "type_vocab_size")
    }
    sizes |= {name: int(raw[name]) for name in ("vocab_size", "max_position_embeddings")}
    for name, value in sizes.items():
        if value < 1:
            raise CheckpointInvalid(
                path,
                f"entry {family.sizes.get(name, name)} = {value!r} is not a count of at least 1",
            )
    return sizes


def _read_modules(directory: Path) -> tuple[Path, Path, bool]:
    """Find the encoder's directory, the pooling's file, and whether vectors are normalized.

    Raises CheckpointInvalid for modules other than pooling and normalization.
    """
    path = directory / "modules.json"
    if not path.exists():
        why = "it defines the pooling of token vectors; save the model with sentence-transformers"
        raise CheckpointInvalid(path, f"the file is missing: {why}")
    modules = read_json_list(path)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointInvalid(
            path,
            f"modules {', '.join(kinds)} are not supported; supported: Transformer, Pooling, and"
            " Normalize after them",
        )
    transformer, pooling, *normalize = (
        _inside(directory, str(module.get("path", "")), path) for module in modules
    )
    return transformer, pooling / "config.json", bool(normalize)


def _inside(directory: Path, relative: str, path: Path) -> Path:
    """Resolve a module's directory. modules.json is untrusted and must not reach other files."""
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise CheckpointInvalid(path, f"path {relative!r} is outside the checkpoint")
    return directory / relative


def _read_pooling(path: Path) -> tuple[Pooling, int | None]:
    raw = read_json(path)
    dimension = raw.get("word_embedding_dimension", raw.get("embedding_dimension"))
    known = {"word_embedding_dimension", "embedding_dimension", "include_prompt"}
    modes = {name: value for name, value in raw.items() if name not in known and value}
    if modes in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}):
        return Pooling.MEAN, dimension
    if modes in ({"pooling_mode_cls_token": True}, {"pooling_mode": "cls"}):
        return Pooling.CLS, dimension
    shown = ", ".join(f"{name} = {value!r}" for name, value in modes.items()) or "none"
    raise CheckpointInvalid(
        path,
        f"pooling by {shown} is not supported; supported: the mean of all tokens, or the first one",
    )


def _read_input_limit(directory: Path) -> int | None:
    """Read the checkpoint's limit of tokens per text; None if it has no limit."""
    path = directory / "sentence_bert_config.json"
    if not path.exists():
        return None
    raw = read_json(path)
    if raw.get("do_lower_case"):
        raise CheckpointInvalid(
            path, "do_lower_case = True is not supported: let the tokenizer's normalizer do it"
        )
    limit = raw.get("max_seq_length")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise CheckpointInvalid(path, f"entry max_seq_length = {limit!r} is not a count of tokens")
    return limit


def _refuse_prompt(path: Path) -> None:
    """Reject a default prompt, which would be billed invisibly; clients must send it themselves."""
    raw = read_json(path) if path.exists() else {}
    name, prompts = raw.get("default_prompt_name"), raw.get("prompts") or {}
    if name is not None and prompts.get(name):
        raise CheckpointInvalid(
            path,
            f"default_prompt_name = {name!r} is not supported: clients must prepend that text"
            " themselves",
        )
