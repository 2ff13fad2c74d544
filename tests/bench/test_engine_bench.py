"""Benchmark of the engine: the other engines are checked before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.engine import describe_run
from bench.harness import Unusable


def arguments(**changes: object) -> argparse.Namespace:
    given = {
        "vllm_python": None,
        "llama_server": None,
        "llama_python": None,
        "transformers": 0,
        "threads": 2,
        "shape": "S",
        "precision": "bfloat16",
        "requests": 1,
    }
    return argparse.Namespace(**given | changes)


def program(path: Path, prints: str, status: int = 0) -> Path:
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_the_versions_of_the_other_engines_are_recorded(tmp_path: Path) -> None:
    python, server = (
        program(tmp_path / "python", "a warning\n0.32.0"),
        program(tmp_path / "server", "version: 77 (abc)\nbuilt with gcc"),
    )

    described = describe_run(
        arguments(vllm_python=python, llama_server=server, llama_python=python)
    )

    assert described["versions"] == {"vllm": "0.32.0", "llama.cpp": "version: 77 (abc)"}


@pytest.mark.parametrize("status", [1, None])
def test_an_engine_that_cannot_start_names_its_option(tmp_path: Path, status: int | None) -> None:
    python = tmp_path / "python"
    if status is not None:
        program(python, "no module named vllm", status)

    with pytest.raises(Unusable, match="--vllm-python"):
        describe_run(arguments(vllm_python=python))
