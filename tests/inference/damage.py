"""Changes of a checkpoint's files that damage it, for tests of its loading."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import processors

MATRIX = "model.layers.1.mlp.down_proj.weight"
Spoil = Callable[[Path], object]


def tear(name: str, kept: int) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:kept])

    return spoil


def write(name: str, content: str | bytes) -> Spoil:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def change(name: str, **entries: Any) -> Spoil:
    """Change entries of a JSON file."""

    def spoil(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return spoil


def config(**entries: Any) -> Spoil:
    return change("config.json", **entries)


def generation(**entries: Any) -> Spoil:
    return change("generation_config.json", **entries)


def tokenizer_config(**entries: Any) -> Spoil:
    return change("tokenizer_config.json", **entries)


def added(token: str, *, begins: bool = False, **entries: Any) -> Spoil:
    """Add a special token behind the vocabulary, which begins prompts or is named by entries."""

    def spoil(directory: Path) -> None:
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([token])
        if begins:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{token} $A", special_tokens=[(token, 400)]
            )
        tokenizer.save(str(directory / "tokenizer.json"))
        tokenizer_config(**entries)(directory)

    return spoil


def tensors(edit: Callable[[dict[str, Any]], object], name: str = "model.safetensors") -> Spoil:
    def spoil(directory: Path) -> None:
        found = load_file(directory / name)
        edit(found)
        save_file(found, directory / name, {"format": "pt"})

    return spoil


def header(**entry: Any) -> Spoil:
    """Change entries of one tensor in the header of the weights."""

    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        [length] = struct.unpack("<Q", data[:8])
        described = json.loads(data[8 : 8 + length])
        described[MATRIX] |= entry
        encoded = json.dumps(described).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])

    return spoil


def put(name: str, value: float) -> Spoil:
    """Change one number of a tensor."""

    def edit(found: dict[str, Any]) -> None:
        found[name].flat[3] = value

    return tensors(edit)
