"""Fingerprint of a checkpoint's content, the same for every copy of the files."""

from __future__ import annotations

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path

SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine"})
CONFIGURATION = frozenset({".json", ".jinja", ".model"})
# Read whole up to this size, within 50 ms; of larger weights, samples: one in each tensor that
# counts, without the minutes that all of it would take to read.
WHOLE_BYTES_MAX = 64 * 2**20
SAMPLE_COUNT, SAMPLE_BYTES = 1024, 16_384
CHUNK_BYTES = 2**20
DIGEST_BYTES = 6


def fingerprint(directory: Path, engine: str) -> str:
    """Hash a checkpoint's files, its engine and our version.

    The directory's name, times and files that cannot be read have no influence.
    """
    identity = f"{engine}\0{version('weir-server')}"
    digest = hashlib.blake2b(identity.encode(), digest_size=DIGEST_BYTES)
    files = sorted(path for path in directory.glob("*") if path.is_file())
    weights = [path for path in files if path.suffix in SUFFIXES]
    sizes = [path.stat().st_size for path in weights]
    step = 0 if sum(sizes) <= WHOLE_BYTES_MAX else sum(sizes) // SAMPLE_COUNT
    for path in files:
        if path.suffix in CONFIGURATION:
            with contextlib.suppress(OSError):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path, size in zip(weights, sizes, strict=True):
        digest.update(f"{path.name}\0{size}\0".encode())
        with contextlib.suppress(OSError), path.open("rb") as file:
            for offset in range(0, size, step or CHUNK_BYTES):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES if step else CHUNK_BYTES))
    return f"fp_{digest.hexdigest()}"
