"""The tag of a release is the only source of the version, in every package and file that has it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from infra.release import ROOT, UNRELEASED, VERSIONED, npm_version, pack, stamp, version_of


@pytest.mark.parametrize(
    ("described", "expected", "of_npm"),
    [
        ("", "0.1.0.dev1563", "0.1.0-dev.1563"),
        ("v0.2.0-0-g1e038a69", "0.2.0", "0.2.0"),
        ("v0.2.0-5-g1e038a69", "0.2.1.dev5", "0.2.1-dev.5"),
        ("v1.10.3-12-gabc", "1.10.4.dev12", "1.10.4-dev.12"),
    ],
)
def test_a_tag_gives_the_version(described: str, expected: str, of_npm: str) -> None:
    assert version_of(described, 1563) == expected
    assert npm_version(expected) == of_npm


def test_a_tag_that_is_no_version_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"named like v0\.2\.0, got v2-0-gabc"):
        version_of("v2-0-gabc", 9)


def test_the_version_is_written_into_every_package(tmp_path: Path) -> None:
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    stamp(tmp_path, "0.2.1.dev5")

    server, client = (
        tomllib.loads((tmp_path / path).read_text())["project"]
        for path in ("pyproject.toml", "sdk/python/pyproject.toml")
    )
    node, lock = (
        json.loads((tmp_path / "sdk/typescript" / name).read_text())
        for name in ("package.json", "package-lock.json")
    )
    assert "weir-client==0.2.1.dev5" in server["dependencies"]
    assert server["version"] == client["version"] == "0.2.1.dev5"
    assert node["version"] == lock["version"] == lock["packages"][""]["version"] == "0.2.1-dev.5"
    for name in VERSIONED:
        assert not re.search(rf'(?<![\d.]){re.escape(UNRELEASED)}"', (tmp_path / name).read_text())
    with pytest.raises(SystemExit, match=r"must have the version 0\.0\.0: tags have the others"):
        stamp(tmp_path, "0.3.0")


def test_an_archive_depends_on_its_content_only(tmp_path: Path) -> None:
    archives = []
    for parent, changed_s in (("a", 1), ("another", 2)):
        source = tmp_path / parent / "weir-1"
        source.mkdir(parents=True)
        (source / "file").write_text("content")
        os.utime(source / "file", (changed_s, changed_s))
        archives.append(tmp_path / f"{parent}.tar.gz")
        pack(source, archives[-1], 1_700_000_000)

    assert archives[0].read_bytes() == archives[1].read_bytes()
