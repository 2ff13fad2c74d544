"""The images hold what the documents say of them. Nothing is built here: the steps that compute are tested where their code is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "infra" / "images"


def instructions(name: str) -> list[str]:
    """The instructions of a Dockerfile, each on one line."""
    text = (IMAGES / name).read_text().replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line and not line.startswith("#")]


def extras(lines: list[str]) -> set[str]:
    (installed,) = [line for line in lines if "pip install" in line]
    found = re.search(r'-e "\.\[([a-z,]+)\]"', installed)
    assert found is not None, installed
    return set(found[1].split(","))


def test_the_image_has_every_extra_that_it_can_use() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()

    assert extras(instructions("Dockerfile")) == known - {"tensorrt"}
    assert extras(instructions("tensorrt.Dockerfile")) == known - {"tensorrt", "safety"}


def test_the_image_computes_with_the_native_library() -> None:
    """Compiled in a stage of its own, and copied to where the loader looks."""
    lines = instructions("Dockerfile")
    build = lines.index("RUN python -m inference.native.build --out /prebuilt")
    last_stage = max(index for index, line in enumerate(lines) if line.startswith("FROM "))

    assert any("g++" in line for line in lines[:build])
    assert not any("g++" in line for line in lines[last_stage:])
    copied = lines.index("COPY --from=native /prebuilt inference/native/prebuilt")
    assert build < last_stage < copied
    assert copied > lines.index("COPY inference inference"), "which would otherwise hide it"


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_an_image_runs_as_a_user_without_rights(name: str) -> None:
    lines = instructions(name)

    assert [line for line in lines if line.startswith("USER ")] == ["USER weir"]
    assert lines.index("USER weir") > max(index for index, line in enumerate(lines) if line.startswith("RUN "))


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_an_image_copies_what_is_there_and_not_ignored(name: str) -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#", "!")}
    copied = [
        part for line in instructions(name) if line.startswith("COPY ") and "--from" not in line for part in line.split()[1:-1]
    ]

    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert Path(path).parts[0] not in ignored, path
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text().split("packages.find", 1)[1])
    assert packages is not None
    assert {each.strip().strip('"*') for each in packages[1].split(",")} <= set(copied)
