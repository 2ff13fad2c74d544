"""Fingerprint of a checkpoint: equal for copies, different for other weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from inference.checkpoint import fingerprint as module
from inference.checkpoint.fingerprint import fingerprint


@pytest.fixture(params=[False, True], ids=["whole", "sampled"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a directory with weights, of which all or samples are read."""
    if request.param:
        monkeypatch.setattr(module, "WHOLE_BYTES_MAX", 1000)
        monkeypatch.setattr(module, "SAMPLE_COUNT", 10)
        monkeypatch.setattr(module, "SAMPLE_BYTES", 100)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "README.md").write_text("About")
    for number in range(2):
        (directory / f"{number}.safetensors").write_bytes(bytes(range(250)) * 20)
    return directory


def test_copies_have_one_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    os.utime(copy / "config.json", (1, 1))
    (copy / "README.md").write_text("Other")

    assert fingerprint(copy, "torch") == fingerprint(checkpoint, "torch")
    assert fingerprint(checkpoint, "vllm") != fingerprint(checkpoint, "torch")


@pytest.mark.parametrize("name", ["config.json", "0.safetensors", "1.safetensors"])
def test_other_content_has_another_fingerprint(checkpoint: Path, name: str) -> None:
    before = fingerprint(checkpoint, "torch")
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[::-1])

    assert fingerprint(checkpoint, "torch") != before
