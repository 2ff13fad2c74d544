"""What the API needs to know of a model that others compute: of any architecture, in any precision, whatever its server can run.

Reads the small files of the Hugging Face layout, as `checkpoint.py` does, but refuses nothing that only the arithmetic would need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference.capabilities import Capabilities
from inference.checkpoint.checkpoint import read_default_sampling, read_end_token_ids, read_json, read_json_list
from inference.engine import ModelInfo
from inference.errors import CheckpointInvalid


def read_remote_model(
    directory: Path, *, name: str, engine: str, context_window_tokens_max: int | None, capabilities: Capabilities
) -> tuple[ModelInfo, frozenset[int]]:
    """The model, and the tokens that end its outputs. Raises: CheckpointInvalid naming the file and what to mend."""
    path = directory / "config.json"
    raw = read_json(path)
    text = raw.get("text_config") or raw  # of models that also see or hear
    vocabulary_size = _count(text, "vocab_size", path)
    window = _count(text, "max_position_embeddings", path)
    try:
        ends = read_end_token_ids(directory, raw) or read_end_token_ids(directory, text)
    except (TypeError, ValueError) as error:
        raise CheckpointInvalid(str(path), f"eos_token_id is no token: {error}") from error
    if any(not 0 <= end < vocabulary_size for end in ends):
        raise CheckpointInvalid(str(path), f"eos_token_id {sorted(ends)} is not within vocab_size {vocabulary_size}")
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(window, context_window_tokens_max or window),
        vocabulary_size=vocabulary_size,
        directory=str(directory),
        default_sampling=read_default_sampling(directory, vocabulary_size, capabilities, engine),
        capabilities=capabilities,
        continues_output=True,
    )
    return model, ends


# Families whose first position is the row behind that of the padding token.
_OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})


def read_remote_encoder(directory: Path, *, name: str, engine: str, input_tokens_max: int | None) -> tuple[ModelInfo, bool]:
    """A model that embeds, and whether its vectors have the length 1. Raises: CheckpointInvalid naming the file."""
    path = directory / "config.json"
    raw = read_json(path)
    size = "hidden_size" if "hidden_size" in raw else "dim"
    window = _count(raw, "max_position_embeddings", path)
    if raw.get("model_type") in _OFFSET_FAMILIES:
        window -= int(raw.get("pad_token_id") or 0) + 1
    limits = [window, input_tokens_max or window]
    if (limit_path := directory / "sentence_bert_config.json").exists():
        limit = read_json(limit_path).get("max_seq_length")
        limits += [limit] if isinstance(limit, int) and limit > 0 else []
    modules = read_json_list(directory / "modules.json") if (directory / "modules.json").exists() else []
    normalized = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    architectures = raw.get("architectures") or ["unknown"]
    model = ModelInfo(
        name=name,
        architecture=str(architectures[0]),
        engine=engine,
        context_window_tokens=min(limits),
        vocabulary_size=_count(raw, "vocab_size", path),
        directory=str(directory),
        embedding_dimension=_count(raw, size, path),
    )
    return model, normalized


def _count(raw: dict[str, Any], entry: str, path: Path) -> int:
    value = raw.get(entry)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(str(path), f"entry {entry} = {value!r} is not a count of at least 1")
    return value
