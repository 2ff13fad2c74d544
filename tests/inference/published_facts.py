"""Entries of the `config.json` of published checkpoints, as the tests need them."""

from __future__ import annotations

from typing import Any


def rope(kind: str, factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "low_freq_factor": 1.0,
    }


def facts(
    architecture: str, vocab: int, positions: int, eos: int | list[int] | None, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "eos_token_id": eos,
        "hidden_size": 4096,
        **more,
    }


def multimodal(architecture: str, model_type: str, **text: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "text_config": {"model_type": model_type, **text},
        "vision_config": {"hidden_size": 1408},
    }
